"""The command `precision`. Exit codes: 0 done, 1 error, 2 usage, 3 the SLA is not met.

Commands talk to the service over HTTP (`options.py` says where it is); those of
`operate.py` work on its data folder itself. The doctor needs neither, and ends with 3
where it found something.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from api import (
    apply_cli,
    console,
    console_training,
    doctor_cli,
    estimate_cli,
    jobs_cli,
    keys_cli,
    lookup,
    measure,
    models_cli,
    operate,
    training_options,
    training_views,
    transfers,
    verify_cli,
)
from api.client import Client, ClientError
from api.jobs_cli import JobId
from api.operate import DataDir, OperateError
from api.options import AsJson, Key, Url, connect, connected, dumps, emit, seconds
from api.webhooks_cli import webhooks

SLA_NOT_MET = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

app = typer.Typer(
    name="precision",
    help="Find the Pareto-optimal numeric precision for every layer of a model.",
    epilog="Exit codes: 0 done, 1 error, 2 usage, 3 no stack meets the target (doctor: "
    "something is wrong), 130 interrupted.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(jobs_cli.jobs, name="jobs")
app.add_typer(models_cli.models, name="models")
app.add_typer(models_cli.datasets, name="datasets")
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
app.command()(apply_cli.apply)
app.command()(verify_cli.verify)
app.command()(verify_cli.reproduce)
app.command("report-key")(verify_cli.report_key)
app.command()(doctor_cli.doctor)
app.command()(operate.serve)
app.command()(operate.demo)


@dataclass(frozen=True, slots=True)
class Ask:
    """The request of `precision optimize`, as its options give it."""

    model: str  # a name, or a folder under one of the service's roots
    hardware: str
    per_token_s: float | None
    first_token_s: float | None
    task: str | dict[str, Any] | None
    distribution: str | None
    workload: dict[str, int]
    rounding: str | None
    exports: list[str] | None
    stack: dict[str, Any] | None

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
            "exports": self.exports,
            "stack": self.stack,
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
    task: training_options.Task = None,
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
    exports: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            help="compressed_tensors (what vLLM loads), transformer_engine or torchao; "
            "again for several. All where none is named.",
        ),
    ] = None,
    stack: Annotated[
        Path | None,
        typer.Option(
            help="A stack.json to measure, instead of a search.", metavar="FILE"
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(help="A stack.json that the search starts from.", metavar="FILE"),
    ] = None,
    rate: training_options.Rate = None,
    rule: training_options.Rule = None,
    steps: training_options.Steps = None,
    warmup: training_options.Warmup = None,
    accumulation: training_options.Accumulation = None,
    sequence: training_options.Sequence = None,
    lora_rank: training_options.Rank = None,
    wait: Annotated[bool, typer.Option(help="Wait for the result.")] = True,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the report, the stack, the exports."),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = operate.DATA_DIR,
) -> None:
    """Find the precision of every layer of MODEL; exit 3 if the SLA is not met.

    A folder that the service does not see is uploaded, and so is a file of --data.
    """
    if to is not None and not wait:
        raise typer.BadParameter(
            "what is waited for can be written", param_hint="--out"
        )
    asked = training_options.task(
        task,
        {
            "--lr": rate,
            "--optimizer": rule,
            "--steps": steps,
            "--warmup": warmup,
            "--accumulation": accumulation,
            "--sequence-tokens": sequence,
            "--lora-rank": lora_rank,
            "--batch-size": batch_size,
        },
    )
    workload = {
        "batch_size": None if training_options.trains(asked) else batch_size,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "tensor_parallel": tensor_parallel,
    }
    with connect(url, key, data_dir) as client:
        ask = Ask(
            model=model,
            hardware=hardware,
            per_token_s=None if sla is None else seconds(sla, "--sla"),
            first_token_s=None
            if first_token is None
            else seconds(first_token, "--first-token"),
            task=asked,
            distribution=_distribution(client, distribution),
            workload={k: n for k, n in workload.items() if n is not None},
            rounding=rounding,
            exports=exports or None,
            stack=_stack(stack, start_from),
        )
        job = _created(client, ask, here=url is None)
        if wait:
            job = _follow(client, job, as_json)
            if to is not None and job["status"] == "succeeded":
                _written(to, [str(path) for path in _fetched(client, job["id"], to)])
            raise typer.Exit(_show_end(client, job, as_json))
    emit(job, as_json, lambda job: typer.echo(job["id"]))


def _created(client: Client, ask: Ask, *, here: bool) -> dict[str, Any]:
    """Create the job. A folder is sent unless the service, being `here`, sees it."""
    if "/" not in ask.model and not Path(ask.model).is_dir():
        return client.optimize(ask.body())
    folder = Path(ask.model).expanduser().resolve()
    if here:
        try:
            return client.optimize(replace(ask, model=str(folder)).body())
        except ClientError as error:
            if error.code != "model_folder_not_allowed" or not folder.is_dir():
                raise
    model = models_cli.send_model(client, folder)["name"]
    return client.optimize(replace(ask, model=model).body())


def _stack(fixed: Path | None, start: Path | None) -> dict[str, Any] | None:
    """Return the stack to send, of the one file that was named."""
    if fixed is not None and start is not None:
        raise typer.BadParameter("give --stack or --start-from, not both")
    path = fixed or start
    if path is None:
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    return {"file": found, "use": "validate" if fixed else "start"}


def _distribution(client: Client, name: str | None) -> str | None:
    """Return the name to send; a file of JSON lines is uploaded first."""
    if name is None or not name.endswith(".jsonl"):
        return name
    return str(models_cli.send_dataset(client, Path(name))["name"])


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
        _print_report(client.report(job["id"]))
        again = f"report: precision report {job['id']} --html --out FILE"
        console.out.print(again, soft_wrap=True)  # to be copied
    else:
        console.failure(job)
    if job["status"] != "succeeded":
        return 1
    return SLA_NOT_MET if job["outcome"] == "sla_not_met" else 0


def _print_report(document: dict[str, Any]) -> None:
    probed = document["schema"] == training_views.SCHEMA
    (console_training.report if probed else console.stack)(document)


@app.command()
@connected
def report(
    client: Client,
    job_id: JobId,
    html: Annotated[
        bool, typer.Option("--html", help="The page for people, not the JSON.")
    ] = False,
    form: Annotated[
        str | None, typer.Option("--format", help="json, html, md, csv or pdf.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="File to write; else stdout.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Get the report of a job that succeeded; as JSON where no other form is named."""
    if as_json and (html or form not in (None, "json")):
        raise typer.BadParameter("name one form", param_hint="--json")
    content = client.report_as(job_id, form or ("html" if html else "json"))
    if to is None:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(content)
        console.err.print(f"wrote {to}", soft_wrap=True)


@app.command()
@connected
def download(
    client: Client,
    job_id: JobId,
    to: Annotated[Path, typer.Option("--out", help="Folder to write to.")],
    only: Annotated[
        list[str] | None,
        typer.Option(help="A file, or the start of names; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Get the files of a job, digests checked; asked again, a cut one goes on."""
    found = _fetched(client, job_id, to, tuple(only or ("",)))
    emit([str(path) for path in found], as_json, lambda paths: _written(to, paths))


def _fetched(
    client: Client, job_id: str, to: Path, only: tuple[str, ...] = ("",)
) -> list[Path]:
    listed = client.artifacts(job_id)
    wanted = [each for each in listed if each["name"].startswith(only)]
    if not wanted:
        names = ", ".join(each["name"] for each in listed) or "none"
        raise OperateError(f"{job_id} has no such file; there are: {names}")
    total = sum(each["bytes"] for each in wanted)
    with console.live_bytes("fetching", total) as show:
        return [transfers.download(client, job_id, each, to, show) for each in wanted]


def _written(to: Path, paths: list[str]) -> None:
    files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
    console.err.print(f"wrote {files} to {to}", soft_wrap=True)


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
