"""A model as this processor executes it: every site in the precision of a stack.

`model.py` emulates precisions in fp32 and says what they lose; here nothing is
emulated, so that it can be timed. transformers' own modules run, and each site
computes in its own format: fp32 and bf16 on torch's kernels, FP8 weights as codes
that are widened to bf16 at every call, K and V in a cache that is written in place.
What no site has (positions, sums of the residual stream, transformers' own Python)
stays as it is.

The three sites of attention are one fused kernel: it runs in the widest of their
formats.
"""

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from optimizer.errors import HardwareError
from optimizer.execute import dynamic_scale
from optimizer.formats import E4M3
from optimizer.matmul import linear
from optimizer.native_attention import Held, fused
from optimizer.own_attention import OWN_ATTENTION
from optimizer.quantize import to_codes
from optimizer.shapes import is_encoder, model_shape
from optimizer.sites import (
    ACTIVATIONS,
    LinearPart,
    attention_module,
    find_layers,
    is_norm,
    linear_parts,
)
from optimizer.stack import (
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Precision,
    Site,
    Stack,
)

ATTENTION = "precision_native"  # what transformers' attention interface calls
NATIVE = "precision_native_model"
WIDE = {"bf16": torch.bfloat16, "fp32": torch.float32}  # narrowest first
E4M3_IN_BF16 = 0x87F0 - (1 << 16)  # sign, four bits of exponent, three of mantissa
E4M3_BIAS = 2.0**120  # between the exponents' biases: 127 - 7

EMBEDDINGS = Site(WHOLE_MODEL, Component.EMBEDDINGS)
FUSED = (Component.ATTN_SCORES, Component.ATTN_SOFTMAX, Component.ATTN_VALUES)

Spent = dict[Site, list[float]]  # seconds of each call


def widened(codes: Tensor) -> Tensor:
    """Return the bf16 values of e4m3 codes (uint8, no NaN among them), exactly.

    torch casts one number at a time; shifting the bits into place is ten times
    faster: the exponent is then off by 120, which a product puts right.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(4).bitwise_and_(E4M3_IN_BF16)
    return bits.view(torch.bfloat16).mul_(E4M3_BIAS)


class Native:
    """A network whose sites compute in the formats of the stack in use."""

    def __init__(self, network: nn.Module) -> None:
        """Take a network in fp32. Raises HardwareError where it cannot be run so."""
        refuse(network)
        self.network: Any = network
        self.layers = find_layers(network)
        self._spent: Spent = defaultdict(list)
        self._weights: dict[tuple[int, str], tuple[Tensor, Tensor | None]] = {}
        self._choices: Mapping[Site, Choice] = {}
        self._cast: tuple[Tensor, Tensor] | None = None  # the last, before and after
        parts: dict[Site, list[LinearPart]] = defaultdict(list)
        for part in linear_parts(network, self.layers):
            parts[part.site].append(part)
        self.shape: ModelShape = model_shape(network, "", self.layers, parts, 0)
        parameters = inspect.signature(network.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._route(parts)

    def use(self, stack: Stack) -> None:
        """Compute as a stack says from now on; weights are converted once.

        Raises HardwareError naming a choice that is not run here.
        """
        for site, choice in stack.choices.items():
            formats = {choice.input.format, choice.output}
            stored = choice.weight.format if choice.weight else choice.input.format
            narrow = stored == "fp8_e4m3" and site.component is not Component.KV_CACHE
            if not formats <= WIDE.keys() or not (narrow or stored in WIDE):
                raise HardwareError(f"{choice.name} at {site} is not run on this CPU")
        self._choices = stack.choices

    @torch.inference_mode()
    def run(self, ids: Tensor, cache: Cache) -> Tensor:
        """Run tokens (batch, tokens) behind those of the cache.

        Returns the logits of the last of them (batch, 1, vocab).
        """
        out = self.network(
            ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}
        )
        logits: Tensor = out.logits
        return logits

    def spent_until_now(self) -> dict[Site, float]:
        """Return the seconds that each site took since this was last asked."""
        found = {site: sum(calls) for site, calls in self._spent.items()}
        for calls in self._spent.values():
            calls.clear()
        return found

    def cache(self, batch: int, tokens: int, filled: int = 0) -> Cache:
        """Return a cache with room for `tokens`, the first `filled` of them there."""
        held = [s for s in self.shape.sites if s.site.component is Component.KV_CACHE]
        layers: list[Any] = [
            Held(
                (batch, s.kv_heads, tokens, s.head_dim),
                WIDE[self._choices[s.site].output],
                filled,
                self._spent[s.site],
            )
            for s in held
        ]
        return Cache(layers=layers)

    # --- routing ---------------------------------------------------------------

    def _route(self, parts: Mapping[Site, list[LinearPart]]) -> None:
        self.network.set_attn_implementation(ATTENTION)
        for some in parts.values():
            for part in some:
                self._replace(part.module, part.site, self._matrix(part))
        norms = {id(n): Site(WHOLE_MODEL, Component.NORMS) for n in self._norms()}
        for index, layer in enumerate(self.layers):
            attention_module(layer).__dict__[NATIVE] = (self, index)
            for path, module in layer.named_modules():
                if is_norm(module):
                    norms[id(module)] = Site(index, Component.NORMS)
                elif path in ACTIVATIONS:
                    site = Site(index, Component.FFN_ACT)
                    self._replace(module, site, self._elementwise(module, site))
        for module in self.network.modules():
            if id(module) in norms:
                site = norms[id(module)]
                self._replace(module, site, self._elementwise(module, site))
            elif isinstance(module, nn.Embedding):
                self._replace(module, EMBEDDINGS, self._rows(module))

    def _norms(self) -> list[nn.Module]:
        return [m for m in self.network.modules() if is_norm(m)]

    def _replace(
        self, module: nn.Module, site: Site, forward: Callable[[Tensor], Tensor]
    ) -> None:
        spent = self._spent[site]

        def timed(x: Tensor) -> Tensor:
            start = time.perf_counter()
            y = forward(x)
            spent.append(time.perf_counter() - start)
            return y

        module.forward = timed

    def _matrix(self, part: LinearPart) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            choice = self._choices[part.site]
            assert choice.weight is not None
            x = self._as(x, WIDE[choice.input.format])
            weight, scale = self._weight(part.weight, choice.weight)
            bias = None if part.bias is None else part.bias.to(x.dtype)
            if scale is not None:
                y = functional.linear(x, widened(weight)).mul_(scale)
                y = y if bias is None else y.add_(bias)
            elif x.dtype == torch.float32:
                y = linear(x, weight, bias)
            else:
                y = functional.linear(x, weight, bias)
            return y.to(WIDE[choice.output])

        return forward

    def _as(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast what several matrices read (q, k, v; gate, up) once."""
        if self._cast is None or self._cast[0] is not x or self._cast[1].dtype != dtype:
            self._cast = (x, x.to(dtype))
        return self._cast[1]

    def _weight(
        self, weight: Tensor, precision: Precision
    ) -> tuple[Tensor, Tensor | None]:
        """Return a matrix as it is stored, and the scales of its rows in FP8 (out,)."""
        key = (weight.data_ptr(), precision.format)
        if key not in self._weights:
            self._weights[key] = _stored(weight, precision)
        return self._weights[key]

    def _elementwise(self, module: Any, site: Site) -> Callable[[Tensor], Tensor]:
        """A norm or an activation in its format, its parameters with it."""
        inner = module.forward
        parameters = dict(module.named_parameters(recurse=False))
        copies = {
            dtype: {n: nn.Parameter(p.to(dtype), False) for n, p in parameters.items()}
            for dtype in WIDE.values()
        }

        def forward(x: Tensor) -> Tensor:
            dtype = WIDE[self._choices[site].input.format]
            module._parameters.update(copies[dtype])
            y: Tensor = inner(x.to(dtype))
            return y.to(dtype)

        return forward

    def _rows(self, module: nn.Embedding) -> Callable[[Tensor], Tensor]:
        def forward(ids: Tensor) -> Tensor:
            choice = self._choices[EMBEDDINGS]
            assert choice.weight is not None
            table, scale = self._weight(module.weight, choice.weight)
            rows = functional.embedding(ids, table)
            if scale is not None:
                rows = widened(rows) * scale[ids].unsqueeze(-1)
            return rows * getattr(module, "embed_scale", 1.0)  # Gemma's

        return forward

    def attend(
        self, layer: int, module: nn.Module, qkv: list[Tensor], rest: dict[str, Any]
    ) -> Tensor:
        """Return (batch, tokens, heads, head_dim) of one layer's fused attention."""
        start = time.perf_counter()
        used = {self._choices[Site(layer, c)].input.format for c in FUSED}
        dtype = next(d for name, d in reversed(WIDE.items()) if name in used)
        query, key, value = (t.to(dtype) for t in qkv)
        out = fused(module, query, key, value, **rest)
        values = Site(layer, Component.ATTN_VALUES)
        out = out.to(WIDE[self._choices[values].output])
        half = (time.perf_counter() - start) / 2
        for component in (Component.ATTN_SCORES, Component.ATTN_VALUES):
            self._spent[Site(layer, component)].append(half)
        return out


def _stored(weight: Tensor, precision: Precision) -> tuple[Tensor, Tensor | None]:
    if precision.format in WIDE:
        return weight.to(WIDE[precision.format]).contiguous(), None
    scale = dynamic_scale(weight, precision)
    return to_codes(weight / scale, E4M3), scale.flatten().to(torch.bfloat16)


def refuse(network: nn.Module) -> None:
    """Raise HardwareError, saying why, where a network cannot be run here."""
    config: Any = network.config
    layers = find_layers(network)
    parts = list(linear_parts(network, layers))
    kind = type(attention_module(layers[0])).__name__
    for no, why in (
        (is_encoder(config), "an encoder generates nothing"),
        (any(p.index is not None for p in parts), "experts share one module"),
        (kind in OWN_ATTENTION, f"{kind} multiplies on its own"),
        (
            getattr(config, "attn_logit_softcapping", None) is not None,
            "no fused attention kernel has a soft cap",
        ),
    ):
        if no:
            raise HardwareError(f"not run end to end on this CPU: {why}")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Answer transformers' attention interface: (batch, tokens, heads, head_dim)."""
    native, layer = module.__dict__[NATIVE]
    rest["attention_mask"] = mask
    return native.attend(layer, module, [query, key, value], rest), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
