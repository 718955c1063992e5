"""The probe on one page: what a training precision will do, before the long run.

    fp32 twice ──▶ every candidate ──▶ promotions, run again ──▶ which to train in
    noise floor    drift, findings     up to three rounds

It is a library: `probe` takes whatever runs a candidate (`Here` does, in this process),
so that a job may keep runs, share them among workers and resume them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from optimizer.training import causes, promote
from optimizer.training.candidates import BASELINE, Candidate
from optimizer.training.causes import Cause
from optimizer.training.drift import drift
from optimizer.training.gemms import matrices
from optimizer.training.reasons import reasons
from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import FIRST, SECOND
from optimizer.training.trainer import Figures, Problem, Run, Told
from optimizer.training.verdict import (
    Outcome,
    Result,
    Status,
    Tried,
    choose,
    held_out_loss,
    outcome,
)

Asked = tuple[Candidate, int]
"""A candidate, and the order of the data that it is run on."""


class Runs(Protocol):
    """What runs candidates, here or elsewhere."""

    def __call__(self, asked: Sequence[Asked]) -> list[Figures]:
        """Run each, and return what each came to."""
        ...


@dataclass(slots=True)
class Probed:
    """All that a probe found."""

    how: TrainingSpec
    baseline: Figures
    again: Figures  # fp32 on the data in another order
    findings: list[Cause]  # in fp32: where there are some, nothing else was run
    results: dict[str, Result] = field(default_factory=dict)
    chosen: Tried | None = None

    @property
    def outcome(self) -> Outcome:
        """What came of it."""
        if any(f.breaks for f in self.findings):
            return Outcome.UNSTABLE
        return outcome(self.chosen)


def silent(phase: str, fraction: float) -> None:
    """Tell nobody."""


def probe(
    how: TrainingSpec,
    runs: Runs,
    sizes: Mapping[str, int],
    *,
    unusable: Callable[[Candidate], str | None] = lambda candidate: None,
    seed: int = 0,
    told: Callable[[str, float], None] = silent,
) -> Probed:
    """Probe a training: `sizes` has the elements of each matrix.

    `unusable` says why a device has no units for a candidate, which then is not run.
    """
    told("calibrate", 0.0)
    baseline, again = runs([(BASELINE, FIRST), (BASELINE, SECOND)])
    found = Probed(how, baseline, again, causes.of_baseline(baseline, again))
    if any(f.breaks for f in found.findings):
        return found
    told("sweep", 0.0)
    tried = [(c, unusable(c)) for c in how.tried()]
    found.results = {c.name: Result(unusable=no) for c, no in tried}
    first = [c for c, no in tried if no is None]
    for candidate, figures in zip(
        first, runs([(c, FIRST) for c in first]), strict=True
    ):
        found.results[candidate.name].rounds.append(
            judge(candidate, figures, found, seed)
        )
    told("validate", 0.0)
    _promote(found, runs, seed, lambda share: told("validate", share))
    found.chosen = choose(found.results, sizes)
    return found


def judge(candidate: Candidate, figures: Figures, found: Probed, seed: int) -> Tried:
    """Hold a run against the baseline."""
    drifts = drift(found.baseline, found.again, figures, seed)
    return Tried(
        candidate,
        figures,
        drifts,
        held_out_loss(found.baseline, found.again, figures, seed),
        causes.of_candidate(candidate, figures, found.baseline),
        reasons(candidate, figures, found.baseline, drifts),
    )


def _promote(
    found: Probed, runs: Runs, seed: int, told: Callable[[float], None]
) -> None:
    """Promote what drifts or overflows, and run again: all candidates side by side."""
    for round_ in range(promote.ROUNDS):
        told(round_ / promote.ROUNDS)
        wider = {}
        for name, result in found.results.items():
            if not (result.rounds and _curable(result)):
                continue
            last = result.last
            more = promote.promotions(
                last.candidate, last.figures, last.drifts, last.findings, round_
            )
            if more:
                wider[name] = last.candidate.promoted(more)
        if not wider:
            return
        done = runs([(candidate, FIRST) for candidate in wider.values()])
        for (name, candidate), figures in zip(wider.items(), done, strict=True):
            tried = judge(candidate, figures, found, seed)
            found.results[name].rounds.append(tried)


def _curable(result: Result) -> bool:
    """Whether wider products could help: not where weights are frozen, or scales loop."""
    if (
        result.status in (Status.SAFE, Status.CURED)
        or not result.last.candidate.masters
    ):
        return False
    others = {"backoff_loop", "frozen_weights"}
    breaking = {f.code for f in result.last.findings if f.breaks}
    return not breaking or not breaking <= others


# -- in this process --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Here:
    """Runs one candidate after the other in this process."""

    problem_of: Callable[[int], Problem]  # by the order of its data
    how: TrainingSpec
    told: Told = lambda done, planned: None

    def __call__(self, asked: Sequence[Asked]) -> list[Figures]:
        """Run each, and return what each came to."""
        found = []
        for number, (candidate, order) in enumerate(asked):
            run = Run(self.problem_of(order), self.how, candidate)
            run.run(self.how.steps, self._told(number, len(asked)))
            found.append(run.figures)
        return found

    def _told(self, number: int, count: int) -> Told:
        before, planned = number * self.how.steps, count * self.how.steps

        def told(done: int, _: int) -> None:
            self.told(before + done, planned)

        return told


def sizes_of(problem: Problem) -> dict[str, int]:
    """Return the elements of every matrix of a problem's network."""
    return {m.name: m.parameter.numel() for m in matrices(problem.network)}


def probe_here(
    problem_of: Callable[[int], Problem], how: TrainingSpec, seed: int = 0
) -> Probed:
    """Probe a training in this process: any network, any loss, any data."""
    runs = Here(problem_of, how)
    return probe(how, runs, sizes_of(problem_of(FIRST)), seed=seed)
