"""A job as a person sees it: sent, watched, its report, its files, beside another."""

import hashlib
import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.service import BODY, Service, eventually
from tests.ui.browser import WIDTHS, Watch, fits, picture, violations
from tests.ui.conftest import Portal

pytestmark = [pytest.mark.service, pytest.mark.slow]

RESULT_MS = 240_000  # of two jobs, on a machine that is busy


@pytest.fixture(scope="module")
def done(running: Service, first: str) -> str:
    """The first job, which has ended."""
    ended = eventually(
        lambda: running.client.job(first)["status"] == "succeeded", RESULT_MS / 1000
    )
    assert ended, running.client.job(first)
    return first


def both_widths(page: Page, name: str) -> None:
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert fits(page), (name, width)
        picture(page, name)
        assert violations(page) == [], (name, width)


def test_submit_progress_report_download_compare(
    page: Page, first: str, running: Service, tmp_path: Path, watch: list[Watch]
) -> None:
    page.goto(f"/ui/new?like={first}")
    page.get_by_label("Hardware").select_option("l4")
    page.get_by_label("Per output token").fill("0.05")
    page.get_by_label("Entity").fill("component:default/checkout")
    expect(page.get_by_role("region", name="Estimate by stack")).to_be_visible()
    page.get_by_role("button", name="Start the job").click()

    page.wait_for_url(re.compile("/ui/jobs/job_"))
    job_id = page.url.rpartition("/")[2]
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny on l4")
    expect(page.locator("#bar")).to_be_visible()
    expect(page.locator("#front circle").first).to_be_visible(timeout=RESULT_MS)
    picture(page, "job-running")
    verdict = page.locator("#state .verdict .outcome")
    expect(verdict).to_have_text(
        re.compile("SLA met|SLA not met|No improvement"), timeout=RESULT_MS
    )
    expect(page.locator("#log")).to_contain_text("Validate began")
    expect(page.locator("#log")).to_contain_text("Measured a stack")
    both_widths(page, "job")

    with page.expect_download() as download:
        page.get_by_role("link", name="report.json").click()
    got = tmp_path / "report.json"
    download.value.save_as(got)
    artifacts = {one["name"]: one for one in running.client.artifacts(job_id)}
    sha256 = hashlib.sha256(got.read_bytes()).hexdigest()
    assert sha256 == artifacts["report.json"]["sha256"]
    assert json.loads(got.read_text())["verdict"]["outcome"]

    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Open the report").click()
    report = opened.value
    expect(report.get_by_role("heading", name="Verdict", exact=True)).to_be_visible()
    report.reload()  # the copy that the browser keeps is as readable as the first
    both_widths(report, "report")
    report.emulate_media(color_scheme="dark")
    assert violations(report) == []
    report.close()

    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/ui/jobs?entity_ref=component:default/checkout")
    expect(page.get_by_role("row")).to_have_count(2)
    page.goto("/ui/jobs")
    compare = page.get_by_role("button", name=re.compile("compare", re.IGNORECASE))
    expect(compare).to_have_attribute("aria-disabled", "true")
    for box in page.get_by_role("checkbox").all()[:2]:
        box.check()
    page.get_by_role("button", name="Compare these two").click()
    page.wait_for_url("**/ui/compare?**")
    expect(page.get_by_role("heading", name="Pareto fronts")).to_be_visible()
    row = page.get_by_role("row", name=re.compile("^Hardware"))
    expect(row).to_contain_text("differs")
    both_widths(page, "compare")


def test_a_retry_is_another_job_and_a_cancel_ends_it(page: Page, done: str) -> None:
    page.goto(f"/ui/jobs/{done}")
    page.get_by_role("button", name="Run again").click()
    page.wait_for_url(lambda url: "/ui/jobs/job_" in url and done not in url)
    expect(page.get_by_text("Repeats")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("#state")).to_contain_text("Cancelled", timeout=RESULT_MS)
    assert violations(page) == []
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.wait_for_url("**/ui/jobs")


def test_a_portal_may_frame_a_job_and_nobody_else(
    page: Page, done: str, browser: Browser, allowed: Portal, stranger: Portal
) -> None:
    page.goto(f"/ui/jobs/{done}")
    page.get_by_role("button", name="Make a view link").click()
    link = page.get_by_label("Address")
    expect(link).to_have_value(re.compile("#vt=pv_"))
    address = quote(link.input_value(), safe="")

    context = browser.new_context(viewport={"width": 800, "height": 700})
    said: list[str] = []
    context.on("console", lambda one: said.append(one.text))
    outside = context.new_page()
    outside.goto(f"{allowed.origin}/?src={address}")
    frame = outside.frame_locator("iframe")
    expect(frame.get_by_role("heading", level=1)).to_have_text("tiny on h100")
    expect(frame.locator(".verdict")).to_be_visible()
    outside.wait_for_function("window.heard && window.heard.data.height > 100")
    assert outside.evaluate("window.heard.data.type") == "precision:height"
    assert said == []
    picture(outside, "embed")

    outside.goto(f"{stranger.origin}/?src={address}")
    outside.wait_for_timeout(500)
    assert any("frame-ancestors" in one for one in said), said
    assert outside.evaluate("window.heard") is None
    expect(frame.locator(".verdict")).to_have_count(0)
    context.close()


def test_a_badge_is_a_picture_anywhere(page: Page, done: str) -> None:
    page.goto(f"/ui/jobs/{done}")
    page.get_by_role("button", name="Make a badge").click()
    link = page.get_by_label("Address")
    expect(link).to_have_value(re.compile("badge.svg"))
    page.goto(link.input_value())
    assert page.evaluate("document.documentElement.getAttribute('aria-label')") in (
        "precision: No improvement",
        "precision: SLA met",
        "precision: SLA not met",
    )


def test_a_stream_that_was_cut_goes_on(
    page: Page, running: Service, watch: list[Watch]
) -> None:
    watch[0].expected = ["ERR_INTERNET_DISCONNECTED"]
    job_id = running.client.optimize({**BODY, "hardware": "l40s"})["id"]
    page.goto(f"/ui/jobs/{job_id}")
    expect(page.locator("#log")).to_contain_text("A worker took it", timeout=RESULT_MS)
    page.context.set_offline(True)
    running.client.cancel(job_id)  # what happens now, the page does not hear
    page.wait_for_timeout(300)
    page.context.set_offline(False)
    expect(page.locator("#state")).to_contain_text("Cancelled", timeout=RESULT_MS)
    assert page.locator("#log").inner_text().count("Accepted") == 1
