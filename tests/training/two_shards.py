"""What each of two processes does with half a model, as FSDP cuts it up.

python -m tests.training.two_shards RANK FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from optimizer.training.health import Alarm
from optimizer.training.monitor import HealthMonitor
from tests.training.two_layers import TwoLayers, batch, loss_of


def main(rank: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    mesh = distributed.init_device_mesh("cpu", (2,))
    model = TwoLayers()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)  # 5 rows and 3: of odd numbers, the parts differ
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    heard: list[Alarm] = []
    monitor = HealthMonitor(
        model, optimizer, precision="bf16", every=1, on_alarm=[heard.append]
    )
    readings = []
    for step in range(2):
        mine = batch().chunk(2)[rank]
        if step == 1 and rank == 1:
            mine = mine * torch.nan  # on one process alone
        loss = loss_of(model, mine)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, norm.full_tensor())
        optimizer.zero_grad()
        assert monitor.latest is not None
        layers = monitor.latest.layers
        readings.append({name: layer.to_json() for name, layer in layers.items()})
    said = {"readings": readings, "norm": monitor.latest.gradient_norm}
    said |= {"heard": len(heard), "rung": sum(monitor.alarms.values())}
    (folder / f"said.{rank}.json").write_text(json.dumps(said))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
