"""A computing process whose model took it over: it tries what no model should.

`python -m tests.workers.rogue READ WRITE WORKER` stands in the place of `workers.child`;
the name of the job's model says what it does. The walls are the real ones.
"""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimizer.seal import sealed
from workers import child
from workers.child import Line, Start


def attempt(deed: Callable[[], object]) -> str:
    """Return what came of it: "done", or the name of the error."""
    try:
        deed()
    except OSError as error:
        return type(error).__name__
    return "done"


def look_around(start: Start, line: Line) -> None:
    """Write down everything that can be seen and reached from here."""
    outside = Path(start.spec["task"])
    port = int(start.spec["data_distribution"])
    resources = Path(f"/proc/{start.worker}")
    mine = Path(start.folder)

    def serve_and_call() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 2).close()

    facts: dict[str, Any] = {
        "environment": dict(os.environ),
        "descriptors": {
            n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{n}")
        },
        "uid": os.getuid(),
        "status": Path("/proc/self/status").read_text(),
        "connect": attempt(lambda: socket.create_connection(("127.0.0.1", port), 2)),
        "loopback": attempt(serve_and_call),
        "read": attempt(outside.read_bytes),
        "write": attempt(lambda: outside.write_text("taken over")),
        "create": attempt(lambda: outside.with_name("new").write_text("x")),
        "delete": attempt(outside.unlink),
        "link": attempt(lambda: os.link(outside, mine / "out" / "link")),
        "list": attempt(lambda: os.listdir(outside.parent)),
        "workers_environment": attempt((resources / "environ").read_bytes),
        "workers_memory": attempt(lambda: (resources / "mem").open("rb")),
        "workers_descriptors": attempt(lambda: os.listdir(resources / "fd")),
        "kill_worker": attempt(lambda: os.kill(start.worker, 0)),
        "model": attempt(lambda: os.listdir(start.spec["model_path"])),
        "own_file": attempt(lambda: (mine / "tmp" / "x").write_text("x")),
        "program": subprocess.run(["/bin/echo", "hi"], capture_output=True, text=True, check=False).stdout,
        "cwd": os.getcwd(),
        "umask": os.umask(0),
    }  # fmt: skip
    (mine / "out" / "facts.json").write_text(json.dumps(facts))
    line.done("sla_met", {})


def search_memory(start: Start, line: Line) -> None:
    """Look for two strings in all of this process's memory.

    One is known to be there. The other is read backwards and never put together, so
    that the search does not find itself.
    """
    first, *rest = reversed((Path(start.spec["model_path"]) / "needle").read_text())
    wanted = re.compile(f"[{first}]{''.join(rest)}".encode())
    known = start.folder.encode()
    facts = {"secret": 0, "known": 0, "bytes": 0}
    with Path("/proc/self/mem").open("rb", 0) as memory:
        for line_of_map in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_ = line_of_map.split()
            if "r" not in rights:
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            try:
                memory.seek(begin)
                content = memory.read(end - begin)
            except (OSError, OverflowError):  # what the kernel alone has there
                continue
            facts["secret"] += len(wanted.findall(content))
            facts["known"] += content.count(known)
            facts["bytes"] += len(content)
    (Path(start.folder) / "out" / "facts.json").write_text(json.dumps(facts))
    line.done("sla_met", {})


def take_memory(start: Start, line: Line) -> None:
    """Take 400 MB, unless told to be sparing."""
    line.tell("sweep", 0.5)
    held = bytearray(0)
    if not start.sparing:
        for _ in range(40):
            held += os.urandom(1024) * 10_000  # really there, page by page
            time.sleep(0.02)
        time.sleep(30)
    finish(start, line)


def take_all_memory(start: Start, line: Line) -> None:
    """Take more than there may be, whatever is said."""
    held = []
    while True:
        held.append(bytearray(os.urandom(1024) * 10_000))


def be_killed(start: Start, line: Line) -> None:
    """End as the kernel ends a process when memory is short; not if it is sparing."""
    if not start.sparing:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(start, line)


def crash(start: Start, line: Line) -> None:
    """End as a defect of a library ends a process."""
    os.kill(os.getpid(), signal.SIGSEGV)


def mourn(start: Start, line: Line) -> None:
    """Print data, a path and a secret, then end as a defect of a library ends one."""
    frame = '  File "/srv/precision/work/0123/in.py", line 7, in read'
    why = "ValueError: cannot read /srv/precision/models/m.bin, token=hunter2"
    os.write(2, f"prompt: my own text\n{frame}\n{why}\n".encode())
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(start: Start, line: Line) -> None:
    """End without a word."""
    os._exit(0)


def fork(start: Start, line: Line) -> None:
    """Start processes that start processes, some in sessions of their own."""
    for number in range(400):
        if os.fork() == 0:
            if number % 2:
                os.setpgid(0, 0)
            time.sleep(600)
    time.sleep(600)


def write(data: bytes) -> Callable[[Start, Line], None]:
    """Return a deed that writes into the pipe."""

    def deed(start: Start, line: Line) -> None:
        writer = int(sys.argv[2])
        os.set_blocking(writer, True)
        with open(writer, "wb", closefd=False) as pipe:
            for _ in range(200_000):
                pipe.write(data)
        time.sleep(600)

    return deed


def frame(message: object) -> bytes:
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + bytes(8) + text


MEASURED = {
    "per_token_s": 0.01,
    "kl_nats": 0.001,
    "kl_nats_low": 0.0009,
    "kl_nats_high": 0.0011,
    "memory_bytes": 10**9,
    "fp8_share": 0.5,
}


def boast(start: Start, line: Line) -> None:
    """Tell of more stacks than any job measures."""
    for _ in range(50):
        line.measured([MEASURED] * 2)
    finish(start, line)


def lose(start: Start, line: Line) -> None:
    """Tell of losses, one of them not a number."""
    for step in range(1, 25):
        line.losses(("fp16", 0, False), [1.0] * (step - 1) + [math.nan], 24)
    finish(start, line)


def chatter(start: Start, line: Line) -> None:
    """Tell more lines than anybody reads, and a longer one than there may be."""
    line.log("\x1b[31mred\u202e\n" + "x" * 1000)
    for number in range(1000):
        line.log(f"line {number}")
    finish(start, line)


def babble(start: Start, line: Line) -> None:
    """Tell of a stack that there cannot be."""
    line.measured([{**MEASURED, "per_token_s": "<script>"}])
    finish(start, line)


def steal(start: Start, line: Line) -> None:
    """Finish a piece that was not given to it."""
    line.finish("a" * 64, "{}")


def poison(start: Start, line: Line) -> None:
    """Keep a false result under another model's key."""
    line.keep(child.Piece("sweep", "b" * 64, {}), '{"kl": 0}')
    finish(start, line)


def sleep(start: Start, line: Line) -> None:
    """Never end, and start one more that does not."""
    subprocess.Popen(["sleep", "600"])
    line.tell("sweep", 0.1)
    time.sleep(600)


def fill_folder(start: Start, line: Line) -> None:
    """Leave what is no file of its own: a link to elsewhere."""
    (Path(start.folder) / "out" / "link.json").symlink_to("/etc/passwd")
    finish(start, line)


def checkpoint(start: Start, line: Line) -> None:
    """Leave a folder, as a job that exports does."""
    folder = Path(start.folder) / "out" / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    finish(start, line)


def print_much(start: Start, line: Line) -> None:
    """Print more than anybody reads."""
    for _ in range(400):
        os.write(1, b"x" * 10_000)
    finish(start, line)


def no_report(start: Start, line: Line) -> None:
    """Leave a report whose digest is another's: it is not to be signed."""
    told = {**sealed({"schema": "precision.report/1"}), "verdict": "sla_met"}
    (Path(start.folder) / "out" / "report.json").write_text(json.dumps(told))
    line.done("sla_met", {"outcome": "sla_met"})


def odd_name(start: Start, line: Line) -> None:
    """Leave a file whose name is a way out."""
    (Path(start.folder) / "out" / "..\\x\n").write_text("x")
    finish(start, line)


def finish(start: Start, line: Line) -> None:
    report = json.dumps(sealed({"schema": "precision.report/1"}))
    (Path(start.folder) / "out" / "report.json").write_text(report)
    line.done("sla_met", {"outcome": "sla_met"})


DEEDS: dict[str, Callable[[Start, Line], None]] = {
    "look_around": look_around,
    "search_memory": search_memory,
    "no_report": no_report,
    "take_memory": take_memory,
    "take_all_memory": take_all_memory,
    "be_killed": be_killed,
    "crash": crash,
    "mourn": mourn,
    "leave": leave,
    "fork": fork,
    "junk": write(b"\xff" * 4096),
    "huge": write((2**31).to_bytes(4, "big") + bytes(8)),
    "no_json": write((3).to_bytes(4, "big") + bytes(8) + b"{{{"),
    "flood": write(frame({"do": "tell", "phase": "sweep", "fraction": 0.5})),
    "unknown": write(frame({"do": "drop_tables"})),
    "pickle": write(frame({"do": "done", "outcome": "free", "summary": {}})),
    "boast": boast,
    "babble": babble,
    "chatter": chatter,
    "escape": write(frame({"do": "log", "line": "\x1b[2J"})),
    "long_line": write(frame({"do": "log", "line": "x" * 501})),
    "lose": lose,
    "steal": steal,
    "poison": poison,
    "sleep": sleep,
    "fill_folder": fill_folder,
    "checkpoint": checkpoint,
    "print_much": print_much,
    "odd_name": odd_name,
}


def work(start: Start, line: Line) -> None:
    DEEDS[start.spec["model"]](start, line)


if __name__ == "__main__":
    sys.exit(child.main(work))
