"""What the documents say is what there is."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from api.app import create_app
from api.cli import app
from api.schemas import OptimizeRequest
from api.settings import Settings
from tests.documents import (
    DOCUMENTS,
    GUIDE,
    README,
    ROOT,
    anchors,
    name_of,
    objects,
    spans,
)
from tests.ui.pictures import pages

SETTINGS = {f"PRECISION_{name.upper()}" for name in Settings.model_fields}
OF_THE_CLIENT = {"PRECISION_URL", "PRECISION_API_KEY"}  # of the command line alone
CALL = re.compile(r"\b(GET|POST|PUT|PATCH|DELETE) (/[^\s,`]*)")
PATH = re.compile(r"(?<![\w…}/.])(/(?:v1|embed)/[^\s,`\"']+)")


def settings_table() -> str:
    """Return the README's table of settings, from their descriptions."""
    rows = ["| variable | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = str(field.get_default(call_default_factory=True))
        shown = f"`{default}`" if default not in ("", "[]", "None") else ""
        rows.append(f"| `PRECISION_{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(rows)


def test_the_table_of_settings_is_complete() -> None:
    told = README.read_text("utf-8").split("<!-- settings:begin -->\n")[1]
    assert told.split("\n<!-- settings:end -->")[0] == settings_table()


def test_every_endpoint_is_named() -> None:
    said = "".join(page.read_text("utf-8") for page in (README, *GUIDE))
    for path in create_app().openapi()["paths"]:
        named = [part for part in path.split("/") if part and "{" not in part]
        assert f"/{named[-1]}" in said, path


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_settings_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"PRECISION_[A-Z0-9_]*[A-Z0-9]", page.read_text("utf-8")))
    assert named - SETTINGS - OF_THE_CLIENT == set()


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_endpoints_that_are_named_exist(page: Path) -> None:
    paths = create_app().openapi()["paths"]
    text = page.read_text("utf-8")
    called = {(method, path) for method, path in CALL.findall(text)}
    called |= {("", path) for path in PATH.findall(text)}
    assert [call for call in called if not _is_served(*call, paths)] == []


def _is_served(method: str, said: str, paths: dict[str, Any]) -> bool:
    said = re.sub(r"[?#].*", "", said).rstrip(".;:)/") or "/"
    if "…" in said or not said.startswith("/v1"):
        return True  # shortened, or a page
    return any(
        _is_alike(said, path) and (not method or method.lower() in paths[path])
        for path in paths
    )


def _is_alike(said: str, path: str) -> bool:
    """Whether an address as documents write it is one of a path's."""
    pattern = re.sub(r"\\\{[^}]+:path\\\}", ".+", re.escape(path))
    return re.fullmatch(re.sub(r"\\\{.+?\\\}", "[^/]+", pattern), said) is not None


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_bodies_that_are_shown_are_taken(page: Path) -> None:
    fields = OptimizeRequest.model_fields.keys()
    shown = [body for body in objects(page) if body.keys() <= fields]
    for body in shown:
        OptimizeRequest.model_validate({"model": "m", "hardware": "h100", **body})


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    wrong = [line for line in _precision_lines(page) if _strange(line)]
    assert wrong == []


def _precision_lines(page: Path) -> list[str]:
    typed = re.findall(r"\bprecision [^\n`$()|;&>]*", page.read_text("utf-8"))
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    inside = [line for line in typed if any(line in block for block in blocks)]
    return [*inside, *(s for s in spans(page) if s.startswith("precision "))]


def _strange(line: str) -> str | None:
    """Return a word of a `precision …` line that the command line has not, if any."""
    words = shlex.split(re.sub(r"\s#.*|\\$", "", line.replace("…", "")))[1:]
    command: Any = get_command(app)
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            break
        name = words.pop(0)
        if name not in command.commands:
            return name
        command = command.commands[name]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--install-completion", "--show-completion", "--"}
    options = (word.partition("=")[0] for word in words if word.startswith("--"))
    return next((option for option in options if option not in known), None)


@pytest.mark.parametrize("command", ["demo", "test", "serve", "help", "install"])
def test_every_make_target_that_is_promised_exists(command: str) -> None:
    assert re.search(rf"^{command}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_documents_link_to_what_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^):]+)\)", page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_guide_lists_its_pages() -> None:
    index = (ROOT / "deploy" / "guide" / "README.md").read_text("utf-8")
    others = {page.name for page in GUIDE} - {"README.md"}
    assert [name for name in others if f"]({name})" not in index] == []


def test_pictures_are_those_that_are_taken() -> None:
    """`python -m tests.ui.pictures` takes every picture of the README, and no other."""
    shown = re.findall(
        r"!\[[^\]]+\]\(deploy/([\w-]+)\.png\)", README.read_text("utf-8")
    )
    assert set(shown) == set(pages(["job_1", "job_2"]))


def _rewrite_settings() -> None:
    """Bring the README's table up to date: `python -m tests.test_docs`."""
    before, rest = README.read_text("utf-8").split("<!-- settings:begin -->\n")
    after = rest.split("\n<!-- settings:end -->")[1]
    table = f"<!-- settings:begin -->\n{settings_table()}\n<!-- settings:end -->"
    README.write_text(before + table + after, "utf-8")


if __name__ == "__main__":
    _rewrite_settings()
