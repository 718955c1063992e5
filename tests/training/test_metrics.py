"""Every figure of a look, against the same by hand in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from optimizer.training.metrics import (
    Look,
    Watched,
    layer_parameters,
    looks,
    output_look,
    plain_name,
    total_norm,
)
from tests.training.two_layers import TwoLayers, batch, by_hand, by_hand_norm, loss_of

# float32 gradients of sums of a few products: some ulp of 2^-24.
CLOSE = 16 * 2.0**-24


def looked(scale: float = 1.0) -> tuple[TwoLayers, dict[str, Look]]:
    model = TwoLayers()
    (loss_of(model, batch()) * scale).backward()
    return model, looks(layer_parameters(model), scale)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_norms_and_ratios_are_those_of_float64(scale: float) -> None:
    model, found = looked(scale)
    hand = by_hand(model, batch())
    for name, layer in (("first", model.first), ("second", model.second)):
        norm = float(np.sqrt((hand[name] ** 2).sum()))
        weights = layer.weight.detach().double().square().sum().sqrt().item()
        assert found[name].gradient_norm == pytest.approx(norm, rel=CLOSE)
        assert found[name].weight_norm == pytest.approx(weights, rel=CLOSE)
        ratio = found[name].update_ratio(0.01)
        assert ratio == pytest.approx(0.01 * norm / weights, rel=CLOSE)
    assert total_norm(found.values()) == pytest.approx(by_hand_norm(hand), rel=CLOSE)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_zeros_and_underflow_are_counted_exactly(scale: float) -> None:
    model, found = looked(scale)
    hand = by_hand(model, batch())
    for name, g in hand.items():
        nonzero = g != 0
        assert found[name].zero_rate == (~nonzero).sum() / g.size
        tiny = (np.abs(g) < 2.0**-126) & nonzero
        assert found[name].underflow_share == tiny.sum() / nonzero.sum()
    assert found["first"].zero_rate == 1 / 6  # the column of zeros
    assert found["first"].underflow_share == 1 / 5  # the column of 1e-39


def test_a_gradient_of_fp16_is_looked_at_as_it_is() -> None:
    layer = nn.Linear(2, 2, bias=False).half()
    layer.weight.grad = torch.tensor([[0.0, 3.0], [6e-8, -4.0]], dtype=torch.float16)
    look = looks(layer_parameters(layer))["model"]
    assert (look.zeros, look.underflowed, look.nonfinite) == (1, 0, 0)
    assert look.gradient_norm == pytest.approx(5.0, rel=1e-12)


def test_what_is_not_finite_is_counted() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.tensor([[1.0, torch.inf], [torch.nan, 0.0]])
    layer.bias.grad = torch.zeros(2)
    look = looks(layer_parameters(layer))["model"]
    assert (look.elements, look.zeros, look.nonfinite) == (6, 3, 2)
    assert np.isnan(look.gradient_norm)


def test_tables_of_embeddings_count_only_where_they_are_the_output_too() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    assert [p.shape for p in layer_parameters(model)["head"]] == [(4, 3), (4,)]
    assert "table" not in layer_parameters(model)
    model["head"].weight = model["table"].weight
    assert len(layer_parameters(model)["head"]) == 2


def test_frozen_parameters_are_not_looked_at() -> None:
    model = TwoLayers()
    model.first.requires_grad_(False)
    assert list(layer_parameters(model)) == ["second"]


def test_the_names_of_wrappers_are_left_out() -> None:
    assert plain_name("module._orig_mod.h.0") == "h.0"
    assert plain_name("module") == plain_name("") == "model"
    assert plain_name("modules.0") == "modules.0"


def test_an_output_is_its_largest_finite_value_and_what_is_not() -> None:
    y = torch.tensor([1.0, -7.0, torch.inf, torch.nan], dtype=torch.float16)
    assert output_look(y).tolist() == [7.0, 2.0]


def test_updates_that_round_away_are_counted() -> None:
    layer = nn.Linear(4, 1, bias=False).bfloat16()
    layer.weight.data.fill_(1.0)
    layer.weight.grad = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    watched = Watched(layer_parameters(layer))
    # Half of bf16's step under 1 is 2^-9: 2^-10 rounds away, 2^-8 does not.
    change = torch.tensor([[2.0**-10, 2.0**-10, 2.0**-8, 1.0]])
    layer.weight.data -= change.bfloat16()
    assert watched.unchanged() == {"model": 2 / 3}
