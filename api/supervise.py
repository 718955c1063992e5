"""Child processes that live and die together. It does not know what they do.

A crashed child comes back, later each time. A stopped supervisor ends them all; a
killed one too: on Linux every child asks the kernel to be killed with its parent.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOG_BYTES = 16 * 2**20  # a log this long is moved aside at the next start
BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0)  # wait before the n-th restart; the last repeats
STEADY_S = 60.0  # a child that lived this long starts its backoff anew
GRACE_S = 4.0  # from the polite signal to SIGKILL

# Loaded before any fork: a child between fork and exec must not take the loader's lock.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Gone(Exception):
    """A program ended again and again before the service was ready."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that made it ends.

    Linux only; elsewhere a killed supervisor leaves its children behind.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Program:
    """One child: how to start it, and how to end it politely."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)  # added to ours
    stdin: bytes = b""
    pass_fds: tuple[int, ...] = ()
    stop_signal: signal.Signals = signal.SIGTERM


@dataclass(slots=True)
class Child:
    """A program's present process and its history."""

    program: Program
    process: subprocess.Popen[bytes]
    started: float
    failures: int = 0
    restart_at: float | None = None  # None: it runs, as far as we know


class Supervisor:
    """Starts programs in order, keeps them alive, ends them in reverse order."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._children: list[Child] = []
        self._log = log

    def start(self, program: Program) -> None:
        """Start one more program. Call it from the main thread only.

        The kernel's "parent died" means the *thread* that forked.
        """
        self._children.append(Child(program, _spawn(program), time.monotonic()))

    def check(self) -> None:
        """Start again what ended, when its time has come. Call it often."""
        now = time.monotonic()
        for child in self._children:
            if child.restart_at is None and child.process.poll() is not None:
                self._plan_restart(child, now)
            if child.restart_at is not None and now >= child.restart_at:
                child.process = _spawn(child.program)
                child.started, child.restart_at = now, None

    def failures(self) -> dict[str, int]:
        """Return how often each program ended on its own, lately."""
        return {c.program.name: c.failures for c in self._children}

    def pids(self) -> dict[str, int]:
        """Return the process id of each program."""
        return {c.program.name: c.process.pid for c in self._children}

    def stop(self, forced: Callable[[], bool]) -> None:
        """End everything: the first program (others lean on it) last.

        `forced` says whether to stop being polite; it is asked all the time.
        """
        first, others = self._children[:1], self._children[1:]
        for wave in (others, first):
            for child in wave:
                child.process.send_signal(child.program.stop_signal)
            end = time.monotonic() + GRACE_S
            while any(c.process.poll() is None for c in wave):
                if forced() or time.monotonic() > end:
                    break
                time.sleep(0.05)
            for child in wave:
                _kill_group(child)  # whoever is left
                child.process.wait()

    def _plan_restart(self, child: Child, now: float) -> None:
        _kill_group(child)  # whatever it left behind
        if now - child.started > STEADY_S:
            child.failures = 0
        wait_s = BACKOFF_S[min(child.failures, len(BACKOFF_S) - 1)]
        child.failures += 1
        child.restart_at = now + wait_s
        self._log(
            f"{child.program.name} ended with {_ending(child.process.returncode)}; "
            f"starting it again in {wait_s:g} s, see {child.program.log}"
        )


def _spawn(program: Program) -> subprocess.Popen[bytes]:
    """Start the program in a process group of its own: Ctrl-C is ours to pass on."""
    parent = os.getpid()
    with program.log.open("ab") as log:
        process = subprocess.Popen(
            list(program.command),
            env={**os.environ, **program.environment},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=program.pass_fds,
            process_group=0,
            preexec_fn=lambda: die_with(parent),
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended already; `check` will see
        process.stdin.write(program.stdin)
        process.stdin.close()
    return process


def _kill_group(child: Child) -> None:
    # Nobody left; macOS says EPERM where only a zombie is.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"


def rotate(log: Path) -> None:
    """Move a long log aside, over the one moved before."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))


def tail(log: Path, lines: int = 15) -> str:
    """Return the end of a log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
