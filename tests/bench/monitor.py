"""What watching a training costs: `python -m tests.bench.monitor`.

Two copies of a small transformer learn the same text in bf16 autocast, one of them with
a HealthMonitor at N=50 as it comes, outputs and updates included. They take turns step by
step, so that whatever else the machine does meets both. A cycle is N steps, one of them
sampled. For each place in a cycle the median over the cycles is taken of what the watched
step took longer than the plain one beside it, in processor time; `overhead` is their sum
over that of the plain steps, and its interval a bootstrap over the cycles. Then a smaller
one runs 10,000 steps, and the process's memory after the first 2,000 is held against that
at the end. The last line is JSON.
"""

import argparse
import json
import time
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from optimizer.training.monitor import HealthMonitor
from optimizer.training.trainer import NextToken
from tests.training.small import Small, text

LIMIT = 0.03
FLAT_BYTES = 2 << 20  # of an allocator that keeps what it was given
SAMPLES = 1000  # of the bootstrap
LOSS = NextToken()

Times = NDArray[np.float64]


@dataclass
class Side:
    """One of both runs: a model, its optimizer, and the time that its steps took."""

    width: int
    tokens: int
    batch: int
    model: nn.Module = field(init=False)
    cpu_s: list[float] = field(default_factory=list)  # by step
    monitor: HealthMonitor | None = None

    def __post_init__(self) -> None:
        self.model = Small(self.width, layers=2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def watch(self, every: int) -> None:
        self.monitor = HealthMonitor(
            self.model, self.optimizer, precision="bf16", every=every
        )

    def timed(self, step: int) -> None:
        """Do a step, and note its processor time."""
        used = time.process_time()
        self.step(step)
        self.cpu_s.append(time.process_time() - used)

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


def overhead(every: int, cycles: int, width: int) -> dict[str, float]:
    """Return what the monitor adds, as a share of the processor time, and its interval."""
    plain, watched = Side(width, 64, 8), Side(width, 64, 8)
    for side in (plain, watched):
        side.step(0)  # torch allocates, and plans its products
    watched.watch(every)
    for step in range(cycles * every):
        for side in (plain, watched) if step % 2 else (watched, plain):
            side.timed(step)
    base, more = (np.array(s.cpu_s).reshape(cycles, every) for s in (plain, watched))
    drawn = np.random.default_rng(0).integers(cycles, size=(SAMPLES, cycles))
    low, high = np.quantile([added(base[d], more[d]) for d in drawn], [0.025, 0.975])
    return {
        "overhead": added(base, more),
        "overhead_low": float(low),
        "overhead_high": float(high),
        "plain_step_ms": 1e3 * float(np.median(base)),
        "sampled_step_ms": 1e3 * float(np.median(more[:, 0])),
    }


def added(plain: Times, watched: Times) -> float:
    """Return what the watched steps take longer: of times (cycles, steps of a cycle)."""
    longer = np.median(watched - plain, axis=0).sum()
    return float(longer / np.median(plain, axis=0).sum())


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
    parser.add_argument("--cycles", type=int, default=30, help="of `every` steps")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10_000, help="for the memory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cost = overhead(arguments.every, arguments.cycles, arguments.width)
    print(f"a step without {cost['plain_step_ms']:.2f} ms, a sampled one "
          f"{cost['sampled_step_ms']:.2f} ms (medians, processor time)")  # fmt: skip
    print(f"overhead at N={arguments.every} {cost['overhead']:.2%} "
          f"({cost['overhead_low']:.2%} to {cost['overhead_high']:.2%}, 95 %); "
          f"the limit is {LIMIT:.0%}")  # fmt: skip
    held = memory(arguments.every, arguments.steps)
    grown = (held["late_mib"] - held["early_mib"]) * 2**20
    print(f"memory after {arguments.steps // 5} steps {held['early_mib']:.1f} MiB, after "
          f"{arguments.steps} {held['late_mib']:.1f} MiB")  # fmt: skip
    figures = {name: round(value, 5) for name, value in {**cost, **held}.items()}
    met = cost["overhead_high"] <= LIMIT and grown <= FLAT_BYTES
    print(json.dumps({**figures, "met": met}))


if __name__ == "__main__":
    main()
