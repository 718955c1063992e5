"""The pictures of the pages in the README: `python -m tests.ui.pictures` takes them of the demo model.

It runs two jobs on the real service, which takes some minutes, and looks at their pages
as the tests do. The tests take the same pictures of a tiny model, at two widths, into
`var/screenshots`.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from api.client import Client
from tests.service import eventually, service
from tests.ui import browser as browsers

MODEL = "smollm2-135m-instruct"
DEPLOY = browsers.ROOT / "deploy"
JOBS: list[dict[str, Any]] = [
    {
        "model": MODEL,
        "hardware": "l4",
        "latency_sla": 0.002,
        "data_distribution": "chat",
        "workload": {"batch_size": 16},
    },
    {
        "model": MODEL,
        "hardware": "l40s",
        "latency_sla": 0.001,
        "data_distribution": "chat",
        "workload": {"batch_size": 16},
    },
]


def main() -> int:
    """Take the pictures. Returns the exit code."""
    path = browsers.chromium()
    if path is None:
        sys.stderr.write("no chromium here: apt-get install chromium\n")
        return 1
    models = (
        Path(os.environ.get("PRECISION_DATA_DIR", browsers.ROOT / "var")) / "models"
    )
    with tempfile.TemporaryDirectory() as folder:
        told = {"PRECISION_MODEL_ROOTS": str(models.resolve())}
        with service(Path(folder), environment=told) as running:
            running.client.add_model(MODEL, str(models.resolve() / MODEL))
            eventually(running.client.models, 300)  # its weights are read first
            ids = [_finished(running.client, body) for body in JOBS]
            with browsers.launched(path) as browser:
                origin = str(running.address["url"])
                context, _ = browsers.new_context(browser, origin)
                page = context.new_page()
                browsers.sign_in(page, running.key)
                _take(page, ids)
    return 0


def _finished(client: Client, body: dict[str, Any]) -> str:
    job = client.optimize(body)
    return str(client.wait(job["id"])["id"])


def _take(page: Page, ids: list[str]) -> None:
    both = "&".join(f"job={each}" for each in ids)
    for name, address in (
        ("portal-job", f"/ui/jobs/{ids[0]}"),
        ("portal-compare", f"/ui/compare?{both}"),
        ("portal-new", f"/ui/new?like={ids[0]}"),
    ):
        page.goto(address)
        page.wait_for_timeout(1500)  # the estimate comes a moment later
        page.set_viewport_size({"width": 1200, "height": 1500})
        page.screenshot(path=DEPLOY / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
