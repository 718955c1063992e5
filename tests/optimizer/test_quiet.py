import os
import subprocess
import sys

import pytest

from optimizer.quiet import stdout_without

SAY = "import ctypes; from optimizer.quiet import stdout_without\n"


def test_only_marked_lines_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_without(b"Highs"):
        os.write(1, b"one\nHighs repairs\ntwo\n")
    os.write(1, b"three\n")
    assert capfd.readouterr().out == "one\ntwo\nthree\n"


def test_stdout_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with stdout_without(b"Highs"):
            os.write(1, b"Highs repairs\nbefore\n")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"


def test_lines_that_c_still_buffers_are_seen() -> None:
    # In a process of its own, whose stdout is a pipe: C writes only when it is full.
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            SAY + "c = ctypes.CDLL(None)\n"
            "c.puts(b'first')\n"
            "with stdout_without(b'Highs'): c.puts(b'Highs repairs')\n"
            "c.puts(b'last')",
        ],
        capture_output=True,
        check=True,
        text=True,
    )
    assert said.stdout == "first\nlast\n"
