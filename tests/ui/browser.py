"""Chromium against the real service: who is watched, what is looked at, pictures.

The browser is the machine's own; nothing is downloaded. Whatever a page does wrong is
noted while it is used: an error in the console, a broken rule of its policy, a request
to anybody but the service.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).parents[2]
AXE = Path(__file__).with_name("axe.min.js")
SCREENSHOTS = Path(os.environ.get("PRECISION_SCREENSHOTS", ROOT / "var/screenshots"))
ARGUMENTS = (
    "--no-sandbox",  # of Chromium's own; CI is root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)
WIDTHS = (375, 1440)
SERIOUS = {"serious", "critical"}


def chromium() -> str | None:
    """Return where the browser is. None: there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def launched(path: str) -> Iterator[Browser]:
    """Run a browser until the block ends."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watch:
    """What went wrong on the pages of one context."""

    origin: str
    expected: list[str] = field(default_factory=list)  # parts of what may be said
    wrong: list[str] = field(default_factory=list)

    def look_at(self, context: BrowserContext) -> None:
        """Note what goes wrong from now on."""
        context.on("console", lambda said: self._note(said.type, said.text))
        context.on("weberror", lambda found: self._note("error", str(found.error)))
        context.on("request", lambda request: self._origin(request.url))

    def _note(self, kind: str, text: str) -> None:
        bad = kind == "error" or "Content Security Policy" in text
        if bad and not any(part in text for part in self.expected):
            self.wrong.append(f"{kind}: {text}")

    def _origin(self, url: str) -> None:
        parts = urlsplit(url)
        there = f"{parts.scheme}://{parts.netloc}"
        if parts.scheme in ("http", "https", "ws") and there != self.origin:
            self.wrong.append(f"a request to {url}")


def new_context(
    browser: Browser, origin: str, width: int = 1440, scheme: str = "light"
) -> tuple[BrowserContext, Watch]:
    """Return a context that nobody signed in with, and its watch."""
    context = browser.new_context(
        base_url=origin,
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(30_000)
    watch = Watch(origin)
    watch.look_at(context)
    return context, watch


def sign_in(page: Page, key: str) -> None:
    """Sign in as a person does."""
    page.goto("/ui/signin")
    page.get_by_label("API key or token").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/ui/jobs")


def violations(page: Page) -> list[str]:
    """Return what axe finds that is serious, in words.

    It is run apart from the page, whose policy lets no script of others in.
    """
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text("utf-8"))
    found: list[dict[str, Any]] = page.evaluate(
        "async () => (await axe.run(document, {resultTypes: ['violations']})).violations"
    )
    return [
        f"{one['id']}: {one['help']}: {json.dumps(one['nodes'][0]['target'])} "
        f"{one['nodes'][0].get('failureSummary', '')}"
        for one in found
        if one["impact"] in SERIOUS
    ]


def fits(page: Page) -> bool:
    """Say whether the page is no wider than the window."""
    return bool(
        page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    )


def picture(page: Page, name: str, *, whole: bool = True) -> Path:
    """Take a picture of a page, named by what it shows and how wide it is."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    size = page.viewport_size
    assert size is not None
    path = SCREENSHOTS / f"{name}-{size['width']}.png"
    page.screenshot(path=path, full_page=whole)
    return path
