"""Each site of a network is handed to the executor of the pass that is under way.

A module's `forward` is replaced on the module itself: matrices go to
`executor.linear`, attention to `executor.attention`, and what flows in and out of
embeddings, norms and activations past `executor.elementwise`. What transformers
computes in between stays its own.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optimizer.experts import route_experts
from optimizer.own_attention import OWN_ATTENTION, Attend, own_forward
from optimizer.shapes import first_position
from optimizer.sites import (
    ACTIVATIONS,
    LinearPart,
    attention_module,
    is_linear,
    is_norm,
)
from optimizer.stack import WHOLE_MODEL, Component, Role, Site

if TYPE_CHECKING:
    from optimizer.model import LoadedModel

ATTENTION = "precision_four_steps"  # what transformers' attention interface calls
ROUTE = "precision_route"
FFN_BLOCKS = ("mlp", "ffn", "intermediate")
# Layers that hand on a tuple, hidden states first.
TUPLE_LAYERS = frozenset({"FalconDecoderLayer", "MptBlock"})

AroundLayer = Callable[["LoadedModel", int, Callable[..., Any]], Callable[..., Any]]


def route(model: "LoadedModel", around: AroundLayer, attend: Attend) -> None:
    """Route every site of the model.

    `around` wraps the forward of a layer, which returns hidden states (batch, tokens,
    hidden); `attend` answers transformers' attention interface under `ATTENTION`.
    """
    kind = type(attention_module(model.layers[0])).__name__
    network: Any = model.network
    if kind in OWN_ATTENTION:
        network.config._attn_implementation = "eager"  # which decides on additive masks
    else:
        network.set_attn_implementation(ATTENTION)
    for some in model.parts.values():
        for part in some:
            if is_linear(part.module):
                _replace(part.module, _linear_forward(model, part))
    for index, layer in enumerate(model.layers):
        _route_layer(model, index, layer, around, attend)
    _route_ends(model)


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


def _route_ends(model: "LoadedModel") -> None:
    embeddings = Site(WHOLE_MODEL, Component.EMBEDDINGS)
    norms = Site(WHOLE_MODEL, Component.NORMS)
    inside = {id(m) for layer in model.layers for m in layer.modules()}
    for path, module in model.network.named_modules():
        if isinstance(module, nn.Embedding):
            _tap_rows(model, module, embeddings)
        elif is_norm(module) and id(module) not in inside:
            if "embeddings." in path:  # BERT's: before the first layer
                _tap_embedded(model, module, embeddings)
            else:
                _tap_norm(model, module, norms)


def _route_layer(
    model: "LoadedModel",
    index: int,
    layer: nn.Module,
    around: AroundLayer,
    attend: Attend,
) -> None:
    attention = attention_module(layer)
    attention.__dict__[ROUTE] = (model, index)  # beside the module tree, not in it
    _replace(attention, _apart(own_forward(attention, attend) or attention.forward))
    route_experts(model, index, layer)
    for path, module in layer.named_modules():
        if is_norm(module):
            _tap_norm(model, module, Site(index, Component.NORMS))
        elif path in ACTIVATIONS:
            _tap_around(model, module, Site(index, Component.FFN_ACT))
        elif path in FFN_BLOCKS:
            fresh = type(module).__name__ == "FalconMLP"
            _replace(module, _apart(module.forward, fresh))
    if type(layer).__name__ in TUPLE_LAYERS:
        _replace(layer, _as_tuple(around(model, index, _alone(layer.forward))))
    else:
        _replace(layer, around(model, index, layer.forward))


def _alone(inner: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: inner(*args, **kwargs)[0]


def _as_tuple(inner: Callable[..., Any]) -> Callable[..., tuple[Any, None]]:
    return lambda *args, **kwargs: (inner(*args, **kwargs), None)


def _apart(inner: Callable[..., Any], fresh: bool = False) -> Callable[..., Any]:
    """Give a block a second name for what it reads, with the gradient of it alone.

    It may be the residual stream (BERT) or another block's input (Falcon). `fresh`:
    a copy of what it returns, which Falcon adds to in place.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (args[0].view_as(args[0]), *args[1:])
        else:
            hidden = kwargs["hidden_states"]
            kwargs["hidden_states"] = hidden.view_as(hidden)
        out = inner(*args, **kwargs)
        return out.clone() if fresh else out

    return forward


def _linear_forward(
    model: "LoadedModel", part: LinearPart
) -> Callable[[Tensor], Tensor]:
    return lambda x: model.executor.linear(part, x)


def _tap_rows(model: "LoadedModel", module: nn.Embedding, site: Site) -> None:
    """An embedding's rows come out as weights, then as the site's output."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        if model.segment.hidden is not None:  # replaced before the first layer
            return torch.zeros(*x.shape, module.embedding_dim)
        rows = model.executor.elementwise(site, Role.WEIGHT, inner(x))
        return model.executor.elementwise(site, Role.OUTPUT, rows)

    _replace(module, forward)


def _tap_embedded(model: "LoadedModel", module: nn.Module, site: Site) -> None:
    """A norm over the sum of embeddings makes the output of the embeddings."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        if model.segment.hidden is not None:
            return x
        return model.executor.elementwise(site, Role.OUTPUT, inner(x))

    _replace(module, forward)


def _tap_around(model: "LoadedModel", module: nn.Module, site: Site) -> None:
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        y = inner(model.executor.elementwise(site, Role.INPUT, x))
        return model.executor.elementwise(site, Role.OUTPUT, y)

    _replace(module, forward)


def _tap_norm(model: "LoadedModel", module: nn.Module, site: Site) -> None:
    """A norm's input *is* the residual stream: rounding it rounds both, in place.

    The arithmetic of the norm itself stays fp32, as in every engine.
    """
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        seen = model.executor.elementwise(site, Role.INPUT, x)
        if seen is not x:
            x.copy_(seen)
        return model.executor.elementwise(site, Role.OUTPUT, inner(x))

    _replace(module, forward)


def position_inputs(network: nn.Module, mask: Tensor | None) -> dict[str, Tensor]:
    """Return the positions that padding on the left must not move, where a model has any.

    `mask` is an attention mask (batch, tokens), 0 at padding. Positions count from the
    first token that it leaves visible.
    """
    if mask is None:
        return {}
    if "position_ids" not in inspect.signature(network.forward).parameters:
        return {}  # MPT: distances alone
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"position_ids": positions + first_position(network.config)}
