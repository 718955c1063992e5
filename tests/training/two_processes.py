"""What each of two processes does: `python -m tests.training.two_processes RANK FOLDER`."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from optimizer.training.health import Alarm
from optimizer.training.monitor import HealthMonitor
from optimizer.training.scheduler import PrecisionScheduler
from optimizer.training.stability import Policy
from tests.training.two_layers import TwoLayers, batch, loss_of

POLICY = Policy(run_steps=1, calm_steps=5)


def main(rank: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    model = DistributedDataParallel(TwoLayers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    heard: list[Alarm] = []
    monitor = HealthMonitor(
        model,
        optimizer,
        precision="fp16",
        scaler=scaler,
        every=1,
        on_alarm=[heard.append],
    )
    scheduler, seen = PrecisionScheduler(POLICY), []
    for step in range(4):
        mine = batch().chunk(2)[rank]
        if step == 3 and rank == 1:
            mine = mine * torch.nan  # on one process alone
        first, second = mine.chunk(2)
        with model.no_sync():
            scaler.scale(loss_of(model, first) / 2).backward()
        loss = loss_of(model, second) / 2
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss.detach())
        seen.append(scheduler.step(loss.detach()))
        optimizer.zero_grad()
        if step == 0:
            assert monitor.latest is not None
            layers = monitor.latest.layers
            norms = {name: layer.gradient_norm for name, layer in layers.items()}
            zeros = {name: layer.zero_rate for name, layer in layers.items()}
    said = {
        "norms": norms,
        "zeros": zeros,
        "heard": len(heard),
        "rung": sum(monitor.alarms.values()),
        "skipped": monitor.skipped,
        "precisions": seen,
    }
    (folder / f"said.{rank}.json").write_text(json.dumps(said))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
