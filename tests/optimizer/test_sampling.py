"""Datasets of any size: every line is checked, and a sample of many is kept."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from optimizer import datasets, sampling
from optimizer.errors import DatasetError

# Not `ru_maxrss`: that remembers the process that started this one.
PEAK = "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"


def lines(count: int, width: int = 10) -> list[bytes]:
    return [json.dumps({"text": f"{i} " + "x" * width}).encode() for i in range(count)]


def keep(folder: Path, content: bytes) -> tuple[sampling.Kept, bytes]:
    (folder / "sent").write_bytes(content)
    (folder / "kept").unlink(missing_ok=True)
    found = sampling.keep(folder / "sent", folder / "kept")
    return found, (folder / "kept").read_bytes()


def test_a_small_dataset_is_kept_whole_and_in_order(tmp_path: Path) -> None:
    content = b"\n".join(lines(100)) + b"\n"
    found, kept = keep(tmp_path, content)
    assert kept == content
    assert found.sha256 == hashlib.sha256(content).hexdigest()
    assert (found.samples, found.samples_read, found.bytes) == (100, 100, len(content))


def test_blank_and_repeated_lines_go(tmp_path: Path) -> None:
    content = b'{"text": "a"}\r\n\n{"text": " "}\n{"text": "b"}\n{"text": "a"}'
    found, kept = keep(tmp_path, content)
    assert kept == b'{"text": "a"}\n{"text": "b"}\n'
    assert (found.samples, found.samples_read) == (2, 4)


def test_what_is_kept_of_many_depends_on_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_KEPT_BYTES", 2000)
    every = [*lines(300), *lines(40, 90)]
    found, kept = keep(tmp_path, b"\n".join(every))
    assert 1800 < len(kept) == found.bytes <= 2000
    random.Random(0).shuffle(every)
    assert sorted(keep(tmp_path, b"\n".join(every))[1].splitlines()) == sorted(
        kept.splitlines()
    )
    assert datasets.load("sampled", tmp_path / "kept").sha256


def test_no_more_lines_are_kept_than_a_job_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_KEPT_LINES", 50)
    found, _ = keep(tmp_path, b"\n".join(lines(300)))
    assert (found.samples, found.samples_read) == (50, 300)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 of 0 samples"),
        (b'{"text": "one"}\n' * 3, "1 of 3 samples"),
        (b'{"text": "one"}\n\nnonsense\n', "line 3: not JSON"),
        (b'{"text": "' + b"x" * (5 << 20) + b'"}', "line 1: .* bytes, the limit is"),
        (b'{"text": "one"}\n\xff\n', "line 2: not UTF-8"),
        (b"[" * 100_000, "line 1: .*nested too deeply"),
        (b"\0" * 1000, "line 1: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        keep(tmp_path, content)


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    with (tmp_path / "sent").open("wb") as file:
        for number in range(80):  # 160 MB in lines of 100 kB
            rest = b"x" * 100_000
            file.writelines(
                b'{"text": "%d %d %s"}\n' % (number, i, rest) for i in range(20)
            )
    asked = "from pathlib import Path; from optimizer.sampling import keep; import sys"
    run = "print(keep(Path(sys.argv[1]), Path(sys.argv[2])).samples_read)"
    done = subprocess.run(
        [sys.executable, "-c", f"{asked}\n{run}\n{PEAK}", "sent", "kept"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    read, peak_kb = done.stdout.split()
    assert read == "1600"
    assert int(peak_kb) < 100_000
    assert (tmp_path / "kept").stat().st_size <= sampling.MAX_KEPT_BYTES
