"""The whole road: what a request changes, what stops it, and the same again."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.errors import Cancelled, DatasetError, HardwareError, ModelError
from optimizer.run import optimize
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.stack import CHOICES, Component, Site
from optimizer.units import nats
from tests.optimizer.conftest import Document, chosen, quiet, spec_of
from tests.service import tiny_model

SLOW = pytest.mark.slow
PHASES = ("load", "calibrate", "sweep", "search", "validate", "export", "report")
IMPOSSIBLE = LatencySla(per_token_s=1e-9)


# What a request changes


@SLOW
def test_a_context_that_was_calibrated_is_not_warned_about(spec: OptimizeSpec) -> None:
    short = replace(spec, workload=Workload(1, 48, 16))
    assert optimize(short, quiet)["warnings"] == []


def test_a_context_beyond_the_model_is_warned_about(spec: OptimizeSpec) -> None:
    long = replace(spec, workload=Workload(1, 2048, 16))  # it was made for 2048
    warnings = optimize(long, quiet)["warnings"]
    assert any("2064 tokens" in w and "made for 2048" in w for w in warnings)


@SLOW
def test_a_target_changes_the_stack(
    spec: OptimizeSpec, document_of: Callable[[str], Document]
) -> None:
    free = document_of("l4")
    base = next(s for s in free["validation"]["stacks"] if s["id"] == "all_bf16")
    fastest = free["front"][0]["per_token_s"]
    target = (base["per_token_s"] + fastest) / 2
    sla = LatencySla(per_token_s=target)
    found = optimize(replace(spec, hardware="l4", latency_sla=sla), quiet)
    assert found["verdict"]["outcome"] == "sla_met"
    it = chosen(found)
    assert it["per_token_s"] <= target < chosen(free)["per_token_s"]
    assert it["kl_nats"]["value"] > chosen(free)["kl_nats"]["value"]
    assert found["precision_stack"] != free["precision_stack"] or it["fp8_share"] > 0


@SLOW
def test_a_target_that_nothing_meets_is_an_answer(spec: OptimizeSpec) -> None:
    found = optimize(replace(spec, hardware="l4", latency_sla=IMPOSSIBLE), quiet)
    assert found["verdict"]["outcome"] == "sla_not_met"
    it = chosen(found)
    assert it["per_token_s"] == min(p["per_token_s"] for p in found["front"])
    (said,) = found["verdict"]["would_meet"]  # no device takes a nanosecond
    least = re.fullmatch(r"latency_sla.per_token_s of (\S+) s or more", said)
    assert least is not None, said
    times = float(least[1]) / it["per_token_s"]  # said in three digits, rounded up
    assert 1 <= times < 1.01


def test_too_little_memory_is_an_answer(spec: OptimizeSpec) -> None:
    found = optimize(replace(spec, max_memory_bytes=1000), quiet)
    assert found["verdict"]["outcome"] == "sla_not_met"
    assert "GB of memory" in found["verdict"]["would_meet"][0]
    # Nothing fits, so the front is what is smallest.
    smallest = chosen(found)["memory_bytes"]
    assert {p["memory_bytes"] for p in found["front"]} == {smallest}


def test_vllm_gets_nothing_that_it_cannot_load(spec: OptimizeSpec) -> None:
    found = optimize(replace(spec, engine="vllm"), quiet)
    names = {
        (Site.parse(site).component, choice)
        for p in found["front"]
        for site, choice in p["stack"].items()
    }
    assert any(choice == "fp8_e4m3" for _, choice in names)
    assert not any(choice == "fp8_e5m2" for _, choice in names)
    linear = {
        c for c in Component if len(CHOICES[c]) == len(CHOICES[Component.LM_HEAD])
    }
    narrow = {c for c, choice in names if choice.startswith("fp8")}
    assert narrow <= {*linear, Component.KV_CACHE}


def test_values_that_overflow_fp16_keep_it_out(
    tmp_path: Path, spec: OptimizeSpec
) -> None:
    # Case A12: as in T5's FFN. silu(gate) · up reaches millions here.
    folder = tiny_model(tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.1.mlp.{name}.weight"] *= 1000.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = optimize(replace(spec_of(folder), hardware="t4"), quiet)
    sites = {s["site"]: s for s in found["sites"]}
    assert sites["layers.1.ffn_out"]["choice"] == "fp32"
    rows = {a["choice"]: a for a in sites["layers.1.ffn_out"]["alternatives"]}
    assert "overflow fp16" in rows["fp16"]["refused"]
    assert sites["layers.0.ffn_out"]["choice"] == "fp16"
    ids = {s["id"] for s in found["validation"]["stacks"]}
    assert "all_16bit" in ids


# What stops a run


def test_stacks_are_told_of_as_they_are_measured(spec: OptimizeSpec) -> None:
    told: list[dict[str, Any]] = []
    found = optimize(spec, quiet, measured=told.extend)
    stacks = found["validation"]["stacks"]
    # A label may name a stack that has another one; each is told of once.
    assert {row["kl_nats"] for row in told} == {s["kl_nats"]["value"] for s in stacks}
    by_loss = {s["kl_nats"]["value"]: s for s in stacks}
    for row in told:
        same = by_loss[row["kl_nats"]]
        assert row["fp8_share"] == same["fp8_share"]
        assert row["per_token_s"] == pytest.approx(same["per_token_s"], rel=1e-3)
        assert row["kl_nats_low"] <= row["kl_nats"] <= row["kl_nats_high"]


def test_phases_come_in_order_and_each_is_told(spec: OptimizeSpec) -> None:
    told: list[tuple[str, float]] = []
    optimize(spec, lambda phase, fraction, detail: told.append((phase, fraction)))
    order = [PHASES.index(phase) for phase, _ in told]
    assert order == sorted(order)
    assert set(order) == set(range(len(PHASES)))
    for phase in PHASES:
        fractions = [f for p, f in told if p == phase]
        assert fractions == sorted(fractions)
        assert fractions[0] == 0.0
        assert all(0.0 <= f <= 1.0 for f in fractions)
    for phase in ("calibrate", "validate"):
        assert (phase, 1.0) in told


@pytest.mark.parametrize(
    "last", [*PHASES[:4], *(pytest.param(p, marks=SLOW) for p in PHASES[4:])]
)
def test_a_run_can_be_stopped_in_every_phase(spec: OptimizeSpec, last: str) -> None:
    told: list[str] = []

    def progress(phase: str, fraction: float, detail: str) -> None:
        told.append(phase)
        if phase == last:
            raise Cancelled

    with pytest.raises(Cancelled):
        optimize(spec, progress)
    assert told.count(last) == 1  # and nothing after it


def test_too_little_text_is_an_error_before_the_model_runs(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    # Case B6.
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "short"}\n{"text": "also short"}\n')
    told: set[str] = set()
    wanted = replace(spec, data_distribution="mine", dataset_path=str(path))
    with pytest.raises(DatasetError, match=r"half of mine: 1 samples with \d+ tokens"):
        optimize(wanted, lambda phase, fraction, detail: told.add(phase))
    assert told == {"load"}


def test_unknown_hardware_is_an_error_before_the_model_runs(spec: OptimizeSpec) -> None:
    told: set[str] = set()
    with pytest.raises(HardwareError, match="abacus"):
        optimize(replace(spec, hardware="abacus"), lambda p, f, d: told.add(p))
    assert told == {"load"}


def test_a_folder_without_a_model_is_the_models_error(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    with pytest.raises(ModelError):
        optimize(replace(spec, model_path=str(tmp_path)), quiet)


# The same again (case B10)


def test_the_same_request_gives_the_same_bytes(
    spec: OptimizeSpec, document_of: Callable[[str], Document]
) -> None:
    again = optimize(spec, quiet)
    assert json.dumps(again) == json.dumps(document_of("h100"))


@SLOW
def test_another_seed_draws_other_labels(
    spec: OptimizeSpec, document_of: Callable[[str], Document]
) -> None:
    other = optimize(replace(spec, seed=1), quiet)
    first = document_of("h100")
    predicted = [chosen(d)["predicted_kl_nats"] for d in (other, first)]
    assert predicted[0] != predicted[1]
    assert predicted[0] == pytest.approx(predicted[1], rel=0.5)


@SLOW
def test_another_process_gives_the_same_bytes(
    spec: OptimizeSpec, document_of: Callable[[str], Document]
) -> None:
    script = (
        "import json, sys; from optimizer.run import optimize;"
        "from optimizer.spec import OptimizeSpec;"
        "spec = OptimizeSpec.from_json(json.loads(sys.argv[1]));"
        "print(json.dumps(optimize(spec, lambda p, f, d: None)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps(spec.to_json())],
        env={
            **os.environ,
            "PYTHONHASHSEED": "7",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == document_of("h100")


# What it tells of itself


def test_a_run_tells_what_it_read_swept_refused_and_measured(
    spec: OptimizeSpec,
) -> None:
    lines: list[str] = []
    found = optimize(replace(spec, hardware="a100"), quiet, said=lines.append)
    read, data, swept, *others = lines
    assert read.startswith("Read LlamaForCausalLM: 2 layers, ")
    assert f"{len(found['sites'])} sites" in read
    assert "128 tokens in 2 sequences" in data
    refused = [line for line in others if line.startswith("Refused")]
    assert any("no FP8 matmul" in line for line in refused)
    assert f"{sum(int(line.split()[1]) for line in refused)} are refused" in swept
    told = " ".join(line for line in others if line.startswith("Measured"))
    for stack in found["validation"]["stacks"]:
        assert nats(stack["kl_nats"]["value"]) in told
