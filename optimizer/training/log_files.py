"""Files that loggers write, as rows: JSON lines, Trainer's state, TensorBoard's events.

Which of them a file is, its first bytes say. A file that was cut in the middle gives
what is before the cut, and a note.
"""

import json
from collections.abc import Callable
from pathlib import Path

from optimizer.training.log_events import event_rows, looks_like_events
from optimizer.training.logs import LogError, Row, RunLog, run_log
from optimizer.units import size

MAX_BYTES = 256 << 20
HISTORY = '"log_history"'  # of trainer_state.json
EVENTS = "events.out.tfevents*"
KNOWN = (
    "JSON lines, trainer_state.json, or a TensorBoard event file (events.out.tfevents…)"
)


def read_log(path: Path) -> RunLog:
    """Read a log, or the folder of a run. Raises LogError, naming the file."""
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise LogError(f"no file {path}")
    if path.stat().st_size > MAX_BYTES:
        raise LogError(f"{path.name} has more than {size(MAX_BYTES)}")
    return parse_log(path.read_bytes())


def _in_folder(folder: Path) -> Path:
    """Return the newest log of a run's folder, by what loggers call them."""
    patterns = ("*.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json")
    for pattern in (*patterns, EVENTS, f"**/{EVENTS}"):
        found = sorted(folder.glob(pattern), key=lambda p: p.stat().st_mtime)
        if found:
            return found[-1]
    raise LogError(f"the folder {folder} has no log: {KNOWN}")


def parse_log(content: bytes) -> RunLog:
    """Read the bytes of a log. Raises LogError, saying what would be right."""
    if not content.strip():
        raise LogError(f"the log is empty: it may be {KNOWN}")
    if looks_like_events(content):
        rows, notes = event_rows(content)
        return run_log(rows, notes)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # A cut in the middle of a character is a cut in the middle of a line.
        if error.start < len(content) - 4:
            raise LogError(f"the log is no text: it may be {KNOWN}") from None
        text = content[: error.start].decode("utf-8-sig")
    rows, notes = _json_rows(text)
    return run_log(rows, notes)


def _json_rows(text: str) -> tuple[list[Row], list[str]]:
    head = text.lstrip()
    at = text.find(HISTORY)
    if head.startswith("{") and at >= 0:
        return _array(text, text.find("[", at) + 1, "trainer_state.json")
    if head.startswith("["):
        return _array(text, text.find("[") + 1, "the list")
    return _lines(text)


def _array(text: str, at: int, what: str) -> tuple[list[Row], list[str]]:
    """Read objects one by one, so that a cut costs the last one alone."""
    decoder = json.JSONDecoder()
    rows: list[Row] = []
    while at > 0:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text):
            return rows, [f"{what} is cut after {len(rows)} entries"]
        if text[at] == "]":
            return rows, []
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return rows, [f"{what} is cut after {len(rows)} entries"]
        if isinstance(row, dict):
            rows.append(row)
    return rows, []


def _lines(text: str) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    bad: list[int] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _object(line)
        if row is None:
            bad.append(number)
        else:
            rows.append(row)
    if not rows:
        shown = lines[bad[0] - 1].strip()[:40] if bad else ""
        raise LogError(
            f"no line is a JSON object; the first is {shown!r}. Known: {KNOWN}"
        )
    notes = []
    if bad and bad[-1] == len(lines):
        notes.append(f"the last line ({bad.pop()}) is cut, and left out")
    if bad:
        notes.append(
            f"{len(bad)} lines are no JSON objects, the first is line {bad[0]}"
        )
    return rows, notes


def _object(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def jsonl_log(path: Path) -> Callable[[Row], None]:
    """Return what appends each record to a file, for HealthMonitor's `log`."""

    def write(record: Row) -> None:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(record)) + "\n")

    return write
