"""What devices and engines say about blocks, and about the formats to come."""

import pytest

from optimizer import abilities
from optimizer.hardware import DEVICES, device
from optimizer.rules import matmul_refusal, refusals
from optimizer.sizes import held_bytes
from optimizer.spec import ENGINES, SWEPT_FORMATS
from optimizer.stack import (
    CHOICES,
    LINEAR,
    ON_REQUEST,
    Component,
    Granularity,
    Precision,
    Site,
    SiteShape,
    choice_named,
)
from optimizer.support import Matmul, Scaling

EVERYTHING = (*SWEPT_FORMATS, *sorted(ON_REQUEST))
COMING = [c for c in CHOICES[Component.FFN_IN] if c.on_request]


def refused(
    where: str,
    name: str,
    *,
    engine: str = "any",
    formats: tuple[str, ...] = EVERYTHING,
    k: int = 4096,
    parts: tuple[int, ...] = (4096,),
) -> str | None:
    n = sum(parts)
    shape = SiteShape(Site(0, Component.FFN_IN), n, k, n * k, parts=parts)
    answers = refusals(device(where), engine, shape, formats)
    return answers[choice_named(Component.FFN_IN, name)]


@pytest.mark.parametrize("found", DEVICES)
def test_formats_to_come_are_off_unless_asked_for(found: str) -> None:
    for choice in COMING:
        reason = refused(found, choice.name, formats=SWEPT_FORMATS)
        assert reason is not None
        assert "search.formats" in reason or "no bf16" in reason
    off = {c.name for some in CHOICES.values() for c in some if c.on_request}
    assert off == {c.name for c in COMING}  # linear layers only
    for component, choices in CHOICES.items():
        assert component in LINEAR or not any(c.on_request for c in choices)


@pytest.mark.parametrize(
    ("name", "able"),
    [
        ("fp6_e3m2_mx", {"b200", "gb200"}),
        ("fp4_e2m1_mx", {"b200", "gb200", "rtx-5090"}),
        ("fp4_e2m1_nv", {"b200", "gb200", "rtx-5090"}),
        ("int8", {"a100", "l4", "h100", "b200", "mi300x"}),
        ("int4_weight_only", {"a10", "a100", "l4", "h100", "b200", "rtx-5090"}),
    ],
)
def test_which_devices_have_them(name: str, able: set[str]) -> None:
    some = {"v100", "t4", "a10", "a100", "l4", "h100", "b200", "gb200"}
    some |= {"rtx-5090", "mi300x", "gaudi3"}
    found = {d for d in some if refused(d, name) is None}
    assert found >= able
    assert not found & {"v100", "t4", "gaudi3"}
    if name.startswith("fp"):
        assert found == able
    if name == "int4_weight_only":
        assert "mi300x" not in found


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("fp8_e4m3_block", {"any", "vllm", "tensorrt_llm"}),
        ("fp6_e3m2_mx", {"any"}),
        ("fp4_e2m1_mx", {"any"}),
        ("fp4_e2m1_nv", {"any", "vllm", "tensorrt_llm"}),
        ("int8", {"any", "torchao"}),  # vLLM's kernel stops at Hopper
        ("int4_weight_only", {"any", "vllm", "tensorrt_llm", "torchao"}),
    ],
)
def test_which_engines_take_them(name: str, engines: set[str]) -> None:
    assert {e for e in ENGINES if refused("b200", name, engine=e) is None} == engines


@pytest.mark.parametrize("name", ["h100", "b200", "rtx-5090"])
def test_blocks_are_for_hopper_and_blackwell(name: str) -> None:
    assert refused(name, "fp8_e4m3_block") is None
    for other in ("l4", "mi300x", "a100"):
        assert refused(other, "fp8_e4m3_block") is not None


@pytest.mark.parametrize(
    ("component", "name", "said"),
    [
        (Component.FFN_IN, "fp8_e4m3", None),
        (Component.FFN_IN, "fp8_e4m3_token", None),
        (Component.KV_CACHE, "fp8_e4m3", None),
        (Component.KV_CACHE, "fp8_e4m3_head", "one scale for a layer"),
        (Component.FFN_IN, "fp8_e4m3_weight_only", "no weight-only FP8"),
        (Component.ATTN_SCORES, "fp8_e4m3", "no FP8 attn_scores"),
        (Component.EMBEDDINGS, "fp8_e4m3", "no FP8 embeddings"),
        (Component.FFN_IN, "int8", "lists no int8"),
    ],
)
def test_what_tensorrt_llm_takes(
    component: Component, name: str, said: str | None
) -> None:
    asked = abilities.choices(device("h100"), "tensorrt_llm")[component]
    found = asked[choice_named(component, name)].reason
    if said is None:
        assert asked[choice_named(component, name)] == abilities.YES
    else:
        assert said in str(found)


def test_vllm_takes_int8_before_blackwell() -> None:
    for name in ("a100", "l4", "h100"):
        assert refused(name, "int8", engine="vllm") is None
    for name in ("b200", "gb200", "rtx-5090"):
        assert "int8" in str(refused(name, "int8", engine="vllm"))


def test_ada_multiplies_blocks_on_other_kernels() -> None:
    said = str(refused("l4", "fp8_e4m3_block"))
    assert "vLLM runs such checkpoints through Triton" in said
    assert "Transformer Engine has no such recipe" in said


@pytest.mark.parametrize(
    ("name", "pair", "said"),
    [
        ("h100", Matmul("fp8_e5m2", "fp8_e4m3", Scaling.TENSOR), None),
        ("h100", Matmul("fp8_e4m3", "fp8_e5m2", Scaling.TENSOR), None),
        ("mi300x", Matmul("fp8_e5m2", "fp8_e4m3", Scaling.TENSOR), None),
        (
            "h100",
            Matmul("fp8_e5m2", "fp8_e5m2", Scaling.TENSOR),
            "cuBLASLt and torch._scaled_mm take e5m2 for one operand at most",
        ),
        (
            "h100",
            Matmul("fp8_e5m2", "fp8_e4m3", Scaling.TOKEN_CHANNEL),
            "no kernel for tokens and channels of fp8_e5m2 × fp8_e4m3",
        ),
        ("a100", Matmul("fp8_e4m3", "fp8_e4m3", Scaling.TENSOR), "has no FP8 matmul"),
        ("h100", Matmul("fp4_e2m1", "fp4_e2m1", Scaling.NV), "no fp4_e2m1 matmul"),
        ("gaudi2", Matmul("fp8_e5m2", "fp8_e5m2", Scaling.TENSOR), "e5m2 for one"),
    ],
)
def test_pairs_of_operands(name: str, pair: Matmul, said: str | None) -> None:
    reason = matmul_refusal(device(name), pair)
    assert reason is None if said is None else said in str(reason)


def test_groups_must_be_whole() -> None:
    # SmolLM2's hidden size of 576 is four blocks and a half.
    assert (
        refused("h100", "fp8_e4m3_block", k=576) == "K = 576 is not a multiple of 128"
    )
    assert refused("b200", "fp4_e2m1_mx", k=48) == "K = 48 is not a multiple of 32"
    assert refused("b200", "fp4_e2m1_nv", k=48) is None
    fused = refused("h100", "fp8_e4m3_block", parts=(576, 192, 192))
    assert "across two fused matrices" in str(fused)
    assert refused("h100", "fp8_e4m3_block", parts=(576,)) is None
    assert refused("h100", "fp8_e4m3_block", parts=(256, 128, 128)) is None


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision("fp8_e4m3", Granularity.BLOCK), 300 * 576 + 4 * 3 * 5),
        (Precision("int4", Granularity.GROUP), 300 * 576 // 2 + 4 * 300 * 5),
        (Precision("fp4_e2m1", Granularity.NV), 300 * 576 // 2 + 300 * 36 + 4),
        (Precision("fp6_e3m2", Granularity.MX), 300 * 576 * 6 // 8 + 300 * 18),
        (Precision("bf16"), 300 * 576 * 2),
    ],
    ids=str,
)
def test_bytes_with_scales_by_hand(precision: Precision, expected: int) -> None:
    assert held_bytes(300 * 576, 576, precision) == expected
