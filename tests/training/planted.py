"""Seven small runs that fail, each of its own cause, and five that do not.

A transformer of two layers learns real text, byte by byte. Everything that makes a run
fail lies in its network, its data or the fields of `Run`, so that the same can be tried
in another loop.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from optimizer.formats import E4M3, E5M2, Format
from optimizer.quantize import fake_quantize, scale_from_amax
from optimizer.training.health import Alarm
from optimizer.training.monitor import HealthMonitor

VOCAB, WIDTH, HEADS, TOKENS, BATCH = 256, 32, 2, 16, 8
NUL = 0  # a byte that no text has: the network reads it as "not a number"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


# -- data


@cache
def text() -> Tensor:
    """Real text as ids (sequences, tokens)."""
    path = Path(str(files("optimizer").joinpath("data/corpora/web_text.jsonl")))
    lines = path.read_text("utf-8").splitlines()
    content = b"\n".join(json.loads(line)["text"].encode() for line in lines)
    ids = torch.tensor(list(content))
    return ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)


def sequences(step: int) -> Tensor:
    """The ids of a step, (batch, tokens): always the same ones."""
    generator = torch.Generator().manual_seed(step)
    return text()[torch.randint(len(text()), (BATCH,), generator=generator)]


def with_missing_values(step: int, at: int) -> Tensor:
    """The ids of a step; in one step some are missing."""
    ids = sequences(step).clone()
    if step == at:
        ids[:, TOKENS // 2] = NUL
    return ids


# -- network


class Gain(nn.Module):
    """Multiplies channels, or all values, by something that is not trained."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _Faded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Fade(nn.Module):
    """Passes values as they are, and their gradients times a small factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Faded.apply(x, self.factor)
        return y


class Numbers(nn.Embedding):
    """A table in which the row of NUL is not a number."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).masked_fill((ids == NUL)[..., None], torch.nan)


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)
        self.of_qkv: nn.Module = nn.Identity()
        self.of_up: nn.Module = nn.Identity()
        self.of_gelu: nn.Module = nn.Identity()
        self.of_down: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            part.view(rows, tokens, HEADS, -1).transpose(1, 2)
            for part in self.of_qkv(self.qkv(self.before(x))).split(width, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        wide = self.of_gelu(functional.gelu(self.of_up(self.up(self.after(x)))))
        return x + self.of_down(self.down(wide))


class Small(nn.Module):
    """Ids (rows, tokens) to logits (rows, tokens, 256)."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__()
            self.embed = Numbers(VOCAB, WIDTH)
            self.places = nn.Embedding(TOKENS, WIDTH)
            self.blocks = nn.ModuleList(Block(linear) for _ in range(2))
            self.norm: nn.Module = nn.LayerNorm(WIDTH)
            self.fade: nn.Module = nn.Identity()
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.fade(self.norm(x)))


def faded() -> Small:
    """Gradients of the layers around 1e-8; values and optimum as without."""
    model = Small()
    model.fade = Fade(1e-5)
    return model


def loud(gain: float) -> Small:
    """The second block's GELU hands on values times `gain`, taken back after it."""
    model = Small()
    model.blocks[1].of_gelu = Gain(torch.tensor(gain))
    model.blocks[1].of_down = Gain(torch.tensor(1 / gain))
    return model


def with_outlier(linear: type[nn.Linear] = nn.Linear) -> Small:
    """One output channel of matrices has weights a million times too large.

    What follows divides by as much, so nothing changes but for who shares a scale.
    """
    model = Small(linear)
    for block in model.blocks:
        for layer, name in ((block.qkv, "of_qkv"), (block.up, "of_up")):
            factor = torch.ones(layer.out_features)
            factor[0] = 1e-6
            layer.weight.data[0] *= 1e6
            layer.bias.data[0] *= 1e6
            setattr(block, name, Gain(factor))
    return model


class Fp8Linear(nn.Linear):
    """Emulated FP8: e4m3 forward, e5m2 for gradients, with delayed scales.

    They are made for twice the largest value of the last 16 steps: a margin of 1, as
    Transformer Engine calls it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales: dict[str, tuple[Tensor, Format]] = {}
        self.amaxes: dict[str, list[Tensor]] = {}

    def fp8_scales(self) -> Mapping[str, tuple[float, Format]]:
        return {name: (float(s), fmt) for name, (s, fmt) in self.scales.items()}

    def narrow(self, name: str, x: Tensor, fmt: Format) -> Tensor:
        largest = x.detach().float().abs().amax()
        history = self.amaxes.get(name, [largest])
        self.amaxes[name] = [*history, largest][-16:]
        scale = scale_from_amax(2 * torch.stack(history).amax(), fmt)
        self.scales[name] = (scale, fmt)
        return fake_quantize(x.float(), scale, fmt)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Fp8.apply(x, self.weight, self)
        return y + self.bias


class _Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Fp8Linear) -> Tensor:
        x8 = layer.narrow("input", x, E4M3)
        w8 = layer.narrow("weight", weight, E4M3)
        ctx.save_for_backward(x8, w8)
        ctx.layer = layer
        return functional.linear(x8, w8)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x8, w8 = ctx.saved_tensors
        g8 = ctx.layer.narrow("gradient", gradients[0], E5M2)
        wgrad = g8.flatten(0, -2).T @ x8.flatten(0, -2)
        return g8 @ w8, wgrad, None


# -- runs


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training; `verdict` is what a doctor should say after it."""

    name: str
    verdict: str
    network: Callable[[], nn.Module] = Small
    sequences: Callable[[int], Tensor] = sequences
    arithmetic: str  # fp32, bf16, fp16, fp8
    masters: bool = True  # False: weights in 16 bits alone
    initial_scale: float | None = None  # None: the loss is not scaled
    growth_interval: int = 2000
    optimizer: str = "adam"
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    clip: float = 1.0
    accumulation: int = 1
    steps: int = 120

    def rate(self, step: int) -> float:
        return self.learning_rate * min((step + 1) / self.warmup_steps, 1)


BAD_STEP = 73  # not one that is sampled

PLANTED = (
    Run(
        name="fp16_weights",
        verdict="frozen_weights",
        arithmetic="fp16",
        masters=False,
        optimizer="sgd_momentum",
        learning_rate=1e-3,
    ),
    Run(
        name="no_loss_scale",
        verdict="gradient_underflow",
        network=faded,
        arithmetic="fp16",
    ),
    Run(
        name="scale_too_high",
        verdict="backoff_loop",
        arithmetic="fp16",
        initial_scale=2.0**24,
        growth_interval=1,
    ),
    Run(
        name="loud_activation",
        verdict="layer_overflow",
        network=partial(loud, 2.2e4),
        arithmetic="fp16",
        initial_scale=2.0**16,
    ),
    Run(
        name="bf16_weights",
        verdict="frozen_weights",
        arithmetic="bf16",
        masters=False,
        learning_rate=3e-5,
    ),
    Run(
        name="fp8_outlier",
        verdict="fp8_outlier",
        network=partial(with_outlier, Fp8Linear),
        arithmetic="fp8",
    ),
    Run(
        name="nan_in_data",
        verdict="bad_data",
        sequences=partial(with_missing_values, at=BAD_STEP),
        arithmetic="bf16",
    ),
)

HEALTHY = (
    Run(name="fp32", verdict="healthy", arithmetic="fp32"),
    Run(name="bf16", verdict="healthy", arithmetic="bf16"),
    Run(
        name="fp16_scaled", verdict="healthy", arithmetic="fp16", initial_scale=2.0**16
    ),
    Run(
        name="fp8",
        verdict="healthy",
        network=partial(Small, Fp8Linear),
        arithmetic="fp8",
    ),
    Run(
        name="bf16_sgd",
        verdict="healthy",
        arithmetic="bf16",
        optimizer="sgd_momentum",
        learning_rate=0.1,
        accumulation=2,
    ),
)

TOO_FAST = Run(
    name="too_fast",
    verdict="learning_rate",
    arithmetic="fp32",
    optimizer="sgd_momentum",
    learning_rate=3.0,
    warmup_steps=100,
    clip=1e9,
)


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    log: list[dict[str, Any]]  # a record of each step, as HealthMonitor gives it
    alarms: list[Alarm]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.log]


def train(run: Run, every: int = 10) -> Trained:
    """Train as a run says, with a HealthMonitor in the loop."""
    model = run.network()
    dtype = DTYPES.get(run.arithmetic)
    if not run.masters:
        model = model.to(dtype)
    optimizer = _optimizer(run, model)
    scaler = torch.amp.GradScaler(
        "cpu",
        enabled=run.initial_scale is not None,
        init_scale=run.initial_scale or 1.0,
        growth_interval=run.growth_interval,
    )
    log: list[dict[str, Any]] = []
    alarms: list[Alarm] = []
    monitor = HealthMonitor(
        model,
        optimizer,
        precision=run.arithmetic,
        scaler=scaler,
        every=every,
        on_alarm=[alarms.append],
        log=lambda record: log.append(dict(record)),
    )
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.rate(step)
        loss = _backward(run, model, scaler, dtype if run.masters else None, step)
        scaler.unscale_(optimizer) if run.initial_scale else None
        norm = clip_grad_norm_(model.parameters(), run.clip)
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, norm)
        optimizer.zero_grad()
    monitor.close()
    return Trained(log, alarms)


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    if run.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    return torch.optim.SGD(model.parameters(), lr=run.learning_rate, momentum=0.9)


def _backward(
    run: Run,
    model: nn.Module,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype | None,
    step: int,
) -> float:
    total = 0.0
    for ids in run.sequences(step).chunk(run.accumulation):
        around = torch.autocast("cpu", dtype) if dtype else nullcontext()
        with around:
            logits = model(ids)[:, :-1].float().flatten(0, 1)
        loss = functional.cross_entropy(logits, ids[:, 1:].flatten())
        scaler.scale(loss / run.accumulation).backward()
        total += float(loss.detach()) / run.accumulation
    return total


@cache
def trained(name: str) -> Trained:
    """The run of that name, trained once for all who ask."""
    return train(next(r for r in (*PLANTED, *HEALTHY, TOO_FAST) if r.name == name))
