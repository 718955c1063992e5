"""The guide as the service shows it."""

from html.parser import HTMLParser

import pytest
from fastapi.testclient import TestClient

from api import guide
from tests.documents import GUIDE, anchors

PAGES = [page.stem for page in GUIDE]


class Links(HTMLParser):
    """What a page links to, the anchors it has, and the tags it is made of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.tags.add(tag)
        self.attributes |= said.keys()
        self.ids |= {said["id"] or ""} if "id" in said else set()
        if tag == "a" and said.get("href"):
            self.targets.append(str(said["href"]))


def path_of(name: str) -> str:
    return "/guide" if name == guide.INDEX else f"/guide/{name}"


@pytest.mark.parametrize("name", PAGES)
def test_who_has_no_key_reads_it_under_a_strict_policy(
    client: TestClient, name: str
) -> None:
    answer = client.get(path_of(name), headers={"Authorization": ""})
    assert answer.status_code == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    found = Links(answer.text)
    assert "style" not in found.tags
    assert not {a for a in found.attributes if a == "style" or a.startswith("on")}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(client: TestClient, name: str) -> None:
    found = Links(client.get(path_of(name)).text)
    inner = [t for t in found.targets if not t.startswith(("https:", "/ui"))]
    for target in inner:
        path, _, anchor = target.partition("#")
        page = client.get(path) if path else client.get(path_of(name))
        assert page.status_code == 200, target
        assert not anchor or anchor in Links(page.text).ids, target


def test_anchors_are_those_of_the_repository() -> None:
    for page in GUIDE:
        ids = Links(guide.shown()[page.stem].html).ids
        assert ids == anchors(page)


def test_html_in_a_page_is_text() -> None:
    found = guide._shown("# T\n\n<script>alert(1)</script> [x](javascript:alert(1))\n")
    assert "script" not in Links(found.html).tags
    assert Links(found.html).targets == []


def test_what_is_no_page_is_not_found_and_says_which_there_are(
    client: TestClient,
) -> None:
    answer = client.get("/guide/nothing")
    assert answer.status_code == 404
    assert "tutorial" in answer.text
    assert client.get("/guide/..%2FREADME").status_code == 404
