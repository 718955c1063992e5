"""What a report is made of where it is no web page: headings, facts, tables, text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Cell = str


@dataclass(frozen=True, slots=True)
class Heading:
    """A title; level 1 is the report's own."""

    text: str
    level: int = 2
    kind: str = "heading"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph: "lead" says it all, a "note" explains, "plain" is the rest."""

    text: str
    style: str = "plain"
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    rows: Sequence[tuple[str, str]]
    kind: str = "facts"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    rows: Sequence[str]
    kind: str = "items"


@dataclass(frozen=True, slots=True)
class Code:
    """Something to be copied, or text that was written by a model."""

    text: str
    kind: str = "code"


@dataclass(frozen=True, slots=True)
class Plot:
    """The front as a drawing; what has no pictures leaves it out."""

    alternative: str  # what it shows, in words
    kind: str = "plot"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under their titles; `n` columns hold figures and stand right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    figures: Sequence[int] = ()  # numbers of the columns that do
    chosen: Sequence[int] = ()  # numbers of the rows of the chosen stack
    heat: Sequence[Sequence[int | None]] = field(default=())  # shade 0 to 7, by cell
    kind: str = "table"


Block = Heading | Text | Facts | Items | Code | Plot | Table
