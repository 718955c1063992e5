"""Child processes live and die together: real processes, Linux's own /proc as witness."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from api.supervise import LOG_BYTES, Program, Supervisor, rotate, tail

SLEEPER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"
)


def program(tmp_path: Path, code: str, name: str = "child") -> Program:
    return Program(name, (sys.executable, "-c", code), tmp_path / f"{name}.log")


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_crashed_child_comes_back_and_the_log_says_why(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    supervisor.start(program(tmp_path, SLEEPER))
    first = supervisor.pids()["child"]
    os.kill(first, signal.SIGKILL)

    def back() -> bool:
        supervisor.check()
        return supervisor.pids()["child"] != first

    assert eventually(back)
    assert "signal SIGKILL" in said[0]
    assert supervisor.failures() == {"child": 1}
    supervisor.stop(forced=lambda: False)


def test_every_further_crash_waits_longer(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    supervisor.start(program(tmp_path, "raise SystemExit(7)"))

    def thrice() -> bool:
        supervisor.check()
        return supervisor.failures()["child"] >= 3

    assert eventually(thrice)
    waits = [float(line.split(" in ")[1].split(" s")[0]) for line in said]
    assert waits == sorted(set(waits))
    assert "exit code 7" in said[0]
    supervisor.stop(forced=lambda: False)


def test_stop_ends_a_child_and_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time;"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]);"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    supervisor = Supervisor(print)
    supervisor.start(program(tmp_path, code))
    log = tmp_path / "child.log"
    assert eventually(lambda: bool(log.exists() and log.read_text().strip()))
    grandchild = int(log.read_text())
    supervisor.stop(forced=lambda: False)
    assert eventually(lambda: not alive(grandchild))


def test_a_child_that_ignores_the_polite_signal_is_killed_when_forced(
    tmp_path: Path,
) -> None:
    supervisor = Supervisor(print)
    supervisor.start(program(tmp_path, STUBBORN))
    assert eventually(lambda: "up" in tail(tmp_path / "child.log"))
    start = time.monotonic()
    supervisor.stop(forced=lambda: True)
    assert time.monotonic() - start < 2


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_supervisor_leaves_no_child(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from api.supervise import Program, Supervisor;"
        "s = Supervisor(print);"
        f"s.start(Program('x', (sys.executable, '-c', {STUBBORN!r}), Path({str(tmp_path / 'x.log')!r})));"
        "print(s.pids()['x'], flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert eventually(lambda: "up" in tail(tmp_path / "x.log"))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: not alive(child))


def test_a_long_log_is_moved_aside(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    log.write_bytes(b"x" * LOG_BYTES)
    rotate(log)
    assert log.exists()  # not yet longer than the limit
    log.write_bytes(b"x" * (LOG_BYTES + 1))
    rotate(log)
    assert not log.exists()
    assert (tmp_path / "api.log.1").stat().st_size == LOG_BYTES + 1
