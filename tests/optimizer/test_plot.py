import math

import pytest

from optimizer.plot import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Plot,
    Point,
    _shared,
    _text_box,
    plot,
)


def point(x: float, y: float, kind: str = "predicted", **more: object) -> Point:
    return Point(kind, x, y, 1e8, "", **more)  # type: ignore[arg-type]


def drawn(points: list[Point], sla_s: float | None = None) -> Plot:
    result = plot(points, sla_s)
    assert result is not None
    return result


def test_nothing_to_draw_is_no_plot() -> None:
    assert plot([]) is None
    assert plot([point(math.inf, 1.0)]) is None


def test_a_range_of_three_decades_is_drawn_in_powers_of_ten() -> None:
    p = drawn([point(1e-4, 0.1), point(2e-4, 0.01), point(3e-4, 0.0001)])
    assert p.log
    ys = [m.y for m in p.marks]
    # 0.1 -> 0.01 is one decade, 0.01 -> 0.0001 two; y grows downward
    assert ys[2] - ys[1] == pytest.approx(
        2 * (ys[1] - ys[0]), abs=0.2
    )  # rounded to 0.1


def test_a_narrow_range_is_linear_from_zero() -> None:
    p = drawn([point(1e-4, 0.02), point(2e-4, 0.01)])
    assert not p.log
    assert BOTTOM - p.marks[0].y == pytest.approx(2 * (BOTTOM - p.marks[1].y), abs=0.2)


def test_zero_nats_lie_on_the_lower_edge_of_a_log_axis() -> None:
    p = drawn([point(1e-4, 0.1), point(2e-4, 0.001), point(3e-4, 0.0)])
    assert p.marks[2].below
    assert p.marks[2].y == BOTTOM


def test_ticks_are_in_the_unit_of_the_axis() -> None:
    p = drawn([point(1e-4, 0.1), point(2e-4, 0.05)])
    assert p.x_unit == "µs"
    assert "120" in [t.text for t in p.x_ticks]
    assert all(LEFT <= t.x <= RIGHT for t in p.x_ticks)


def test_one_point_alone_is_drawn_inside() -> None:
    (mark,) = drawn([point(0.0, 0.0)]).marks
    assert LEFT <= mark.x <= RIGHT
    assert TOP <= mark.y <= BOTTOM


def test_a_near_sla_is_a_line_and_a_far_one_an_arrow() -> None:
    points = [point(1e-4, 0.1), point(2e-4, 0.05)]
    near, far, short = (drawn(points, s).limit for s in (2.2e-4, 0.02, 1e-6))
    assert near is not None
    assert near.x is not None
    assert far is not None
    assert (far.x, far.label.text[-1]) == (None, "→")
    assert short is not None
    assert (short.x, short.label.text[0]) == (None, "←")


def test_the_word_of_a_far_sla_leaves_points_alone() -> None:
    points = [point(1e-4, 0.001), point(2e-4, 0.1), point(1e-4, 0.1)]
    for sla_s in (0.02, 1e-6):
        p = drawn(points, sla_s)
        assert p.limit is not None
        x, y, right, below = _text_box(p.limit.label)
        assert not any(x < m.x < right and y < m.y < below for m in p.marks)


def test_the_staircase_skips_points_that_another_beats() -> None:
    p = drawn([point(1e-4, 0.1), point(2e-4, 0.2), point(3e-4, 0.05)])
    assert p.steps.count("H") == 1


def test_labels_stand_clear_of_each_other_of_points_and_of_the_sla() -> None:
    crowd = [point(1e-4 + 2e-6 * n, 0.1 * 0.6**n) for n in range(12)]
    labelled = [
        point(1.01e-4, 0.11, "uniform", label="all e4m3"),
        point(1.04e-4, 0.09, "uniform", label="all bf16"),
        point(1.03e-4, 0.08, "measured", label="chosen: p7", low=0.07, high=0.09),
    ]
    p = drawn([*crowd, *labelled], sla_s=1.06e-4)
    assert p.limit is not None
    boxes = [_text_box(m.label) for m in p.marks if m.label]
    assert len(boxes) == 3
    boxes.append(_text_box(p.limit.label))
    for i, box in enumerate(boxes):
        assert all(_shared(box, other) == 0 for other in boxes[:i])
        assert box[0] >= LEFT
        assert box[2] <= RIGHT
    for box in boxes[:3]:
        for m in p.marks:
            assert not (box[0] < m.x < box[2] and box[1] < m.y < box[3])
