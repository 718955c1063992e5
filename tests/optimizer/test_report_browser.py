"""The page in a browser: its plot names stacks, and nothing else runs or is loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer.report import render_html
from tests.optimizer.example_document import example_document

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = "/usr/bin/chromium"
A4_WIDTH = round((210 - 2 * 14) / 25.4 * 96)  # CSS pixels between the margins


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    if not Path(CHROMIUM).exists():
        pytest.skip("Debian's chromium is not installed")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(example_document()), "utf-8")
    return path


def test_a_mark_under_the_pointer_or_in_focus_names_its_stack(
    browser: "playwright.Browser", report: Path
) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    shown = page.locator("#shown")
    assert "arrow keys" in shown.inner_text()
    page.locator(".plot .mark[tabindex='0']").focus()  # the chosen one comes first
    chosen = example_document()["verdict"]["chosen"]
    assert shown.inner_text().startswith(f"{chosen}: ")
    assert "ffn_out: " in shown.inner_text()
    page.keyboard.press("ArrowRight")
    assert not shown.inner_text().startswith(f"{chosen}: ")
    page.keyboard.press("Home")
    assert shown.inner_text().startswith("all e4m3: ")  # the fastest
    page.locator(".plot .mark.predicted").last.hover(force=True)
    assert shown.inner_text().startswith("p")
    assert page.locator(".plot .mark[tabindex='0']").count() == 1
    assert said == []  # no error, and no violation of the policy
    assert [u for u in asked if not u.startswith(("file:", "data:"))] == []
    page.close()


@pytest.mark.parametrize("width", [375, 1440])
def test_the_page_is_never_wider_than_the_window(
    browser: "playwright.Browser", report: Path, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    page.close()


def test_without_scripts_every_mark_has_a_name_and_the_hint_is_hidden(
    browser: "playwright.Browser", report: Path
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert not page.locator("#shown").is_visible()
    marks = page.locator(".plot .mark")
    for index in range(marks.count()):
        assert marks.nth(index).get_attribute("aria-label")
    context.close()


def test_on_paper_no_table_is_wider_than_the_page_and_all_is_open(
    browser: "playwright.Browser", report: Path
) -> None:
    page = browser.new_page(viewport={"width": A4_WIDTH, "height": 970})
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    wide = "[...document.querySelectorAll('table')].map(e => e.scrollWidth)"
    assert max(page.evaluate(wide)) <= A4_WIDTH
    heights = (
        "[...document.querySelectorAll('details > :not(summary)')]"
        ".map(e => e.getBoundingClientRect().height)"
    )
    found = page.evaluate(heights)
    assert found
    assert min(found) > 0
    page.close()
