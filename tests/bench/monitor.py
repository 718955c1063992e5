"""What watching a training costs: `python -m tests.bench.monitor`.

Two copies of a small transformer learn the same text in bf16 autocast, one of them with
a HealthMonitor at N=50 as it comes, outputs and updates included. They take turns of N
steps, so that whatever else the machine does meets both; `overhead` is the processor
time of all turns of the one over that of the other. Then a smaller one runs 10,000
steps, and the process's memory after the first 2,000 is held against that at the end.
The last line is JSON.
"""

import argparse
import json
import time
from dataclasses import dataclass, field

import psutil
import torch
from torch import nn

from optimizer.training.monitor import HealthMonitor
from optimizer.training.trainer import NextToken
from tests.training.small import Small, text

LIMIT = 0.03
FLAT_BYTES = 2 << 20  # of an allocator that keeps what it was given
LOSS = NextToken()


@dataclass
class Side:
    """One of both runs: a model, its optimizer, and the time that its steps took."""

    width: int
    tokens: int
    batch: int
    model: nn.Module = field(init=False)
    cpu_s: list[float] = field(default_factory=list)  # by turn
    wall_s: list[float] = field(default_factory=list)
    monitor: HealthMonitor | None = None

    def __post_init__(self) -> None:
        self.model = Small(self.width, layers=2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def watch(self, every: int) -> None:
        self.monitor = HealthMonitor(
            self.model, self.optimizer, precision="bf16", every=every
        )

    def turn(self, first: int, steps: int) -> None:
        """Do `steps` steps, and note their time."""
        start, used = time.perf_counter(), time.process_time()
        for step in range(first, first + steps):
            self.step(step)
        self.cpu_s.append(time.process_time() - used)
        self.wall_s.append(time.perf_counter() - start)

    def step(self, step: int) -> None:
        ids = text(self.tokens)
        at = step * self.batch % (len(ids) - self.batch)
        samples = ids[at : at + self.batch]
        with torch.autocast("cpu", torch.bfloat16):
            loss = LOSS(self.model, samples) / LOSS.predictions(samples)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.step(loss, norm)
        self.optimizer.zero_grad()


def overhead(every: int, turns: int, width: int) -> dict[str, float]:
    """Return what the monitor adds, as a share, by processor time and by the clock."""
    plain, watched = Side(width, 64, 8), Side(width, 64, 8)
    for side in (plain, watched):
        side.step(0)
    watched.watch(every)
    for turn in range(turns):
        pair = (plain, watched) if turn % 2 else (watched, plain)
        for side in pair:
            side.turn(turn * every, every)
    return {
        "overhead": sum(watched.cpu_s) / sum(plain.cpu_s) - 1,
        "overhead_by_clock": sum(watched.wall_s) / sum(plain.wall_s) - 1,
        "plain_step_ms": 1e3 * sum(plain.cpu_s) / (turns * every),
        "watched_step_ms": 1e3 * sum(watched.cpu_s) / (turns * every),
    }


def memory(every: int, steps: int) -> dict[str, float]:
    """Return the process's memory after a fifth of the steps, and at the end."""
    side, process = Side(32, 16, 4), psutil.Process()
    side.watch(every)
    early = 0
    for step in range(steps):
        side.step(step)
        if step == steps // 5:
            early = process.memory_info().rss
    late = process.memory_info().rss
    return {"steps": steps, "early_mib": early / 2**20, "late_mib": late / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=50, help="steps to a sample")
    parser.add_argument("--turns", type=int, default=10, help="of each, `every` steps")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10_000, help="for the memory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cost = overhead(arguments.every, arguments.turns, arguments.width)
    print(f"a step without {cost['plain_step_ms']:.2f} ms, with a monitor at "
          f"N={arguments.every} {cost['watched_step_ms']:.2f} ms (processor time)")  # fmt: skip
    print(f"overhead {cost['overhead']:.2%}, by the clock "
          f"{cost['overhead_by_clock']:.2%}; the limit is {LIMIT:.0%}")  # fmt: skip
    held = memory(arguments.every, arguments.steps)
    grown = (held["late_mib"] - held["early_mib"]) * 2**20
    print(f"memory after {arguments.steps // 5} steps {held['early_mib']:.1f} MiB, after "
          f"{arguments.steps} {held['late_mib']:.1f} MiB")  # fmt: skip
    figures = {name: round(value, 5) for name, value in {**cost, **held}.items()}
    met = cost["overhead"] <= LIMIT and grown <= FLAT_BYTES
    print(json.dumps({**figures, "met": met}))


if __name__ == "__main__":
    main()
