"""One service and one browser for all tests of pages, and a job that runs meanwhile."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser, Page

from tests.service import BODY, Service, service, tiny_model
from tests.ui import browser as browsers
from tests.ui.browser import Watch


class Portal(ThreadingHTTPServer):
    """A page of another site, that shows in a frame what its address asks for."""

    daemon_threads = True

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        source = unquote(self.path.partition("?src=")[2])
        page = (
            "<!doctype html><title>portal</title><h1>Portal</h1>"
            "<script>addEventListener('message', e => {"
            "window.heard = {origin: e.origin, data: e.data}})</script>"
            f"<iframe title='job' width='700' height='600' src='{source}'></iframe>"
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: object) -> None: ...


def _portal() -> Portal:
    server = Portal(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="package")
def chromium() -> str:
    """The machine's browser. CI installs one; elsewhere these tests may be skipped."""
    found = browsers.chromium()
    if found is None:
        said = "no chromium here: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(said)
    assert found is not None
    return found


@pytest.fixture(scope="package")
def allowed() -> Iterator[Portal]:
    """A portal that may frame jobs."""
    server = _portal()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="package")
def stranger() -> Iterator[Portal]:
    """A site that may not."""
    server = _portal()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="package")
def running(
    chromium: str, allowed: Portal, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The real service, whose first job runs while the other pages are looked at."""
    data_dir = tmp_path_factory.mktemp("ui")
    tiny_model(data_dir / "models" / "tiny")
    told = {
        "PRECISION_FRAME_ORIGINS": allowed.origin,
        "PRECISION_PART_BYTES": str(2**16),  # so that a small file has several
    }
    with service(data_dir, environment=told) as started:
        yield started


@pytest.fixture(scope="package")
def first(running: Service) -> str:
    """A job that was sent at once; it may still run."""
    job: dict[str, Any] = running.client.optimize(BODY)
    return str(job["id"])


@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Browser]:
    """Chromium, for this package alone: its loop must not outlive these tests."""
    with browsers.launched(chromium) as started:
        yield started


@pytest.fixture
def watch() -> list[Watch]:
    """The watches of the test's contexts."""
    return []


@pytest.fixture(params=["light"])
def page(
    request: pytest.FixtureRequest,
    running: Service,
    first: str,
    browser: Browser,
    watch: list[Watch],
) -> Iterator[Page]:
    """A page of somebody who signed in; in the end nothing may have gone wrong on it."""
    origin = str(running.address["url"])
    context, mine = browsers.new_context(browser, origin, scheme=request.param)
    watch.append(mine)
    page = context.new_page()
    browsers.sign_in(page, running.key)
    yield page
    context.close()
    assert mine.wrong == []


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A file of JSON lines, of more than one part."""
    path = tmp_path / "support tickets.jsonl"
    lines = [
        json.dumps(
            {"text": f"Ticket {n}: how do I reset my password? In the settings."}
        )
        for n in range(2000)
    ]
    path.write_text("\n".join(lines))
    return path
