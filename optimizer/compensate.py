"""Rounding that compensates: what one column of a matrix loses, later ones give back.

A matrix W (out, in) meets inputs x. With H = E[x xᵀ] (in, in) and E = W - Q the mean
squared error of its outputs is tr(E H Eᵀ). Factor H = (I + U) D (I + U)ᵀ with U
strictly upper triangular and D diagonal, and round the columns from first to last:

    Q_k = round(W_k + Σ_{j<k} E_j U_jk)       tr(E H Eᵀ) = Σ_k D_k ‖ε_k‖²

where ε_k is what that rounding of column k lost. This is GPTQ (Frantar et al. 2022)
in the form that QuIP (Chee et al. 2023, theorem 6) showed to be the same; it needs no
inverse. Columns go by falling H_kk (GPTQ's act order): what matters most is
rounded while every other column can still make up for it.

Example, rounding to integers: H = [[1, 0.5], [0.5, 1]], W = [0.4, 0.4]. D = (0.75, 1),
U_01 = 0.5. Q_0 = round(0.4) = 0 with E_0 = 0.4; Q_1 = round(0.4 + 0.5 × 0.4) = 1.
The loss is 0.75 × 0.4² + 1 × (-0.4)² = 0.28; rounding to nearest, (0, 0), loses 0.48.

The result is what rounding to nearest would have made, only other numbers of the same
grid under the same scales: an ordinary checkpoint, at the same speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from optimizer.errors import NonFiniteError, SpecError
from optimizer.execute import Operand, WeightCodes
from optimizer.formats import FORMATS, Format
from optimizer.hessians import Hessians, key_of
from optimizer.matmul import linear
from optimizer.model import LoadedModel
from optimizer.quantize import from_codes, quantize, rounder, to_codes
from optimizer.sites import LinearPart
from optimizer.stack import Precision

DAMPING = 0.1  # a share: the diagonal of H grows by it, and the rest counts for less
# Of inputs / tokens: what an estimate needs. From 2048 tokens of SmolLM2 shares of 0.3
# to 1 had the least loss on other tokens, for 576 and 1536 inputs; 0.1 had a tenth more.
DAMPING_OF_TOKENS = 1.5
MORE = 10.0  # the factor by which a damping that does not suffice is raised
LEAST_DAMPING = 1e-4  # where raising starts if none was asked for
LEAST_PIVOT = 1e-6  # of the diagonal: below, float32 has no digit of it left
BLOCK = 64  # columns whose errors reach the rest in one product


def damping_for(width: int, tokens: int) -> float:
    """Return how far a Hessian of `width` inputs goes toward its diagonal.

    An estimate from few tokens has directions that look quiet and are not: errors
    moved there come back on other data.
    """
    return DAMPING_OF_TOKENS * width / max(tokens, 1)


# Factor


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """How the errors of columns reach later ones: damped H = (I+U) D (I+U)ᵀ.

    Columns are in the order of rounding. One serves every matrix with this input.
    """

    order: Tensor  # (in,) which column comes when
    upper: Tensor  # (in, in) I + U, float32
    pivots: Tensor  # (in,) D, float32
    damping: float  # share by which the diagonal is raised; may be more than asked for


def feedback(hessian: Tensor, damping: float = DAMPING) -> Feedback:
    """Factor H (in, in), symmetric.

    Inputs that never fired are left out: their columns round to nearest. Where H
    with its damping has no factor in float32, as with fewer tokens than inputs and
    no damping, the damping is raised tenfold until it has. Raises NonFiniteError.
    """
    if not bool(hessian.isfinite().all()):
        raise NonFiniteError("the Hessian of a matrix")
    diagonal = hessian.diagonal().float()
    alive = diagonal > 0
    mean = float(diagonal[alive].mean()) if bool(alive.any()) else 1.0
    order = diagonal.argsort(descending=True, stable=True)
    h = (hessian.float() / mean)[order][:, order]
    h.diagonal()[~alive[order]] = 1.0
    while True:
        found = _factor(h, damping)
        if found is not None:
            return Feedback(order, found[0], found[1] * mean, damping)
        damping = max(LEAST_DAMPING, damping * MORE)


def _factor(h: Tensor, damping: float) -> tuple[Tensor, Tensor] | None:
    """Return I + U and D of h, damped; None where float32 cannot tell them."""
    damped = h.clone()
    damped.diagonal().mul_(1 + damping)
    # Cholesky's factor of the reversed matrix, reversed, is upper triangular.
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    root = lower.flip(0, 1)
    pivots = root.diagonal().square()
    if bool(failed) or bool((pivots < LEAST_PIVOT * damped.diagonal()).any()):
        return None
    return (root / root.diagonal()).contiguous(), pivots


# Round


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows on the grid, and the loss of each, e H eᵀ."""

    codes: Tensor  # (out, in)
    losses: Tensor  # (out,)
    nearest_losses: Tensor  # (out,) rounded to nearest


def gptq(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    scale: Tensor,
    *,
    damping: float = DAMPING,
    block: int = BLOCK,
) -> Tensor:
    """Return codes (out, in), float32, of `weight` (out, in) for inputs with `hessian`.

    `scale` is (), (out, 1) or (out, in), and is kept. See `round_rows`.
    """
    given = feedback(hessian, damping)
    return round_rows(weight, hessian, given, fmt, scale, block).codes


def round_rows(
    weight: Tensor,
    hessian: Tensor,
    given: Feedback,
    fmt: Format,
    scale: Tensor,
    block: int = BLOCK,
) -> Rows:
    """Round with feedback; a row that would lose no less is rounded to nearest."""
    weight = weight.detach().float().contiguous()
    codes = round_columns(weight, given, fmt, scale, block)
    nearest = quantize(weight, scale, fmt)
    losses = row_losses(weight, codes, scale, hessian)
    nearest_losses = row_losses(weight, nearest, scale, hessian)
    better = losses < nearest_losses
    return Rows(
        codes=torch.where(better[:, None], codes, nearest),
        losses=torch.where(better, losses, nearest_losses),
        nearest_losses=nearest_losses,
    )


def row_losses(weight: Tensor, codes: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    """Return e H eᵀ of every row, (out,): its squared error over the inputs of H."""
    error = torch.addcmul(weight, codes, scale, value=-1)
    return (linear(error, hessian.float()) * error).sum(1)  # H is its own transpose


def round_columns(
    weight: Tensor, given: Feedback, fmt: Format, scale: Tensor, block: int = BLOCK
) -> Tensor:
    """Return codes (out, in): columns rounded in order, errors fed forward.

    `scale` is (), (out, 1) or (out, in). Works on the transpose, whose rows are the
    columns, so that each of them is one stretch of memory.
    """
    columns = weight.T[given.order]  # (in, out): a copy
    scales = _scales_by_column(scale, weight.shape, given.order)
    codes, errors = torch.empty_like(columns), torch.empty_like(columns)
    round_ = rounder(fmt, len(weight))
    for start in range(0, len(columns), block):
        stop = min(start + block, len(columns))
        feeds = given.upper[:start, start:stop]  # (before, block)
        targets = torch.addmm(columns[start:stop], feeds.T, errors[:start])
        for k in range(start, stop):
            target, code, error = targets[k - start], codes[k], errors[k]
            torch.div(target, scales[k], out=code)
            round_(code)
            torch.addcmul(columns[k], code, scales[k], value=-1, out=error)
            if k + 1 < stop:
                targets[k + 1 - start :].addr_(given.upper[k, k + 1 : stop], error)
    out = torch.empty_like(weight)
    out[:, given.order] = codes.T
    return out


def _scales_by_column(scale: Tensor, shape: torch.Size, order: Tensor) -> Tensor:
    """Return (in, out): a view where one scale serves a whole row."""
    if scale.numel() > shape[0]:
        return scale.float().T[order]
    row = scale.float().reshape(-1).expand(shape[0]).contiguous()
    return row.expand(shape[1], shape[0])


# The matrices of a site


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """One matrix on the grid, and what compensation gained on the calibration data."""

    stored: Tensor  # (out, in) uint8: `from_codes` of it are the numbers
    scale: Tensor  # (), (out, 1) or (out, in): as rounding to nearest has it
    loss: float  # mean squared error of its outputs, summed over them
    nearest_loss: float  # the same, rounded to nearest
    kept_rows: int  # rows for which rounding to nearest was as good
    damping: float  # as used: more than asked for where H needed it


Key = tuple[str, Precision]  # a part's name, and what it is rounded to


class CompensatedCodes(WeightCodes):
    """The rounded matrices of a model: compensated where `made` has them."""

    def __init__(self, model: LoadedModel, made: Mapping[Key, Rounded]) -> None:
        super().__init__(model)
        self._kept = made  # a byte a weight: it outlives the stage

    def _round(self, part: LinearPart, precision: Precision) -> Operand:
        found = self._kept.get((part.name, precision))
        if found is None:
            return super()._round(part, precision)
        return from_codes(found.stored, FORMATS[precision.format]), found.scale


def compensate(
    parts: Sequence[LinearPart],
    hessians: Hessians,
    precision: Precision,
    weights: WeightCodes,
    damping: float | None = None,
) -> dict[Key, Rounded]:
    """Round the matrices of one site, under the scales that `weights` gives them.

    Parts that share an input are rounded in one go. Keys are (part.name, precision).
    Without `damping`, each gets the one that its tokens call for. What saw no token of
    the calibration data, as an expert may, is rounded to nearest.
    """
    made: dict[Key, Rounded] = {}
    for key, some in groupby(sorted(parts, key=_group), key_of):
        group = list(some)
        width = group[0].weight.shape[1]
        seen = hessians.seen(key)
        hessian = hessians.hessian(key) if seen else torch.zeros(width, width)
        damped = damping_for(width, seen) if damping is None else damping
        rounded = _round_group(group, hessian, precision, weights, damped)
        made |= {(p.name, precision): r for p, r in zip(group, rounded, strict=True)}
    return made


def _group(part: LinearPart) -> str:
    return part.group


def _round_group(
    group: Sequence[LinearPart],
    hessian: Tensor,
    precision: Precision,
    weights: WeightCodes,
    damping: float,
) -> list[Rounded]:
    """Round parts that share an input as the one matrix that they are."""
    fmt = FORMATS[precision.format]
    scales = [_scale(weights, part, precision) for part in group]
    sizes = [len(part.weight) for part in group]
    given = feedback(hessian, damping)
    rows = round_rows(
        torch.cat([part.weight.detach() for part in group]),
        hessian,
        given,
        fmt,
        torch.cat([_by_row(s, n) for s, n in zip(scales, sizes, strict=True)]),
    )
    split = (t.split(sizes) for t in (rows.codes, rows.losses, rows.nearest_losses))
    return [
        Rounded(
            stored=to_codes(codes, fmt),
            scale=scale,
            loss=float(losses.sum()),
            nearest_loss=float(nearest.sum()),
            kept_rows=int((losses == nearest).sum()),
            damping=given.damping,
        )
        for scale, codes, losses, nearest in zip(scales, *split, strict=True)
    ]


def _scale(weights: WeightCodes, part: LinearPart, precision: Precision) -> Tensor:
    scale = weights.get(part, precision)[1]
    if scale is None:
        raise SpecError(f"{precision.format} has no scale: nothing to compensate")
    return scale


def _by_row(scale: Tensor, rows: int) -> Tensor:
    """Return (rows, 1) or (rows, in)."""
    return scale if scale.ndim == 2 else scale.reshape(1, 1).expand(rows, 1)
