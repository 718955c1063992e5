"""Mixture-of-experts layers: each expert's matrices run by the executor, and counted.

transformers keeps the experts of a layer in two parameters (expert, out, in) and may
run them in one kernel. Here the block is computed expert by expert, so that every
matrix is one the executor sees. All experts of a layer share a decision and the
static scale of their input, as in the fused kernels of serving engines; so an expert
that calibration sent no token has its layer's input scale, and weight scales of its
own. Padding goes to no expert.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optimizer.sites import EXPERTS, ROUTER, LinearPart
from optimizer.stack import Component, Site

if TYPE_CHECKING:
    from optimizer.model import LoadedModel

# An expert with fewer tokens than this, or than a tenth of an even share, was hardly
# seen. Assumptions: eight rows say little of a range, and a tenth is out of balance.
FEW_TOKENS = 8
FEW_OF_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """How many tokens one expert got, padding not counted."""

    name: str  # as in the names of its matrices: model.layers.0.mlp.experts.7
    layer: int
    expert: int
    tokens: int
    even_share: float  # what it would get if the router were indifferent

    @property
    def is_rare(self) -> bool:
        """Whether too few tokens came to say much about this expert."""
        return self.tokens < max(FEW_TOKENS, FEW_OF_SHARE * self.even_share)


@dataclass(slots=True)
class ExpertCounts:
    """Running counts by layer: (experts,) int64 each."""

    by_layer: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, counts: Tensor) -> None:
        """Count one pass through one layer."""
        before = self.by_layer.get(layer)
        self.by_layer[layer] = counts if before is None else before + counts

    def tokens(self, model: "LoadedModel") -> tuple[ExpertTokens, ...]:
        """Return the counts of every expert of every layer that ran, in order."""
        return tuple(self._each(model))

    def _each(self, model: "LoadedModel") -> Iterator[ExpertTokens]:
        for layer, counts in sorted(self.by_layer.items()):
            share = float(counts.sum()) / len(counts)
            for part in model.parts[Site(layer, Component.FFN_OUT)]:
                if part.index is not None:
                    name = part.name.removesuffix(f".{part.parameter}")
                    tokens = int(counts[part.index])
                    yield ExpertTokens(name, layer, part.index, tokens, share)


@contextmanager
def counting(model: "LoadedModel") -> Iterator[ExpertCounts]:
    """Count the tokens of every expert in the passes that run meanwhile."""
    counts = ExpertCounts()
    before, model.on_experts = model.on_experts, counts.add
    try:
        yield counts
    finally:
        model.on_experts = before


def rare(tokens: Iterable[ExpertTokens]) -> tuple[ExpertTokens, ...]:
    """Return the experts that too few tokens reached, those without any first."""
    return tuple(sorted((t for t in tokens if t.is_rare), key=lambda t: t.tokens))


# --- routing -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Matrices:
    """The parts of one layer, experts in order."""

    router: LinearPart
    gate_up: list[LinearPart]
    down: list[LinearPart]


def route_experts(model: "LoadedModel", index: int, layer: nn.Module) -> None:
    """Route the experts of a layer, where it has any."""
    matrices = _matrices(model, index)
    if matrices is not None:
        block = layer.get_submodule(EXPERTS.rpartition(".")[0])
        block.forward = _block_forward(model, index, block, matrices)


def _matrices(model: "LoadedModel", index: int) -> _Matrices | None:
    def experts(component: Component) -> list[LinearPart]:
        every = model.parts.get(Site(index, component), [])
        return [p for p in every if p.index is not None]

    routers = model.parts.get(Site(index, Component.ROUTER), [])
    router = next((p for p in routers if p.name.endswith(ROUTER)), None)
    down = experts(Component.FFN_OUT)
    if router is None or not down:
        return None
    return _Matrices(router, experts(Component.FFN_IN), down)


def _block_forward(
    model: "LoadedModel", index: int, block: Any, matrices: _Matrices
) -> Callable[[Tensor], Tensor]:
    """Return the block's forward: (batch, tokens, hidden) to the same."""

    def forward(hidden: Tensor) -> Tensor:
        routed = hidden.view_as(hidden)  # its gradient is that of the routers alone
        logits = model.executor.linear(matrices.router, routed)
        chosen, shares = _top(block.gate, logits.flatten(0, 1))
        if model.visible is not None:
            chosen = chosen.masked_fill(~model.visible.reshape(-1, 1), -1)
        out = _mixed(model, block, matrices, hidden.flatten(0, 1), chosen, shares)
        model.on_experts(index, _counts(chosen, len(matrices.down)))
        out = out.view_as(hidden)
        shared = getattr(block, "shared_expert", None)
        if shared is None:
            return out
        share = torch.sigmoid(block.shared_expert_gate(routed))
        return out + share * shared(hidden.view_as(hidden))

    return forward


def _top(gate: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each row (rows, k), and the share that each one has."""
    shares, chosen = logits.softmax(dim=-1).topk(gate.top_k, dim=-1)
    if getattr(gate, "norm_topk_prob", True):  # Mixtral always does
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares


def _counts(chosen: Tensor, experts: int) -> Tensor:
    return torch.bincount(chosen[chosen >= 0], minlength=experts)


def _mixed(
    model: "LoadedModel",
    block: Any,
    matrices: _Matrices,
    rows: Tensor,
    chosen: Tensor,
    shares: Tensor,
) -> Tensor:
    """Return what the experts make of rows (rows, hidden), weighed and added up."""
    run = model.executor
    out = torch.zeros_like(rows)
    for expert, (gate_up, down) in enumerate(
        zip(matrices.gate_up, matrices.down, strict=True)
    ):
        row, slot = torch.where(chosen == expert)
        if len(row) == 0:
            continue
        gate, up = run.linear(gate_up, rows[row]).chunk(2, dim=-1)
        y = run.linear(down, block.experts.act_fn(gate) * up)
        out.index_add_(0, row, y * shares[row, slot, None])
    return out
