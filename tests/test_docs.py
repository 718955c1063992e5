"""What the README says is what there is."""

import re
from pathlib import Path

import pytest

from api.app import create_app
from api.settings import Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def settings_table() -> str:
    """Return the README's table of settings, from their descriptions."""
    rows = ["| variable | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = str(field.get_default(call_default_factory=True))
        shown = f"`{default}`" if default not in ("", "[]", "None") else ""
        rows.append(f"| `PRECISION_{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(rows)


def test_the_table_of_settings_is_complete() -> None:
    told = README.split("<!-- settings:begin -->\n")[1]
    assert told.split("\n<!-- settings:end -->")[0] == settings_table()


def test_every_endpoint_is_named() -> None:
    for path in create_app().openapi()["paths"]:
        named = [part for part in path.split("/") if part and "{" not in part]
        assert f"/{named[-1]}" in README, path


@pytest.mark.parametrize("command", ["demo", "test", "serve", "help", "install"])
def test_every_make_target_that_is_promised_exists(command: str) -> None:
    assert re.search(rf"^{command}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_documents_link_to_what_exists() -> None:
    for name in ("README.md", "deploy/README.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{name}: {target}"


def _rewrite_settings() -> None:
    """Bring the README's table up to date: `python -m tests.test_docs`."""
    before, rest = README.split("<!-- settings:begin -->\n")
    after = rest.split("\n<!-- settings:end -->")[1]
    table = f"<!-- settings:begin -->\n{settings_table()}\n<!-- settings:end -->"
    (ROOT / "README.md").write_text(before + table + after, "utf-8")


if __name__ == "__main__":
    _rewrite_settings()
