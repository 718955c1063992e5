"""Dominance, hypervolume and the knee. Every objective is minimized."""

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]  # (n, m): n candidates, m objectives


def pareto_mask(points: Points) -> NDArray[np.bool_]:
    """Mark the points that no other point dominates: (n, m) -> (n,). O(n²m).

    Equal points do not dominate each other, so all of them stay.
    """
    a, b = points[:, None], points[None, :]
    j_beats_i = np.all(b <= a, axis=-1) & np.any(b < a, axis=-1)  # (i, j)
    mask: NDArray[np.bool_] = ~np.any(j_beats_i, axis=1)
    return mask


def hypervolume_2d(front: Points, reference: tuple[float, float]) -> float:
    """Area that `front` (n, 2) dominates below the `reference` point.

    Raises ValueError if a point lies beyond the reference.
    """
    front = np.unique(front[pareto_mask(front)], axis=0)  # and sorted by column 0
    if not (front <= reference).all():
        raise ValueError(f"a point lies beyond the reference point {reference}")
    ceilings = np.concatenate([[reference[1]], front[:-1, 1]])
    return float(((reference[0] - front[:, 0]) * (ceilings - front[:, 1])).sum())


def knee(front: Points) -> int:
    """Return the row of `front` (n, 2) that lies farthest below the chord.

    The chord joins the ends of the front, each axis scaled to 0..1; where nothing
    lies below it, the answer is the first end. Raises ValueError without points.
    """
    if not len(front):
        raise ValueError("an empty front has no knee")
    low, high = front.min(axis=0), front.max(axis=0)
    scaled = (front - low) / np.where(high > low, high - low, 1.0)
    # On the chord x + y = 1, so 1 - x - y is the distance below it, times √2.
    return int(np.argmax(np.round(1.0 - scaled.sum(axis=1), 12)))


def hypervolume_3d(front: Points, reference: tuple[float, float, float]) -> float:
    """Volume that `front` (n, 3) dominates below the `reference` point. O(n² log n).

    Slabs along the third axis: each has the area that the points up to it dominate.
    Raises ValueError if a point lies beyond the reference.
    """
    front = front[np.argsort(front[:, 2], kind="stable")]
    if not (front <= reference).all():
        raise ValueError(f"a point lies beyond the reference point {reference}")
    tops = np.append(front[:, 2], reference[2])[1:]
    return float(
        sum(
            (top - z) * hypervolume_2d(front[: i + 1, :2], reference[:2])
            for i, (z, top) in enumerate(zip(front[:, 2], tops, strict=True))
            if top > z
        )
    )
