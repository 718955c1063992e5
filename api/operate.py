"""Commands for whoever runs the service: `serve`, `demo`. They need its data."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from api import console
from api.client import Client

DATA_DIR = Path("var")
DEMO = {
    "model": "smollm2-135m-instruct",
    "hardware": "l4",  # where a model this small is not all launch time
    "latency_sla": 0.0016,  # seconds; all bf16 takes 0.0019 there
    "task": "chat",
    "data_distribution": "web_text",
}
START_S = 90.0
STOP_S = 15.0

DataDir = Annotated[
    Path,
    typer.Option(envvar="PRECISION_DATA_DIR", help="Where the service keeps its data."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


def dumps(value: Any) -> str:
    """Return JSON for machines and people."""
    return json.dumps(value, indent=2, ensure_ascii=False)


class OperateError(Exception):
    """It cannot be done here; the message says why and what to do."""


def address(data_dir: Path) -> str:
    """Return where the service of `data_dir` listens."""
    path = data_dir / "address"
    try:
        return str(json.loads(path.read_text())["url"])
    except (OSError, ValueError, KeyError):
        raise OperateError(
            f"no service runs on {data_dir}: start one with `precision serve "
            f"--data-dir {data_dir}`, or name one with --url"
        ) from None


def first_key(data_dir: Path) -> str | None:
    """Return the key that the service of `data_dir` made first. None: not readable."""
    try:
        return (data_dir / "api_key").read_text().strip()
    except OSError:
        return None


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one.")
    ] = 8080,
    model_root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that models may lie in; may be repeated."),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, max=64, help="Workers that share this machine's cores."),
    ] = 1,
    as_json: AsJson = False,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Run the whole service on this machine until Ctrl-C."""
    from api.serve import Options, ServeError, serve as run  # pulls in the database

    options = Options(data_dir, host, port, tuple(model_root or ()), workers)
    try:
        if as_json:  # of what goes on later only people want to hear
            ended = run(options, console.err.print, lambda at: typer.echo(dumps(at)))
        else:
            ended = run(options, typer.echo, _ready)
        raise typer.Exit(ended)
    except ServeError as error:
        raise OperateError(str(error)) from None


def _ready(at: dict[str, str]) -> None:
    typer.echo(f"ready      {at['url']}")
    typer.echo(f"bearer key {at['api_key']}")
    typer.echo(f"data       {at['data_dir']}  (logs in logs/)")


def demo(as_json: AsJson = False, data_dir: DataDir = DATA_DIR) -> None:
    """Start a service, optimize the demo model over HTTP, show the result, stop."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end it in order
    with _service(data_dir) as client:
        console.err.print("POST /v1/optimize", json.dumps(DEMO), soft_wrap=True)
        started = time.monotonic()
        job = client.optimize(DEMO)
        console.err.print(f"job {job['id']}")
        try:
            with console.live_progress() as show:
                job = client.wait(job["id"], show, poll_s=0.5)
        except KeyboardInterrupt:
            client.cancel(job["id"])  # or the next demo would begin with it
            raise
        took_s = time.monotonic() - started
        if job["status"] != "succeeded":
            console.failure(job)
            raise typer.Exit(1)
        if not as_json:
            console.stack(client.report(job["id"]))
        page = data_dir / "reports" / f"{job['id']}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(client.report_html(job["id"]))
    if as_json:
        made = {"job": job, "seconds": took_s, "report_html": str(page.resolve())}
        typer.echo(dumps(made))
        return
    console.out.print(f"outcome: {job['outcome']}; the job took {took_s:.1f} s")
    console.out.print(f"report: {page.resolve()}", soft_wrap=True)


@contextmanager
def _service(data_dir: Path) -> Iterator[Client]:
    """Run `precision serve` as a child, on a free port."""
    data_dir.mkdir(parents=True, exist_ok=True)
    before = _stamp(data_dir)
    command = [sys.executable, "-m", "api.cli", "serve", "--port", "0"]
    service = subprocess.Popen(
        [*command, "--data-dir", str(data_dir)],
        stdout=sys.stderr,
        process_group=0,  # a Ctrl-C is for us; we end the service in order
        preexec_fn=_die_with_us(),
    )
    try:
        _wait_for_address(service, data_dir, before)
        with Client(address(data_dir), first_key(data_dir)) as client:
            yield client
    finally:
        service.send_signal(signal.SIGTERM)
        try:
            service.wait(STOP_S)
        except subprocess.TimeoutExpired:
            service.kill()


def _die_with_us() -> Any:
    from api.supervise import die_with

    parent = os.getpid()
    return lambda: die_with(parent)


def _stamp(data_dir: Path) -> int | None:
    """Return the age of the address file; a killed service may have left one."""
    path = data_dir / "address"
    return path.stat().st_mtime_ns if path.exists() else None


def _wait_for_address(
    service: "subprocess.Popen[bytes]", data_dir: Path, before: int | None
) -> None:
    end = time.monotonic() + START_S
    while _stamp(data_dir) in (None, before):
        if service.poll() is not None:
            raise OperateError("the service did not start; its message is above")
        if time.monotonic() > end:
            raise OperateError(f"the service was not ready after {START_S:g} s")
        time.sleep(0.1)


@contextmanager
def database(data_dir: Path) -> Iterator[Any]:
    """Give a transaction on the database of `data_dir`, brought up to date."""
    from sqlalchemy.exc import SQLAlchemyError

    from api import db
    from api.serve import use

    use(data_dir)
    try:
        db.migrate()
        with db.transaction() as session:
            yield session
    except SQLAlchemyError as error:
        raise OperateError(f"the database does not answer: {error}") from None
