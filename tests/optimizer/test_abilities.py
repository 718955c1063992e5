"""What a device may be asked for is what the rules say for every choice."""

import pytest

from optimizer.abilities import (
    FORMATS,
    SHAPE_RULES,
    Status,
    choices,
    matmuls,
    unusable,
)
from optimizer.hardware import DEVICES, device
from optimizer.rules import refusals
from optimizer.spec import ENGINES
from optimizer.stack import CHOICES, Component, Site, SiteShape
from optimizer.support import Matmul, Scaling


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_answers_are_those_of_the_rules(name: str, engine: str) -> None:
    shape = SiteShape(
        Site(0, Component.FFN_IN), n=256, k=256, weight_elements=256 * 256
    )
    asked = choices(device(name), engine)
    assert list(asked) == list(CHOICES)
    reasons = refusals(device(name), engine, shape, FORMATS)
    for choice, answer in asked[Component.FFN_IN].items():
        taken = answer.status in (Status.SUPPORTED, Status.WEIGHT_ONLY)
        assert taken == (reasons[choice] is None)
        assert taken or answer.reason == reasons[choice]


@pytest.mark.parametrize("name", DEVICES)
def test_no_device_multiplies_what_its_rules_refuse(name: str) -> None:
    found = device(name)
    taken = {p for p, a in matmuls(found).items() if a.status is Status.SUPPORTED}
    linear = choices(found, "any")[Component.FFN_IN]
    for choice, answer in linear.items():
        if choice.is_narrow and not choice.weight_only:
            able = answer.status is Status.SUPPORTED and found.base16 == "bf16"
            assert not able or Matmul.of(choice) in taken
    assert all(a.reason for p, a in matmuls(found).items() if p not in taken)


def test_weight_only_is_for_scales_that_a_kernel_widens() -> None:
    ampere = matmuls(device("a100"))
    e4m3 = {
        s: ampere[Matmul("fp8_e4m3", "fp8_e4m3", s)].status
        for s in Scaling
        if s != Scaling.NV
    }
    assert e4m3 == {
        Scaling.TENSOR: Status.WEIGHT_ONLY,
        Scaling.TOKEN_CHANNEL: Status.WEIGHT_ONLY,
        Scaling.BLOCK: Status.WEIGHT_ONLY,
        Scaling.MX: Status.REFUSED,
    }
    # Where there is a unit, what has no kernel is refused.
    mx = matmuls(device("h100"))[Matmul("fp8_e4m3", "fp8_e4m3", Scaling.MX)]
    assert mx.status is Status.REFUSED


@pytest.mark.parametrize(
    ("name", "engine", "fmt", "said"),
    [
        ("h100", "any", "fp8_e4m3", None),
        ("a100", "any", "fp8_e4m3", None),  # weight-only
        ("a100", "transformer_engine", "fp8_e4m3", "no FP8 matmul"),
        ("gaudi3", "any", "int4", "no kernel reads int4 weights"),
        ("rtx-5090", "any", "int8", "no int8 rate is known"),
        ("b200", "vllm", "int8", "vLLM's int8 kernels refuse"),
        ("gaudi2", "any", "fp32", None),  # norms, though no matmul
        ("v100", "any", "bf16", "no bf16 arithmetic"),
        ("h100", "any", "fp16", "only where bf16 is missing"),
        ("h100", "any", "tf32", "no choice is in tf32"),
    ],
)
def test_which_formats_a_device_has(
    name: str, engine: str, fmt: str, said: str | None
) -> None:
    reason = unusable(device(name), engine, fmt)
    assert reason is None if said is None else said in str(reason)


def test_the_rules_of_shapes_name_their_sizes() -> None:
    assert "multiples of 16" in SHAPE_RULES["multiples"]
    assert "128 (block), 128 (group), 32 (mx), 16 (nv)" in SHAPE_RULES["groups"]
