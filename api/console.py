"""What the command line shows: live progress, tables, errors. No requests in here.

Results go to stdout, everything else to stderr, so that a pipe gets results only.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from api import phases
from optimizer.report_text import clean

Json = dict[str, Any]
Show = Callable[[Json], None]

NARROW = 60  # columns: in fewer a table of ours would be folded to letters
IDS = ("id", "job", "endpoint", "delivery")  # in two pieces they cannot be copied
PLAIN_EVERY_S = 5.0  # without a terminal: one line this often, and at each phase


class Terminal(Console):
    """A console that shows names as they are: no markup, nothing that steers it."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Return what is printed of a string, in a table or alone."""
        return super().render_str(clean(text), **how)


out = Terminal(highlight=False, markup=False, emoji=False, soft_wrap=False)
err = Terminal(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def live_progress() -> Iterator[Show]:
    """Give a function that shows a job: a bar on a terminal, plain lines elsewhere."""
    if not err.is_terminal or err.is_dumb_terminal:
        yield _plain_progress()
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[eta]:<9}"),
    )
    with Progress(*columns, console=err, expand=True) as bar:
        task = bar.add_task("queued", total=100, eta="")

        def show(job: Json) -> None:
            percent = job["progress"]["percent"]
            bar.update(task, description=_stage(job), completed=percent, eta=_eta(job))

        yield show


@contextmanager
def live_bytes(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that is told of more bytes; a bar of them on a terminal."""
    if not err.is_terminal or err.is_dumb_terminal:
        yield lambda more: None
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, expand=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)


def _plain_progress() -> Show:
    last: tuple[str, float] = ("", 0.0)

    def show(job: Json) -> None:
        nonlocal last
        stage, now = _stage(job), time.monotonic()
        if stage == last[0] and now - last[1] < PLAIN_EVERY_S:
            return
        last = (stage, now)
        percent = job["progress"]["percent"]
        err.print(f"{stage:<10} {percent:5.1f} %  {_eta(job)}".rstrip())

    return show


def _stage(job: Json) -> str:
    running = job["status"] == "running"
    return (_phase(job, job.get("phase")) or "running") if running else job["status"]


def _phase(job: Json, phase: str | None) -> str:
    trains = bool(job["request"].get("training"))
    return phases.name(phase or "", trains).lower()


def _eta(job: Json) -> str:
    seconds = job["progress"].get("eta_seconds")
    return "" if seconds is None else f"eta {duration(seconds)}"


def duration(seconds: float) -> str:
    """Return e.g. 0:07, 12:30 or 1:02:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def moment(iso: str) -> str:
    """Return 2026-11-01T12:00:07.123+00:00 as 2026-11-01 12:00, which is UTC."""
    return iso[:16].replace("T", " ")


def megabytes(size: int) -> str:
    """Return 134515008 as 134.5: decimal, as everywhere."""
    return f"{size / 1e6:.1f}"


def rows(title: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers are aligned right, long words are folded.

    A window too narrow for that gets a line for each cell, and its name.
    """
    if out.width < NARROW and _width(title, lines) > out.width:
        _records(title, lines)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for i, name in enumerate(title):
        numeric = bool(lines) and all(_is_number(line[i]) for line in lines)
        table.add_column(
            name,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=name in IDS,
        )
    for line in lines:
        table.add_row(*("" if cell is None else str(cell) for cell in line))
    out.print(table)


def _width(title: Sequence[str], lines: Sequence[Sequence[object]]) -> int:
    """Return how many columns a table takes where nothing is folded."""
    columns = zip(title, *lines, strict=True)
    longest = [max(cell_len(str(cell or "")) for cell in column) for column in columns]
    return sum(longest) + len(longest) - 1


def _records(title: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    widest = max(map(len, title))
    for line in lines:
        for name, cell in zip(title, line, strict=True):
            if cell not in (None, ""):
                out.print(f"{name:<{widest}} {cell}")
        out.print()


def _is_number(cell: object) -> bool:
    text = "" if cell is None else str(cell)
    return not text or text[0].isdigit() or text[0] in "-+."


def stack(document: Json) -> None:
    """Print the verdict of a report and the chosen stack by component."""
    out.print()
    rows(
        ("component", "sites × choice", "KL nats", "µs/tok", "MB"),
        [_component(part) for part in document["components"]],
    )
    out.print()
    out.print(document["verdict"]["sentence"])
    if ways := document["verdict"].get("would_meet"):
        out.print("What would meet it:")
        for way in ways:
            out.print(f"  - {way}")


def _component(part: Json) -> tuple[str, ...]:
    frequent_first = sorted(
        part["choices"].items(), key=lambda item: (-item[1], item[0])
    )
    return (
        part["component"],
        "\n".join(f"{sites:>2} × {choice}" for choice, sites in frequent_first),
        f"{part['kl_nats']:.5f}",
        f"{part['per_token_s'] * 1e6:.2f}",
        megabytes(part["bytes"]),
    )


def failure(job: Json) -> None:
    """Print why a job has no result."""
    error = job.get("error") or {}
    err.print(f"job {job['id']} {job['status']}")
    if error:
        err.print(f"error: {error['message']}", soft_wrap=True)
        again = "worth another try" if error.get("retryable") else "no use in retrying"
        phase = _phase(job, error.get("phase"))
        where = f"code {error['code']}, in phase {phase}; {again}"
        err.print(where, soft_wrap=True)


def jobs(found: list[Json]) -> None:
    """Print a list of jobs."""
    title = ("job", "status", "%", "model", "hardware")
    rows(title, [_job_line(job) for job in found])


def _job_line(job: Json) -> tuple[object, ...]:
    request = job["request"]
    percent = f"{job['progress']['percent']:.0f}"
    state = job.get("outcome") or job["status"]
    return (
        job["id"],
        state,
        percent,
        _name(request["model"]),
        _name(request["hardware"]),
    )


def trials(found: list[Json]) -> None:
    """Print what a job tried; a choice that was refused says why."""
    title = ("trial", "nats", "s/token", "")
    rows(title, [_trial_line(trial) for trial in found])


def _trial_line(trial: Json) -> tuple[object, ...]:
    figures = (trial["kl_nats"], trial["per_token_s"])
    shown = ("" if value is None else f"{value:.3g}" for value in figures)
    note = trial["refused"] or ("chosen" if trial["chosen"] else "")
    return (trial["id"], *shown, note)


def models(found: list[Json]) -> None:
    """Print a list of models."""
    rows(
        ("name", "architecture", "parameters", "MB"),
        [
            (
                model["name"],
                model.get("architecture"),
                model.get("parameters"),
                megabytes(model.get("stored_bytes", 0)),
            )
            for model in found
        ],
    )


def model(found: Json) -> None:
    """Print a model, and its files with their digests."""
    facts = ("name", "id", "architecture", "parameters", "declared_dtype", "sha256")
    for fact in facts:
        out.print(f"{fact:<14} {found.get(fact)}", soft_wrap=True)
    out.print()
    files = found.get("files") or []
    lines = [(f["path"], megabytes(f["bytes"]), f["sha256"][:16]) for f in files]
    rows(("file", "MB", "sha256"), lines)


def datasets(found: list[Json]) -> None:
    """Print a list of datasets."""
    lines = [
        (each["name"], each.get("samples"), "" if each["built_in"] else "yours")
        for each in found
    ]
    rows(("name", "samples", ""), lines)


def _name(value: Any) -> str:
    """Return the short form of a field that may be a name or an object."""
    return (
        str(next(iter(value.values()), "")) if isinstance(value, dict) else str(value)
    )


def job(job: Json) -> None:
    """Print one job."""
    times = job["timestamps"]
    facts = {
        "job": job["id"],
        "status": job["status"],
        "phase": _phase(job, job.get("phase")),
        "percent": f"{job['progress']['percent']:.1f}",
        "outcome": job.get("outcome"),
        "attempt": job.get("attempt"),
        "created": times.get("created_at"),
        "started": times.get("started_at"),
        "finished": times.get("finished_at"),
    }
    for name, value in facts.items():
        if value is not None:
            out.print(f"{name:<9} {value}")
    if job.get("error"):
        failure(job)
    for component, choice in (
        (job.get("result") or {}).get("precision_stack") or {}
    ).items():
        out.print(f"  {component:<13} {choice}")


def event_line(event: Json, of_training: bool = False) -> str:
    """Return one event as a line: when in UTC, and what, in the words of the pages."""
    from api import page_words, phases  # other commands do without

    data = event["data"]
    said = page_words.event(event, of_training)
    if said is None and "percent" in data:
        phase = phases.name(data.get("phase") or "", of_training)
        said = f"{phase}: {data['percent']:.0f} %"
    when = event["timestamp"][:19].replace("T", " ")
    return f"{event['seq']:>4} {when} {clean(said or event['type'])}"


def problem(document: Json) -> None:
    """Print a problem document: what went wrong, field by field."""
    detail = document.get("detail") or document.get("title") or "unknown error"
    err.print(f"error: {detail}", soft_wrap=True)
    for error in document.get("errors", ()):
        where = error.get("pointer") or error.get("parameter") or "/"
        said = f"{where}: {error.get('detail')}"
        if detail not in (said, error.get("detail")):
            err.print(f"  {said}", soft_wrap=True)
        if known := error.get("known"):
            err.print(f"  known: {', '.join(known)}", soft_wrap=True)
    if request := document.get("request_id"):
        err.print(f"  request {request}", style="dim")
