"""`GET /v1/jobs/{id}/trials`: everything that a job tried, one by one.

A trial of kind "site" is one choice at one site, all else at full precision; one of
kind "stack" is a whole stack on held-out data.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api import cursors, results, training_views
from api.access import DB, Caller
from api.strict import StrictRoute

router = APIRouter(prefix="/v1/jobs/{job_id}", route_class=StrictRoute, tags=["jobs"])


class Trial(BaseModel):
    """One choice at one site, or one whole stack, and what it came to.

    Whatever was not measured or does not apply is null; `refused` says why a choice
    was not tried.
    """

    object: str = "trial"
    kind: Literal["site", "stack"]
    id: str
    site: str | None = None
    component: str | None = None
    layer: int | None = None
    choice: str | None = None
    chosen: bool = False
    kl_nats: float | None = None
    kl_nats_low: float | None = None
    kl_nats_high: float | None = None
    kl_nats_se: float | None = None
    sqnr_db: float | None = None
    saturated: float | None = None
    flushed: float | None = None
    perplexity: float | None = None
    top1_agreement: float | None = None
    per_token_s: float | None = None
    first_token_s: float | None = None
    bytes: int | None = None
    basis: str | None = None  # of the seconds: measured, modelled
    refused: str | None = None


class TrialPage(BaseModel):
    """Some trials, by site in the model's order, then stacks."""

    object: str = "list"
    data: list[Trial]
    has_more: bool
    next_cursor: str | None


@router.get("/trials")
def list_trials(
    job_id: str,
    caller: Caller,
    session: DB,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=200)] = None,
    kind: Literal["site", "stack"] | None = None,
) -> TrialPage:
    """List what a job that succeeded tried, and what each trial came to."""
    scope = f"trials:{caller.tenant_id}:{job_id}:{kind}"
    start = int(cursors.read(scope, after)) if after else 0
    report = results.report_of(session, caller, job_id)
    found = [t for t in trials(report) if kind in (None, t.kind)]
    page, stop = found[start : start + limit], start + limit
    more = stop < len(found)
    cursor = cursors.write(scope, str(stop)) if more else None
    return TrialPage(data=page, has_more=more, next_cursor=cursor)


def trials(report: dict[str, Any]) -> list[Trial]:
    """Return every trial that a report tells of."""
    if report.get("schema") == training_views.SCHEMA:
        return [Trial.model_validate(row) for row in training_views.tried(report)]
    sites = [_at_site(s, a) for s in report["sites"] for a in s["alternatives"]]
    return sites + [_stack(row) for row in report["validation"]["stacks"]]


def _at_site(site: dict[str, Any], tried: dict[str, Any]) -> Trial:
    where = {name: site[name] for name in ("site", "component", "layer")}
    known = {k: v for k, v in tried.items() if k in Trial.model_fields}
    choice = tried["choice"]
    return Trial.model_validate(
        {
            **known,
            **where,
            "kind": "site",
            "id": f"{site['site']}={choice}",
            "chosen": choice == site["choice"],
        }
    )


def _stack(row: dict[str, Any]) -> Trial:
    kl = row["kl_nats"]
    plain = ("per_token_s", "first_token_s", "bytes", "chosen")
    return Trial.model_validate(
        {
            **{name: row[name] for name in plain if name in row},
            "kind": "stack",
            "id": row["id"],
            "kl_nats": kl["value"],
            "kl_nats_low": kl["low"],
            "kl_nats_high": kl["high"],
            "perplexity": _value(row.get("perplexity")),
            "top1_agreement": _value(row.get("top1_agreement")),
        }
    )


def _value(figure: dict[str, Any] | None) -> float | None:
    return None if figure is None else figure["value"]
