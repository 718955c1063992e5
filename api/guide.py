"""The guide of `deploy/guide`, as pages. Who reads them needs no key.

Markdown becomes HTML once. Raw HTML in it stays text, so that a page has no script;
links to other pages of the guide lead to them, links to files of the repository to
where the service has them, or nowhere.
"""

import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from api.errors import NotFound
from api.page_render import page
from api.pages import PageRoute

INDEX = "README"
FOLDERS = ("api/data/guide", "deploy/guide")  # of a wheel, of the repository
SERVED = {"../../api/openapi.json": "/openapi.json"}
REGION = '<div class="scroll" role="region" aria-label="Table" tabindex="0">'
SCROLLING = {  # what is wider than a telephone, for those who have no mouse too
    "<table>": f"{REGION}<table>",
    "</table>": "</table></div>",
    "<pre>": '<pre tabindex="0">',
}

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Shown(NamedTuple):
    """A page of the guide."""

    title: str
    html: Markup


@router.get("/guide")
@router.get("/guide/{name}")
def guide_page(request: Request, name: str = INDEX) -> Response:
    """Show a page of the guide."""
    found = shown().get(name)
    if found is None:
        known = ", ".join(other for other in shown() if other != INDEX)
        raise NotFound(f"the guide has no page {name[:64]!r}; there are: {known}")
    return page(request, "guide.html.j2", None, shown=found, index=name == INDEX)


@cache
def shown() -> dict[str, Shown]:
    """Return every page by its name; {}: this installation came without them."""
    root = Path(__file__).parent.parent
    folders = [root / name for name in FOLDERS if (root / name).is_dir()]
    files = sorted(folders[0].glob("*.md")) if folders else []
    return {file.stem: _shown(file.read_text("utf-8")) for file in files}


def _shown(text: str) -> Shown:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    titles = list(_headings(tokens))
    _lead_on(tokens)
    html = markdown.renderer.render(tokens, markdown.options, {})
    for plain, scrolling in SCROLLING.items():
        html = html.replace(plain, scrolling)
    return Shown(titles[0], Markup(html))  # html is off: all of it is escaped


def _headings(tokens: list[Token]) -> Iterable[str]:
    """Give each heading its anchor, as GitHub has it; yield the titles."""
    for heading, inline in pairwise(tokens):
        if heading.type == "heading_open":
            heading.attrSet("id", anchor(inline.content))
            yield inline.content


def anchor(title: str) -> str:
    """Return the anchor of a heading: `What is refused` has what-is-refused."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _lead_on(tokens: list[Token]) -> None:
    """Point every link to where this service has it; others become plain text."""
    for token in tokens:
        inside = token.children or []
        for place, link in enumerate(inside):
            if link.type != "link_open":
                continue
            target = _target(str(link.attrGet("href")))
            if target is not None:
                link.attrSet("href", target)
                continue
            end = next(t for t in inside[place:] if t.type == "link_close")
            for part in (link, end):
                part.type, part.tag, part.nesting, part.hidden = "text", "", 0, True


def _target(href: str) -> str | None:
    path, hashed, anchored = href.partition("#")
    if not path or "://" in path:
        return href
    if path in SERVED:
        return SERVED[path]
    if "/" in path or not path.endswith(".md"):
        return None
    name = path.removesuffix(".md")
    return ("/guide" if name == INDEX else f"/guide/{name}") + hashed + anchored
