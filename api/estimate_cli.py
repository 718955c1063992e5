"""`precision estimate`: what to expect of a model on a device, without a job."""

from pathlib import Path
from typing import Annotated, Any

import typer

from api import console_estimate
from api.client import Client
from api.options import AsJson, connected, emit, seconds


@connected
def estimate(
    client: Client,
    model: Annotated[
        str, typer.Argument(help="A registered or published name, or a folder.")
    ],
    hardware: Annotated[str, typer.Option(help="A device id such as h100.")],
    sla: Annotated[
        str | None, typer.Option(help="Time per output token: 20ms, or 0.02 seconds.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences at once.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel",
            "--devices",
            min=1,
            help="Devices that share every layer.",
        ),
    ] = None,
    train: Annotated[
        str | None, typer.Option(help="pretraining, finetuning, lora, …: and training.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, latency by format and what FP8 buys; measures nothing."""
    workload = {
        "batch_size": batch,
        "prompt_tokens": context,
        "tensor_parallel": tensor_parallel,
    }
    folder = Path(model).expanduser()
    said: dict[str, Any] = {
        "model": {"path": str(folder.resolve())} if folder.is_dir() else model,
        "hardware": hardware,
        "latency_sla": None if sla is None else seconds(sla, "--sla"),
        "workload": {k: n for k, n in workload.items() if n is not None} or None,
        "training": None if train is None else {"scenario": train},
    }
    body = {name: value for name, value in said.items() if value is not None}
    found = client.estimate(body)
    emit(found, as_json, console_estimate.estimate)
