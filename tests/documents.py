"""The documents that come with the code, and the commands in them.

A block marked `sh` or `python` is what a reader types, in the order of the page: all
blocks of a page are one session, and later ones know the variables of earlier ones.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDE = sorted((ROOT / "deploy" / "guide").glob("*.md"))
DOCUMENTS = [
    README,
    ROOT / "deploy" / "README.md",
    ROOT / "deploy" / "portal" / "README.md",
    *GUIDE,
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, slots=True)
class Command:
    """What a reader types at one place of a document."""

    where: str  # README.md:12
    text: str  # bash


def name_of(page: Path) -> str:
    """Return a document's path as people write it."""
    return str(page.relative_to(ROOT))


def commands(page: Path) -> Iterator[Command]:
    """Yield every command of a document, in its order."""
    content = page.read_text("utf-8")
    for match in FENCE.finditer(content):
        line = content.count("\n", 0, match.start(2)) + 1
        if match[1] == "python":
            text = f"python - <<'THE END'\n{match[2]}THE END"
            yield Command(f"{name_of(page)}:{line}", text)
        elif match[1] == "sh":
            for first, text in split(match[2]):
                yield Command(f"{name_of(page)}:{line + first}", text)


def split(block: str) -> Iterator[tuple[int, str]]:
    """Yield each command of a block with the number of its first line, from 0.

    A command goes on as long as bash wants more of it: a quote, a loop, a document.
    """
    begun: list[str] = []
    first = 0
    for number, line in enumerate(block.splitlines()):
        if not begun and (not line.strip() or line.startswith("#")):
            continue
        first = first if begun else number
        begun.append(line)
        if _is_whole("\n".join(begun)):
            yield first, "\n".join(begun)
            begun = []
    assert not begun, f"bash cannot read: {begun}"


def _is_whole(text: str) -> bool:
    if text.endswith("\\"):
        return False
    read = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True)
    return read.returncode == 0 and not read.stderr  # it warns of a missing end


def objects(page: Path) -> Iterator[dict[str, Any]]:
    """Yield every JSON object that a document shows whole."""
    decoder = json.JSONDecoder()
    for match in FENCE.finditer(page.read_text("utf-8")):
        rest = match[2].strip() if match[1] == "json" else ""
        while rest:
            found, end = decoder.raw_decode(rest)
            yield found
            rest = rest[end:].strip()


def spans(page: Path) -> list[str]:
    """Return what a document has in backticks, within its lines."""
    return CODE.findall(FENCE.sub("", page.read_text("utf-8")))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}
