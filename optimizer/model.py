"""A model folder becomes sites: load it, find them, run it under any executor.

transformers' own classes do the loading and the arithmetic between the sites;
each site's own arithmetic is handed to an *executor* (`execute.py`), which runs
it in fp32, watches it, or rounds it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from optimizer.checkpoint import ARCHITECTURES, inspect
from optimizer.errors import ModelError
from optimizer.quantize import check_finite
from optimizer.sites import (
    ACTIVATIONS,
    LinearPart,
    Unrecognized,
    attention_module,
    coverage_percent,
    find_layers,
    find_unrecognized,
    is_norm,
    linear_parts,
    model_shape,
)
from optimizer.stack import WHOLE_MODEL, Component, ModelShape, Role, Site

ATTENTION = "precision_four_steps"
ROUTE = "precision_route"
SAVE_AGAIN = "Save the model again with transformers: save_pretrained(folder)"


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
    resume: tuple[int, Tensor] | None = None  # start at this layer with this input
    captured: list[Tensor] | None = None  # inputs of the layers, output of the last

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site, in order."""
        return tuple(s.site for s in self.shape.sites)

    def forward(
        self,
        ids: Tensor,
        executor: Executor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return fp32 logits (batch, tokens, vocab) of `ids` (batch, tokens).

        Positions count from the first token that `attention_mask` leaves visible.
        """
        positions = None
        if attention_mask is not None:  # padding on the left must not move the text
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        self.running = executor
        try:
            out = self.network(
                ids,
                attention_mask=attention_mask,
                position_ids=positions,
                use_cache=False,
            )
        finally:
            self.running = None
        logits: Tensor = out.logits
        return logits

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
    checkpoint = inspect(folder)
    network = _construct(folder, checkpoint.architecture)
    refuse_unusable_weights(network)
    return instrument(
        network, checkpoint.architecture, name or folder.name, checkpoint.stored_bytes
    )


def _construct(folder: Path, architecture: str) -> nn.Module:
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{architecture} is not one of {', '.join(ARCHITECTURES)}")
    cls = getattr(transformers, architecture)  # the allow-list names it, not the folder
    try:
        network, report = cls.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below by name
        )
    except (MemoryError, RuntimeError):  # this machine's, not the model's
        raise
    except Exception as error:  # whatever a config makes transformers raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{architecture} cannot be built from config.json: {why}. {SAVE_AGAIN}"
        ) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report.get(kind):
            first = sorted(str(k) for k in report[kind])[0]
            count = len(report[kind])
            raise ModelError(
                f"{count} {kind.replace('_', ' ')} in {folder.name}: {first}. "
                f"The weights are not those of config.json. {SAVE_AGAIN}"
            )
    network.eval().requires_grad_(False)
    return network


def refuse_unusable_weights(network: nn.Module) -> None:
    """Raise, naming the parameter, where a weight is missing, inf or NaN."""
    for name, weight in network.named_parameters():
        if weight.is_meta:
            raise ModelError(f"{name} has no data: it is on the meta device")
        check_finite(weight, f"weight {name}")


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
    _route(model)
    return model


# --- routing -----------------------------------------------------------------


def _route(model: LoadedModel) -> None:
    for some in model.parts.values():
        for part in some:
            part.module.forward = _linear_forward(model, part)
    embeddings = Site(WHOLE_MODEL, Component.EMBEDDINGS)
    for module in model.network.modules():
        if isinstance(module, nn.Embedding):
            _tap_around(model, module, embeddings, (Role.WEIGHT, Role.OUTPUT))
    for index, layer in enumerate(model.layers):
        _route_layer(model, index, layer)
    norms = Site(WHOLE_MODEL, Component.NORMS)
    inside = {id(m) for layer in model.layers for m in layer.modules()}
    for module in model.network.modules():
        if is_norm(module) and id(module) not in inside:
            _tap_norm(model, module, norms)


def _route_layer(model: LoadedModel, index: int, layer: nn.Module) -> None:
    attention = attention_module(layer)
    attention.__dict__[ROUTE] = (model, index)  # beside the module tree, not in it
    for path, module in layer.named_modules():
        if is_norm(module):
            _tap_norm(model, module, Site(index, Component.NORMS))
        elif path in ACTIVATIONS:
            site = Site(index, Component.FFN_ACT)
            _tap_around(model, module, site, (Role.INPUT, Role.OUTPUT))
    layer.forward = _layer_forward(model, index, layer.forward)


def _linear_forward(model: LoadedModel, part: LinearPart) -> Callable[[Tensor], Tensor]:
    return lambda x: model.executor.linear(part, x)


def _tap_around(
    model: LoadedModel, module: nn.Module, site: Site, roles: tuple[Role, Role]
) -> None:
    """Hand the executor what goes in and out; an embedding's rows come out as weights."""
    inner = module.forward
    first, last = roles

    def forward(x: Tensor) -> Tensor:
        if first is Role.WEIGHT:
            y = model.executor.elementwise(site, Role.WEIGHT, inner(x))
        else:
            y = inner(model.executor.elementwise(site, first, x))
        return model.executor.elementwise(site, last, y)

    module.forward = forward


def _tap_norm(model: LoadedModel, module: nn.Module, site: Site) -> None:
    """A norm's input *is* the residual stream: rounding it rounds both, in place.

    The arithmetic of the norm itself stays fp32, as in every engine.
    """
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        seen = model.executor.elementwise(site, Role.INPUT, x)
        if seen is not x:
            x.copy_(seen)
        return model.executor.elementwise(site, Role.OUTPUT, inner(x))

    module.forward = forward


def _layer_forward(
    model: LoadedModel, index: int, inner: Callable[..., Any]
) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if model.resume is not None and index < model.resume[0]:
            first, saved = model.resume
            return saved.clone() if index == first - 1 else hidden
        model.on_layer(index)
        if model.captured is not None:
            model.captured.append(hidden.clone())
        out = inner(hidden, *args, **kwargs)
        if model.captured is not None and index == len(model.layers) - 1:
            model.captured.append(out.clone())
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
