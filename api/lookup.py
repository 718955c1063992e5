"""Commands that look things up: `precision hardware …`."""

from typing import Annotated

import typer

from api import console_devices, operate
from api.operate import DataDir
from api.options import AsJson, Key, Url, connect, emit

hardware = typer.Typer(
    no_args_is_help=True, help="The devices, and what each can do in which format."
)

DeviceId = Annotated[
    str, typer.Argument(metavar="ID", help="A device's id or alias, or local.")
]


@hardware.command("list")
def list_hardware(
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """List the devices that a request may name."""
    with connect(url, key, data_dir) as client:
        found = client.hardware()
    emit(found, as_json, console_devices.devices)


@hardware.command("show")
def show_hardware(
    device: DeviceId,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """Show one device: peaks, memory, and what it refuses and why."""
    with connect(url, key, data_dir) as client:
        found = client.device(device)
    emit(found, as_json, console_devices.device)
