"""What is shown of what a crashed process printed."""

import time

import pytest

from workers.printed import EXCERPT_CHARACTERS, HIDDEN, KEPT_BYTES, Tail


def excerpt(*lines: str) -> str:
    tail = Tail()
    for line in lines:
        tail.add(f"{line}\n".encode())
    return tail.excerpt


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Fatal Python error: Aborted", "Fatal Python error: Aborted"),
        ('  File "/a/b/c.py", line 3 in f', 'File "c.py", line 3 in f'),
        ("  what():  CUDA error: out of range", "what():  CUDA error: out of range"),
        ("torch.cuda.OutOfMemoryError: x", "torch.cuda.OutOfMemoryError: x"),
        ("OSError: no /home/me/a b", "OSError: no a b"),
        ("KeyError: 'hf_abcDEF123'", f"KeyError: '{HIDDEN}'"),
        ("ValueError: secret: hunter2", f"ValueError: {HIDDEN}"),
        ("ValueError: Authorization: Bearer x", f"ValueError: {HIDDEN}"),
        ("ValueError: " + "4f" * 20, f"ValueError: {HIDDEN}"),
        ("ValueError: a\x1b[2Jb\u202ec", "ValueError: a [2Jb c"),
    ],
)
def test_a_crash_is_shown_without_folders_and_secrets(line: str, shown: str) -> None:
    assert excerpt(line) == shown


@pytest.mark.parametrize(
    "line",
    [
        "the text of somebody's prompt",
        "INFO:root:loaded 3 samples",
        '    weights = read("/srv/model")',
        "Loading weights: 100%|####| 20/20",
        "",
    ],
)
def test_what_tells_of_no_crash_is_not_shown(line: str) -> None:
    assert excerpt(line) == ""


def test_of_much_the_end_is_shown() -> None:
    found = excerpt(*(f"ValueError: {n} {'x ' * 40}" for n in range(1000)))
    assert len(found) <= EXCERPT_CHARACTERS
    assert "ValueError: 999 " in found
    assert "ValueError: 900 " not in found
    tail = Tail()
    tail.add(b"x" * (3 * KEPT_BYTES))
    tail.add(b"\nFatal Python error: Aborted\n")
    assert tail.excerpt == "Fatal Python error: Aborted"


@pytest.mark.parametrize(
    "evil", ["-a" * 2**15, "XError\n" * 2**13, "/!" * 2**15, "E: " * 2**14]
)
def test_nothing_that_is_printed_takes_long_to_look_at(evil: str) -> None:
    began = time.process_time()
    assert len(excerpt(f"ValueError: {evil}")) <= EXCERPT_CHARACTERS
    assert time.process_time() - began < 1.0
