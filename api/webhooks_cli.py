"""`precision webhooks …`: endpoints, and what was delivered to them."""

from typing import Annotated, Any

import typer

from api import console
from api.client import Client
from api.options import AsJson, connected, deleted, emit

webhooks = typer.Typer(
    no_args_is_help=True, help="Where to tell of jobs that end, and whether it arrived."
)

EndpointId = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="An endpoint's id, we_….")
]


@webhooks.command("list")
@connected
def list_webhooks(
    client: Client,
    as_json: AsJson = False,
) -> None:
    """List the endpoints, the newest first."""
    found = client.webhooks()
    emit(found, as_json, _endpoints)


@webhooks.command("add")
@connected
def add_webhook(
    client: Client,
    target: Annotated[str, typer.Argument(metavar="HTTPS_URL", help="Where to send.")],
    event: Annotated[
        list[str] | None,
        typer.Option(help="job.started, …; may be repeated. Else: how jobs end."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--format", help="standard, slack or port.")
    ] = None,
    description: Annotated[str, typer.Option(help="For people.")] = "",
    as_json: AsJson = False,
) -> None:
    """Add an endpoint. Its secret, which signs, is shown this once."""
    said = {"events": event, "format": shape, "description": description}
    body = {"url": target, **{name: value for name, value in said.items() if value}}
    made = client.add_webhook(body)
    emit(made, as_json, lambda made: typer.echo(f"{made['id']}\n{made['secret']}"))


@webhooks.command("test")
@connected
def try_webhook(
    client: Client,
    endpoint: EndpointId,
    as_json: AsJson = False,
) -> None:
    """Send a test; `precision webhooks deliveries` then says what came of it."""
    sent = client.test_webhook(endpoint)
    emit(sent, as_json, lambda sent: typer.echo(sent["id"]))


@webhooks.command("deliveries")
@connected
def list_deliveries(
    client: Client,
    endpoint: EndpointId,
    state: Annotated[
        str | None, typer.Option(help="pending, delivered or failed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the newest deliveries, with their last attempt."""
    found = client.webhook_deliveries(endpoint, state)
    emit(found, as_json, _deliveries)


@webhooks.command("delete")
@connected
def delete_webhook(
    client: Client,
    endpoint: EndpointId,
    as_json: AsJson = False,
) -> None:
    """Delete an endpoint, what waits for it and its log."""
    client.delete_webhook(endpoint)
    deleted(endpoint, as_json)


def _endpoints(found: list[dict[str, Any]]) -> None:
    lines = [
        (row["id"], row["url"], row["format"], _health(row), ", ".join(row["events"]))
        for row in found
    ]
    console.rows(("endpoint", "url", "format", "state", "events"), lines)


def _health(row: dict[str, Any]) -> str:
    if not row["enabled"]:
        return f"disabled: {row['disabled_reason'] or 'by its owner'}"
    return f"failing since {row['failing_since']}" if row["failing_since"] else "ok"


def _deliveries(found: list[dict[str, Any]]) -> None:
    lines = [
        (row["id"], row["event_type"], row["job_id"] or "", row["state"], _last(row))
        for row in found
    ]
    console.rows(("delivery", "event", "job", "state", "last attempt"), lines)


def _last(row: dict[str, Any]) -> str:
    if not row["attempts"]:
        return ""
    last = row["attempts"][-1]
    came = last["error"] or last["status"]
    return f"{len(row['attempts'])}: {came}, {last['at'][:19]}Z"
