"""The planted and the healthy runs as a probe sees them: before they are started."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from optimizer.advice import LossScaling
from optimizer.training.candidates import BASELINE, Arithmetic, Candidate, Scaling
from optimizer.training.causes import of_baseline
from optimizer.training.probe import Here, Probed, judge
from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import FIRST, SECOND, Batches
from optimizer.training.trainer import NextToken, Problem
from optimizer.training.verdict import Tried
from tests.training import planted

# Their networks emulate FP8 themselves; a probe does so in any network.
PLAIN = {"fp8_outlier": planted.with_outlier, "fp8": planted.Small}


def how(run: planted.Run, steps: int) -> TrainingSpec:
    """A run's own training, over fewer steps."""
    adam = run.optimizer == "adam"
    return TrainingSpec(
        optimizer=run.optimizer,
        learning_rate=run.learning_rate,
        warmup_steps=run.warmup_steps,
        weight_decay=0.01 if adam else 0.0,  # torch's defaults
        clip=run.clip,
        batch_size=planted.BATCH // run.accumulation,
        accumulation=run.accumulation,
        sequence_tokens=planted.TOKENS,
        steps=steps,
        candidates=(),
    )


def candidate(run: planted.Run) -> Candidate:
    """The precision that a run is planned in."""
    arithmetic, scaling = Arithmetic(run.arithmetic), None
    if run.initial_scale:
        scaling = LossScaling(run.initial_scale, growth_interval=run.growth_interval)
    return Candidate(
        name="planned",
        arithmetic=arithmetic,
        masters=run.masters,
        loss_scaling=scaling,
        scaling=Scaling.CURRENT if arithmetic is Arithmetic.FP8 else None,
    )


def problem(run: planted.Run, steps: int) -> Callable[[int], Problem]:
    """The network and the data that a run's first steps see, by order."""
    ids = torch.cat([run.sequences(step) for step in range(steps)])
    network = PLAIN.get(run.name, run.network)()
    held_out = tuple(planted.text()[-8:].split(1))

    def of(order: int) -> Problem:
        numbers = np.arange(len(ids))
        if order == SECOND:
            numbers = np.random.default_rng(SECOND).permutation(numbers)
        dealt = Batches(ids, numbers.reshape(steps, -1), 1.0)
        return Problem(network, NextToken(), dealt, held_out)

    return of


def probed(run: planted.Run, steps: int = 40) -> tuple[Probed, Tried | None]:
    """Probe a run in the precision it is planned in. None: fp32 fails already."""
    training, runs = how(run, steps), Here(problem(run, steps), how(run, steps))
    baseline, again = runs([(BASELINE, FIRST), (BASELINE, SECOND)])
    found = Probed(training, baseline, again, of_baseline(baseline, again))
    if found.findings:
        return found, None
    planned = candidate(run)
    (figures,) = runs([(planned, FIRST)])
    return found, judge(planned, figures, found, seed=0)


def with_candidates(run: planted.Run, *names: str, steps: int = 40) -> TrainingSpec:
    """A run's training, to be probed in these candidates."""
    return replace(how(run, steps), candidates=names)
