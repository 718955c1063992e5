"""Times on a grid: at its points, between them, outside."""

import math

import numpy as np
import pytest

from optimizer.grid import Grid, grid

NAN = math.nan


def test_a_point_of_the_grid_is_answered_exactly():
    known = grid([[1, 2, 4], [10, 20, 30]], np.arange(9.0).reshape(3, 3))
    reading = known.at(2, 30)
    assert reading is not None
    assert (reading.seconds, reading.error) == (5.0, 0.0)


def test_between_two_points_the_time_is_on_the_chord():
    known = grid([[0, 10, 20]], np.array([1.0, 3.0, 4.0]))
    reading = known.at(4)
    assert reading is not None
    assert reading.seconds == pytest.approx(1.8)  # 1 + 0.4 · (3 - 1)


def test_the_error_is_what_the_middle_point_misses_when_its_neighbors_predict_it():
    known = grid([[0, 10, 20]], np.array([1.0, 3.0, 4.0]))
    assert known.leave_one_out(0).tolist() == pytest.approx([2.5 / 3 - 1])
    reading = known.at(4)
    assert reading is not None
    assert reading.error == pytest.approx(1 / 6)


def test_a_gap_is_left_out_of_a_line_too():
    # 20 was not measured: 10 is told from 0 and 40, as the chord from 2 to 6.
    seconds = np.array([[2.0, 4.0, NAN, 6.0], [NAN, NAN, 1.0, 2.0]])
    known = Grid(((0, 1), (0, 10, 20, 40)), seconds)
    assert known.leave_one_out(1).tolist() == pytest.approx([-0.25])


def test_an_uneven_gap_weighs_the_nearer_point_more():
    # At 10, between 0 and 40, the chord from 2 to 6 is at 3; measured were 4.
    known = grid([[0, 10, 40]], np.array([2.0, 4.0, 6.0]))
    assert known.leave_one_out(0).tolist() == pytest.approx([-0.25])


def test_errors_of_two_axes_add_up_in_squares():
    # Along the first axis the middle is 10 % off, along the second it is 20 %.
    first, second = np.array([0.9, 1.0, 1.3]), np.array([0.8, 1.0, 1.6])
    known = grid([[0, 1, 2], [0, 1, 2]], np.outer(first, second))
    assert known.errors == pytest.approx((0.1, 0.2))
    # Off both axes at once: of integer axes only with wider ones.
    wide = grid([[0, 2, 4], [0, 2, 4]], np.outer(first, second))
    reading = wide.at(1, 1)
    assert reading is not None
    assert reading.error == pytest.approx(math.hypot(0.1, 0.2))
    assert reading.seconds == pytest.approx(0.95 * 0.9)


@pytest.mark.parametrize("point", [(0, 5), (21, 5), (10, 4), (10, 8)])
def test_outside_the_grid_there_is_no_answer(point):
    assert grid([[1, 10, 20], [5, 6, 7]], np.ones((3, 3))).at(*point) is None


def test_beside_a_point_that_was_not_measured_there_is_no_answer():
    seconds = np.array([[1.0, 2.0, 3.0], [2.0, NAN, 4.0], [3.0, 4.0, 5.0]])
    known = Grid(((0, 10, 20), (0, 10, 20)), seconds, None, (0.1, 0.1))
    assert known.at(10, 10) is None
    assert known.at(5, 5) is None


def test_along_one_line_a_gap_is_bridged():
    seconds = np.array([[1.0, 2.0, 3.0], [2.0, NAN, 4.0], [3.0, 4.0, 5.0]])
    known = Grid(((0, 10, 20), (0, 10, 20)), seconds, None, (0.1, 0.1))
    reading = known.at(10, 5)
    assert reading is not None
    assert reading.seconds == pytest.approx(2.5)  # a quarter of the way from 2 to 4


def test_a_line_that_ends_before_the_point_has_no_answer():
    seconds = np.array([[1.0, 2.0, NAN], [2.0, 3.0, 4.0]])
    known = Grid(((0, 10), (0, 10, 20)), seconds, None, (0.1, 0.1))
    assert known.at(0, 15) is None


def test_between_two_points_without_a_third_there_is_no_error_and_no_answer():
    known = grid([[1, 64]], np.array([1.0, 2.0]))
    assert known.at(1) is not None
    assert known.at(32) is None


def test_a_measured_point_has_the_spread_that_was_measured_with_it():
    known = grid([[1, 2, 4]], np.array([1.0, 2.0, 3.0]), np.array([0.01, 0.02, 0.03]))
    reading = known.at(2)
    assert reading is not None
    assert reading.error == 0.02


def test_no_reading_beats_a_limit_that_every_point_keeps():
    # max(a·m, b·n) is convex along each axis, and a chord lies above a convex curve.
    m, n = np.array([1, 8, 64]), np.array([1, 16, 256])
    limit = np.maximum.outer(3.0 * m, 1.0 * n)
    known = grid([m.tolist(), n.tolist()], limit)
    for i in (1, 3, 9, 40, 64):
        for j in (1, 5, 17, 200, 256):
            reading = known.at(i, j)
            assert reading is not None
            assert reading.seconds >= max(3.0 * i, 1.0 * j) * (1 - 1e-12)
