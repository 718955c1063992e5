"""The commands `precision models …` and `precision datasets …`: look, add, delete."""

from pathlib import Path
from typing import Annotated, Any

import typer

from api import console, transfers
from api.client import Client, ClientError
from api.operate import OperateError
from api.options import AsJson, connected, deleted, emit

models = typer.Typer(no_args_is_help=True, help="The models that the service knows.")
datasets = typer.Typer(no_args_is_help=True, help="The texts that jobs may measure on.")

Folder = Annotated[Path, typer.Argument(help="safetensors, config, tokenizer.")]
Lines = Annotated[
    Path, typer.Argument(help="JSON lines of {text} or {messages}, UTF-8.")
]


@models.command("list")
@connected
def list_models(
    client: Client,
    as_json: AsJson = False,
) -> None:
    """List the models that jobs may name."""
    found = client.models()
    emit(found, as_json, console.models)


@models.command("show")
@connected
def show_model(
    client: Client,
    name: str,
    as_json: AsJson = False,
) -> None:
    """Show a model: its files with their digests, tensors, dtypes."""
    found = client.model(name)
    emit(found, as_json, console.model)


@models.command("add")
@connected
def add_model(
    client: Client,
    name: Annotated[str, typer.Argument(help="The name that callers will use.")],
    folder: Folder,
    upload: Annotated[
        bool, typer.Option(help="Send the files; the service need not see FOLDER.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Register the weights in FOLDER, which the service must see, under NAME."""
    if upload:
        model = send_model(client, folder, name)
    else:
        model = client.add_model(name, str(folder.resolve()))
    emit(model, as_json, lambda model: typer.echo(f"added {model['name']}"))


@models.command("delete")
@connected
def delete_model(
    client: Client,
    name: str,
    as_json: AsJson = False,
) -> None:
    """Delete a model of yours, and the files that were uploaded for it."""
    client.delete_model(name)
    deleted(name, as_json)


@datasets.command("list")
@connected
def list_datasets(
    client: Client,
    as_json: AsJson = False,
) -> None:
    """List the texts that come with the service, and yours."""
    found = client.datasets()
    emit(found, as_json, console.datasets)


@datasets.command("add")
@connected
def add_dataset(
    client: Client,
    name: Annotated[str, typer.Argument(help="The name that callers will use.")],
    file: Lines,
    as_json: AsJson = False,
) -> None:
    """Upload FILE under NAME, in parts; what was cut goes on when you ask again."""
    found = send_dataset(client, file, name)
    emit(found, as_json, lambda found: typer.echo(f"added {found['name']}"))


@datasets.command("delete")
@connected
def delete_dataset(
    client: Client,
    name: str,
    as_json: AsJson = False,
) -> None:
    """Delete a dataset of yours."""
    client.delete_dataset(name)
    deleted(name, as_json)


# -- sending -------------------------------------------------------------------


def send_model(client: Client, folder: Path, name: str | None = None) -> dict[str, Any]:
    """Send a folder of weights, and return the model.

    Without a name it gets one of its content, and what was sent before is found again.
    """
    if not folder.is_dir():
        raise OperateError(f"no folder {folder}")
    return _sent(client, "models", transfers.model_files(folder), name, folder)


def send_dataset(client: Client, file: Path, name: str | None = None) -> dict[str, Any]:
    """Send a file of JSON lines, and return the dataset; see `send_model`."""
    if not file.is_file():
        raise OperateError(f"no file {file}")
    return _sent(client, "datasets", {file.name: file}, name, file)


def _sent(
    client: Client,
    kind: transfers.Kind,
    files: transfers.Files,
    name: str | None,
    source: Path,
) -> dict[str, Any]:
    total = sum(path.stat().st_size for path in files.values())
    with console.live_bytes("reading", total) as show:
        sha256 = transfers.digests(files, show)
    named = name or transfers.short_name(source, sha256)
    with console.live_bytes("sending", total) as show:
        try:
            return transfers.upload(client, kind, named, files, sha256, show)
        except ClientError as error:
            if name is not None or error.code != "name_taken":
                raise
            return {"name": named}  # of this very content: it is there
