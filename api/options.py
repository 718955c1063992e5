"""What commands that talk to the service share: their options, a client, the output.

The address and the key are --url and --key, or PRECISION_URL and PRECISION_API_KEY,
or what a service on this machine left in --data-dir.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from api import operate
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


def connect(url: str | None, key: str | None, data_dir: Path) -> Client:
    """Return a client; the local service's key never goes to another address."""
    if url is None:
        url = operate.address(data_dir)
        key = key or operate.first_key(data_dir)
    return Client(url, key)


def dumps(value: Any) -> str:
    """Return JSON for machines and people."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def emit(value: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """Print `value` for machines, or let `show` print it for people."""
    if as_json:
        typer.echo(dumps(value))
    else:
        show(value)
