"""Between the database and the process that computes: its only way to the outside.

The worker starts one process for a job, answers what it asks, looks at what it takes,
and ends it. It never loads torch, and believes nothing that the process says.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from api import profiles, upload_files
from api.settings import settings
from optimizer.pieces import Piece
from optimizer.spec import OptimizeSpec
from workers import messages, watch
from workers.beat import Pulse
from workers.channel import Channel, Closed, Garbled
from workers.child import Start
from workers.messages import Message
from workers.pieces import Bench, HelpersBench, JobsBench
from workers.printed import Tail
from workers.watch import OutOfMemory, Watch
from workers.workdir import Workdir

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "workers.child")
MESSAGES = 20_000  # within WINDOW_S; an honest process sends a few a second
WINDOW_S = 10.0
LOG_BYTES = 2**20  # of what the process prints; the rest is not written down
LAST_WORDS_S = 1.0  # for what a process printed to arrive after its end
END_S = 5.0  # from the end of its messages to its own
# Nothing else of our environment reaches the process that computes.
PASSED_ON = frozenset(
    (
        *("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME"),
        *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KMP_AFFINITY"),
        *("THP_MEM_ALLOC_ENABLE", "MALLOC_ARENA_MAX", "PYTORCH_CUDA_ALLOC_CONF"),
        "PRECISION_TEST_MARK",  # by which tests find what they started
    )
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

Told = Callable[[str, float], None]


class Refused(Exception):
    """The computing process says why it cannot: `problem` is for the owner."""

    def __init__(self, problem: dict[str, Any], name: str) -> None:
        super().__init__(problem["message"])
        self.problem = problem
        self.name = name  # of the exception's class


class Crashed(Exception):
    """The computing process ended without a word; `excerpt` is what it printed last."""

    def __init__(self, message: str, excerpt: str = "") -> None:
        super().__init__(message)
        self.excerpt = excerpt


def start(role: str, spec: OptimizeSpec, workdir: Workdir, *, sparing: bool) -> Start:
    """Return all that the computing process gets to know."""
    own, profile = settings(), profiles.path(spec.hardware)
    return Start(
        role=role,
        spec=spec.to_json(),
        folder=str(workdir.root),
        worker=os.getpid(),
        sandbox=own.sandbox,
        user=own.sandbox_user,
        memory_bytes=own.job_memory_bytes,
        sparing=sparing,
        threads=own.threads,
        hardware_file=str(own.hardware_file) if own.hardware_file else None,
        profile=str(profile) if profile.is_file() else None,
        vllm_python=str(own.vllm_python) if own.vllm_python else None,
        room_bytes=max(upload_files.free_bytes() - own.storage_reserve_bytes, 0),
    )


def compute(
    start: Start, bench: Bench, beat: Pulse, told: Told, workdir: Workdir
) -> messages.Done:
    """Have one process compute, and answer what it asks until it is done.

    Raises Cancelled where the job should stop, Refused with what the process says,
    OutOfMemory, Crashed, TooMany, and Garbled where it does not keep to the protocol.
    The process is gone in any case.
    """
    with running(workdir) as process:
        limits = Watch(process.pid, start.memory_bytes)
        pace = _Pace()

        def look() -> None:
            beat.check()
            limits.look()

        channel = process.channel
        channel.look = look
        try:
            channel.send(json.dumps(asdict(start)).encode())
            while True:
                said, text = channel.receive()
                pace.count()
                message = messages.parse(said)
                if isinstance(message, messages.Done):
                    return message
                _answer(message, text, bench, told, channel)
        except Closed:
            raise process.ending() from None


def _answer(
    message: Message, text: bytes, bench: Bench, told: Told, channel: Channel
) -> None:
    match message:
        case messages.Tell(phase=phase, fraction=fraction):
            told(phase, fraction)
        case messages.Started(unprotected=missing):
            for each in missing:
                logger.warning(
                    "job %s: the sandbox lacks %s: %s",
                    bench.job_id,
                    each.measure,
                    each.reason,
                )
        case messages.Failed(problem=problem, name=name):
            if problem.code == "device_out_of_memory":
                raise OutOfMemory(problem.message)
            raise Refused(problem.model_dump(exclude_none=True), name)
        case messages.Read(keys=keys):
            _send_results(bench.read(keys), channel)
        case _:
            channel.send(json.dumps(_done(message, text, bench)).encode())


def _send_results(found: dict[str, str], channel: Channel) -> None:
    texts = {key: text.encode() for key, text in found.items()}
    lengths = [[key, len(text)] for key, text in texts.items()]
    channel.send(json.dumps({"lengths": lengths}).encode(), *texts.values())


def _done(message: Message, text: bytes, bench: Bench) -> dict[str, Any]:
    """Do what is asked, if this process may ask it, and return the answer."""
    match message, bench:
        case messages.Keep(kind=kind, key=key), _:
            bench.keep(Piece(kind, key, {}), _ascii(text))
        case messages.Finish(key=key, kept=kept), _:
            if key not in bench.held:
                raise Garbled("it finishes a piece that it was not given")
            bench.finish(key, _ascii(text) if kept else None)
        case messages.Add(pieces=asked), JobsBench():
            bench.add([each.piece() for each in asked])
        case messages.Claim(keys=keys), JobsBench():
            return {"key": bench.claim(keys)}
        case messages.Underway(keys=keys), JobsBench():
            return {"underway": bench.underway(keys)}
        case messages.Drop(keys=keys), JobsBench():
            bench.drop(keys)
        case messages.Measured(stacks=stacks), JobsBench():
            bench.measured([stack.model_dump() for stack in stacks])
        case messages.Losses(), JobsBench():
            bench.losses(message.model_dump(exclude={"do"}))
        case messages.Log(line=line), JobsBench():
            bench.log(line)
        case messages.Next(), HelpersBench():
            found = bench.next()
            given = asdict(found) if isinstance(found, Piece) else None
            return {"piece": given, "stay": found is True}
        case _:
            raise Garbled(f"it may not ask for {type(message).__name__}")
    return {}


def _ascii(text: bytes) -> str:
    try:
        return text.decode("ascii")
    except UnicodeDecodeError:
        raise Garbled("a result is not the text that pieces write") from None


class _Pace:
    """How many messages came lately."""

    def __init__(self) -> None:
        self._count, self._since = 0, time.monotonic()

    def count(self) -> None:
        """Raise Garbled where they are too many to be meant."""
        now = time.monotonic()
        if now - self._since > WINDOW_S:
            self._count, self._since = 0, now
        self._count += 1
        if self._count > MESSAGES:
            raise Garbled(f"{MESSAGES} messages in less than {WINDOW_S:g} s")


# -- the process -------------------------------------------------------------------


@dataclass(slots=True)
class Process:
    """A computing process, and the pipes to it."""

    process: "subprocess.Popen[bytes]"
    channel: Channel
    printed: Tail
    logged: threading.Thread  # that fills it, until nobody can print any more

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def ending(self) -> Exception:
        """Return what it means that its messages ended."""
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return Garbled("it closed its pipe, and goes on")
        if code == -9:  # nobody but the kernel, out of memory, ends it so
            return OutOfMemory("the kernel killed the process that computes")
        self.logged.join(LAST_WORDS_S)
        said = f"the process that computes ended with {code}"
        return Crashed(said, self.printed.excerpt)


@contextmanager
def running(workdir: Workdir) -> Iterator[Process]:
    """Start a computing process, and end it and all that it started with the block."""
    reads, answers = os.pipe()  # what it hears
    hears, says = os.pipe()  # what it tells
    try:
        process = subprocess.Popen(
            [*COMMAND, str(reads), str(says), str(os.getpid())],
            env=environment(workdir.scratch),
            cwd=workdir.scratch,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(reads, says),
            start_new_session=True,
        )
    finally:
        os.close(reads)
        os.close(says)
    channel = Channel(hears, answers)
    assert process.stdout is not None
    tail = Tail()
    logged = threading.Thread(target=_log, args=(process.stdout, tail), daemon=True)
    logged.start()
    try:
        yield Process(process, channel, tail, logged)
    finally:
        watch.end(process.pid, reaped=process.returncode is not None)
        process.wait()
        channel.close()
        logged.join(END_S)
        process.stdout.close()


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a computing process: nothing that is secret."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    own = {"PYTHONPATH": path, "HOME": str(home), "TMPDIR": str(home), **OFFLINE}
    return {k: v for k, v in os.environ.items() if k in PASSED_ON} | own


def _log(printed: IO[bytes], tail: Tail) -> None:
    """Pass on what the process prints to our own log, up to a limit; keep its end."""
    left = LOG_BYTES
    for part in iter(partial(os.read, printed.fileno(), 65536), b""):
        with contextlib.suppress(OSError):
            os.write(2, part[:left])
        left = max(left - len(part), 0)
        tail.add(part)
