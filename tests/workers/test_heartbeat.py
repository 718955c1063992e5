"""The file by which a probe sees that a worker lives."""

import logging
import os
from pathlib import Path

import pytest

from api import settings
from workers import app


def test_without_a_file_nothing_is_touched(data_dir: Path) -> None:
    before = sorted(data_dir.rglob("*"))
    app.show_life()
    assert sorted(data_dir.rglob("*")) == before


def test_the_file_is_as_young_as_the_last_sweep(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = data_dir / "beats"
    monkeypatch.setenv("PRECISION_HEARTBEAT_FILE", str(file))
    settings.settings.cache_clear()
    app.show_life()
    os.utime(file, (0, 0))
    app.show_life()
    assert file.stat().st_mtime > 0


def test_a_file_that_cannot_be_touched_is_named_and_the_worker_goes_on(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = data_dir / "no such folder" / "beats"
    monkeypatch.setenv("PRECISION_HEARTBEAT_FILE", str(file))
    settings.settings.cache_clear()
    with caplog.at_level(logging.ERROR):
        app.show_life()
    assert f"{file} cannot be touched: No such file or directory" in caplog.text
