"""A stack that comes with a request is the answer, or where the search starts."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from optimizer.run import optimize
from optimizer.spec import LatencySla, OptimizeSpec
from optimizer.stack_file import StackFileError
from tests.optimizer.conftest import Document, chosen, quiet

pytestmark = pytest.mark.slow


def given(document: Document) -> dict[str, str]:
    """A stack that no search would choose: FP8 in one place, for nothing."""
    stack = {site["site"]: "bf16" for site in document["sites"]}
    return {**stack, "layers.1.ffn_out": "fp8_e4m3", "layers.0.attn_out": "fp32"}


def test_a_given_stack_is_measured_and_is_the_answer(
    spec: OptimizeSpec, document_of: Callable[[str], Document]
) -> None:
    stack = given(document_of("h100"))
    found = optimize(replace(spec, stack=stack), quiet)
    assert {s["site"]: s["choice"] for s in found["sites"]} == stack
    assert found["verdict"]["outcome"] == "sla_met"
    ids = [s["id"] for s in found["validation"]["stacks"]]
    assert ids == ["chosen", "all_bf16", "all_e4m3"]  # nothing else was measured
    assert chosen(found)["kl_nats"]["value"] > 0
    assert any("came with the request" in said for said in found["limits"])
    tight = replace(spec, stack=stack, latency_sla=LatencySla(per_token_s=1e-9))
    missed = optimize(tight, quiet)
    assert missed["verdict"]["outcome"] == "sla_not_met"
    assert {s["site"]: s["choice"] for s in missed["sites"]} == stack


def test_a_stack_to_start_from_is_measured_with_what_is_found(
    spec: OptimizeSpec, document_of: Callable[[str], Document]
) -> None:
    free, stack = document_of("h100"), given(document_of("h100"))
    found = optimize(replace(spec, stack=stack, stack_use="start"), quiet)
    measured = len(found["validation"]["stacks"])
    assert measured >= len(free["validation"]["stacks"])
    assert chosen(found)["kl_nats"]["value"] <= chosen(free)["kl_nats"]["value"] * 1.05
    assert {s["site"]: s["choice"] for s in found["sites"]} != stack


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers.9.norms": "bf16"}, "/stack/layers.9.norms: no such site"),
        ({"layers.1.ffn_out": "int8"}, "int8 is not in search.formats"),
        ({"lm_head": "fp16"}, "/stack/lm_head: fp16: "),
    ],
)
def test_what_cannot_be_run_is_named(
    spec: OptimizeSpec,
    document_of: Callable[[str], Document],
    change: dict[str, str],
    said: str,
) -> None:
    stack = {**given(document_of("h100")), **change}
    with pytest.raises(StackFileError, match=said):
        optimize(replace(spec, stack=stack), quiet)
