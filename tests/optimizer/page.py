"""A report as its reader sees it: sections, tables, and figures of three digits."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """The page's sections, tables and attributes; refuses unbalanced tags."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.text: dict[str, str] = {}
        self.section = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            return
        data = data.replace("\u00a0", " ")
        self.text[self.section] = self.text.get(self.section, "") + data
        if "tr" in self.open and ("td" in self.open or "th" in self.open):
            self.rows[self.section][-1][-1] += data

    def row(self, section: str, name: str) -> list[str]:
        """The first row whose heading starts with `name`."""
        rows = [[cell.strip() for cell in row] for row in self.rows[section]]
        return next(r for r in rows if r and r[0].split()[:1] == [name])


def three(x: float, digits: int = 3) -> str:
    """Three digits by printf, the second opinion on `units.significant`."""
    if x == 0:
        return "0"
    if abs(x) < 1e-4:
        mantissa, exponent = f"{x:.{digits - 1}e}".split("e-")
        return (
            mantissa
            + "×10⁻"
            + str(int(exponent)).translate(
                dict(zip(range(48, 58), "⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True))
            )
        )
    return f"{x:#.{digits}g}".rstrip(".")
