"""The end of what a process printed before it crashed, for the owner of its job.

It read the owner's model and text, and may have printed some of either. So only lines
of the kinds below are kept: where a crash happened, and what the runtime called it.
They name no folder of the machine, and nothing that looks like a secret.
"""

import re

KEPT_BYTES = 2**16  # of the end; a traceback is far shorter
EXCERPT_CHARACTERS = 2000
SEEN_CHARACTERS = 1000  # of a line
LINE_CHARACTERS = 300

# What Python, libstdc++, glibc and CUDA write when a process goes down.
TELLING = re.compile(
    r"Fatal Python error: .*"
    r"|Traceback \(most recent call last\):"
    r"|(Current thread|Thread) 0x[0-9a-f]+ \(most recent call first\):"
    r'|File "[^"]*", line \d+,? in [\w<>.]+'
    r"|[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*)?"
    r"|terminate called .*"
    r"|what\(\): .*"
    r"|(free|malloc|realloc|munmap_chunk|corrupted|double free)[\w()! ]*: .*"
)
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/\"']+/)+")  # of a path; its last name stays
SECRET = re.compile(
    r"(?i)\b[\w-]*(?:secret|token|passw|api.?key|authorization|bearer)[\w-]*\W*[=:\s].*"
    r"|\b(?:po_(?:live|test)|hf|sk|ghp|whsec)_[\w-]+"
    r"|[\w+/=-]{32,}"
)
HIDDEN = "[…]"


class Tail:
    """The last bytes that a process printed."""

    def __init__(self) -> None:
        self._kept = b""

    def add(self, part: bytes) -> None:
        """Take what it printed next."""
        self._kept = (self._kept + part)[-KEPT_BYTES:]

    @property
    def excerpt(self) -> str:
        """What the end of it says of a crash; empty: nothing."""
        told: list[str] = []
        room = EXCERPT_CHARACTERS
        for line in reversed(self._kept.decode("utf-8", "replace").splitlines()):
            # A hostile process prints what patterns take long over: so cut it first.
            cut = line.strip()[:SEEN_CHARACTERS]
            if TELLING.fullmatch(cut):
                told.append(_cleaned(cut))
                room -= len(told[-1]) + 1
            if room < 0:
                return "\n".join(reversed(told[:-1]))
        return "\n".join(reversed(told))


def _cleaned(line: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in line)
    return SECRET.sub(HIDDEN, FOLDERS.sub("", plain))[:LINE_CHARACTERS]
