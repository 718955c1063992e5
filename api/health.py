"""The endpoints for machines that watch: alive, ready, measured."""

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from api import db, queue
from api.strict import PlainRoute

router = APIRouter(tags=["health"], route_class=PlainRoute)


@router.get("/healthz", include_in_schema=False)
@router.get("/livez")
async def livez() -> dict[str, str]:
    """Say that the process answers. It asks nobody else."""
    return {"status": "ok"}


class Ready(BaseModel):
    """Whether requests can be served, and what is missing for that."""

    status: Literal["ok", "degraded", "not_ready"]
    checks: dict[str, str]


@router.get(
    "/readyz",
    response_model=Ready,
    responses={503: {"model": Ready, "description": "Not ready to serve"}},
)
def readyz(response: Response) -> Any:
    """Say whether requests can be served: the database is there and migrated.

    A broker that is away degrades and does not stop the service: jobs are kept.
    """
    database = _database()
    broker = "ok" if queue.reachable() else "unreachable"
    if database != "ok":
        response.status_code = 503
        status = "not_ready"
    else:
        status = "ok" if broker == "ok" else "degraded"
    return {"status": status, "checks": {"database": database, "broker": broker}}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    text = request.app.state.metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _database() -> str:
    try:
        with db.reading() as session:
            revision = db.revision(session)
    except SQLAlchemyError:
        return "unreachable or not migrated"
    return "ok" if revision == db.head() else "not migrated"
