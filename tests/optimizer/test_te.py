import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer.errors import HardwareError
from optimizer.formats import E4M3
from optimizer.quantize import scale_from_amax
from optimizer.stack import CHOICES, LINEAR, Component, choice_named
from optimizer.te import TeLinear, recipe_of, recipes, refusal, te_scale
from tests.optimizer.numbers import normal

FFN, SCORES = Component.FFN_IN, Component.ATTN_SCORES


@pytest.fixture(scope="module")
def real() -> Any:
    """The package's own recipes, without a GPU."""
    pytest.importorskip(
        "pydantic", reason="Transformer Engine's recipes are pydantic dataclasses"
    )
    try:
        return recipes()
    except HardwareError as missing:
        pytest.skip(str(missing))


# Scales


def test_its_scale_is_the_reciprocal_of_ours() -> None:
    # amax 2.0: ours is 0.00446429 as compressed-tensors has it, theirs 224.
    ours = scale_from_amax(torch.tensor(2.0), E4M3)
    assert float(ours) == pytest.approx(0.00446429, rel=1e-6)
    assert float(te_scale(ours)) == pytest.approx(224.0)


# Recipes


def test_linear_choices_have_the_recipes_that_compute_them(real: Any) -> None:
    made = {
        c.name: recipe_of(FFN, c, real) for c in CHOICES[FFN] if refusal(FFN, c) is None
    }
    assert {name for name, recipe in made.items() if recipe is None} == {
        "fp32",
        "bf16",
        "fp16",
    }
    delayed, block, nv = (
        made[n] for n in ("fp8_e4m3", "fp8_e4m3_block", "fp4_e2m1_nv")
    )
    assert isinstance(delayed, real.DelayedScaling)
    assert delayed.fp8_format is real.Format.E4M3
    assert (delayed.amax_history_len, delayed.margin, delayed.fp8_dpa) == (1, 0, False)
    assert isinstance(block, real.Float8BlockScaling)
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim) == (1, 2)
    assert not block.fp8_quant_fwd_inp.power_2_scale  # ours are fp32 numbers
    assert not block.fp8_quant_fwd_weight.power_2_scale
    assert isinstance(nv, real.NVFP4BlockScaling)
    assert nv.disable_rht
    assert nv.disable_2d_quantization
    assert nv.disable_stochastic_rounding
    assert len(made) == 6


def test_its_formats_have_our_ranges(real: Any) -> None:
    assert real.Format.E4M3.value.max_fwd == E4M3.max


def test_attention_in_fp8_is_a_switch_of_the_recipe(real: Any) -> None:
    made = recipe_of(SCORES, choice_named(SCORES, "fp8_e4m3"), real)
    assert made.fp8_dpa
    assert recipe_of(SCORES, choice_named(SCORES, "bf16"), real) is None


def test_what_has_no_recipe_says_why(real: Any) -> None:
    for component, name, reason in (
        (FFN, "fp8_e4m3_token", "there are no scales by row"),
        (FFN, "fp8_e4m3_weight_only", "there are no weight-only modules"),
        (FFN, "fp8_e5m2", "e5m2 is for gradients: forward products are e4m3"),
        (FFN, "int8", "there is no recipe for int8"),
        (FFN, "fp6_e3m2_mx", "there is no recipe for fp6_e3m2_mx"),
        (FFN, "fp4_e2m1_mx", "there is no recipe for fp4_e2m1_mx"),
        (SCORES, "fp8_e4m3_head", "attention is scaled by tensor"),
        (Component.FFN_ACT, "fp8_e4m3", "there is no narrow ffn_act"),
        (Component.KV_CACHE, "fp8_e4m3", "there is no narrow kv_cache"),
    ):
        choice = choice_named(component, name)
        assert refusal(component, choice) == reason
        with pytest.raises(HardwareError, match=reason):
            recipe_of(component, choice, real)


def test_every_choice_has_a_recipe_or_a_reason(real: Any) -> None:
    for component in (*LINEAR, SCORES, Component.ATTN_VALUES):
        for choice in CHOICES[component]:
            if refusal(component, choice) is None:
                assert (recipe_of(component, choice, real) is None) == (
                    not choice.is_narrow
                )


def test_a_machine_without_the_package_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.common", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(HardwareError, match="Transformer Engine is not here"):
        recipes()


def test_beside_a_gpu_the_whole_package_is_imported(
    real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("NVTE_PROJECT_BUILDING", raising=False)
    assert recipes() is real  # imported before: nothing is asked of the environment
    import os

    assert "NVTE_PROJECT_BUILDING" not in os.environ


# Modules, with the package's kernels replaced by torch's


class Engine:
    """The part of `transformer_engine.pytorch` that is used, in plain bf16."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.rows: list[int] = []
        engine = self

        class Linear(nn.Linear):
            def __init__(
                self, k: int, n: int, bias: bool, params_dtype: torch.dtype, device: str
            ) -> None:
                super().__init__(k, n, bias=bias, dtype=params_dtype, device=device)
                self.fp8_meta: dict[str, Any] = {}

            def forward(self, x: Tensor) -> Tensor:
                engine.rows.append(len(x))
                if engine.entered and "scaling_fwd" not in self.fp8_meta:
                    scale = SimpleNamespace(scale=torch.ones(3))
                    self.fp8_meta["scaling_fwd"] = scale
                return super().forward(x)

        self.Linear = Linear

    @contextmanager
    def autocast(self, *, enabled: bool, recipe: Any) -> Iterator[None]:
        assert enabled
        self.entered.append(recipe)
        yield


def test_a_module_is_padded_to_steps_of_16_and_8_and_nobody_sees_it() -> None:
    engine, weight, bias = Engine(), normal(15, 24).bfloat16(), normal(15).bfloat16()
    module = TeLinear(engine, weight.float(), bias.float(), None, where="cpu")
    x = normal(3, 24, seed=2).bfloat16()
    y = module(x)
    assert engine.rows == [8]
    assert engine.entered == []  # bf16: outside of FP8
    assert y.shape == (3, 15)
    # Zeros change no sum; kernels may add in another order, then round to bf16.
    wanted = nn.functional.linear(x.float(), weight.float(), bias.float())
    assert torch.allclose(y.float(), wanted, rtol=2**-7, atol=2**-7)


def test_calibrated_scales_are_put_where_the_module_keeps_them() -> None:
    engine = Engine()
    module = TeLinear(
        engine,
        normal(16, 16),
        None,
        "recipe",
        (torch.tensor(0.5), torch.tensor(4.0)),
        "cpu",
    )
    x = normal(8, 16)
    module(x)
    # Once to make the place, once with our scales; afterwards they are there.
    assert engine.entered == ["recipe", "recipe"]
    kept = module._module.fp8_meta["scaling_fwd"].scale
    assert kept.tolist() == [2.0, 0.25, 1.0]
    module(x)
    assert len(engine.entered) == 3
