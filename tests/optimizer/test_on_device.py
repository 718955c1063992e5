import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimizer.calibrate import amaxes, calibrate
from optimizer.errors import HardwareError
from optimizer.execute import Reference, WeightCodes
from optimizer.on_device import (
    REPEATS,
    OnDevice,
    ScaledMm,
    TransformerEngine,
    as_one,
    compare,
    executed_as,
    executed_on,
    executor,
    graph_seconds,
)
from optimizer.overflow import Noting
from optimizer.stack import LINEAR, Stack, choice_named
from optimizer.te import recipes
from tests.optimizer import tiny
from tests.optimizer.test_te import Engine

CPU = torch.device("cpu")


def narrow(model: Any, name: str) -> Stack:
    return Stack(
        {
            s: choice_named(s.component, name if s.component in LINEAR else "bf16")
            for s in model.sites
        }
    )


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2"])
def test_the_operator_and_the_emulation_agree_at_every_matrix(name: str) -> None:
    # The head has 97 rows, which a GPU refuses: it is padded.
    model, ids = tiny.loaded("Qwen2ForCausalLM"), tiny.ids(12)
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    kernels = ScaledMm(largest, weights, CPU)
    found = compare(model, ids, narrow(model, name), largest, weights, kernels)
    assert len(found) == sum(len(parts) for parts in model.parts.values())
    assert {c.choice for c in found} == {name}
    biased = {
        p.name for parts in model.parts.values() for p in parts if p.bias is not None
    }
    for one in found:
        # The same products and scales: sums in another order, and a bias in bf16.
        assert one.relative < 2.0**-8
        assert one.part in biased or one.differing < 0.02


def test_what_a_device_does_not_take_stays_emulated() -> None:
    model, ids = tiny.loaded(), tiny.ids(6)
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    kernels = ScaledMm(largest, weights, CPU)
    for stack in (
        narrow(model, "bf16"),
        narrow(model, "fp8_e4m3_weight_only"),
        Stack(),
    ):
        assert compare(model, ids, stack, largest, weights, kernels) == []


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_block"])
def test_modules_of_transformer_engine_are_compared_the_same_way(name: str) -> None:
    try:
        recipes()
    except HardwareError as missing:
        pytest.skip(str(missing))
    model, ids = tiny.loaded("Qwen2ForCausalLM"), tiny.ids(8)
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    engine = Engine()  # computes in bf16: as far off as FP8 is from it
    kernels = TransformerEngine(largest, weights, CPU, engine)
    found = compare(model, ids, narrow(model, name), largest, weights, kernels)
    assert found
    assert all(0 < one.relative < 0.2 for one in found)
    assert type(engine.entered[0]).__name__ == (
        "DelayedScaling" if name == "fp8_e4m3" else "Float8BlockScaling"
    )
    assert not kernels.takes(
        found[0].site.component, choice_named(found[0].site.component, "bf16")
    )


def test_a_matrix_of_zeros_differs_by_nothing() -> None:
    model, ids = tiny.loaded(), tiny.ids(4)
    stack = narrow(model, "fp8_e4m3_token")
    for parts in model.parts.values():
        for part in parts:
            part.module.weight.zero_()
    weights = WeightCodes(model)
    found = compare(model, ids, stack, {}, weights, ScaledMm({}, weights, CPU))
    assert {one.relative for one in found} == {0.0}


# Where, and how long


class Cuda:
    """The part of `torch.cuda` that timing uses; a replay takes 3 ms."""

    def __init__(self, there: bool = True) -> None:
        self.there, self.replays, self.captured = there, 0, False

    def is_available(self) -> bool:
        return self.there

    def Stream(self) -> "Cuda":  # noqa: N802 torch's name
        return self

    def current_stream(self) -> "Cuda":
        return self

    def wait_stream(self, other: object) -> None:
        pass

    def stream(self, other: object) -> "Cuda":
        return self

    def graph(self, other: object) -> "Cuda":
        self.captured = True
        return self

    def CUDAGraph(self) -> "Cuda":  # noqa: N802 torch's name
        return self

    def Event(self, enable_timing: bool) -> "Cuda":  # noqa: N802 torch's name
        assert enable_timing
        return self

    def replay(self) -> None:
        self.replays += 1

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 3.0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


def test_a_graph_is_replayed_and_shared_out_over_its_calls() -> None:
    cuda, calls = Cuda(), [0, 0]

    def call(index: int) -> None:
        calls[index] += 1

    found = graph_seconds([lambda: call(0), lambda: call(1)], cuda)
    assert found == pytest.approx(0.0015)  # 3 ms for both
    assert calls == [2, 2]  # once before, once while it is captured
    assert cuda.captured
    assert cuda.replays == 1 + REPEATS


def test_there_are_no_graphs_without_a_device() -> None:
    with pytest.raises(HardwareError, match="CUDA device"):
        graph_seconds([], Cuda(there=False))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A process that says that it has a GPU of some compute capability."""

    def of(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some GPU")
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda index: capability
        )

    return of


def test_without_a_gpu_the_processor_emulates() -> None:
    said = executed_on()
    assert said["processor"]
    assert said["torch"] == torch.__version__
    assert {k: said[k] for k in ("device", "emulated", "kernels")} == {
        "device": "cpu",
        "emulated": True,
        "kernels": None,
    }


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [((8, 0), None), ((8, 9), "torch._scaled_mm"), ((9, 0), "torch._scaled_mm")],
)
def test_fp8_units_are_used_where_a_gpu_has_them(
    gpu: Callable[..., None], capability: tuple[int, int], kernels: str | None
) -> None:
    gpu(*capability)
    said = executed_on()
    assert said["device"] == "some GPU"
    assert said["emulated"] is (kernels is None)
    assert said["kernels"] == kernels
    assert said["compute_capability"] == f"{capability[0]}.{capability[1]}"
    run = executor(Stack(), {}, WeightCodes(tiny.loaded()))
    assert isinstance(run, OnDevice) is (kernels is not None)


def test_a_stack_that_the_operator_runs_is_what_the_emulation_says() -> None:
    # The operator runs on CPUs as well: this is the road that a GPU takes.
    model, ids = tiny.loaded("Qwen2ForCausalLM"), tiny.ids(12)
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    stack = narrow(model, "fp8_e4m3_token")
    emulated = Noting(stack, largest, weights)
    run = OnDevice(stack, largest, weights, ScaledMm(largest, weights, CPU))
    with torch.no_grad():
        exact, wanted, found = (
            model.forward(ids, r) for r in (Reference(), emulated, run)
        )
    assert not torch.equal(found, wanted)  # another order of sums
    errors = [float((y - exact).norm()) for y in (wanted, found)]
    assert errors[1] == pytest.approx(errors[0], rel=0.1)


def test_on_a_device_tokens_beyond_fp8_are_noted_as_in_the_emulation() -> None:
    model, ids = tiny.loaded(), tiny.ids(12)
    weights = WeightCodes(model)
    largest = {k: 0.2 * v for k, v in amaxes(calibrate(model, [ids])).items()}
    stack = narrow(model, "fp8_e4m3")
    emulated = Noting(stack, largest, weights)
    run = OnDevice(stack, largest, weights, ScaledMm(largest, weights, CPU))
    with torch.no_grad():
        for each in (emulated, run):
            model.forward(ids, each)
    assert run.overflowed > 0
    assert abs(run.overflowed - emulated.overflowed) <= 1


def test_stacks_that_ran_in_several_places_name_them_all() -> None:
    here = executed_on()
    there = {**here, "device": "some GPU", "emulated": False}
    assert as_one([here, here]) == {**here, "also": []}
    assert as_one([there, here, there]) == {
        **here,
        "also": [f"some GPU, {here['processor']}"],
    }
    assert "some GPU (" in executed_as({**there, "kernels": "torch._scaled_mm"})
    assert "emulated on a CPU" in executed_as(here)


def test_a_difference_from_nothing_is_infinite() -> None:
    from optimizer.on_device import _ratio

    assert (_ratio(0.0, 0.0), _ratio(1.0, 0.0), _ratio(1.0, 4.0)) == (
        0.0,
        math.inf,
        0.25,
    )
