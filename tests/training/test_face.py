"""The public face of `optimizer.training`, in a fresh interpreter."""

import subprocess
import sys

import pytest

import optimizer.training

LOADED = "import optimizer.training, sys; print('torch' in sys.modules)"


def test_every_listed_name_is_there() -> None:
    for name in optimizer.training.__all__:
        assert getattr(optimizer.training, name).__name__ == name


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match=r"'optimizer\.training'.*'Sceduler'"):
        optimizer.training.Sceduler  # noqa: B018 (the access is the test)


def test_the_face_alone_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True
    )
    assert done.stdout == "False\n"
