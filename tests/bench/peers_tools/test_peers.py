"""The whole comparison on a tiny model, with an answer made up for one peer."""

from pathlib import Path

import pytest
import torch

from optimizer.execute import Reference, WeightCodes
from optimizer.sites import LinearPart
from tests.bench import peers
from tests.bench.peers_tools import matrices
from tests.bench.peers_tools.environment import Answer
from tests.bench.peers_tools.tables import APART, FUSED, Report
from tests.optimizer import tiny

BITS = [9.0, 12.0]


def test_everybody_is_run_at_the_same_bits_and_ratios_are_of_the_means() -> None:
    loaded = tiny.loaded()
    sites = matrices.split(loaded)
    bench = peers.Bench(
        product=tiny.loaded(),
        loaded=loaded,
        folder=Path(),
        sites=sites,
        sizes=matrices.linear_sites(loaded),
        weights=WeightCodes(loaded),
        bits=BITS,
        held_out=[tiny.ids(seed=seed) for seed in (8, 9)],
    )
    everything = dict.fromkeys(BITS, frozenset(sites))
    answers = {"theirs": Answer(everything, 4.0, 2.0, "1")}
    draw = peers.decide(bench, [tiny.ids(seed=1), tiny.ids(seed=2)], answers, seed=0)
    for bits in BITS:
        for name in (FUSED, APART, *peers.WHOLE):
            assert draw.bits.get((name, bits), 0.0) <= bits
    kl = peers.evaluate(bench, draw, "tiny")
    assert all(len(values) == 48 for values in kl.values())
    # What narrows every matrix is one stack, whoever asked for it.
    narrow = kl["everything fp8_e4m3", 0.0]
    assert (kl["theirs", 9.0] == narrow).all()
    assert kl["everything bf16", 0.0].mean() < kl[FUSED, 12.0].mean() < narrow.mean()
    report = Report(BITS, ["theirs"], peers.WHOLE, [kl], [{**draw.seconds}])
    figures = report.figures()
    share = figures["ours, weight-only at 9 bits: times the best peer's KL"]
    assert share == pytest.approx(kl["ours, weight-only", 9.0].mean() / narrow.mean())
    ours = draw.seconds["ours"][0]
    assert figures["time over the fastest peer's, by the clock"] == ours / 4.0


def test_a_matrix_sends_back_its_own_gradient_alone() -> None:
    model = tiny.loaded()
    matrices.split(model)
    q, k = (model.layers[0].self_attn.get_submodule(f"{p}_proj") for p in "qk")
    seen: list[torch.Tensor] = []

    class Watch(Reference):
        def linear(self, part: LinearPart, x: torch.Tensor) -> torch.Tensor:
            x.register_hook(seen.append)
            return super().linear(part, x)

    x = torch.randn(1, 3, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    x.requires_grad_(True)
    model.running = Watch()
    (q(x).sum() + k(x).sum()).backward()
    assert x.grad is not None
    assert len(seen) == 2
    assert torch.allclose(seen[0] + seen[1], x.grad)
    assert not torch.allclose(seen[0], seen[1])
