"""A model folder becomes sites: load it, find them, run it under any executor.

transformers' own classes do the loading and the arithmetic between the sites;
each site's own arithmetic is handed to an *executor* (`execute.py`), which runs
it in fp32, watches it, or rounds it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from optimizer import checkpoint
from optimizer.construct import construct
from optimizer.routing import ATTENTION, ROUTE, position_inputs, route
from optimizer.segments import WHOLE, Residency, Resident, Segment, Stopped, given
from optimizer.shapes import model_shape
from optimizer.sites import (
    LinearPart,
    Unrecognized,
    coverage_percent,
    find_layers,
    find_unrecognized,
    linear_parts,
)
from optimizer.stack import ModelShape, Role, Site


class Executor(Protocol):
    """What runs the sites. See `execute.Reference` for the meaning of each."""

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run one matrix."""

    def attention(self, step: "AttentionStep") -> Tensor:
        """Run QKᵀ, softmax and PV of one layer."""

    def elementwise(self, site: Site, role: Role, x: Tensor) -> Tensor:
        """See, and perhaps round, what goes into or out of a site."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The operands of one layer's attention, positions already encoded."""

    layer: int
    query: Tensor  # (batch, heads, tokens, head_dim)
    key: Tensor  # (batch, kv_heads, tokens, head_dim)
    value: Tensor  # (batch, kv_heads, tokens, head_dim)
    mask: Tensor | None  # additive, (batch, 1, tokens, tokens); None: sees everything
    scaling: float
    softcap: float | None


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model whose sites run as the executor of the current pass says."""

    name: str
    network: nn.Module
    architecture: str
    layers: nn.ModuleList
    shape: ModelShape
    parts: dict[Site, list[LinearPart]]
    unrecognized: tuple[Unrecognized, ...]
    coverage_percent: float  # of parameters, by sites
    running: Executor | None = None  # None: no pass is under way
    on_layer: Callable[[int], None] = lambda layer: None  # called as each layer starts
    segment: Segment = WHOLE  # what the current pass runs
    visible: Tensor | None = None  # (batch, tokens): False is padding; None: no padding
    on_experts: Callable[[int, Tensor], None] = lambda layer, tokens: None
    residency: Residency = field(default_factory=Resident)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site, in order."""
        return tuple(s.site for s in self.shape.sites)

    @property
    def stages(self) -> int:
        """How many stages a pass has: embeddings, every layer, norm and head."""
        return len(self.layers) + 2

    def forward(
        self,
        ids: Tensor,
        executor: Executor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return fp32 logits (batch, tokens, vocab) of `ids` (batch, tokens).

        Positions count from the first token that `attention_mask` leaves visible.
        """
        if self.residency.whole:
            return self._run(ids, executor, attention_mask, WHOLE)
        hidden: Tensor | None = None
        for stage in range(self.stages):
            with self.residency.holding(stage):
                hidden = self.stage(stage, ids, hidden, executor, attention_mask)
        assert hidden is not None
        return hidden

    def stage(
        self,
        number: int,
        ids: Tensor,
        hidden: Tensor | None,
        executor: Executor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Run one stage from the hidden states (batch, tokens, hidden) before it.

        Returns those after it, and the logits after the last. Stage 0 takes None.
        """
        last = number == self.stages - 1
        first = max(number - 1, 0)
        segment = Segment(first, hidden, None if last else number)
        return self._run(ids, executor, attention_mask, segment)

    def _run(
        self, ids: Tensor, executor: Executor, mask: Tensor | None, segment: Segment
    ) -> Tensor:
        positions = position_inputs(self.network, mask)
        self.running, self.segment = executor, segment
        self.visible = None if mask is None else mask.bool()
        try:
            out = self.network(ids, attention_mask=mask, use_cache=False, **positions)
        except Stopped as stopped:
            return stopped.hidden
        finally:
            self.running, self.segment, self.visible = None, WHOLE, None
        logits: Tensor = out.logits
        return logits

    def cached(self, ids: Tensor, executor: Executor, cache: Any) -> Tensor:
        """Return the logits (batch, vocab) after `ids`, which follow what a cache holds.

        `cache` is transformers', and has them in it after this.
        """
        names = inspect.signature(self.network.forward).parameters
        name = "cache" if "cache" in names else "past_key_values"  # transformers < 5.24
        self.running = executor
        try:
            out = self.network(ids, **{name: cache}, use_cache=True)
        finally:
            self.running = None
        logits: Tensor = out.logits
        return logits[:, -1]

    @property
    def executor(self) -> Executor:
        """Who runs the sites of the current pass."""
        assert self.running is not None, "run the model through `forward`"
        return self.running


def load(folder: Path, name: str = "") -> LoadedModel:
    """Load a checkpoint in fp32 and route its sites.

    Raises ModelError for an architecture that is not in the allow-list or weights
    that do not fill the model, NonFiniteError for inf or NaN in a weight.
    """
    found = checkpoint.inspect(folder)
    network = construct(found, "eager")  # until the sites are routed
    return instrument(
        network, found.architecture, name or folder.name, found.stored_bytes
    )


def instrument(
    network: nn.Module, architecture: str, name: str = "", stored_bytes: int = 0
) -> LoadedModel:
    """Find the sites of `network` and route each through the executor of a pass."""
    layers = find_layers(network)
    parts: dict[Site, list[LinearPart]] = {}
    for part in linear_parts(network, layers):
        parts.setdefault(part.site, []).append(part)
    unrecognized = tuple(find_unrecognized(network, parts))
    model = LoadedModel(
        name=name,
        network=network,
        architecture=architecture,
        layers=layers,
        shape=model_shape(network, architecture, layers, parts, stored_bytes),
        parts=parts,
        unrecognized=unrecognized,
        coverage_percent=coverage_percent(network, unrecognized),
    )
    route(model, _layer_forward, _four_steps)
    return model


# --- routing -----------------------------------------------------------------


def _layer_forward(
    model: LoadedModel, index: int, inner: Callable[..., Any]
) -> Callable[..., Any]:
    """Run the layer where the segment has it; pass by, or leave, where it has not."""
    last = len(model.layers) - 1

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        segment = model.segment
        if index < segment.first:
            if index < last or segment.first <= last:
                return hidden
            return given(segment)  # only norm and head run
        if index == segment.first and segment.hidden is not None:
            hidden = given(segment)
        if segment.stop == index:
            raise Stopped(hidden)
        model.on_layer(index)
        out = inner(hidden, *args, **kwargs)
        if index == last and segment.stop == last + 1:
            raise Stopped(out)
        return out

    return forward


def _four_steps(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Answer transformers' attention interface: (batch, tokens, heads, head_dim)."""
    model, layer = module.__dict__[ROUTE]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    step = AttentionStep(layer, query, key, value, attention_mask, scaling, softcap)
    return model.executor.attention(step).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _four_steps)
AttentionMaskInterface.register(ATTENTION, eager_mask)
