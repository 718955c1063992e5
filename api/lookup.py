"""Commands that look things up: `precision hardware …` and `precision bits`."""

from typing import Annotated

import typer

from api import console_bits, console_devices
from api.client import Client
from api.options import AsJson, connected, emit
from optimizer import bits
from optimizer.errors import SpecError

hardware = typer.Typer(
    no_args_is_help=True, help="The devices, and what each can do in which format."
)

DeviceId = Annotated[
    str, typer.Argument(metavar="ID", help="A device's id or alias, or local.")
]


@hardware.command("list")
@connected
def list_hardware(
    client: Client,
    as_json: AsJson = False,
) -> None:
    """List the devices that a request may name."""
    found = client.hardware()
    emit(found, as_json, console_devices.devices)


@hardware.command("show")
@connected
def show_hardware(
    client: Client,
    device: DeviceId,
    as_json: AsJson = False,
) -> None:
    """Show one device: peaks, memory, and what it refuses and why."""
    found = client.device(device)
    emit(found, as_json, console_devices.device)


def look_at_bits(
    value: Annotated[
        str, typer.Argument(help="A decimal number such as 0.1 or -1e-5.")
    ],
    name: Annotated[
        str | None, typer.Option("--format", help="bf16, fp8_e4m3, …; else all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a number's bits, stored value, error and neighbors; needs no service."""
    try:
        if name is None:
            every = [one.to_json() for one in bits.inspect_everywhere(value)]
            emit(every, as_json, console_bits.every)
        else:
            one = bits.inspect(bits.format_named(name), value)
            emit(one.to_json(), as_json, console_bits.one)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None
