"""With the engine vllm every stack of a front is one that its checkpoint holds."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.as_exported import joined, require_class, writable
from optimizer.choose import allowed
from optimizer.errors import HardwareError
from optimizer.export_layout import layout
from optimizer.export_scheme import MATRICES, plan
from optimizer.hardware import device
from optimizer.pieces import Memory
from optimizer.run import optimize
from optimizer.shards import Shards
from optimizer.spec import SWEPT_FORMATS, OptimizeSpec
from optimizer.stack import Component, Site, Stack, choice_named
from optimizer.work import Work
from tests.optimizer import tiny
from tests.optimizer.conftest import quiet
from tests.optimizer.exporting import saved

EVERY = (*SWEPT_FORMATS, "int8", "int4", "fp6_e3m2", "fp4_e2m1")


@pytest.fixture
def asked(
    tmp_path: Path, spec: OptimizeSpec, request: pytest.FixtureRequest
) -> OptimizeSpec:
    """A job for vLLM on a tiny network of the architecture, with every format."""
    folder = saved(request.param, tmp_path / "model")
    for file in Path(spec.model_path).glob("tokenizer*"):
        shutil.copy(file, folder)
    return replace(spec, model_path=str(folder), engine="vllm", formats=EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ("LlamaForCausalLM", "b200"),
        ("GPT2LMHeadModel", "h100"),
        ("Gemma2ForCausalLM", "h100"),
        ("MixtralForCausalLM", "h100"),
        ("Qwen2MoeForCausalLM", "b200"),
    ],
    indirect=["asked"],
)
def test_every_stack_of_the_front_is_laid_out(asked: OptimizeSpec, where: str) -> None:
    found = optimize(replace(asked, hardware=where), quiet)
    work = Work(asked, Memory())
    shards = Shards.open(Path(asked.model_path))
    stacks = [Stack.from_json(point["stack"]) for point in found["front"]]
    assert any(c.is_fp8 for stack in stacks for c in stack.choices.values())
    for stack in stacks:
        made = plan(stack, work.outline.shape)
        assert layout(work.model, shards, made).bytes > 0
        assert {d.site for d in made.deviations if _is_matrix(d.site)} == set()


def _is_matrix(site: str) -> bool:
    return Site.parse(site).component in MATRICES


def verdicts_of(architecture: str, spec: OptimizeSpec) -> dict[Site, dict[str, str]]:
    """Return why each choice of each site is refused, by its name; "": it is not."""
    shape = tiny.loaded(architecture).shape
    found = writable(shape, spec, allowed(shape, device(spec.hardware), spec, {}))
    return {
        s: {c.name: no or "" for c, no in some.items()} for s, some in found.items()
    }


ASKED = OptimizeSpec(
    model="tiny",
    model_path="",
    model_sha256="0" * 64,
    hardware="h100",
    engine="vllm",
    formats=EVERY,
)
HEAD = Site(-1, Component.LM_HEAD)
GATE, DOWN = Site(0, Component.FFN_IN), Site(0, Component.FFN_OUT)


def test_no_matrix_is_left_in_fp32() -> None:
    for site, found in verdicts_of("LlamaForCausalLM", ASKED).items():
        refused = "one 16-bit format" in found["fp32"]
        assert refused == (site.component in MATRICES)
        assert found["bf16"] == ""


def test_formats_without_a_writer_are_left_to_other_exports() -> None:
    found = verdicts_of("LlamaForCausalLM", ASKED)[GATE]
    assert "are written" in found["int8"]
    others = replace(ASKED, exports=("torchao",))
    assert verdicts_of("LlamaForCausalLM", others)[GATE]["int8"] == ""


def test_a_head_that_vllm_takes_from_the_embeddings_is_not_narrowed() -> None:
    found = verdicts_of("Gemma2ForCausalLM", ASKED)[HEAD]
    assert "takes the embeddings" in found["fp8_e4m3_weight_only"]
    assert found["bf16"] == ""


def test_experts_of_a_layer_are_decided_together() -> None:
    found = verdicts_of("MixtralForCausalLM", ASKED)
    assert "no weight-only FP8 kernel" in found[GATE]["fp8_e4m3_weight_only"]
    usable = [{n for n, no in found[s].items() if not no} for s in (GATE, DOWN)]
    assert usable[0] == usable[1]
    shape = tiny.loaded("MixtralForCausalLM").shape
    assert (GATE, DOWN) in joined(shape, "vllm")
    assert joined(shape, "any") == ()
    (cache,) = joined(tiny.loaded().shape, "tensorrt_llm")
    assert {s.component for s in cache} == {Component.KV_CACHE}


def test_what_is_refused_of_one_matrix_of_experts_is_of_the_other() -> None:
    shape = tiny.loaded("MixtralForCausalLM").shape
    verdicts = allowed(shape, device("h100"), ASKED, {})
    fp8 = choice_named(Component.FFN_OUT, "fp8_e4m3")
    verdicts[DOWN][fp8] = "K = 24 is not a multiple of 16"
    said = writable(shape, ASKED, verdicts)[GATE][fp8]
    assert said == f"{DOWN}, under the same scheme: K = 24 is not a multiple of 16"


def test_a_site_without_any_format_is_named() -> None:
    shape = tiny.loaded().shape
    spec = replace(ASKED, hardware="t4")
    verdicts = allowed(shape, device("t4"), spec, {DOWN: 1e6})
    with pytest.raises(HardwareError, match=r"layers\.0\.ffn_out has no format left"):
        writable(shape, spec, verdicts)


def test_a_model_that_vllm_has_no_class_for_is_refused_at_once(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    folder = saved("GPTNeoXForCausalLM", tmp_path / "model")
    asked = replace(spec, model_path=str(folder), engine="vllm")
    with pytest.raises(HardwareError, match="no GPTNeoXForCausalLM of its own"):
        optimize(asked, quiet)
    require_class("GPTNeoXForCausalLM", "vllm", ("torchao",))
    require_class("GPTNeoXForCausalLM", "any", ("compressed_tensors",))
