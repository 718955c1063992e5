"""What commands that talk to the service share: their options, a client, the output.

The address and the key are --url and --key, or PRECISION_URL and PRECISION_API_KEY,
or what a service on this machine left in --data-dir.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Concatenate

import typer

from api import console, operate
from api.client import Client

Url = Annotated[
    str | None,
    typer.Option(envvar="PRECISION_URL", help="Address of the service."),
]
Key = Annotated[
    str | None,
    typer.Option(envvar="PRECISION_API_KEY", help="API key.", show_envvar=True),
]
AsJson = operate.AsJson
dumps = operate.dumps


def connect(url: str | None, key: str | None, data_dir: Path) -> Client:
    """Return a client; the local service's key never goes to another address."""
    if url is None:
        url = operate.address(data_dir)
        key = key or operate.first_key(data_dir)
    return Client(url, key)


def connected(
    command: Callable[Concatenate[Client, ...], None],
) -> Callable[..., None]:
    """Turn a command's client into the options that say of which service."""

    def where(
        url: Url = None, key: Key = None, data_dir: operate.DataDir = operate.DATA_DIR
    ) -> Client:
        return connect(url, key, data_dir)

    def run(**said: Any) -> None:
        with where(**{name: said.pop(name) for name in options}) as client:
            command(client, **said)

    options = inspect.signature(where).parameters
    _, *own = inspect.signature(command).parameters.values()
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = command.__annotations__ | where.__annotations__
    run.__signature__ = inspect.Signature([*own, *options.values()])  # type: ignore[attr-defined]
    return run


def seconds(text: str, option: str | None = None) -> float:
    """Read `20ms`, `0.02s`, `500us` or `0.02`: seconds. Raises BadParameter."""
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs|)\s*", text)
    try:
        value = float(match[1]) * units[match[2]] if match else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        detail = f"{text!r} is not a time above 0 such as 20ms or 0.02"
        raise typer.BadParameter(detail, param_hint=option)
    return value


def deleted(what: str, as_json: bool) -> None:
    """Say that something is gone: on stderr for people, for there is no result."""
    if as_json:
        typer.echo(dumps({"deleted": what}))
    else:
        console.err.print(f"deleted {what}", soft_wrap=True)


def emit(value: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """Print `value` for machines, or let `show` print it for people."""
    if as_json:
        typer.echo(dumps(value))
    else:
        show(value)
