"""Whose kernels a request's engine is priced by."""

from dataclasses import replace

import pytest

from optimizer import kernels
from optimizer.architectures import architecture
from optimizer.choose import modelled
from optimizer.cost import site_cost
from optimizer.estimate import Ask, estimate
from optimizer.hardware import device
from optimizer.run import _target
from optimizer.spec import OptimizeSpec, Workload
from optimizer.stack import Component, choice_named

H100 = device("h100")
FFN = Component.FFN_IN


@pytest.mark.parametrize(
    ("engine", "named", "stands_in"),
    [
        ("any", "vllm", False),
        ("vllm", "vllm", False),
        ("tensorrt_llm", "trtllm", False),
        ("torchao", "vllm", True),
        ("transformer_engine", "vllm", True),
    ],
)
def test_an_engine_has_its_own_kernels_or_those_of_vllm(
    engine: str, named: str, stands_in: bool
) -> None:
    found = kernels.of_engine("h100", engine)
    assert found is not None
    assert found.engine == named
    assert kernels.stand_in(found, engine) is stands_in
    assert kernels.of_engine("v100", engine) is None


def test_a_job_is_priced_by_the_engine_that_it_names(spec: OptimizeSpec) -> None:
    known = architecture("qwen2-7b")
    assert known is not None
    model = known.shape
    matrix = next(s for s in model.sites if s.site.component is FFN)
    choice = choice_named(FFN, "bf16")
    seconds = {}
    for engine in ("vllm", "tensorrt_llm"):
        asked = replace(spec, engine=engine, workload=Workload(16, 512, 128))
        *_, costs, _ = _target(asked, model, lambda layer: None, None)
        seconds[engine] = costs(matrix, choice).per_token_s
        tables = kernels.of_engine("h100", engine)
        own = site_cost(matrix, choice, H100, asked.workload, model, tables=tables)
        assert own.per_token_s == seconds[engine]
    assert seconds["vllm"] != seconds["tensorrt_llm"]
    plain = modelled(model, H100, Workload(16, 512, 128))
    assert plain(matrix, choice).per_token_s == seconds["vllm"]


def test_an_estimate_reads_the_same_tables() -> None:
    known = architecture("qwen2-7b")
    assert known is not None
    ask = Ask(known.shape, H100, Workload(16, 512, 128))
    found = {e: estimate(replace(ask, engine=e)) for e in ("any", "tensorrt_llm")}
    bf16 = {e: f.priced[1].cost.per_token_s for e, f in found.items()}
    assert bf16["any"] != bf16["tensorrt_llm"]
    assert "fp8_weight_only" in found["tensorrt_llm"].refused
