import json
import math

import pytest

from optimizer.errors import SpecError
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.stack import CHOICES, WHOLE_MODEL, Component, Site, Stack, choice_named

SPEC = OptimizeSpec(
    "m",
    "/models/m",
    "0" * 64,
    "h100",
    latency_sla=LatencySla(per_token_s=0.02),
    workload=Workload(8, 64, 32),
    formats=("bf16", "fp8_e4m3"),
)


def test_a_spec_survives_json() -> None:
    stored = json.loads(json.dumps(SPEC.to_json()))
    assert OptimizeSpec.from_json(stored) == SPEC


def test_what_a_later_version_adds_is_ignored() -> None:
    assert OptimizeSpec.from_json({**SPEC.to_json(), "not_yet_known": 1}) == SPEC


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["per_token_s", "first_token_s"])
def test_a_target_that_is_no_duration_is_refused_by_name(
    name: str, value: float
) -> None:
    with pytest.raises(SpecError, match=name):
        LatencySla(**{name: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"formats": ("bf16", "int3", "fp7")}, "unknown formats: fp7, int3"),
        ({"engine": "steam"}, "unknown engine 'steam'"),
    ],
)
def test_what_is_unknown_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        OptimizeSpec("m", "/models/m", "0" * 64, "h100", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("component", list(Component))
def test_a_stack_survives_json(component: Component) -> None:
    for layer in (WHOLE_MODEL, 0, 31):
        for choice in CHOICES[component]:
            stack = Stack({Site(layer, component): choice})
            assert Stack.from_json(json.loads(json.dumps(stack.to_json()))) == stack


@pytest.mark.parametrize(
    "name", ["", "layers", "layers.0", "layers.x.norms", "layers.0.norms.1", "mystery"]
)
def test_what_is_no_site_is_named(name: str) -> None:
    with pytest.raises(SpecError, match=f"not a site: '{name}'"):
        Site.parse(name)


def test_an_unknown_choice_is_answered_with_those_that_exist() -> None:
    with pytest.raises(SpecError, match="norms has no choice 'fp8'; it has fp32, bf16"):
        choice_named(Component.NORMS, "fp8")
