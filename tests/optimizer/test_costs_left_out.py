"""Norms of heads, gathered logits, encoders' heads, casts of padded matrices."""

from dataclasses import replace

import pytest

from optimizer import casts, roofline
from optimizer.architectures import PUBLISHED
from optimizer.configs import shape_of
from optimizer.cost import REDUCE_S, share, site_cost
from optimizer.fits import IDEAL
from optimizer.hardware import Device, device
from optimizer.ledger import LOGIT_BYTES, kinds, served
from optimizer.limits import limits
from optimizer.padding import padded
from optimizer.profile_cases import cases
from optimizer.roofline import Frame, Step
from optimizer.spec import Workload
from optimizer.stack import (
    WHOLE_MODEL,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
    choice_named,
)
from optimizer.timing import pass_s
from tests.optimizer import tiny
from tests.optimizer.test_configs import config_of
from tests.optimizer.test_cost import MODEL, ROOF

H100 = device("h100")
ONE = Workload(batch_size=1, prompt_tokens=512, output_tokens=128)
TWO = replace(ONE, tensor_parallel=2)
HEAD = Site(WHOLE_MODEL, Component.LM_HEAD)


def norms_of(name: str) -> SiteShape:
    model = PUBLISHED[name].shape
    return next(s for s in model.sites if s.site.component is Component.NORMS)


# Norms of heads


def test_the_norms_of_q_and_k_are_kernels_of_their_own() -> None:
    norms, plain = norms_of("qwen3-8b"), norms_of("qwen2-7b")
    assert (norms.heads, norms.kv_heads, norms.head_dim) == (32, 8, 128)
    assert plain.heads == 0
    bf16 = choice_named(Component.NORMS, "bf16")
    assert roofline.launches(norms, bf16, 4096) == 4
    assert roofline.launches(plain, bf16, 3584) == 2
    step, within = Step(3, 1, 512), Frame(4096)
    without = replace(norms, heads=0, kv_heads=0, head_dim=0)
    more, less = (
        roofline.seconds(s, bf16, ROOF, step, within, IDEAL) for s in (norms, without)
    )
    # Each number of 40 heads in and out, in 16 bits.
    moved = 3 * 40 * 128 * (2 + 2)
    assert more - less == pytest.approx(moved / ROOF.bandwidth_bytes_s)


def test_devices_share_the_heads_and_not_the_hidden_states() -> None:
    half = share(norms_of("qwen3-8b"), 2)
    assert (half.elements, half.heads, half.kv_heads) == (2 * 4096, 16, 4)


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def test_networks_and_configs_count_them_alike(name: str) -> None:
    network = tiny.loaded(name).shape.sites
    config = shape_of(config_of(name)).sites
    for sites in (network, config):
        norms = [s for s in sites if s.site == Site(0, Component.NORMS)]
        assert [s.heads > 0 for s in norms] == [name.startswith("Qwen3")]


# Logits under tensor parallelism


def test_devices_gather_the_logits() -> None:
    head = SiteShape(HEAD, n=1600, k=512, weight_elements=1600 * 512)
    half = replace(head, n=800, weight_elements=800 * 512)
    bf16 = choice_named(Component.LM_HEAD, "bf16")

    def step_s(shape: SiteShape, where: Device, workload: Workload) -> float:
        return site_cost(shape, bf16, where, workload, MODEL).per_token_s

    added = step_s(head, ROOF, TWO) - step_s(half, ROOF, ONE)
    # Each sends its 800 logits in 2 bytes to the other.
    assert added == pytest.approx(REDUCE_S + 800 * 2 / ROOF.link_bytes_s)


# Encoders


BERT = shape_of(config_of("BertForMaskedLM"))
GPT = PUBLISHED["qwen2-7b"].shape


def uniform(model: ModelShape) -> Stack:
    return Stack({s.site: choice_named(s.site.component, "bf16") for s in model.sites})


def test_an_encoders_head_answers_at_every_position() -> None:
    assert BERT.every_row
    assert not GPT.every_row
    head = next(s for s in BERT.sites if s.site.component is Component.LM_HEAD)
    bf16 = choice_named(Component.LM_HEAD, "bf16")
    batch = Workload(batch_size=4, prompt_tokens=512, output_tokens=1)

    def pass_of(model: ModelShape) -> float:
        return site_cost(head, bf16, ROOF, batch, model).first_token_s

    def least(rows: int) -> float:
        flops = 2.0 * rows * head.n * head.k / ROOF.peak_flops["bf16"]
        moved = 2 * (head.n * head.k + rows * (head.n + head.k))
        return max(flops, moved / ROOF.bandwidth_bytes_s)

    assert pass_of(BERT) == pytest.approx(least(4 * 512))
    assert pass_of(GPT) == pytest.approx(least(4))


def test_so_it_is_in_limits_memory_profiles_and_casts() -> None:
    alike = kinds(BERT, uniform(BERT))
    batch = Workload(batch_size=4, prompt_tokens=512, output_tokens=1)
    head = next(s for s in BERT.sites if s.site.component is Component.LM_HEAD)
    _, whole = limits(alike, H100, batch)
    bare = {k: n for k, n in alike.items() if k[0].site.component is not HEAD.component}
    _, rest = limits(bare, H100, batch)
    assert whole.flops - rest.flops == 2 * 4 * 512 * head.n * head.k
    held = served(BERT, alike)
    grown = held.working_bytes(4, 512) - held.working_bytes(1, 512)
    assert grown >= 3 * 512 * BERT.vocab * LOGIT_BYTES
    timed = {
        (c.row["n"], c.row["m"])
        for c in cases(BERT, batch, ("bf16",))
        if c.kind == "gemm"
    }
    assert (head.n, 4 * 512) in timed
    some = casts.modelled(BERT, H100, batch)
    wide = choice_named(Component.NORMS, "fp32")
    narrow = choice_named(Component.LM_HEAD, "bf16")
    last = (Site(WHOLE_MODEL, Component.NORMS), HEAD)
    cost = some.cost_of(last, wide, narrow)
    assert cost.first_token_s > cost.per_token_s


# Casts of padded matrices


def test_a_pass_that_is_given_back_is_that_of_the_padded_matrix() -> None:
    act = SiteShape(Site(0, Component.FFN_ACT), elements=4100)
    down = SiteShape(Site(0, Component.FFN_OUT), 4096, 4100, 4096 * 4100)
    up = SiteShape(Site(0, Component.FFN_IN), 4100, 4096, 4096 * 4100, parts=(4100,))
    model = replace(MODEL, sites=(up, act, down))
    e4m3 = choice_named(Component.FFN_OUT, "fp8_e4m3")
    wide = padded(down, e4m3)
    assert wide.k == 4112
    handed = choice_named(Component.FFN_ACT, "fp8_e4m3")
    found = casts.modelled(model, ROOF, ONE).cost_of(
        (act.site, down.site), handed, e4m3
    )
    assert found.per_token_s == -pass_s(1, 4112, e4m3.input, ROOF, None)
    assert found.per_token_s != -pass_s(1, 4100, e4m3.input, ROOF, None)
