"""What one look at a gradient, an output or an update says: the definitions.

Counts are exact; norms are summed in float64. A look at a whole model is one transfer
from its device: every count of every parameter lies in one tensor until then.

Example: of the gradient [0, 3, 1e-39, -4] the zero rate is 1/4, the norm 5, and one of
the three values that are not zero lies under 2^-126 = 1.2e-38, where bf16 underflows.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optimizer.formats import BF16
from optimizer.training.shards import added_up, local

SAMPLED = 1 << 14  # weights of a parameter whose change is watched: bounds the copy
WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel, of torch.compile
# Types with the exponents of bf16: the integers of their width, the exponent's field.
EXPONENTS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
}


@dataclass(frozen=True, slots=True)
class Look:
    """The gradients of one layer (its weight and its bias) and its weights."""

    elements: int = 0
    zeros: int = 0
    nonfinite: int = 0  # inf or NaN
    underflowed: int = 0  # not zero, and below bf16's smallest normal number
    squares: float = 0.0  # sum of the squared gradient
    weight_squares: float = 0.0

    @property
    def zero_rate(self) -> float:
        """Share of the gradient that is exactly zero, 0 to 1."""
        return self.zeros / max(self.elements, 1)

    @property
    def underflow_share(self) -> float:
        """Share of the nonzero gradient that bf16 holds without a full significand.

        IEEE 754 calls that underflow: |g| < 2^-126. fp32 has the same range.
        """
        return self.underflowed / max(self.elements - self.zeros, 1)

    @property
    def gradient_norm(self) -> float:
        """‖g‖; NaN or inf where the gradient has one."""
        return math.sqrt(self.squares)

    @property
    def weight_norm(self) -> float:
        """‖w‖."""
        return math.sqrt(self.weight_squares)

    def update_ratio(self, learning_rate: float) -> float:
        """Return lr·‖g‖/‖w‖: the relative change that plain SGD would make."""
        if not self.weight_squares:
            return 0.0
        return learning_rate * self.gradient_norm / self.weight_norm

    def __add__(self, other: "Look") -> "Look":
        return Look(
            self.elements + other.elements,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.underflowed + other.underflowed,
            self.squares + other.squares,
            self.weight_squares + other.weight_squares,
        )


def total_norm(looks: Iterable[Look]) -> float:
    """Return the norm of all gradients together."""
    return math.sqrt(sum(look.squares for look in looks))


def layer_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters by the module that holds them.

    Tables of embeddings are left out unless they are the output's weights as well:
    rows of absent tokens have no gradient, in any precision.
    """
    tables = {id(p) for m in _embeddings(model) for p in m.parameters(recurse=False)}
    seen: set[int] = set()
    found: dict[str, list[nn.Parameter]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for p in module.parameters(recurse=False):
            tables.discard(id(p))
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                found.setdefault(plain_name(name), []).append(p)
    return found


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]


def plain_name(name: str) -> str:
    """Return a module's name without what wrappers put before it."""
    while name.startswith(WRAPPERS):
        name = name.split(".", 1)[1]
    return "model" if not name or f"{name}." in WRAPPERS else name


def looks(
    layers: Mapping[str, list[nn.Parameter]], scale: Tensor | float = 1.0
) -> dict[str, Look]:
    """Look at every layer that has a gradient; `scale` is what they are multiplied by.

    Gradients scaled by a power of two give the norms of those that are not.
    """
    graded = [(n, p) for n, ps in layers.items() for p in ps if p.grad is not None]
    if not graded:
        return {}
    parameters = [p for _, p in graded]
    with torch.no_grad():
        rows = torch.stack([_counts(p, scale) for p in parameters])
        counts = added_up(rows, parameters).tolist()
    found: dict[str, Look] = {}
    for (name, parameter), row in zip(graded, counts, strict=True):
        elements, zeros, underflowed, squares, weight_squares = row
        sound = math.isfinite(squares)  # no float32 overflows a float64
        look = Look(
            elements=int(elements),
            zeros=int(zeros),
            nonfinite=0 if sound else _nonfinite(parameter),
            underflowed=int(underflowed),
            squares=squares,
            weight_squares=weight_squares,
        )
        found[name] = found.get(name, Look()) + look
    return found


def _values(parameter: nn.Parameter) -> Tensor:
    g = parameter.grad
    assert g is not None
    return g.coalesce().values() if g.is_sparse else local(g)


def _nonfinite(parameter: nn.Parameter) -> int:
    bad = (~_values(parameter).isfinite()).count_nonzero()
    return int(added_up(bad[None], [parameter]))


def _counts(parameter: nn.Parameter, scale: Tensor | float) -> Tensor:
    """Return (elements, zeros, underflowed, Σg², Σw²) as float64 on the device."""
    g = _values(parameter)
    nonzero = g.count_nonzero()
    norm = torch.linalg.vector_norm(g, dtype=torch.float64) / scale
    weight = torch.linalg.vector_norm(local(parameter), dtype=torch.float64)
    row = [
        torch.full_like(nonzero, g.numel()),
        g.numel() - nonzero,
        nonzero - _normal(g, scale),
        norm.square(),
        weight.square(),
    ]
    return torch.stack([value.double() for value in row])


def _normal(g: Tensor, scale: Tensor | float) -> Tensor:
    """Count what bf16 holds with a full significand, and what is not finite."""
    if g.dtype in EXPONENTS and isinstance(scale, float) and scale == 1.0:
        as_int, field = EXPONENTS[g.dtype]
        return (g.view(as_int) & field).count_nonzero()  # its exponent is not zero
    if g.dtype is torch.float16:
        return g.count_nonzero()  # its smallest number is far above
    return (~(g.abs() < BF16.smallest_normal * scale)).count_nonzero()


# Outputs


def output_look(y: Tensor) -> Tensor:
    """Return (largest finite |y|, how many are inf or NaN), on the device."""
    y = y.detach()
    if not y.numel():
        return torch.zeros(2, dtype=torch.float64, device=y.device)
    low, high = torch.aminmax(y)
    largest = torch.maximum(-low, high)
    # Asking a GPU whether it is finite would wait for it; a CPU tells at once.
    if y.device.type == "cpu" and math.isfinite(float(largest)):
        return torch.stack([largest.double(), torch.zeros((), dtype=torch.float64)])
    bad = y.numel() - y.isfinite().count_nonzero()
    low, high = torch.aminmax(y.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return torch.stack([torch.maximum(-low, high).double(), bad.double()])


# Updates


class Watched:
    """Some weights of every layer, before a step of the optimizer and after it."""

    def __init__(self, layers: Mapping[str, list[nn.Parameter]]) -> None:
        """Copy evenly spaced weights, `SAMPLED` of each parameter at most."""
        self._before = {
            name: [(p, _sampled(p).clone()) for p in parameters]
            for name, parameters in layers.items()
        }

    def unchanged(self) -> dict[str, float]:
        """Return by layer the share, of weights with a gradient, that are as before."""
        shares = {}
        for name, parts in self._before.items():
            dense = [(p, w) for p, w in parts if _is_dense(p.grad)]
            if dense:
                rows = torch.stack([_same(p, w) for p, w in dense])
                whole = added_up(rows, [p for p, _ in dense])
                moved, same = whole.sum(0).tolist()
                shares[name] = same / max(moved, 1)
        return shares


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is not None and not gradient.is_sparse


def _same(parameter: nn.Parameter, before: Tensor) -> Tensor:
    """Return (weights with a gradient, those of them that are as before)."""
    assert parameter.grad is not None
    graded = _sampled(parameter.grad) != 0
    return torch.stack([graded.sum(), ((_sampled(parameter) == before) & graded).sum()])


def _sampled(x: Tensor) -> Tensor:
    flat = local(x.detach()).reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLED))]


def as_float(value: Tensor | float | None) -> float | None:
    """Return a loss or a norm as a number. None stays None."""
    if value is None:
        return None
    return float(value.detach() if isinstance(value, Tensor) else value)


def learning_rates(optimizer: Optimizer) -> dict[int, float]:
    """Return the learning rate of each parameter, by id()."""
    return {
        id(p): float(group["lr"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
