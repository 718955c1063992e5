import math

import pytest

from optimizer.cost import fits, site_cost, stack_cost, tied_bytes
from optimizer.hardware import DEVICES, Device, device
from optimizer.rules import refusals
from optimizer.spec import SWEPT_FORMATS, Workload
from optimizer.stack import (
    LINEAR,
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
    choice_named,
)

H100 = device("h100")
ONE = Workload(batch_size=1, prompt_tokens=512, output_tokens=128)


def layer(index: int) -> list[SiteShape]:
    """A layer of width 512: 8 heads of 64, 2 of them cached, an FFN of 1024."""

    def site(component: Component) -> Site:
        return Site(index, component)

    return [
        SiteShape(site(Component.ATTN_QKV), 768, 512, 768 * 512),
        *(
            SiteShape(site(c), heads=8, kv_heads=2, head_dim=64)
            for c in (
                Component.KV_CACHE,
                Component.ATTN_SCORES,
                Component.ATTN_SOFTMAX,
                Component.ATTN_VALUES,
            )
        ),
        SiteShape(site(Component.ATTN_OUT), 512, 512, 512 * 512),
        SiteShape(site(Component.FFN_IN), 2048, 512, 2048 * 512),
        SiteShape(site(Component.FFN_ACT), elements=1024),
        SiteShape(site(Component.FFN_OUT), 512, 1024, 512 * 1024),
        SiteShape(site(Component.NORMS), weight_elements=1024, elements=1024),
        SiteShape(site(Component.ROUTER), 16, 512, 16 * 512),
    ]


def model(*, tied: bool = True, layers: int = 2) -> ModelShape:
    table = 1600 * 512
    sites = [
        SiteShape(Site(WHOLE_MODEL, Component.EMBEDDINGS), weight_elements=table),
        *(s for i in range(layers) for s in layer(i)),
        SiteShape(
            Site(WHOLE_MODEL, Component.NORMS), weight_elements=512, elements=512
        ),
        SiteShape(Site(WHOLE_MODEL, Component.LM_HEAD), 1600, 512, table),
    ]
    return ModelShape(
        architecture="Toy",
        layers=layers,
        hidden=512,
        vocab=1600,
        max_context=2048,
        parameters=sum(s.weight_elements for s in sites),
        stored_bytes=0,
        tied_embeddings=tied,
        sites=tuple(sites),
    )


def uniform(shape: ModelShape, name: str = "bf16") -> Stack:
    return Stack({s.site: choice_named(s.site.component, name) for s in shape.sites})


def test_fp32_is_never_faster_than_bf16() -> None:
    for site in model().sites:
        component = site.site.component
        wide, half = (choice_named(component, n) for n in ("fp32", "bf16"))
        a, b = (site_cost(site, c, H100, ONE, model()) for c in (wide, half))
        assert a.per_token_s >= b.per_token_s
        assert a.first_token_s >= b.first_token_s


BIG = SiteShape(Site(0, Component.FFN_IN), 8192, 8192, 8192**2)


# No time is shorter than physics allows.


def least_s(
    site: SiteShape, choice: Choice, where: Device, tokens: int, queries: int
) -> float:
    """Time of the weights and FLOPs alone, at the data sheet's figures."""
    if site.site.component not in (*LINEAR, Component.ROUTER):
        return 0.0
    rows = 1 if site.site.component is Component.LM_HEAD else tokens * queries
    fp8 = choice.input.format.startswith("fp8")
    peak = where.peak_flops["fp8" if fp8 else choice.input.format]
    stored = (choice.weight or choice.input).format
    width = {"fp32": 4, "bf16": 2, "fp16": 2}.get(stored, 1)
    return max(
        2 * rows * site.n * site.k / peak,
        width * site.n * site.k / where.bandwidth_bytes_s,
    )


@pytest.mark.parametrize("where", DEVICES.values(), ids=DEVICES)
def test_nothing_is_faster_than_the_data_sheet(where: Device) -> None:
    for site in (*model().sites, BIG):
        answers = refusals(where, "any", site, SWEPT_FORMATS)
        for choice in [c for c, no in answers.items() if no is None]:
            cost = site_cost(site, choice, where, ONE, model())
            assert math.isfinite(cost.first_token_s + cost.per_token_s)
            assert cost.per_token_s >= least_s(site, choice, where, 1, 1)
            assert cost.first_token_s >= least_s(site, choice, where, 1, 512)
            # K and V, whole, once a step: at the mean context 576 / 640 of it.
            assert cost.per_token_s * where.bandwidth_bytes_s >= cost.kv_bytes * 0.9


# Stacks


def test_a_stack_is_the_sum_of_its_sites() -> None:
    shape = model(tied=False)
    stack = uniform(shape)
    costs = [site_cost(s, stack.choices[s.site], H100, ONE, shape) for s in shape.sites]
    total = stack_cost(shape, stack, H100, ONE)
    assert total.per_token_s == pytest.approx(sum(c.per_token_s for c in costs))
    assert total.first_token_s == pytest.approx(sum(c.first_token_s for c in costs))
    assert total.weight_bytes == 2 * shape.parameters
    # K and V: 2 layers · 640 tokens · 2 heads · 64, in 2 bytes each.
    assert total.kv_bytes == 2 * 2 * 640 * 2 * 64 * 2
    assert total.memory_bytes == total.weight_bytes + total.kv_bytes


def test_tied_weights_are_counted_once() -> None:
    apart, tied = model(tied=False), model(tied=True)
    table = 2 * 1600 * 512
    assert (
        stack_cost(apart, uniform(apart), H100, ONE).weight_bytes
        - stack_cost(tied, uniform(tied), H100, ONE).weight_bytes
        == table
    )


def test_tied_weights_in_two_precisions_are_two_tensors() -> None:
    shape = model(tied=True)
    table = 1600 * 512
    bf16 = choice_named(Component.EMBEDDINGS, "bf16")
    fp8 = choice_named(Component.EMBEDDINGS, "fp8_e4m3")
    stored, tensor = (
        choice_named(Component.LM_HEAD, n) for n in ("fp8_e4m3_weight_only", "fp8_e4m3")
    )
    channels = 4 * 1600
    assert tied_bytes(shape, bf16, stored) == 2 * table + table + channels
    assert tied_bytes(shape, fp8, stored) == table + channels  # the same codes
    assert tied_bytes(shape, fp8, tensor) == 2 * table + channels + 4


def test_a_stack_that_decides_too_little_is_an_error() -> None:
    with pytest.raises(KeyError):
        stack_cost(model(), Stack(), H100, ONE)


def test_more_sequences_cost_more_but_less_each() -> None:
    shape = model()
    one, many = (
        stack_cost(shape, uniform(shape), H100, Workload(batch_size=b)).per_token_s
        for b in (1, 16)
    )
    assert one < many < 16 * one


def test_weights_and_cache_must_fit_together() -> None:
    shape = model()
    total = stack_cost(shape, uniform(shape), H100, ONE)

    def with_memory(size: int) -> Device:
        return Device(
            id="x",
            name="x",
            peak_flops={},
            bandwidth_bytes_s=1.0,
            memory_bytes=size,
            native=frozenset(),
        )

    assert fits(total, with_memory(total.memory_bytes))
    assert not fits(total, with_memory(total.memory_bytes - 1))
