"""What a job leaves for engines: all of it, what is refused, and what is not as measured."""

import hashlib
import json
import os
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer import te
from optimizer.errors import HardwareError
from optimizer.export_files import Outlet
from optimizer.export_te import KINDS, PLAN
from optimizer.exports import Chosen, export
from optimizer.pieces import Memory
from optimizer.spec import EXPORTS, OptimizeSpec
from optimizer.stack import Component, Site, choice_named
from tests.optimizer import exporting
from tests.optimizer.exporting import CACHE, DENSE, Exported, stack_of

STATIC = {
    f"layers.{n}.{c}": "fp8_e4m3" for n in range(2) for c in ("attn_qkv", "ffn_in")
}
ATTENTION = {f"layers.0.{c}": "fp8_e4m3" for c in ("attn_scores", "attn_values")} | {
    "layers.1.attn_scores": "fp8_e4m3"
}


KEPT = Memory()  # of one model and its data, for all of this file


def exported(
    spec: OptimizeSpec, out: Path, choices: Mapping[str, str], *rest: Any, **more: Any
) -> Exported:
    return exporting.exported(spec, out, choices, *rest, pieces=KEPT, **more)


@pytest.fixture(scope="module")
def mixed(spec: OptimizeSpec, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A stack that every export can write some of."""
    choices = {**DENSE, **CACHE, **ATTENTION, "layers.0.norms": "fp32"}
    return exported(spec, tmp_path_factory.mktemp("out"), choices)


def test_every_file_is_listed_as_it_lies_there(mixed: Exported) -> None:
    listed = {f["name"]: f for f in mixed.section["files"]}
    there = {p.relative_to(mixed.folder).as_posix() for p in mixed.folder.rglob("*.*")}
    assert listed.keys() == there
    assert {f["consumer"] for f in listed.values()} == {
        "vllm",
        "transformer_engine",
        "torchao",
    }
    for name, file in listed.items():
        content = (mixed.folder / name).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["bytes"] == len(content)
    assert mixed.section["asked"] == [*EXPORTS]
    assert mixed.section["refused"] == []
    json.dumps(mixed.section, allow_nan=False)


def test_what_is_read_back_loses_what_the_emulation_loses(mixed: Exported) -> None:
    found = mixed.section["checkpoint"]
    kl = found["kl_nats"]
    assert kl["low"] <= found["emulated_kl_nats"]["value"] <= kl["high"]
    assert found["as_emulated"] is True
    assert (
        found["kl_nats"] != found["emulated_kl_nats"]
    )  # attention is in 16 bits there


def test_without_deviations_it_loses_exactly_the_same(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    found = exported(spec, tmp_path, DENSE).section
    every = [d for d in found["deviations"] if d["export"] == "compressed_tensors"]
    assert every == []
    assert found["checkpoint"]["kl_nats"] == found["checkpoint"]["emulated_kl_nats"]


def test_compensated_weights_are_exported_as_they_were_measured(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    asked = replace(spec, exports=("compressed_tensors",), rounding="compensated")
    found = exported(asked, tmp_path / "a", DENSE, "compensated").section["checkpoint"]
    nearest = exported(asked, tmp_path / "b", DENSE).section["checkpoint"]
    value, emulated = found["kl_nats"]["value"], found["emulated_kl_nats"]["value"]
    assert value == pytest.approx(emulated, rel=1e-3)
    assert value != nearest["kl_nats"]["value"]


def test_where_engines_differ_from_the_measurement_is_listed(mixed: Exported) -> None:
    every = {(d["export"], d["site"]): d for d in mixed.section["deviations"]}
    assert every["compressed_tensors", "layers.0.norms"]["toward"] == "narrower"
    assert every["compressed_tensors", "layers.0.attn_scores"]["served"] == "bf16"
    assert ("compressed_tensors", "layers.0.kv_cache") not in every
    assert ("transformer_engine", "layers.0.attn_scores") not in every
    whole = every["transformer_engine", "layers.1.attn_scores"]["reason"]
    assert whole == "attention is in FP8 as a whole, or not at all"
    assert "by row" in every["transformer_engine", "layers.0.attn_out"]["reason"]
    assert "static" not in every["torchao", "layers.0.attn_qkv"]["served"]


def test_what_is_asked_for_is_what_is_written(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    found = exported(replace(spec, exports=("torchao",)), tmp_path, DENSE).section
    assert [f["name"] for f in found["files"]] == ["torchao.json"]
    assert found["checkpoint"] is None
    assert not exported(replace(spec, exports=()), tmp_path, DENSE).section["files"]


@pytest.mark.parametrize(
    ("choices", "refused"),
    [
        (
            {"layers.1.ffn_in": "int8"},
            {
                "compressed_tensors": "layers.1.ffn_in is int8, and a checkpoint",
                "transformer_engine": "there is no recipe for int8",
                "torchao": "no matrix of the stack",
            },
        ),
        (
            {"layers.1.ffn_in": "fp32"},
            {
                "compressed_tensors": "vLLM runs every other site in 16 bits",
                "transformer_engine": "none of them is in FP8",
                "torchao": "no matrix",
            },
        ),
    ],
)
def test_a_refused_export_says_why_and_leaves_nothing(
    spec: OptimizeSpec,
    tmp_path: Path,
    choices: Mapping[str, str],
    refused: Mapping[str, str],
) -> None:
    found = exported(spec, tmp_path, choices).section
    reasons = {r["export"]: r["reason"] for r in found["refused"]}
    assert reasons.keys() == refused.keys()
    assert all(refused[name] in said for name, said in reasons.items())
    assert found["files"] == []
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_that_has_no_room_is_refused(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    asked = replace(spec, exports=("compressed_tensors",))
    found = exported(asked, tmp_path, DENSE, room_bytes=100_000).section
    (said,) = found["refused"]
    assert "the disk has 0.0001 GB for exports" in said["reason"]
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_for_here_is_served_and_timed(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    said = {"per_token_s": 0.016, "first_token_s": 0.4, "spread": 0.02, "steps": 9}
    said |= {"engine": "vllm", "version": "0.32.0"}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    python.chmod(0o755)
    here = replace(spec, hardware="local", exports=("compressed_tensors",))
    found = exported(here, tmp_path / "a", DENSE, vllm=python).section["checkpoint"]
    assert found["served_seconds"] == {**said, "threads": os.cpu_count()}
    python.write_text("#!/bin/sh\necho 'ValueError: no kernel' >&2; exit 1\n")
    found = exported(here, tmp_path / "b", DENSE, vllm=python).section["checkpoint"]
    error = "vLLM does not serve checkpoint: ValueError: no kernel"
    assert found["served_seconds"] == {"error": error}
    there = replace(here, hardware="h100")
    found = exported(there, tmp_path / "c", DENSE, vllm=python).section["checkpoint"]
    assert "served_seconds" not in found


def test_a_scale_that_is_no_number_is_refused(
    spec: OptimizeSpec, tmp_path: Path, mixed: Exported
) -> None:
    work, stack = mixed.work, stack_of(mixed.work.outline.shape, DENSE)
    largest = dict(work.amaxes())
    place = next(p for p in largest if str(p[0]) == "layers.0.attn_qkv")
    largest[place] = torch.tensor(float("inf"))

    class Broken(type(work)):  # type: ignore[misc]
        def amaxes(self) -> Any:
            return largest

    broken = Broken(replace(spec, exports=("compressed_tensors",)), work.pieces)
    quality = Chosen(stack, "nearest", object())  # type: ignore[arg-type]
    found = export(broken, quality, Outlet(tmp_path))
    (said,) = found["refused"]
    assert "input is not a finite number above 0" in said["reason"]
    assert [*tmp_path.iterdir()] == []


# Transformer Engine


@pytest.fixture(scope="module")
def real() -> Any:
    """The package's own recipes, without a GPU."""
    try:
        return te.recipes()
    except HardwareError as missing:
        pytest.skip(str(missing))


def test_the_plan_runs_under_the_installed_package(mixed: Exported, real: Any) -> None:
    made = runpy.run_path(str(mixed.folder / PLAN))
    static = {
        f"model.layers.0.{name}_proj"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.down")
    }
    attention = {"model.layers.0.self_attn"}
    assert made["RECIPE_OF"].keys() == static | attention
    assert made["SCALES"].keys() == static
    assert made["recipe_of"]("model.layers.1.mlp.up_proj") is None
    with made["autocast"]("lm_head"):  # without FP8: nothing is imported
        pass
    wanted = te.recipe_of(
        Component.FFN_OUT, choice_named(Component.FFN_OUT, "fp8_e4m3"), real
    )
    assert made["recipe_of"]("model.layers.0.mlp.down_proj") == wanted


def test_the_plan_has_transformer_engines_scales(mixed: Exported) -> None:
    made = runpy.run_path(str(mixed.folder / PLAN))
    site = Site(0, Component.FFN_OUT)
    (part,) = mixed.work.model.parts[site]
    largest = float(part.weight.abs().max())
    _, weight = made["SCALES"]["model.layers.0.mlp.down_proj"]
    assert weight == pytest.approx(448 / largest, rel=1e-6)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e4m3_block", "fp4_e2m1_nv"])
def test_the_plans_recipes_are_those_that_we_run(kind: str, real: Any) -> None:
    from optimizer.export_te import RECIPES

    choice = choice_named(Component.FFN_IN, kind)
    source = RECIPES[KINDS[choice.input.granularity]]
    made = eval(source, {"recipe": real})
    assert made == te.recipe_of(Component.FFN_IN, choice, real)


def test_a_models_name_is_text_in_the_plan(spec: OptimizeSpec, tmp_path: Path) -> None:
    evil = 'x"""\nraise SystemExit\n"""'
    asked = replace(spec, model=evil, exports=("transformer_engine",))
    exported(asked, tmp_path, STATIC)
    assert runpy.run_path(str(tmp_path / PLAN))["MODEL"] == evil


# torchao: its own parser reads the file in tests/vllm


def test_torchao_gets_every_matrix_by_its_name(mixed: Exported) -> None:
    made = json.loads((mixed.folder / "torchao.json").read_text())
    named = made["quant_type"]["default"]["_data"]["fqn_to_config"]
    assert made["quant_method"] == "torchao"
    assert named["model.layers.0.mlp.up_proj"]["_type"] == "Float8WeightOnlyConfig"
    assert len(named) == 8
    assert "model.layers.1.mlp.up_proj" not in named
