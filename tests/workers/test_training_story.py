"""The story: fp16 breaks, the probe said so, bf16 goes through, and there is a picture."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from workers import training_story

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_story_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "story.html"
    runs = training_story.story(out, steps=170)
    assert runs["fp16"].broke is not None
    assert runs["fp16"].broke > training_story.PROBED
    assert runs["bf16"].broke is None
    assert runs["bf16"].overflowed == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"The probe, from {training_story.PROBED} steps: layer_overflow" in said
    assert "It recommends bf16: safe." in said
    page = out.read_text("utf-8")
    assert page.count('class="curve k') == 4  # two curves, two in the legend
    assert "fp16 breaks here" in page
