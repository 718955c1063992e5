"""An engine that served the answer decides by its seconds, whatever torch's add up to.

A script stands for the engine here, so that it takes what a test wants;
`tests/vllm/test_road.py` asks the real one.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.export_files import Outlet
from optimizer.pieces import Memory
from optimizer.run import optimize
from optimizer.spec import LatencySla, OptimizeSpec
from tests.optimizer.conftest import Document, quiet
from tests.optimizer.test_engines import SAID, python

KEPT = Memory()  # of one model and its data, for all of this file
Served = Callable[..., Document]


def spaced(sentence: str) -> str:
    """Return a sentence whose numbers and units may part."""
    return sentence.replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture
def served(spec: OptimizeSpec, tmp_path: Path) -> Served:
    def run(target: LatencySla, **taken: float | None) -> Document:
        said = json.dumps(SAID | {"version": "0.32.0"} | taken)
        engine = python(tmp_path, f"echo '{said}'")
        exports = ("compressed_tensors",)
        here = replace(
            spec, hardware="local", engine="vllm", exports=exports, latency_sla=target
        )
        return optimize(here, quiet, KEPT, outlet=Outlet(tmp_path / "out", vllm=engine))

    return run


def test_an_engine_that_is_slower_than_torch_misses_the_target(served: Served) -> None:
    verdict = served(LatencySla(per_token_s=5.0), per_token_s=10.0)["verdict"]
    assert verdict["outcome"] == "sla_not_met"
    said = (
        "is not within the targets: it takes 10.0 s per token under vllm 0.32.0 (meas"
    )
    assert said in spaced(verdict["sentence"])
    assert verdict["would_meet"][0] == "latency_sla.per_token_s of 10 s or more"


def test_an_engine_that_is_faster_than_torch_meets_it(served: Served) -> None:
    target = LatencySla(per_token_s=1e-7)
    found = served(target, per_token_s=5e-8)
    assert found["verdict"]["outcome"] in ("sla_met", "no_improvement")
    assert found["verdict"]["would_meet"] == []
    assert "50.0 ns per token under vllm 0.32.0" in spaced(found["verdict"]["sentence"])


def test_the_first_token_is_the_engines_too(served: Served) -> None:
    target = LatencySla(first_token_s=5.0)
    verdict = served(target, per_token_s=1.0, first_token_s=7.0)["verdict"]
    assert verdict["outcome"] == "sla_not_met"
    assert verdict["would_meet"][0] == "latency_sla.first_token_s of 7 s or more"


def test_a_first_token_that_was_not_timed_is_torchs(served: Served) -> None:
    target = LatencySla(first_token_s=5.0)
    verdict = served(target, per_token_s=1.0, first_token_s=None)["verdict"]
    assert verdict["outcome"] != "sla_not_met"
