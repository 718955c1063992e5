"""The command `precision`. Exit codes: 0 done, 1 error, 2 usage, 3 the SLA is not met.

Commands talk to the service over HTTP (`options.py` says where it is); those of
`operate.py` work on its data folder itself.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from api import console, estimate_cli, jobs_cli, keys_cli, lookup, measure, operate
from api.client import Client, ClientError
from api.jobs_cli import JobId
from api.operate import DataDir, OperateError
from api.options import AsJson, Key, Url, connect, dumps, emit, seconds
from api.webhooks_cli import webhooks

SLA_NOT_MET = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

app = typer.Typer(
    name="precision",
    help="Find the Pareto-optimal numeric precision for every layer of a model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models = typer.Typer(no_args_is_help=True, help="The models that the service knows.")
app.add_typer(jobs_cli.jobs, name="jobs")
app.add_typer(models, name="models")
app.add_typer(lookup.hardware, name="hardware")
app.add_typer(keys_cli.keys, name="keys")
app.add_typer(keys_cli.tenants, name="tenants")
app.add_typer(webhooks, name="webhooks")
lookup.hardware.command("profile")(measure.profile)
# A negative number is not an option.
app.command("bits", context_settings={"ignore_unknown_options": True})(
    lookup.look_at_bits
)
app.command()(estimate_cli.estimate)
app.command()(operate.serve)
app.command()(operate.demo)


@dataclass(frozen=True, slots=True)
class Ask:
    """The request of `precision optimize`, as its options give it."""

    model: str  # a name, or a folder under one of the service's roots
    hardware: str
    per_token_s: float | None
    first_token_s: float | None
    task: str | None
    distribution: str | None
    workload: dict[str, int]
    rounding: str | None

    def body(self) -> dict[str, Any]:
        """Return the JSON body; what was not said is left to the service."""
        sla: Any = self.per_token_s
        if self.first_token_s is not None:
            both = {
                "per_token_s": self.per_token_s,
                "first_token_s": self.first_token_s,
            }
            sla = {name: value for name, value in both.items() if value is not None}
        said = {
            "model": {"path": self.model}
            if Path(self.model).is_absolute()
            else self.model,
            "hardware": self.hardware,
            "latency_sla": sla,
            "task": self.task,
            "data_distribution": self.distribution,
            "workload": self.workload or None,
            "search": {"rounding": self.rounding} if self.rounding else None,
        }
        return {name: value for name, value in said.items() if value is not None}


@app.command()
def optimize(
    model: Annotated[
        str, typer.Argument(help="A name of `precision models list`, or a folder.")
    ],
    hardware: Annotated[str, typer.Option(help="A device id such as h100.")],
    sla: Annotated[
        str | None,
        typer.Option(help="Time per output token: 20ms, or 0.02 seconds."),
    ] = None,
    first_token: Annotated[
        str | None, typer.Option(help="Time to the first token: 300ms.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="chat, completion, …")] = None,
    distribution: Annotated[
        str | None,
        typer.Option("--data", help="A built-in name, or a file of JSON lines."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Devices that share every layer.")
    ] = None,
    rounding: Annotated[
        str | None,
        typer.Option(help="Of FP8 weights: nearest, or compensated (GPTQ, slower)."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the result.")] = True,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """Find the precision of every layer of MODEL; exit 3 if the SLA is not met."""
    workload = {
        "batch_size": batch_size,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "tensor_parallel": tensor_parallel,
    }
    with connect(url, key, data_dir) as client:
        ask = Ask(
            model=str(Path(model).resolve()) if "/" in model else model,
            hardware=hardware,
            per_token_s=None if sla is None else seconds(sla, "--sla"),
            first_token_s=None
            if first_token is None
            else seconds(first_token, "--first-token"),
            task=task,
            distribution=_distribution(client, distribution),
            workload={k: n for k, n in workload.items() if n is not None},
            rounding=rounding,
        )
        job = client.optimize(ask.body())
        if wait:
            job = _follow(client, job, as_json)
            raise typer.Exit(_show_end(client, job, as_json))
    emit(job, as_json, lambda job: typer.echo(job["id"]))


def _distribution(client: Client, name: str | None) -> str | None:
    """Return the name to send; a file of JSON lines is uploaded first."""
    if name is None or not name.endswith(".jsonl"):
        return name
    path = Path(name)
    if not path.is_file():
        raise OperateError(f"no file {name}")
    stem = re.sub(r"[^a-zA-Z0-9._-]+|^[._-]+", "-", path.stem).strip("-")[:63]
    return str(client.add_dataset(stem or "uploaded", path.read_bytes())["id"])


def _follow(client: Client, job: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Wait for the end; Ctrl-C leaves the job alone and says how to find it."""
    try:
        if as_json:
            return client.wait(job["id"])
        console.err.print(f"job {job['id']}")
        with console.live_progress() as show:
            return client.wait(job["id"], show)
    except KeyboardInterrupt:
        console.err.print(
            f"the job goes on; stop it with: precision jobs cancel {job['id']}",
            soft_wrap=True,  # to be copied
        )
        raise typer.Exit(INTERRUPTED) from None


def _show_end(client: Client, job: dict[str, Any], as_json: bool) -> int:
    """Print what came out and return the exit code."""
    if as_json:
        typer.echo(dumps(job))
    elif job["status"] == "succeeded":
        console.stack(client.report(job["id"]))
        again = f"report: precision report {job['id']} --html --out FILE"
        console.out.print(again, soft_wrap=True)  # to be copied
    else:
        console.failure(job)
    if job["status"] != "succeeded":
        return 1
    return SLA_NOT_MET if job["outcome"] == "sla_not_met" else 0


@app.command()
def report(
    job_id: JobId,
    html: Annotated[
        bool, typer.Option("--html", help="The page for people, not the JSON.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option("--out", help="File to write; else stdout.")
    ] = None,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """Get the report of a job that succeeded."""
    with connect(url, key, data_dir) as client:
        text = client.report_html(job_id) if html else dumps(client.report(job_id))
    if to is None:
        typer.echo(text)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)
        console.err.print(f"wrote {to}", soft_wrap=True)


@models.command("list")
def list_models(
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """List the models that jobs may name."""
    with connect(url, key, data_dir) as client:
        found = client.models()
    emit(found, as_json, console.models)


@models.command("add")
def add_model(
    name: Annotated[str, typer.Argument(help="The name that callers will use.")],
    folder: Annotated[Path, typer.Argument(help="safetensors, config, tokenizer.")],
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """Register the weights in FOLDER, which the service must see, under NAME."""
    with connect(url, key, data_dir) as client:
        model = client.add_model(name, str(folder.resolve()))
    emit(model, as_json, lambda model: typer.echo(f"added {model['name']}"))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. What can be expected to go wrong has no traceback."""
    try:
        app(None if arguments is None else list(arguments), prog_name="precision")
    except ClientError as error:
        console.problem(error.problem)
    except (OperateError, OSError) as error:
        console.problem({"detail": str(error)})
    sys.exit(1)


if __name__ == "__main__":
    main()
