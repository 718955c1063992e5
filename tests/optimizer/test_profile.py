from functools import partial
from pathlib import Path

import pytest
import torch

from optimizer import kernels, local, profile, profile_cases
from optimizer.hardware import device
from optimizer.native import Native
from optimizer.profile import Bench, bench, cpu_cache, measure, timed
from optimizer.profile_cases import Case, cases
from optimizer.spec import Workload
from optimizer.stack import ModelShape
from tests.optimizer import tiny

SHORT = Workload(batch_size=2, prompt_tokens=40, output_tokens=8)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> ModelShape:
    return Native(tiny.network()).shape


def only(found: list[Case], kind: str) -> list[Case]:
    return [c for c in found if c.kind == kind]


def test_every_matrix_is_timed_in_every_format_at_the_workloads_tokens(
    model: ModelShape,
) -> None:
    found = only(cases(model, SHORT, ("fp32", "bf16")), "gemm")
    rows = {tuple(c.row.values()) for c in found}
    assert len(rows) == len(found)  # two layers, alike: each shape once
    # q, k and v of 32 inputs: 32 + 16 + 16 outputs; 2 sequences, 2 × 40 tokens, between.
    for m in (1, 2, 16, 64, 80):
        assert ("bf16", m, 64, 32) in rows
    # The head sees the last token of each sequence alone.
    assert {m for fmt, m, n, _ in rows if n == tiny.VOCAB} == {1, 2, 16}


def test_a_matrix_moves_its_weights_its_inputs_and_its_outputs() -> None:
    bf16 = profile_cases._matrix("bf16", 4, 32, 16)
    assert bf16.flops == 2 * 4 * 32 * 16
    assert bf16.bytes == 2 * (32 * 16 + 4 * (32 + 16))
    narrow = profile_cases._matrix("fp8", 4, 32, 16)
    assert narrow.bytes == 32 * 16 + 2 * 4 * (32 + 16)


def test_attention_is_timed_over_a_prompt_and_over_a_cache(model: ModelShape) -> None:
    found = cases(model, SHORT, ("bf16",))
    assert [c.row["tokens"] for c in only(found, "context_attention")] == [10, 20, 40]
    contexts = only(found, "generation_attention")
    assert [c.row["context"] for c in contexts] == [40, 44, 48]
    # One query of 4 heads of 8 against 48 keys, then 48 values; K and V of 2 heads.
    last = contexts[-1]
    assert last.flops == 2 * 2 * 2 * 4 * 8 * 48
    assert last.bytes == 2 * 2 * (2 * 2 * 48 + 2 * 4) * 8


def test_a_window_shorter_than_the_context_is_not_timed() -> None:
    windows = Native(tiny.network("MistralForCausalLM")).shape
    assert not only(cases(windows, SHORT, ("bf16",)), "generation_attention")
    short = Workload(1, 4, 2)  # a window of 8 hides nothing of it
    assert only(cases(windows, short, ("bf16",)), "generation_attention")


def test_every_call_runs(model: ModelShape) -> None:
    every = cases(model, SHORT, ("fp32", "bf16", "fp8_wo"))
    every += [profile_cases._pass(4, 32, dynamic) for dynamic in (False, True)]
    every.append(profile_cases._matrix("fp8", 16, 32, 32))
    for case in every:
        found = case.make(CPU)()
        made = found if isinstance(found, tuple) else (found,)
        assert all(bool(x.float().isfinite().all()) for x in made), case.row


def test_the_pass_to_fp8_is_timed_where_fp8_is_multiplied(model: ModelShape) -> None:
    passes = only(cases(model, SHORT, ("bf16", "fp8")), "quantize")
    assert {(c.row["columns"], c.row["dynamic"]) for c in passes} == {
        (k, dynamic) for k in (32, 48) for dynamic in (False, True)
    }
    assert not only(cases(model, SHORT, ("bf16",)), "quantize")


def test_numbers_are_clamped_before_they_are_narrowed() -> None:
    codes, scale = profile_cases._narrowed(torch.tensor([[1e4, -3.0]]), torch.ones(()))
    assert codes.float().tolist() == [[448.0, -3.0]]
    codes, scale = profile_cases._narrowed(torch.tensor([[896.0, 2.0]]), None)
    assert (codes.float() * scale).tolist() == [[896.0, 2.0]]
    assert scale.tolist() == [[2.0]]


def test_calls_take_turns_on_more_memory_than_the_cache_holds() -> None:
    made: list[int] = []
    order: list[int] = []
    waits: list[None] = []

    def make(where: torch.device) -> profile.Op:
        made.append(len(made))
        return partial(order.append, made[-1])

    case = Case("gemm", {"fmt": "bf16"}, 0.0, 100.0, make)
    seconds, spread = timed(case, Bench(CPU, 250, (), lambda: waits.append(None)))
    assert made == [0, 1, 2, 3, 4]  # 2 × 250 bytes in calls of 100
    assert order[:10] == [0, 1, 2, 3, 4] * 2
    assert seconds > 0
    assert spread >= 0
    assert len(waits) % 2 == 0  # before and after each sample


def test_a_slow_call_is_sampled_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "LIMIT_S", 0.0)
    calls: list[None] = []
    case = Case("gemm", {}, 0.0, 1e12, lambda where: lambda: calls.append(None))
    monkeypatch.setattr(profile, "SAMPLE_S", 0.0)
    timed(case, Bench(CPU, 1, ()))
    assert len(calls) == 2 + 3  # each copy once to warm up, then one call a sample


def test_the_profile_reads_back_as_measured_tables(
    model: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "LIMIT_S", 0.0)
    monkeypatch.setattr(profile, "SAMPLE_S", 0.0)
    told: list[float] = []
    rows = measure(
        model,
        SHORT,
        Bench(CPU, 1, ("fp32", "bf16", "fp8_wo")),
        local.device(),
        lambda fraction, detail: told.append(fraction),
    )
    said = {"device": "local", "engine": "torch", "engine_version": "2"}
    tables = kernels.from_profile({"schema": 1, **said, "measured_at": "now", **rows})
    assert tables.basis == "measured"
    for fmt in ("fp32", "bf16", "fp8_wo"):
        timing = tables.gemm(fmt, 80, 64, 32)
        assert timing is not None
        assert timing.seconds > 0
    assert tables.generation_attention("bf16", 2, 48, 4, 2, 8) is not None
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert ("gemm", "fp8_wo") in {(f["kind"], f["fmt"]) for f in rows["fits"]}
    assert all(f["residual"] >= 0 for f in rows["fits"])


def test_the_model_is_corrected_by_a_fixed_time_and_a_factor() -> None:
    # Each is 3 + 2 × what was modelled.
    pairs = [(5.0, 1.0), (7.0, 2.0), (23.0, 10.0)]
    (fit,) = profile._fits({("gemm", "bf16"): pairs})
    assert fit["fixed_s"] == pytest.approx(3.0)
    assert fit["factor"] == pytest.approx(2.0)
    assert fit["residual"] == pytest.approx(0.0, abs=1e-9)
    assert fit["rows"] == 3
    (fit,) = profile._fits({("gemm", "bf16"): [(1.0, 1.0), (4.0, 2.0)]})
    assert fit["fixed_s"] == 0.0  # never less than nothing
    assert 0 < fit["residual"] < 1


def test_a_product_in_fp8_is_fitted_without_the_pass_that_was_timed_with_it() -> None:
    product = profile_cases._matrix("fp8", 4, 32, 16)
    narrowing = profile_cases._pass(4, 16, True)
    other = profile_cases._pass(8, 16, True)
    found = [(product, 10e-6), (narrowing, 4e-6), (other, 7e-6)]
    pairs = profile._pairs(found, device("h100"))
    ((seconds, _),) = pairs["gemm", "fp8"]
    assert seconds == pytest.approx(6e-6)
    ((seconds, _),) = profile._pairs(found[:1], device("h100"))["gemm", "fp8"]
    assert seconds == 10e-6


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1024K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}/size").write_text(f"{size}\n")
    assert cpu_cache(tmp_path) == 32 << 20
    assert cpu_cache(tmp_path / "none") == profile.CACHE_BYTES


@pytest.mark.parametrize(("major", "narrow"), [(8, ()), (9, ("fp8",))])
def test_the_bench_is_the_accelerator_where_there_is_one(
    major: int, narrow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench().where == CPU or torch.cuda.is_available()

    class Properties:
        minor = 0
        L2_cache_size = 50 << 20

    Properties.major = major  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    found = bench()
    assert found.where == torch.device("cuda")
    assert found.formats == ("bf16", *narrow)
    assert found.cache_bytes == 50 << 20
