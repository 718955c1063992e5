"""Attention and rounding by hand, in float64, for tests of what executors do."""

import torch
from torch import Tensor

from optimizer.formats import FORMATS, Format
from optimizer.model import AttentionStep
from optimizer.quantize import scale_from_amax
from optimizer.reference import round_to
from optimizer.stack import Precision
from tests.optimizer.numbers import normal


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """Round float64 numbers by the definition, in one step, one at a time."""
    values = [round_to(fmt, v) for v in x.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


def codes_by_hand(
    x: Tensor, precision: Precision, largest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes and scale in float64; `largest` broadcasts against x."""
    fmt = FORMATS[precision.format]
    if not fmt.scaled:
        return rounded(x, fmt), torch.ones((), dtype=torch.float64)
    scale = scale_from_amax(largest, fmt)  # fp32, as it is stored
    return rounded(x / scale, fmt), scale.double()


def step(tokens: int = 6) -> AttentionStep:
    """Four query heads in two groups, and a first group 100 times as large."""
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)
    size = torch.tensor([10.0, 0.1]).view(1, 2, 1, 1)
    return AttentionStep(
        layer=0,
        query=normal(1, 4, tokens, 8, seed=1),
        key=normal(1, 2, tokens, 8, seed=2) * size,
        value=normal(1, 2, tokens, 8, seed=3) * size,
        mask=mask[None, None],
        scaling=8**-0.5,
        softcap=None,
    )


def heads_amax(x: Tensor) -> Tensor:
    return x.abs().amax((0, 2, 3))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention in float64, query head i with KV head i // 2."""
    out = []
    for head in range(4):
        s = (q[:, head] @ k[:, head // 2].transpose(1, 2)) * scaling + mask[:, 0]
        out.append(s.softmax(-1) @ v[:, head // 2])
    return torch.stack(out, dim=1)
