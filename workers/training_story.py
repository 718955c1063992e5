"""A training that breaks in fp16, what the probe says of it, and the same in bf16.

    python -m workers.training_story            a minute on two cores; writes a picture

A small transformer learns real text, byte by byte. Its FFN multiplies what goes into its
second matrix by a constant and divides what comes out by it, as parametrizations after
μP do. What it multiplies grows as the model learns. After a while the product is beyond
65504, where fp16 ends: the loss is NaN, the scaler leaves the step out and halves the
scale, and so at every step from there on.
"""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from textwrap import fill

import torch
from jinja2 import Environment
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from optimizer.datasets import load
from optimizer.training import curves
from optimizer.training.candidates import CANDIDATES
from optimizer.training.doctor import diagnose
from optimizer.training.logs import run_log
from optimizer.training.probe import Probed, probe_here
from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import Batches, batches
from optimizer.training.trainer import NextToken, Problem

WIDTH, HEADS, LAYERS, VOCAB, TOKENS = 48, 2, 2, 256, 32
LOUD = 12000.0  # the constant
SEQUENCES, HELD_OUT = 2000, 16
STEPS, PROBED = 240, 24
SMOOTHED = 12  # steps that a point of the picture is the mean of, and a break a half of
HOW = TrainingSpec(
    learning_rate=3e-3,
    warmup_steps=20,
    weight_decay=0.01,
    batch_size=8,
    sequence_tokens=TOKENS,
    steps=PROBED,
    candidates=("fp16", "bf16"),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Block(nn.Module):
    """Attention, and an FFN that multiplies on the way in and divides on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the shape of x (rows, tokens, width)."""
        rows, tokens, width = x.shape
        q, k, v = (
            part.view(rows, tokens, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).split(width, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        wide = functional.gelu(self.up(self.after(x)))
        return x + self.down(LOUD * wide) / LOUD


class Model(nn.Module):
    """Ids (rows, tokens) to logits (rows, tokens, 256); always the same weights."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(slots=True)
class Trained:
    """What a training came to, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    @property
    def overflowed(self) -> int:
        """Steps that were left out."""
        return sum(not math.isfinite(loss) for loss in self.losses)

    @property
    def broke(self) -> int | None:
        """The step by which half of a window overflowed. None: it went through."""
        for step in range(SMOOTHED, len(self.losses)):
            part = self.losses[step - SMOOTHED : step]
            if sum(not math.isfinite(loss) for loss in part) > SMOOTHED / 2:
                return step
        return None

    def smooth(self) -> list[float | None]:
        """Return the mean of the losses up to each step, as far as it went well."""
        found: list[float | None] = []
        for step in range(self.broke or len(self.losses)):
            part = self.losses[max(step - SMOOTHED + 1, 0) : step + 1]
            kept = [loss for loss in part if math.isfinite(loss)]
            found.append(sum(kept) / len(kept) if kept else None)
        return found

    def log(self) -> list[dict[str, float]]:
        """Return what a logger would have written."""
        return [
            {"step": n, "loss": loss, "grad_norm": norm, "loss_scale": scale}
            for n, (loss, norm, scale) in enumerate(
                zip(self.losses, self.norms, self.scales, strict=True)
            )
        ]


def text() -> Tensor:
    """Return the built-in web text, byte by byte: ids (sequences, tokens)."""
    content = "\n".join(load("web_text").calibration).encode()
    ids = torch.tensor(list(islice(content, SEQUENCES * TOKENS)))
    return ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)


def data(order: int = 0, steps: int = STEPS) -> Batches:
    """Return the batches of the first `steps` steps."""
    return batches(text()[HELD_OUT:], HOW.batch_size, steps, 0, order)


def train(precision: str, steps: int = STEPS) -> Trained:
    """Train as torch's own examples do: autocast, and for fp16 a GradScaler."""
    model, found, loss = Model(), Trained(), NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=HOW.learning_rate)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    every = data(steps=steps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = HOW.rate(step)
        ids = every[step]
        with torch.autocast("cpu", dtype=DTYPES[precision]):
            lost = loss(model, ids) / loss.predictions(ids)
        found.scales.append(scaler.get_scale())
        scaler.scale(lost).backward()
        scaler.unscale_(optimizer)
        found.norms.append(float(clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.losses.append(float(lost.detach()))
    return found


def probe(steps: int = PROBED) -> Probed:
    """Probe the first steps of the same training, in fp16 and in bf16."""
    held_out = tuple(text()[:HELD_OUT].split(1))

    def problem(order: int) -> Problem:
        return Problem(Model(), NextToken(), data(order, steps), held_out)

    return probe_here(problem, HOW)


# -- the picture --------------------------------------------------------------------


def picture(runs: Mapping[str, Trained], said: Sequence[str]) -> str:
    """Return a page with the losses overlaid, and what was found."""
    drawn = curves.curves(
        [(name, str(n), run.smooth()) for n, (name, run) in enumerate(runs.items())]
    )
    template = resources.files("optimizer").joinpath("data/training_story.html.j2")
    css = resources.files("optimizer").joinpath("data/report.css").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template.read_text("utf-8"))
    return page.render(curves=drawn, geometry=curves, said=said, css=css)


# -- the command --------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell the story, and write the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.training_story", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = Path(os.environ.get("PRECISION_DATA_DIR", "var")) / "training-story.html"
    parser.add_argument("--out", type=Path, default=default, help="the page to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)  # its matrices are small: threads would wait for another
    story(asked.out, asked.steps)
    return 0


def story(out: Path, steps: int = STEPS) -> dict[str, Trained]:
    """Train, probe, train again; print what happens and write the picture."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        sys.stdout.write(f"{fill(line, 80, subsequent_indent='  ')}\n")
        sys.stdout.flush()

    broken = train("fp16", steps)
    say(_came_to("fp16", broken))
    diagnosis = diagnose(run_log(broken.log())).findings[0]
    say(
        f"The doctor, from its log: {diagnosis.verdict} ({diagnosis.sure}). {diagnosis.said}"
    )
    found = probe()
    first = found.results["fp16"].rounds[0]
    for cause in first.findings:
        if cause.breaks:
            say(
                f"The probe, from {PROBED} steps: {cause.code}. {cause.said}; {cause.first}."
            )
    chosen = found.chosen.candidate.name if found.chosen else "fp32"
    say(f"It recommends {chosen}: {found.results['bf16'].status}.")
    runs = {"fp16": broken}
    if chosen in DTYPES and chosen in CANDIDATES:
        runs[chosen] = train(chosen, steps)
        say(_came_to(chosen, runs[chosen]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(picture(runs, said), "utf-8")
    say(f"Both curves: {out}")
    return runs


def _came_to(name: str, run: Trained) -> str:
    if run.broke is not None:
        return (
            f"{name}: breaks at step {run.broke} of {len(run.losses)}; "
            f"{run.overflowed} steps overflow, and the loss scale falls from "
            f"{run.scales[0]:g} to {run.scales[-1]:.2g}."
        )
    return f"{name}: {len(run.losses)} steps, to a loss of {run.smooth()[-1]:.3f}."


if __name__ == "__main__":
    sys.exit(main())
