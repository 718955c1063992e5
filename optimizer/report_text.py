"""Text that others chose, made harmless: for every output, for tables, for Markdown."""

import re
from collections.abc import Mapping
from typing import Any

# Controls, marks that turn the reading direction, what has no width, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets compute (OWASP)
_MARKDOWN = re.compile(
    r"([\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|^[-+#>]|^\d+(?=[.)](?:\s|$)))"
)
_LINKS = re.compile(r"(?<=:)//|(?<=www)\.|@")


def clean(value: Any) -> Any:
    """Make characters visible that would hide or turn the text around them."""
    if isinstance(value, str):
        return _UNSAFE.sub(lambda m: f"⟨U+{ord(m[0]):04X}⟩", value)
    if isinstance(value, Mapping):
        return {clean(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return None if value != value else value  # NaN: not a figure


def no_formula(text: str) -> str:
    """Return text that a spreadsheet shows and does not compute: =1+1 -> '=1+1."""
    return f"'{text}" if text.lstrip(" \n").startswith(_FORMULA) else text


def markdown(text: str) -> str:
    """Return text that Markdown shows as it is: no markup, HTML, link or new line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    text = _MARKDOWN.sub(_escaped, text)
    return _LINKS.sub(lambda m: "".join(f"\\{c}" for c in m[0]), text)


def _escaped(found: re.Match[str]) -> str:
    """Return what was found so that it is no markup; 1. at the start is no list."""
    return f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}"


def fenced(text: str) -> str:
    """Return text as a code block that nothing in it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
