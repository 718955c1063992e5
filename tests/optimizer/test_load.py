"""A model folder becomes a model, or an error that names what is wrong with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optimizer.errors import ModelError, NonFiniteError
from optimizer.model import load
from tests.optimizer.changed import DOWN, Weights, change_config, change_weights
from tests.service import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def test_what_is_loaded_is_what_is_stored(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    model = load(folder, "mine")
    found = dict(model.network.named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in stored.items())
    assert model.name == "mine"
    assert model.shape.tied_embeddings
    assert model.shape.stored_bytes == sum(w.nbytes for w in stored.values())
    assert not any(p.requires_grad for p in found.values())
    assert not model.network.training


# Case C14a: no layer that was made up at random is ever calibrated.
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop(DOWN), "1 missing keys in tiny: model.layers.1.mlp.down_proj"),
        (lambda w: w.pop("model.embed_tokens.weight"), "2 missing keys in tiny"),
        (
            lambda w: w.update({"model.layers.1.mlp.x.weight": torch.zeros(3, 5)}),
            "1 unexpected keys in tiny: model.layers.1.mlp.x",
        ),
        (
            lambda w: w.update({DOWN: torch.zeros(3, 5)}),
            "1 mismatched keys in tiny: .*down_proj",
        ),
    ],
    ids=["missing", "without embeddings", "unexpected", "of another shape"],
)
def test_weights_that_do_not_fill_the_model_are_named(
    folder: Path, change: Callable[[Weights], object], said: str
) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError, match=said):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 7},
        {"hidden_size": 0},
        {"hidden_size": "64"},
        {"hidden_act": "nope"},
    ],
    ids=str,
)
def test_a_config_that_transformers_refuses_is_the_models_error(
    folder: Path, changes: dict[str, Any]
) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=r"config\.json: .*save_pretrained"):
        load(folder)


def test_more_layers_than_weights_is_an_error(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    said = r"num_hidden_layers is 3, the weights have 2 layers.*save_pretrained"
    with pytest.raises(ModelError, match=said):
        load(folder)


def test_a_weight_that_is_not_a_number_is_named(folder: Path) -> None:
    def spoil(weights: Weights) -> None:
        weights[DOWN][3, 5] = torch.nan

    change_weights(folder, spoil)
    with pytest.raises(NonFiniteError, match="down_proj"):
        load(folder)
