"""When a layer drifts, and when it only looks like it."""

import numpy as np
import pytest

from optimizer.training.drift import drift, layer_of
from optimizer.training.trainer import Figures

STEPS = 40


def figures(factor: float = 1.0, noise: float = 0.0, seed: int = 0) -> Figures:
    """Two layers; the second one's gradients and moves are `factor` as large."""
    rng = np.random.default_rng(seed)
    norms = {
        name: list(by * (1 + noise * rng.standard_normal(STEPS)))
        for name, by in (("a.0.w", 1.0), ("a.1.w", factor))
    }
    moved = {"a.0.w": 1.0, "a.1.w": factor}
    return Figures(losses=[1.0] * STEPS, norms=norms, moved=moved)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("model.layers.3", "model.layers.3"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.bias", "lm_head"),
    ],
)
def test_layers_are_named_as_in_the_module_tree(name: str, layer: str) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    ("off", "floor", "drifts"),
    [
        (1.005, 1.0, False),  # within 1 %
        (1.02, 1.0, True),
        (1.02, 1.03, False),  # within the noise
        (1.05, 1.03, True),
        (0.9, 1.0, True),
        (0.0, 1.0, True),  # nothing arrives
    ],
)
def test_a_layer_drifts_beyond_one_percent_and_the_floor(
    off: float, floor: float, drifts: bool
) -> None:
    first, second = drift(figures(), figures(floor), figures(off))
    assert not first.drifts
    assert second.drifts is drifts
    assert second.gradient_norm.value == pytest.approx(off - 1)
    assert second.gradient_norm.floor == pytest.approx(abs(floor - 1))


def test_a_deviation_that_may_be_chance_is_no_drift() -> None:
    noisy = figures(1.015, noise=0.2, seed=1)
    noisy.moved = figures().moved
    found = drift(figures(noise=0.2), figures(), noisy)[1].gradient_norm
    assert found.low < 0.01
    assert not found.drifts


def test_what_is_not_finite_drifts_and_is_null_in_json() -> None:
    broken = figures()
    broken.norms["a.1.w"][7] = float("nan")
    found = drift(figures(), figures(), broken)[1]
    assert found.drifts
    assert found.to_json()["gradient_norm"]["value"] is None


def test_a_run_that_took_no_step_drifts_everywhere() -> None:
    assert all(one.drifts for one in drift(figures(), figures(), Figures()))
