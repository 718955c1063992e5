"""What the pages say and draw: words, the plot, two jobs side by side."""

import pytest

from api import page_plot, page_words
from api.page_compare import compare
from api.page_plot import Drawn, Point
from api.views import JobView
from optimizer.advice import Scenario
from tests.api.conftest import Json


def point(took: float, lost: float, chosen: bool = False) -> Point:
    return Point("measured", took, lost, f"{took} {lost}", chosen)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "—"),
        (-1.0, "0 s"),
        (42.4, "42 s"),
        (99.6, "2 min"),
        (5970.0, "1 h 40 min"),
        (7200.0, "2 h"),
        (200_000.0, "2 d"),
    ],
)
def test_time_is_said_as_people_say_it(seconds: float | None, said: str) -> None:
    assert page_words.duration(seconds) == said


def test_targets_are_said_with_their_percentile() -> None:
    assert page_words.target(None) == "none"
    sla = {"per_token_s": 0.02, "first_token_s": 0.5, "percentile": 0.95}
    assert (
        page_words.target(sla) == "20.0\u00a0ms a token, 500\u00a0ms to the first (p95)"
    )


def test_every_purpose_of_a_training_has_words() -> None:
    assert {str(s) for s in Scenario} == page_words.SCENARIOS.keys()


def test_every_kind_of_event_is_a_line_or_is_shown_otherwise() -> None:
    def line(kind: str, **data: object) -> str | None:
        return page_words.event({"type": kind, "data": data})

    assert line("job.progress", percent=3) is None
    assert (
        line("job.phase_changed", phase="sweep", percent=20.6) == "Sweep began at 21 %"
    )
    began = {"type": "job.phase_changed", "data": {"phase": "sweep", "percent": 20.6}}
    assert page_words.event(began, of_training=True) == "Candidates began at 21 %"
    assert line("job.succeeded", outcome="sla_met") == "Succeeded: SLA met"
    assert line("job.failed", error={"message": "no memory"}) == "Failed: no memory"
    assert line("job.odd") == "job.odd"
    assert line("job.log", level="info", message="Read it") == "Read it"
    told = line("job.trial_completed", kl_nats=0.01, per_token_s=0.002, fp8_share=1.0)
    assert told == (
        "Measured a stack: 0.0100\u00a0nats at 2.00\u00a0ms a token, 100\u00a0% in FP8"
    )


def test_a_drawing_by_hand() -> None:
    # 10 to 20 ms with 6 % to each side; 0 to 1.1 × 0.02 nats
    one = Drawn("a", (point(0.010, 0.02), point(0.020, 0.001, chosen=True)))
    plot = page_plot.of_jobs([one], 0.015)
    assert plot is not None
    first, last = plot.marks
    width = page_plot.RIGHT - page_plot.LEFT
    assert first.x == pytest.approx(page_plot.LEFT + 0.06 / 1.12 * width, abs=0.1)
    assert last.x == pytest.approx(page_plot.LEFT + 1.06 / 1.12 * width, abs=0.1)
    assert last.point.chosen  # drawn last, over the others
    height = page_plot.BOTTOM - page_plot.TOP
    assert first.y == pytest.approx(page_plot.BOTTOM - height / 1.1, abs=0.1)
    assert plot.limit_x == pytest.approx((first.x + last.x) / 2, abs=0.1)
    assert plot.unit == "ms"
    assert "2 stacks" in plot.said
    assert "target" in plot.said


def test_a_target_far_away_does_not_squeeze_the_front() -> None:
    one = Drawn("a", (point(0.010, 0.02), point(0.011, 0.01)))
    plot = page_plot.of_jobs([one], 1.0)
    assert plot is not None
    assert plot.limit_x is None
    assert plot.marks[0].x != plot.marks[1].x


def test_losses_of_many_sizes_are_drawn_in_powers_of_ten() -> None:
    one = Drawn("a", (point(1.0, 1.0), point(2.0, 0.01), point(3.0, 0.0)))
    plot = page_plot.of_jobs([one], None)
    assert plot is not None
    assert {tick.text for tick in plot.y_ticks} >= {"10⁰", "10⁻²"}
    lowest = max(mark.y for mark in plot.marks)
    assert lowest == page_plot.BOTTOM  # nothing lost lies on the lower edge


@pytest.mark.parametrize(
    "points",
    [
        (point(0.0, 0.0),),
        (point(1e-12, 1e-300),),
        (point(1.0, 5.0), point(1.0, 5.0)),
        (point(1e6, 1e6), point(1e-9, 1e-12)),
    ],
)
def test_odd_fronts_are_drawn_too(points: tuple[Point, ...]) -> None:
    plot = page_plot.of_jobs([Drawn("a", points)], None)
    assert plot is not None
    for mark in plot.marks:
        assert page_plot.LEFT <= mark.x <= page_plot.RIGHT
        assert page_plot.TOP <= mark.y <= page_plot.BOTTOM


def test_no_point_no_drawing() -> None:
    assert page_plot.of_jobs([Drawn("a", ())], 0.02) is None
    lacking = page_plot.drawn("a", [{"id": "p0", "per_token_s": None}], {})
    assert lacking.points == ()


def job(**chosen: object) -> JobView:
    figures = {"per_token_s": 0.01, "bytes": 100, **chosen}
    result = {
        "precision_stack": {"ffn_in": chosen.get("ffn", "bf16"), "lm_head": "bf16"},
        "layers": [{"layer": 0, "choices": {"ffn_in": chosen.get("ffn", "bf16")}}],
        "chosen": figures,
        "front": [],
    }
    request: Json = {"model": "tiny", "hardware": chosen.get("hardware", "h100")}
    return JobView.model_construct(result=result, request=request)


def interval(value: float, by: float) -> dict[str, float]:
    return {"value": value, "low": value - by, "high": value + by}


def test_what_differs_is_marked_and_what_cannot_be_told_apart_is_not() -> None:
    first = job(kl_nats=interval(0.010, 0.001), perplexity=interval(20, 5))
    second = job(
        kl_nats=interval(0.020, 0.001),
        perplexity=interval(21, 5),
        per_token_s=0.005,
        ffn="fp8_e4m3",
        hardware="l4",
    )
    found = compare(first, second)
    tones = {row.name: row.tone for row in found.figures}
    assert tones["Per output token"] == "good"
    assert tones["KL from the reference"] == "bad"
    assert tones["Perplexity"] == "even"
    assert tones["Weights"] == "even"
    changes = {row.name: row.change for row in found.figures}
    assert changes["Per output token"] == "−50.0\u00a0%"
    assert [pair.name for pair in found.components if not pair.same] == ["FFN: in"]
    assert [pair.name for pair in found.requests if not pair.same] == ["Hardware"]
    assert [layer for layer, _ in found.layers] == [0]
    assert compare(first, first).layers == []


def test_losses_on_other_text_are_not_compared() -> None:
    first, second = job(kl_nats=interval(0.01, 0.001)), job(kl_nats=interval(1, 0.1))
    assert {r.name: r.tone for r in compare(first, second).figures}[
        "KL from the reference"
    ] == "bad"
    second.request["data_distribution"] = "code"
    found = compare(first, second)
    (row,) = (r for r in found.figures if r.name == "KL from the reference")
    assert (found.same_text, row.change, row.tone) == (False, "—", "even")
    assert [r.tone for r in found.figures if r.name == "Per output token"] == ["even"]
