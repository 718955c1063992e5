"""Runs of a probe: cut, spread over processes, resumed, and refused."""

import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from optimizer.advice import LossScaling
from optimizer.errors import DatasetError, SpecError
from optimizer.training import processes
from optimizer.training.candidates import (
    BASELINE,
    CANDIDATES,
    Arithmetic,
    Candidate,
    without_masters,
)
from optimizer.training.checkpoints import figures_json, resume, to_bytes
from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import FIRST, SECOND, batches
from optimizer.training.trainer import Figures, Run, looked_at
from tests.training.small import Small, problem, text

HOW = TrainingSpec(
    steps=6, batch_size=8, sequence_tokens=16, learning_rate=3e-3, warmup_steps=2
)
FP8 = CANDIDATES["fp8_delayed"]


def ran(how: TrainingSpec, candidate: Candidate = BASELINE) -> Figures:
    run = Run(problem(how), how, candidate)
    run.run(how.steps)
    return run.figures


def agree(a: Figures, b: Figures, rel: float) -> None:
    """Two runs have the same figures, but for the order of their sums."""
    np.testing.assert_allclose(a.losses, b.losses, rtol=rel)
    np.testing.assert_allclose(a.held_out, b.held_out, rtol=rel)
    for name, norms in a.norms.items():
        np.testing.assert_allclose(norms, b.norms[name], rtol=100 * rel)
    for matrix, roles in a.seen.items():
        for role, seen in roles.items():
            other = b.seen[matrix][role]
            assert seen.elements == other.elements
            # What cancels to zero in one order of a sum is a tiny number in another.
            assert seen.zero_rate == pytest.approx(other.zero_rate, abs=5e-3)
            moved = np.abs(np.subtract(seen.counts, other.counts)).sum()
            assert moved <= 1e-2 * seen.elements  # or lies across a power of two


def test_figures_do_not_depend_on_how_a_batch_is_cut() -> None:
    whole = ran(HOW)
    cut = ran(replace(HOW, batch_size=1, accumulation=8))
    agree(whole, cut, rel=1e-5)


def test_the_same_run_twice_gives_the_same_bytes() -> None:
    assert figures_json(ran(HOW, FP8)) == figures_json(ran(HOW, FP8))


@pytest.mark.parametrize("name", ["fp32", "fp16", "fp8_delayed"])
def test_a_run_resumed_in_the_middle_gives_the_same_bytes(name: str) -> None:
    candidate = {**CANDIDATES, "fp32": BASELINE}[name]
    half = Run(problem(HOW), HOW, candidate)
    half.run(HOW.steps // 2)
    rest = Run(problem(HOW), HOW, candidate)
    resume(rest, to_bytes(half))
    rest.run(HOW.steps)
    assert figures_json(rest.figures) == figures_json(ran(HOW, candidate))


def test_a_checkpoint_of_another_network_is_refused_by_name() -> None:
    run = Run(problem(HOW), HOW, BASELINE)
    other = Run(problem(HOW, Small(layers=1)), HOW, BASELINE)
    with pytest.raises(SpecError, match=r"blocks\.1\."):
        resume(other, to_bytes(run))


def _process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    how = replace(HOW, batch_size=4)
    run = Run(problem(HOW), how, BASELINE, processes.current())
    run.run(how.steps)
    if rank == 0:
        (Path(folder) / "run").write_bytes(to_bytes(run))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_see_what_one_sees(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, (port, str(tmp_path)), nprocs=2)
    found = Run(problem(HOW), HOW, BASELINE)
    resume(found, (tmp_path / "run").read_bytes())
    agree(ran(HOW), found.figures, rel=1e-5)


def test_orders_differ_and_hold_the_same_samples_equally_often() -> None:
    first, second = (batches(text(16)[:20], 8, 5, 0, o) for o in (FIRST, SECOND))
    assert (first.steps != second.steps).any()
    assert sorted(first.steps.ravel()) == sorted(second.steps.ravel())
    assert first.epochs == 2.0


def test_data_shorter_than_a_batch_is_told_with_the_counts() -> None:
    with pytest.raises(DatasetError, match="3 whole sequences, and one step takes 8"):
        batches(text(16)[:3], 8, 5, 0, FIRST)


def test_a_frozen_model_is_refused() -> None:
    frozen = Small().requires_grad_(False)
    with pytest.raises(SpecError, match="all 28 parameters of the model are frozen"):
        Run(problem(HOW, frozen), HOW, BASELINE)


def test_a_step_that_overflows_is_tried_again_with_a_smaller_scale() -> None:
    high = LossScaling(initial=2.0**40)
    run = ran(HOW, Candidate(name="x", arithmetic=Arithmetic.FP16, loss_scaling=high))
    assert len(run.losses) == HOW.steps
    steps = [step for step, _ in run.skipped]
    assert steps.count(0) > 10
    assert run.scales[0] == 2.0**40 / 2 ** steps.count(0)
    agree_on = ran(HOW, CANDIDATES["fp16"]).losses
    np.testing.assert_allclose(run.losses, agree_on, rtol=1e-2)


def test_a_static_scale_that_overflows_ends_the_run() -> None:
    high = LossScaling(initial=2.0**40)
    stuck = Candidate(
        name="x", arithmetic=Arithmetic.FP16, loss_scaling=high, dynamic=False
    )
    run = ran(HOW, stuck)
    assert run.losses == []
    assert run.stopped == "step 0 overflows at every scale of 30 tried"
    gradients = run.seen["head"]["gradient"]
    assert gradients.nonfinite > 0  # the evidence is kept


def test_16_bit_adam_without_masters_divides_by_zero_and_says_where() -> None:
    run = ran(HOW, without_masters(CANDIDATES["fp16"]))
    assert run.stopped is not None
    assert "left embed.weight with inf or NaN" in run.stopped
    assert run.stopped.endswith(
        "(Adam adds eps = 1e-08 to what it divides by: 0 in fp16)"
    )


def test_the_steps_that_are_looked_into() -> None:
    assert looked_at(100) >= {0, 99}
    assert len(looked_at(100)) == 8
    assert looked_at(4) == {0, 1, 2, 3}
