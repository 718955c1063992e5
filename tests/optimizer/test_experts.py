"""Mixture-of-experts layers: what each expert's matrices get, and who got no tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from optimizer.calibrate import Stats, amaxes, calibrate
from optimizer.cost import site_cost
from optimizer.execute import Reference, Stacked, WeightCodes
from optimizer.experts import ExpertCounts, counting, rare
from optimizer.fits import fit
from optimizer.formats import E4M3
from optimizer.hardware import device
from optimizer.model import LoadedModel, instrument
from optimizer.sensitivity import measure
from optimizer.sites import LinearPart
from optimizer.spec import Workload
from optimizer.stack import (
    CHOICES,
    Component,
    Granularity,
    Precision,
    Role,
    Site,
    SiteShape,
    Stack,
    choice_named,
)
from tests.optimizer import tiny

SPARSE = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
IN, OUT, ACT, ROUTER = (
    Site(0, c)
    for c in (
        Component.FFN_IN,
        Component.FFN_OUT,
        Component.FFN_ACT,
        Component.ROUTER,
    )
)
SPECIAL = 5  # the one token that is sent to expert 6
LONELY, DEAD = 6, 7
PER_TENSOR = Precision("fp8_e4m3")


@pytest.fixture
def lopsided() -> LoadedModel:
    """Eight experts, of which one gets a single token and one gets none (case B1)."""
    config = MixtralConfig(
        **{**tiny.COMMON, "num_hidden_layers": 1},
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    network: Any = MixtralForCausalLM(config)
    layer, table = network.model.layers[0], network.model.embed_tokens.weight
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 0.25)
        layer.self_attn.o_proj.weight.zero_()  # the router sees the tokens themselves
        table[:, 0], table[:, 1] = 3.0, 0.0
        table[SPECIAL, 1] = 30.0
        layer.mlp.gate.weight[DEAD].zero_()[0] = -50.0
        layer.mlp.gate.weight[LONELY].zero_()[0] = -50.0
        layer.mlp.gate.weight[LONELY, 1] = 50.0
        layer.mlp.experts.gate_up_proj[DEAD] *= 0.01  # scales of its own would show
        layer.mlp.experts.down_proj[DEAD] *= 0.01
    network.eval().requires_grad_(False)
    return instrument(network, "MixtralForCausalLM")


def tokens_with_one_special() -> Tensor:
    ids = tiny.ids(64)
    ids[ids == SPECIAL] = SPECIAL + 1
    ids[0, 40] = SPECIAL
    return ids


def calibrated(model: LoadedModel) -> tuple[dict[tuple[Site, Role], Stats], Any]:
    with counting(model) as counts:
        stats = calibrate(model, [tokens_with_one_special()])
    return stats, counts


# Case B1: experts that calibration never routes to.
def test_experts_that_got_few_tokens_are_named_with_their_counts(
    lopsided: LoadedModel,
) -> None:
    _, counts = calibrated(lopsided)
    every = counts.tokens(lopsided)
    assert [t.expert for t in every] == list(range(8))
    assert sum(t.tokens for t in every) == 2 * 64
    few = rare(every)
    assert [(t.name, t.tokens) for t in few[:2]] == [
        ("model.layers.0.mlp.experts.7", 0),
        ("model.layers.0.mlp.experts.6", 1),
    ]


def test_an_expert_without_tokens_has_scales_all_the_same(
    lopsided: LoadedModel,
) -> None:
    stats, _ = calibrated(lopsided)
    found = amaxes(stats)
    for site in (IN, OUT, ROUTER):
        assert found[site, Role.INPUT].isfinite().all()
        assert (found[site, Role.INPUT] > 0).all()
    weights = WeightCodes(lopsided)
    scales = {}
    for part in lopsided.parts[IN]:
        codes, scale = weights.get(part, PER_TENSOR)
        assert scale is not None
        assert scale == part.weight.abs().max() / E4M3.max
        assert codes.abs().max() == E4M3.max  # its own range, fully used
        scales[part.index] = float(scale)
    assert scales[DEAD] < 0.05 * min(v for k, v in scales.items() if k != DEAD)


def test_an_expert_without_tokens_runs_when_a_token_comes(
    lopsided: LoadedModel,
) -> None:
    # Its input's static scale is that of the tokens which the other experts saw.
    stats, _ = calibrated(lopsided)
    stack = Stack({s: choice_named(s.component, "fp8_e4m3") for s in (IN, OUT)})
    executor = Stacked(stack, amaxes(stats), WeightCodes(lopsided))
    with torch.no_grad():
        lopsided.layers[0].mlp.gate.weight[DEAD, 0] = 50.0  # type: ignore[union-attr, index, operator]
        ids = tokens_with_one_special()
        with counting(lopsided) as counts:
            reference = lopsided.forward(ids, Reference())
        logits = lopsided.forward(ids, executor)
    assert counts.tokens(lopsided)[DEAD].tokens > 32
    assert logits.isfinite().all()
    assert 0 < (logits - reference).norm() / reference.norm() < 0.1


def test_a_sweep_passes_over_experts_without_tokens(lopsided: LoadedModel) -> None:
    stats, _ = calibrated(lopsided)
    choice = choice_named(Component.FFN_IN, "fp8_e4m3")
    found = measure(
        lopsided,
        [tokens_with_one_special()],
        {IN: [choice], OUT: [choice]},
        amaxes(stats),
        WeightCodes(lopsided),
    )
    assert all(0 < s.kl_nats < 10 for s in found.values())


def test_every_expert_has_matrices_of_its_own_name(lopsided: LoadedModel) -> None:
    for site, parameter in ((IN, "gate_up_proj"), (OUT, "down_proj")):
        assert [p.name for p in lopsided.parts[site]] == [
            f"model.layers.0.mlp.experts.{e}.{parameter}" for e in range(8)
        ]
        for expert, part in enumerate(lopsided.parts[site]):
            assert part.weight.shape[::-1] == (
                (tiny.WIDTH, 2 * tiny.INNER) if site == IN else (tiny.INNER, tiny.WIDTH)
            )
            assert torch.equal(part.weight, part.stored[expert])


# Case B3, where experts split the tokens up: padding goes to none of them.
@pytest.mark.parametrize("name", SPARSE)
def test_padding_reaches_no_expert(name: str) -> None:
    model, ids = tiny.loaded(name), tiny.ids(12)
    padded = torch.cat([tiny.ids(5, seed=3), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    with counting(model) as alone:
        wanted = amaxes(calibrate(model, [ids]))
    with counting(model) as beside:
        found = amaxes(calibrate(model, [padded], masks=[mask]))
    for place in wanted:
        torch.testing.assert_close(found[place], wanted[place])
    assert counted(beside, model) == counted(alone, model)
    assert sum(counted(alone, model)) == 2 * 12 * len(model.layers)


def counted(counts: ExpertCounts, model: LoadedModel) -> list[int]:
    return [t.tokens for t in counts.tokens(model)]


def test_counting_ends_with_its_context() -> None:
    model = tiny.loaded("MixtralForCausalLM")
    with counting(model) as counts:
        pass
    with torch.no_grad():
        model.forward(tiny.ids(), Reference())
    assert counts.tokens(model) == ()


# Case C3a: `mlp.gate` is a router, `mlp.gate_proj` is not.
def test_routers_stay_high_and_projections_called_gate_do_not() -> None:
    model = tiny.loaded("Qwen3MoeForCausalLM/dense")  # the first layer has no experts
    names = {p.name: site for site, parts in model.parts.items() for p in parts}
    assert names["model.layers.0.mlp.gate_proj"] == IN
    assert names["model.layers.1.mlp.gate"] == Site(1, Component.ROUTER)
    assert not any(c.is_fp8 for c in CHOICES[Component.ROUTER])
    routers = [n for n, site in names.items() if site.component is Component.ROUTER]
    assert routers == ["model.layers.1.mlp.gate"]


def test_the_shared_experts_gate_is_a_router() -> None:
    model = tiny.loaded("Qwen2MoeForCausalLM")
    assert [p.name for p in model.parts[ROUTER]] == [
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
    ]
    shared = [p.name for p in model.parts[IN] if p.index is None]
    assert shared == [
        "model.layers.0.mlp.shared_expert.gate_proj",
        "model.layers.0.mlp.shared_expert.up_proj",
    ]


def test_a_rounded_router_has_a_rounded_weight() -> None:
    class Spy(Stacked):
        def linear(self, part: LinearPart, x: Tensor) -> Tensor:
            y = super().linear(part, x)
            if part.site == ROUTER:
                codes, _ = self._weights.get(part, Precision("bf16"))
                seen.append((codes, y))
            return y

    seen: list[tuple[Tensor, Tensor]] = []
    model = tiny.loaded("MixtralForCausalLM")
    stack = Stack({ROUTER: choice_named(Component.ROUTER, "bf16")})
    with torch.no_grad():
        model.forward(tiny.ids(8), Spy(stack, {}, WeightCodes(model)))
    ((codes, logits),) = seen
    assert torch.equal(codes, codes.bfloat16().float())
    assert torch.equal(logits, logits.bfloat16().float())


def test_gate_and_up_of_a_shared_expert_share_a_scale_and_no_expert_does() -> None:
    model = tiny.loaded("Qwen2MoeForCausalLM")
    weights = WeightCodes(model)
    scales: dict[str, set[float]] = {}
    for part in model.parts[IN]:
        scale = weights.get(part, PER_TENSOR)[1]
        assert scale is not None
        scales.setdefault(part.group, set()).add(float(scale))
    assert [len(s) for s in scales.values()] == [1] * 5  # four experts, one shared
    assert len(set.union(*scales.values())) == 5


def test_channel_scales_of_an_expert_are_its_own() -> None:
    model = tiny.loaded("MixtralForCausalLM")
    part = model.parts[IN][1]
    precision = Precision("fp8_e4m3", Granularity.CHANNEL)
    _, scale = WeightCodes(model).get(part, precision)
    assert scale is not None
    rows = part.weight.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(scale, rows / E4M3.max)


# --- sizes -------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSE)
def test_sizes_count_every_expert_and_what_a_token_reads(name: str) -> None:
    model = tiny.loaded(name)
    shapes = {s.site: s for s in model.shape.sites}
    inner = {"MixtralForCausalLM": tiny.INNER}.get(name, 16)
    shared = 24 if "Qwen2" in name else 0
    width, experts, used = tiny.WIDTH, 4, 2
    for site, rows in ((IN, 2), (OUT, 1)):
        shape = shapes[site]
        assert shape.weight_elements == rows * width * (experts * inner + shared)
        read = rows * width * (used * inner + shared)
        assert shape.n * shape.k == read
        assert shape.active_share == pytest.approx(read / shape.weight_elements)
    assert shapes[IN].k == shapes[OUT].n == width
    assert shapes[ACT].elements == shapes[OUT].k == used * inner + shared
    gates = 1 if "Qwen2" in name else 0
    assert (shapes[ROUTER].n, shapes[ROUTER].k) == (experts + gates, width)
    assert shapes[ROUTER].active_share == 1.0


def test_more_tokens_read_more_experts() -> None:
    # Eight experts of which a token takes two: at decode a quarter is read, and the
    # 64 tokens of a batch, all but surely, read every one of them.
    wide = 4096
    shape = SiteShape(IN, 2 * wide, wide, 8 * wide * wide, active_share=0.25)
    model = replace(tiny.loaded("MixtralForCausalLM").shape, hidden=wide)
    one, many = (
        site_cost(
            shape,
            choice_named(IN.component, "bf16"),
            device("h100"),
            Workload(batch_size=rows, prompt_tokens=1, output_tokens=1),
            model,
        ).per_token_s
        for rows in (1, 64)
    )
    floor = fit(device("h100")).gemm("bf16").fixed_s
    assert (many - floor) / (one - floor) == pytest.approx(4, rel=0.05)


def test_the_parts_of_a_model_are_all_its_matrices() -> None:
    model = tiny.loaded("Qwen2MoeForCausalLM")
    sizes = sum(p.weight.numel() for some in model.parts.values() for p in some)
    norms = sum(p.numel() for p in model.network.parameters() if p.ndim == 1)
    table = tiny.VOCAB * tiny.WIDTH
    assert model.shape.parameters == sizes + norms + table
