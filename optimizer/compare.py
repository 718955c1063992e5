"""Two reports, held against each other: where the second says something else.

What they were computed on and with may differ where every figure is the same: that is
told apart from what was found.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.seal import INTEGRITY

# What may be others on another machine, in another build or installation.
SURROUNDINGS = (
    ("executed_on",),
    ("provenance", "versions"),
    ("provenance", "code_sha256"),
    ("request", "model_path"),
    ("request", "dataset_path"),
    ("exported",),
    ("request", "exports"),
    ("runs",),
    (INTEGRITY,),
)
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """One place, as a path into the document, and what each report has there."""

    path: tuple[str, ...]
    first: Any
    second: Any

    @property
    def pointer(self) -> str:
        """The place as a JSON pointer."""
        parts = (p.replace("~", "~0").replace("/", "~1") for p in self.path)
        return "".join(f"/{part}" for part in parts)

    @property
    def of_surroundings(self) -> bool:
        """Whether it says where a report was made, and nothing that it found."""
        return any(self.path[: len(s)] == s for s in SURROUNDINGS)


def differences(
    first: Any, second: Any, path: tuple[str, ...] = ()
) -> Iterator[Difference]:
    """Yield every leaf in which two JSON values differ; what is missing is None."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = {k: (first.get(k, _ABSENT), second.get(k, _ABSENT)) for k in first}
        pairs |= {k: (_ABSENT, v) for k, v in second.items() if k not in first}
    elif isinstance(first, list) and isinstance(second, list):
        most = max(len(first), len(second))
        pairs = {str(n): (_item(first, n), _item(second, n)) for n in range(most)}
    else:
        if type(first) is not type(second) or first != second:
            yield Difference(
                path, *(None if v is _ABSENT else v for v in (first, second))
            )
        return
    for key, (a, b) in pairs.items():
        yield from differences(a, b, (*path, key))


def _item(values: list[Any], number: int) -> Any:
    return values[number] if number < len(values) else _ABSENT
