"""Transformer Engine: the recipe of a choice, and modules that run it on a GPU.

The only file that imports `transformer_engine` (extra `gpu`). Its scale is what a value
is multiplied by on its way in, so the reciprocal of ours; what it calls `scale_inv` is
our scale.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimizer.errors import HardwareError
from optimizer.padding import fitting
from optimizer.stack import LINEAR, Choice, Component, Granularity

ROWS = 8  # its FP8 products take rows in steps of 8 (utils.assert_dim_for_fp8_exec)
INPUT, WEIGHT = 0, 1  # places in a linear module's forward scales (FP8FwdTensorIdx)


def te_scale(scale: Tensor) -> Tensor:
    """Return Transformer Engine's scale for ours: what a value is multiplied by."""
    return scale.reciprocal()


def recipes() -> Any:
    """Return the module of its recipes, without its kernels where there is no GPU.

    Raises HardwareError where the package is not installed.
    """
    if not torch.cuda.is_available():  # its own switches: the Python part alone
        os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")
        os.environ.setdefault("NVTE_FRAMEWORK", "none")
    try:
        from transformer_engine.common import recipe
    except ImportError as missing:
        raise HardwareError(f"Transformer Engine is not here: {missing}") from missing
    return recipe


def refusal(component: Component, choice: Choice) -> str | None:
    """Say why there is no recipe that computes a choice; None: there is one."""
    operands = [choice.input, *([choice.weight] if choice.weight else [])]
    if not choice.is_narrow:
        return None
    if component not in (*LINEAR, Component.ATTN_SCORES, Component.ATTN_VALUES):
        return f"there is no narrow {component}"
    if choice.weight_only:
        return "there are no weight-only modules"
    if any(p.format == "fp8_e5m2" for p in operands):
        return "e5m2 is for gradients: forward products are e4m3"
    kinds = {p.granularity for p in operands}
    nv = kinds == {Granularity.NV}
    if not nv and any(p.format != "fp8_e4m3" for p in operands):
        return f"there is no recipe for {choice.name}"
    if component not in LINEAR and kinds != {Granularity.TENSOR}:
        return "attention is scaled by tensor"
    if kinds & {Granularity.TOKEN, Granularity.CHANNEL}:
        return "there are no scales by row"
    return None


def recipe_of(component: Component, choice: Choice, module: Any) -> Any:
    """Return the recipe object of a choice; None: outside of FP8.

    `module` is `recipes()`. Our static scales are kept in modules under delayed scaling
    (`TeLinear`), our groups and blocks have fp32 scales as its `Float8BlockScaling` has
    them on request. Raises HardwareError with `refusal`'s reason.
    """
    no = refusal(component, choice)
    if no is not None:
        raise HardwareError(f"Transformer Engine, {choice.name}: {no}")
    if not choice.is_narrow:
        return None
    e4m3 = module.Format.E4M3
    match choice.input.granularity:
        case Granularity.GROUP:
            made = module.Float8BlockScaling(fp8_format=e4m3)
            full = module.QParams(power_2_scale=False)
            made.fp8_quant_fwd_inp = made.fp8_quant_fwd_weight = full
            return made
        case Granularity.NV:
            return module.NVFP4BlockScaling(
                disable_rht=True,
                disable_stochastic_rounding=True,
                disable_2d_quantization=True,
            )
        case _:
            return module.DelayedScaling(
                fp8_format=e4m3,
                amax_history_len=1,
                amax_compute_algo="most_recent",
                fp8_dpa=component not in LINEAR,
            )


class TeLinear:
    """One matrix (n, k) as a module of Transformer Engine, padded to its steps.

    `te` is `transformer_engine.pytorch`. `recipe` None runs it in bf16. With `scales`,
    ours of input and weight, they stay what they are: scales are only updated from
    what was seen where gradients are recorded.
    """

    def __init__(
        self,
        te: Any,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Any,
        scales: tuple[Tensor, Tensor] | None = None,
        where: str = "cuda",
    ) -> None:
        self._n, self._k = weight.shape
        n, k = fitting(self._n), fitting(self._k)
        self._te, self._recipe, self._scales = te, recipe, scales
        self._more = k - self._k
        self._module = te.Linear(
            k, n, bias=bias is not None, params_dtype=torch.bfloat16, device=where
        )
        with torch.no_grad():
            grown = pad(weight, (0, k - self._k, 0, n - self._n))
            self._module.weight.copy_(grown)
            if bias is not None:
                self._module.bias.copy_(pad(bias, (0, n - self._n)))

    def _autocast(self) -> AbstractContextManager[object]:
        if self._recipe is None:
            return nullcontext()
        entered: Callable[..., AbstractContextManager[object]] = self._te.autocast
        return entered(enabled=True, recipe=self._recipe)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b in bf16: (rows, k) -> (rows, n)."""
        rows = len(x)
        x = pad(x.to(torch.bfloat16), (0, self._more, 0, -rows % ROWS))
        y = self._run(x)
        if self._scales is not None:
            # The first call has made the place for the scales, and used its own.
            kept = self._module.fp8_meta["scaling_fwd"].scale
            kept[INPUT], kept[WEIGHT] = map(te_scale, self._scales)
            self._scales = None
            y = self._run(x)
        return y[:rows, : self._n]

    def _run(self, x: Tensor) -> Tensor:
        with self._autocast():
            y: Tensor = self._module(x)
        return y
