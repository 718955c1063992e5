"""An answer after an engine served it: where it did, its seconds decide what is met."""

from dataclasses import replace
from typing import TYPE_CHECKING

from optimizer import plan
from optimizer.choose import Totals
from optimizer.local_run import SERVED
from optimizer.reasons import would_meet

if TYPE_CHECKING:
    from optimizer.document import Run


def taken(run: "Run") -> Totals:
    """Return the chosen stack's totals, with an engine's seconds where it served it."""
    summed = run.chooser.totals(run.stacks[run.verdict.label])
    under = run.runs.get(SERVED)
    if under is None:
        return summed
    first = under.first_token_s or summed.first_token_s  # None: it was not timed
    return replace(summed, per_token_s=under.per_token_s, first_token_s=first)


def decided(run: "Run") -> "Run":
    """Return the run with the outcome, and the advice, that the engine's seconds give.

    The same run where no engine served the stack.
    """
    if SERVED not in run.runs:
        return run
    stack, spec, found = run.stacks[run.verdict.label], run.spec, taken(run)
    outcome = plan.outcome(run.chooser, stack, found, spec.latency_sla)
    missed = outcome == "sla_not_met"
    advice = tuple(would_meet(run.chooser, found, spec)) if missed else ()
    verdict = replace(run.verdict, outcome=outcome, would_meet=advice)
    return replace(run, verdict=verdict)
