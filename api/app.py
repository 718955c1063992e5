"""The ASGI application: `uvicorn --factory api.app:create_app`. It never loads torch."""

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from api import (
    audit_routes,
    backstage,
    badge,
    catalog,
    checks,
    crew,
    db,
    diagnose,
    embed,
    estimate,
    formats,
    guide,
    hardware,
    health,
    key_routes,
    limits,
    listings,
    openapi,
    pages,
    pages_catalog,
    pages_jobs,
    problems,
    report_key,
    results,
    routes,
    task_routes,
    tracing,
    trials,
    upload_routes,
    usage,
    webhook_docs,
    webhook_routes,
)
from api.cors import Cors
from api.events import Streams
from api.guards import Bodies, Doors
from api.metrics import Metrics, service_version
from api.middleware import Envelope
from api.rates import Rates
from api.settings import settings
from api.traced import Traced
from api.versions import Versions
from api.watch import Watcher, closed_on_signals
from optimizer.hardware import use as use_hardware

DESCRIPTION = "Finds the precision of every part of a language model, on your data."
PROBLEM = {
    "description": "What is wrong, RFC 9457",
    "content": {
        problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}
    },
}


def create_app() -> FastAPI:
    """Build a fresh application. The database must be migrated before it serves.

    Raises HardwareError where the operator's devices break a rule, and NotInstalled
    where spans are asked for without OpenTelemetry.
    """
    configure_logging(settings().log_level)
    tracing.require()
    use_hardware(settings().hardware_file)
    app = FastAPI(
        title="Precision",
        version=service_version(),
        description=DESCRIPTION,
        docs_url=None,  # the pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": PROBLEM},
        generate_unique_id_function=_operation_id,
        lifespan=_lifespan,
    )
    app.state.rates = Rates()
    app.state.watcher = Watcher()
    app.state.streams = Streams()
    app.state.metrics = Metrics(app.state.streams.total)
    app.state.crew = crew.for_database(settings().database_url)
    problems.install(app)
    app.add_middleware(Bodies, limits=_body_limits())
    app.add_middleware(Versions)
    app.add_middleware(Doors)
    app.add_middleware(Envelope, metrics=app.state.metrics)
    if tracing.on():
        app.add_middleware(Traced)  # outside of what answers where everything fails
    app.add_middleware(Cors)  # the last is outermost: pages read failures too
    for part in (
        routes,
        badge,
        embed,
        results,
        report_key,
        trials,
        estimate,
        diagnose,
        hardware,
        formats,
        task_routes,
        listings,
        upload_routes,
        key_routes,
        webhook_routes,
        usage,
        limits,
        audit_routes,
        health,
    ):
        app.include_router(part.router)
    for page_part in (pages, pages_jobs, pages_catalog, guide, backstage):
        app.include_router(page_part.router)
    app.include_router(openapi.router)
    app.include_router(embed.frames)
    app.include_router(pages.last)
    webhook_docs.install(app)
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    return app


def _body_limits() -> dict[str, int]:
    """Return how many bytes a body may have, by the beginning of the path."""
    say = settings()
    return {
        "/": say.max_body_bytes,
        "/v1/diagnose": max(say.max_body_bytes, diagnose.MAX_LOG_BYTES),
        "/v1/datasets/": max(say.max_dataset_bytes, say.part_bytes),
        "/v1/models/": max(say.max_body_bytes, say.part_bytes),
    }


def configure_logging(level: str) -> None:
    """Write one JSON object a line to stdout, with the request's id."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    logging.getLogger("uvicorn.access").disabled = True  # `request` lines say more


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    # Reading gigabytes of weights must not hold up the first answer.
    reader = threading.Thread(target=_register_folders, daemon=True)
    reader.start()
    tracing.start("api")
    with closed_on_signals(app.state.watcher):
        yield
    await app.state.rates.close()
    await run_in_threadpool(tracing.stop)
    db.close()


def _register_folders() -> None:
    try:
        checks.resume()
        catalog.register_folders()
    except Exception:  # a thread has nobody to tell but the log
        structlog.get_logger().exception("register_folders_failed")


def _operation_id(route: APIRoute) -> str:
    return route.name
