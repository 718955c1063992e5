import numpy as np
import pytest

from optimizer.pareto import hypervolume_2d, hypervolume_3d, knee, pareto_mask


def test_front_of_a_staircase() -> None:
    points = np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [3.0, 3.0]])
    assert pareto_mask(points).tolist() == [True, True, True, False]


def test_equal_points_do_not_dominate_each_other() -> None:
    assert pareto_mask(np.array([[1.0, 1.0], [1.0, 1.0]])).all()


def test_a_third_objective_keeps_what_two_would_drop() -> None:
    points = np.array([[1.0, 1.0, 2.0], [2.0, 2.0, 1.0]])
    assert pareto_mask(points).all()
    assert pareto_mask(points[:, :2]).tolist() == [True, False]


def test_hypervolume_by_hand() -> None:
    # (4-1)(4-3) + (4-2)(3-2) + (4-3)(2-1) = 3 + 2 + 1
    points = np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [3.0, 3.0]])
    assert hypervolume_2d(points, (4.0, 4.0)) == 6.0


@pytest.mark.parametrize("seed", range(5))
def test_hypervolume_against_darts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, darts = rng.random((20, 2)), rng.random((200_000, 2))
    hit = (points[:, None] <= darts).all(axis=-1).any(axis=0).mean()
    # Four standard errors of a share of at most one half: 4 · 0.5 / √200000.
    assert hypervolume_2d(points, (1.0, 1.0)) == pytest.approx(hit, abs=4.5e-3)


def test_reference_point_must_be_worst() -> None:
    with pytest.raises(ValueError, match="beyond the reference"):
        hypervolume_2d(np.array([[2.0, 0.0]]), (1.0, 1.0))


def test_hypervolume_of_two_boxes_by_hand() -> None:
    # 2·2·2 below (1, 1, 1), and 3·1·1 below (0, 2, 2), of which 2·1·1 is in both.
    points = np.array([[1.0, 1.0, 1.0], [0.0, 2.0, 2.0]])
    assert hypervolume_3d(points, (3.0, 3.0, 3.0)) == 8.0 + 3.0 - 2.0
    assert hypervolume_3d(points[:1], (3.0, 3.0, 1.0)) == 0.0
    assert hypervolume_3d(np.empty((0, 3)), (3.0, 3.0, 3.0)) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_hypervolume_in_three_axes_against_darts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, darts = rng.random((15, 3)), rng.random((200_000, 3))
    points[3, 2] = points[4, 2]  # equal in the axis that is swept
    hit = (points[:, None] <= darts).all(axis=-1).any(axis=0).mean()
    assert hypervolume_3d(points, (1.0, 1.0, 1.0)) == pytest.approx(hit, abs=4.5e-3)


def test_the_reference_point_is_worst_in_three_axes_too() -> None:
    with pytest.raises(ValueError, match="beyond the reference"):
        hypervolume_3d(np.array([[0.0, 0.0, 2.0]]), (1.0, 1.0, 1.0))


def test_knee_is_where_the_curve_bends() -> None:
    # Scaled to the unit square: (0, 1), (0.1, 0.2), (0.5, 0.1), (1, 0).
    front = np.array([[10.0, 100.0], [11.0, 20.0], [15.0, 10.0], [20.0, 0.0]])
    assert knee(front) == 1


def test_a_straight_front_has_its_knee_at_the_first_end() -> None:
    assert knee(np.array([[0.0, 3.0], [1.0, 2.0], [2.0, 1.0], [3.0, 0.0]])) == 0


def test_the_knee_of_one_point_is_that_point() -> None:
    assert knee(np.array([[1.0, 1.0]])) == 0


def test_nothing_has_no_knee() -> None:
    with pytest.raises(ValueError, match="empty"):
        knee(np.empty((0, 2)))
