"""The README's pictures: `python -m tests.ui.pictures` takes them of the demo model.

It runs two jobs on the real service, which takes some minutes, and takes the pictures
that the tests take of a tiny model, at both widths, into the same folder
(`var/screenshots`, or `PRECISION_SCREENSHOTS`). Those of the wide window go into
`deploy/`. With `--data-dir DIR` nothing is run: the service that keeps its data there is
asked for its two latest jobs with a result.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from api.client import Client
from tests.service import eventually, service
from tests.ui import browser as browsers

MODEL = "smollm2-135m-instruct"
DEPLOY = browsers.ROOT / "deploy"
Found = tuple[str, str, list[str]]  # address, key, ids of jobs
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
    parser = argparse.ArgumentParser(description="Take the README's pictures.")
    parser.add_argument("--data-dir", type=Path, help="of a service with two results")
    there = parser.parse_args().data_dir
    path = browsers.chromium()
    if path is None:
        sys.stderr.write("no chromium here: apt-get install chromium\n")
        return 1
    found = _there(there) if there else _run()
    with found as (origin, key, ids), browsers.launched(path) as browser:
        context, watch = browsers.new_context(browser, origin)
        page = context.new_page()
        browsers.sign_in(page, key)
        _take(page, ids)
    sys.stderr.writelines(f"{wrong}\n" for wrong in watch.wrong)
    return 1 if watch.wrong else 0


@contextmanager
def _there(folder: Path) -> Iterator[Found]:
    """Yield the address, the key and the latest jobs of a service that runs."""
    origin = json.loads((folder / "address").read_text())["url"]
    key = (folder / "api_key").read_text().strip()
    with Client(origin, key) as client:
        ended = client.jobs(status="succeeded")
    yield origin, key, [str(job["id"]) for job in reversed(ended[:2])]


@contextmanager
def _run() -> Iterator[Found]:
    """Yield the same of a service that has just run the jobs."""
    data = Path(os.environ.get("PRECISION_DATA_DIR", browsers.ROOT / "var"))
    models = (data / "models").resolve()
    with tempfile.TemporaryDirectory() as folder:
        told = {"PRECISION_MODEL_ROOTS": str(models)}
        with service(Path(folder), environment=told) as running:
            running.client.add_model(MODEL, str(models / MODEL))
            eventually(running.client.models, 300)  # its weights are read first
            ids = [_finished(running.client, body) for body in JOBS]
            yield str(running.address["url"]), running.key, ids


def _finished(client: Client, body: dict[str, Any]) -> str:
    job = client.optimize(body)
    return str(client.wait(job["id"])["id"])


def pages(ids: list[str]) -> dict[str, str]:
    """Return the address of every picture of the README, by its name."""
    both = "&".join(f"job={each}" for each in ids)
    return {
        "report": f"/v1/jobs/{ids[0]}/report?format=html",
        "portal-job": f"/ui/jobs/{ids[0]}",
        "portal-compare": f"/ui/compare?{both}",
        "portal-new": f"/ui/new?like={ids[0]}",
    }


def _take(page: Page, ids: list[str]) -> None:
    for name, address in pages(ids).items():
        for width in browsers.WIDTHS:
            page.set_viewport_size({"width": width, "height": 1800})
            page.goto(address)
            page.wait_for_timeout(1500)  # the estimate comes a moment later
            taken = browsers.picture(page, f"demo-{name}", whole=False)
        shutil.copy(taken, DEPLOY / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
