"""The commands `precision jobs …`: find, show, stop, repeat and delete jobs."""

import json
from typing import Annotated, Any

import typer

from api import console
from api.client import Client
from api.options import AsJson, connected, deleted, emit

jobs = typer.Typer(no_args_is_help=True, help="Look at jobs, and end or repeat them.")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, job_….")]


@jobs.command("list")
@connected
def list_jobs(
    client: Client,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    status: Annotated[
        list[str] | None, typer.Option(help="running, failed, …; may be repeated.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="A device id.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE; may be repeated.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Created after: 2026-11-01T00:00:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Created before.")] = None,
    oldest_first: Annotated[bool, typer.Option("--oldest-first")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    found = client.jobs(
        limit=limit,
        status=status,
        hardware=hardware,
        created_after=since,
        created_before=until,
        metadata=_pairs(metadata or []),
        order="asc" if oldest_first else None,
    )
    emit(found, as_json, console.jobs)


def _pairs(said: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in said]
    for key, equals, _ in pairs:
        if not key or not equals:
            detail = "write --metadata KEY=VALUE"
            raise typer.BadParameter(detail, param_hint="--metadata")
    return {key: value for key, _, value in pairs}


@jobs.command("get")
@connected
def get_job(
    client: Client,
    job_id: JobId,
    as_json: AsJson = False,
) -> None:
    """Show one job."""
    job = client.job(job_id)
    emit(job, as_json, console.job)


@jobs.command("cancel")
@connected
def cancel_job(
    client: Client,
    job_id: JobId,
    as_json: AsJson = False,
) -> None:
    """Stop a job; it ends within seconds."""
    job = client.cancel(job_id)
    emit(job, as_json, _state)


@jobs.command("retry")
@connected
def retry_job(
    client: Client,
    job_id: JobId,
    as_json: AsJson = False,
) -> None:
    """Run a job that has ended once more; what it measured is not measured again."""
    job = client.retry(job_id)
    emit(job, as_json, _state)


@jobs.command("delete")
@connected
def delete_job(
    client: Client,
    job_id: JobId,
    as_json: AsJson = False,
) -> None:
    """Delete the files of a job that has ended; what it was stays on record."""
    client.delete(job_id)
    deleted(job_id, as_json)


@jobs.command("trials")
@connected
def list_trials(
    client: Client,
    job_id: JobId,
    kind: Annotated[
        str | None, typer.Option(help="site: one choice at one site; stack: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show everything that a job tried; with --json one trial per line."""
    found = client.trials(job_id, kind)
    if as_json:
        for trial in found:
            typer.echo(json.dumps(trial))
    else:
        console.trials(list(found))


@jobs.command("events")
@connected
def list_events(
    client: Client,
    job_id: JobId,
    as_json: AsJson = False,
) -> None:
    """Show what happened to a job so far; with --json one event per line."""
    if as_json:
        for event in client.events(job_id):
            typer.echo(json.dumps(event))
        return
    trains = bool(client.job(job_id)["request"].get("training"))
    for event in client.events(job_id):
        typer.echo(console.event_line(event, trains))


def _state(job: dict[str, Any]) -> None:
    typer.echo(f"{job['id']} {job['status']}")
