"""Pages that need no result: every one is looked at while the first job runs."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.service import Service
from tests.ui import browser as browsers
from tests.ui.browser import WIDTHS, Watch, fits, violations

pytestmark = [pytest.mark.service, pytest.mark.slow]

PAGES = ("jobs", "new", "compare", "models", "models/tiny", "datasets", "hardware")


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_every_page_is_readable_by_all_and_fits_a_phone(page: Page, first: str) -> None:
    for path in (*PAGES, "hardware/h100", f"jobs/{first}", "new?like=" + first):
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(f"/ui/{path}")
            assert fits(page), (path, width)
        assert violations(page) == [], path


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_the_guide_is_readable_by_all_and_fits_a_phone(page: Page) -> None:
    for path in ("/guide", "/guide/numerics", "/guide/api"):
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(path)
            assert fits(page), (path, width)
        assert violations(page) == [], path


def test_who_is_not_signed_in_reads_why(running: Service, browser: Browser) -> None:
    context, watch = browsers.new_context(browser, str(running.address["url"]), 375)
    watch.expected = ["401"]
    page = context.new_page()
    page.goto("/ui/datasets")
    expect(page).to_have_url(re.compile("signin.next=%2Fui%2Fdatasets"))
    page.get_by_label("API key or token").fill("po_live_not_a_key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    assert violations(page) == []
    assert fits(page)
    page.get_by_label("API key or token").fill(running.key)
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/datasets")
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/ui/signin")
    page.goto("/ui/jobs")
    expect(page).to_have_url(re.compile("signin"))
    context.close()
    assert watch.wrong == []


def test_a_page_that_is_not_there_says_what_to_do(
    page: Page, watch: list[Watch]
) -> None:
    watch[0].expected = ["404"]
    page.goto("/ui/jobs/job_00000000000000000000000000")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no such thing")
    assert violations(page) == []
    page.get_by_role("link", name="To the jobs").click()
    page.wait_for_url("**/ui/jobs")


def test_the_form_estimates_while_somebody_types(page: Page) -> None:
    page.goto("/ui/new")
    page.get_by_label("Model").fill("qwen2-7b")
    page.get_by_label("Per output token").fill("20")
    table = page.get_by_role("region", name="Estimate by stack")
    expect(table.get_by_role("row", name=re.compile("^fp8 "))).to_contain_text("✓ met")
    expect(page.locator("#estimate-note")).to_contain_text("parameters")
    before = table.inner_text()
    page.get_by_label("Hardware").select_option("h200")
    expect(table).not_to_have_text(before)
    assert violations(page) == []


def test_a_target_under_the_physical_limit_has_no_estimate(
    page: Page, watch: list[Watch]
) -> None:
    watch[0].expected = ["422"]
    page.goto("/ui/new")
    page.get_by_label("Model").fill("qwen2-7b")
    page.get_by_label("Hardware").select_option("l4")  # 15 GB over 300 GB/s
    page.get_by_label("Per output token").fill("1")
    expect(page.locator("#estimate-note")).to_contain_text("No estimate")
    field = page.get_by_label("Per output token")
    expect(field).to_have_attribute("aria-invalid", "true")


def test_refusals_stand_at_their_fields(page: Page, watch: list[Watch]) -> None:
    watch[0].expected = ["422"]
    page.goto("/ui/new")
    page.get_by_label("Model").fill("nobodys-model")
    page.get_by_label("Per output token").fill("soon")
    page.get_by_role("button", name="Start the job").click()
    field = page.get_by_label("Per output token")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description(re.compile("number"))
    field.fill("")
    page.get_by_role("button", name="Start the job").click()
    model = page.get_by_label("Model")
    expect(model).to_have_accessible_description(re.compile("nobodys-model"))
    expect(model).to_be_focused()
    page.get_by_text("Workload, formats and more").click()
    page.get_by_label("Model").fill("tiny")
    page.get_by_label("Batch size").fill("0")
    expect(page.get_by_label("Batch size")).to_have_accessible_description(
        re.compile("greater than or equal to 1")
    )
    assert violations(page) == []


def test_a_task_that_trains_has_its_own_fields_and_advice(page: Page) -> None:
    page.goto("/ui/new")
    page.get_by_label("Model").fill("qwen2-7b")
    expect(page.get_by_label("Learning rate")).to_be_hidden()
    page.get_by_label("Task").select_option("pretrain")
    expect(page.get_by_label("Per output token")).to_be_hidden()
    expect(page.get_by_label("Learning rate")).to_have_attribute(
        "placeholder", "0.0003"
    )
    page.get_by_label("Task").select_option("lora")
    expect(page.get_by_label("Learning rate")).to_have_attribute(
        "placeholder", "0.0002"
    )
    memory = page.get_by_role("region", name="Memory of the training")
    expect(memory.get_by_role("row", name="frozen weights")).to_contain_text("15.2 GB")
    expect(page.locator("#estimate-body")).to_contain_text("By rules: bf16")
    assert violations(page) == []
    page.get_by_label("Task").select_option("pretrain")
    page.get_by_label("Sequences at once").fill("2")
    expect(memory.get_by_role("row", name="master weights")).to_be_visible()
    expect(page.locator("#estimate-body")).to_contain_text("folklore")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert fits(page), width


def test_refusals_of_a_training_stand_at_their_fields(
    page: Page, watch: list[Watch]
) -> None:
    watch[0].expected = ["422"]
    page.goto("/ui/new")
    page.get_by_label("Model").fill("tiny")
    page.get_by_label("Task").select_option("finetune")
    for label, given, said in (
        ("Steps", "0", "greater than or equal to 4"),
        ("Steps", "1000000", "less than or equal to 5000"),
        ("Learning rate", "0", "greater than 0"),
        ("Learning rate", "1e9", "less than or equal to 10"),
        ("Learning rate", "fast", "number"),
        ("Sequence length", "4096", "tiny takes at most 2048"),
    ):
        field = page.get_by_label(label, exact=True)
        field.fill(given)
        page.get_by_role("button", name="Start the job").click()
        expect(field).to_have_accessible_description(re.compile(said))
        expect(field).to_be_focused()
        field.fill("")
    assert violations(page) == []


def test_a_dataset_comes_in_parts_and_goes(page: Page, dataset: Path) -> None:
    sent: list[str] = []
    page.on("request", lambda r: sent.append(f"{r.method} {r.url}"))
    page.goto("/ui/datasets")
    page.get_by_label("File").set_input_files(dataset)
    expect(page.get_by_label("Name")).to_have_value("support-tickets")
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("[data-said]")).to_contain_text("2000 samples")
    assert len([one for one in sent if "/parts/" in one]) == 3
    row = page.get_by_role("row", name=re.compile("support-tickets"))
    expect(row).to_contain_text("2000")
    page.goto("/ui/new")
    page.get_by_label("Data", exact=True).select_option("support-tickets")
    page.goto("/ui/datasets")
    page.get_by_role("button", name="Delete support-tickets").click()
    assert violations(page) == []
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("None yet")).to_be_visible()


def test_an_upload_that_a_reload_cut_goes_on(page: Page, dataset: Path) -> None:
    sent: list[str] = []

    def upload() -> None:
        page.goto("/ui/datasets")
        page.get_by_label("File").set_input_files(dataset)
        page.get_by_label("Name").fill("cut-in-two")
        page.get_by_role("button", name="Upload").click()

    page.route("**/parts/3", lambda route: None)  # it is never answered
    upload()
    expect(page.locator("[data-said]")).to_contain_text("132 kB of")
    page.reload()  # while that part is on its way
    page.unroute("**/parts/3")
    page.on("request", lambda r: sent.append(f"{r.method} {r.url}"))
    upload()
    expect(page.locator("[data-said]")).to_contain_text("2000 samples")
    assert [one[-2:] for one in sent if "/parts/" in one] == ["/3"]
    page.get_by_role("button", name="Delete cut-in-two").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("None yet")).to_be_visible()


def test_a_file_that_is_dropped_and_bad_is_refused_in_words(
    page: Page, watch: list[Watch]
) -> None:
    watch[0].expected = ["422"]
    page.goto("/ui/datasets")
    drop = """(form) => {
        const data = new DataTransfer();
        data.items.add(new File(['{"prompt": 1}\\n'], 'bad.jsonl'));
        form.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}));
    }"""
    page.locator("form[data-upload]").evaluate(drop)
    expect(page.get_by_label("Name")).to_have_value("bad")
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("[data-said]")).to_contain_text("✗")
    expect(page.locator("[data-said]")).to_contain_text("line 1")


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.goto("/ui/hardware")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.tagName")
    assert focused == "A"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_pages_read_without_scripts(running: Service, browser: Browser) -> None:
    context = browser.new_context(
        base_url=str(running.address["url"]), java_script_enabled=False
    )
    page = context.new_page()
    browsers.sign_in(page, running.key)
    page.get_by_label("Hardware").select_option("h100")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("link", name="tiny on h100")).to_be_visible()
    page.get_by_role("link", name="tiny on h100").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny on h100")
    context.close()
