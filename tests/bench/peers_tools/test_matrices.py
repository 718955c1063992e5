"""What the comparison with the peers rests on: any assignment runs exactly as given."""

from itertools import combinations

import pytest
import torch

from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import Reference, Stacked, WeightCodes
from optimizer.stack import Component, Site, choice_named
from tests.bench.peers_tools import matrices
from tests.optimizer import tiny


def test_a_split_model_computes_what_it_did() -> None:
    model = tiny.loaded()
    before = model.forward(tiny.ids(), Reference())
    matrices.split(model)
    assert torch.equal(model.forward(tiny.ids(), Reference()), before)


def test_every_matrix_of_the_layers_is_a_site_and_remembers_whom_it_is_fused_with() -> (
    None
):
    model = tiny.loaded()
    sites = matrices.split(model)
    assert len(sites) == len(set(sites.values())) == 7 * tiny.LAYERS
    fused = {
        n for n, s in sites.items() if matrices.group(s) == Site(1, Component.ATTN_QKV)
    }
    assert fused == {f"model.layers.1.self_attn.{p}_proj" for p in "qkv"}


def test_one_matrix_of_a_fused_group_can_be_narrow_alone() -> None:
    model = tiny.loaded()
    ids = tiny.ids()
    sites = matrices.split(model)
    largest = amaxes(calibrate(model, [ids]))
    weights = WeightCodes(model)

    def logits(*names: str) -> torch.Tensor:
        narrow = {sites[n]: choice_named(sites[n].component, "fp8_e4m3") for n in names}
        stack = matrices.assign(sites, narrow, "fp32")
        return model.forward(ids, Stacked(stack, largest, weights))

    q, k = (f"model.layers.0.self_attn.{p}_proj" for p in "qk")
    runs = [logits(), logits(q), logits(k), logits(q, k)]
    for one, other in combinations(runs, 2):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("bits", [8.0, 9.0, 11.5, 16.0])
def test_the_least_loss_is_what_trying_everything_finds(bits: float) -> None:
    generator = torch.Generator().manual_seed(0)
    names = list("abcdefgh")
    sizes = {n: int(torch.randint(1, 9, (), generator=generator)) for n in names}
    gains = {n: float(torch.rand((), generator=generator)) for n in names}
    groups = dict(zip(names, "AABCDEFF", strict=True))
    found = matrices.least(gains, sizes, bits, groups)
    every = [
        [n for n in names if groups[n] in taken]
        for count in range(len(set(groups.values())) + 1)
        for taken in combinations(sorted(set(groups.values())), count)
    ]
    allowed = [some for some in every if matrices.mean_bits(sizes, some) <= bits]
    best = min(sum(gains[n] for n in some) for some in allowed)
    assert found in allowed
    assert sum(gains[n] for n in found) == pytest.approx(best, abs=1e-4 * best)


def test_bits_by_hand() -> None:
    # (16 × 1 + 8 × 3) / 4
    assert matrices.mean_bits({"a": 1, "b": 3}, ["b"]) == 10.0


def test_narrowing_in_an_order_stops_when_the_bits_are_met() -> None:
    sizes = dict.fromkeys("abcd", 1)
    assert matrices.until("dcba", sizes, 12.0) == ["d", "c"]
    assert matrices.until("dcba", sizes, 11.9) == ["d", "c", "b"]
    assert matrices.mean_bits(sizes, matrices.at_random(sizes, 12.0, seed=1)) == 12.0


def test_the_ends_are_narrowed_last() -> None:
    sizes = {f"model.layers.{i}.mlp.down_proj": 1 for i in range(5)}
    assert matrices.ends_last(sizes, 5, 12.8) == [
        "model.layers.2.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]
