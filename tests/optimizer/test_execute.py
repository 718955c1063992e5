from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from optimizer.calibrate import amaxes, calibrate
from optimizer.errors import SpecError
from optimizer.execute import (
    Operand,
    Reference,
    Stacked,
    WeightCodes,
    round_operand,
)
from optimizer.formats import FORMATS
from optimizer.matmul import linear_fp8, scaled_product
from optimizer.model import LoadedModel
from optimizer.quantize import amax, scale_from_amax
from optimizer.sites import LinearPart
from optimizer.stack import (
    CHOICES,
    GROUP_SIZES,
    WHOLE_MODEL,
    Choice,
    Component,
    Granularity,
    Precision,
    Role,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer import tiny
from tests.optimizer.numbers import assert_same_bits, normal
from tests.optimizer.steps import (
    attend,
    codes_by_hand,
    heads_amax,
    rounded,
    step,
)

QKV = Site(0, Component.ATTN_QKV)
SCORES = Site(0, Component.ATTN_SCORES)
VALUES = Site(0, Component.ATTN_VALUES)
NARROWED = [  # with scales behind the sum; test_groups.py has the others
    c
    for c in CHOICES[Component.ATTN_QKV]
    if c.name != "fp32"
    and c.weight is not None
    and c.weight.granularity not in GROUP_SIZES
]
FP32_ULP = 2.0**-24  # half of one, relative


def run_linear(
    model: LoadedModel, part: LinearPart, choice: Choice, x: Tensor, largest: Tensor
) -> Tensor:
    stack = Stack({part.site: choice})
    executor = Stacked(stack, {(part.site, Role.INPUT): largest}, WeightCodes(model))
    return executor.linear(part, x)


# Linear layers


@pytest.mark.parametrize("choice", NARROWED, ids=lambda c: c.name)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "GPT2LMHeadModel"])
def test_a_linear_is_codes_multiplied_scaled_biased_and_rounded_once(
    architecture: str, choice: Choice
) -> None:
    model = tiny.loaded(architecture)
    part = model.parts[QKV][-1]  # Qwen2: v, with two siblings; GPT-2: c_attn, a Conv1D
    assert part.bias is not None
    assert choice.weight is not None
    x = normal(2, 5, 32) * 3
    static = torch.tensor(8.0)  # what calibration saw: some of x saturates, or none
    dynamic = choice.input.granularity is Granularity.TOKEN
    a, a_scale = codes_by_hand(
        x, choice.input, x.abs().amax(-1, True) if dynamic else static
    )
    per_row = choice.weight.granularity is Granularity.CHANNEL
    siblings = max(p.weight.abs().max() for p in model.parts[QKV])
    w, w_scale = codes_by_hand(
        part.weight,
        choice.weight,
        part.weight.abs().amax(-1, True) if per_row else siblings,
    )
    scale = a_scale * w_scale.flatten()  # (..., 1) or () times (out,) or (1,)
    exact = (a @ w.T) * scale + part.bias.double()
    # fp32: 32 products summed, two scales and a bias.
    absolute = (a.abs() @ w.abs().T) * scale + part.bias.double().abs()
    error = absolute * (32 + 3) * FP32_ULP
    output = FORMATS[choice.output]
    low, high = rounded(exact - error, output), rounded(exact + error, output)
    got = run_linear(model, part, choice, x, static)
    assert ((low <= got) & (got <= high)).all()
    # Elsewhere a tie is too near to call: with fp16's 11 bits, for one in twelve.
    assert (low == high).double().mean() > 0.85


def test_scales_come_after_the_sum() -> None:
    # Case A11: 64 products of 448 and 4 are 114688, which fp16 would make infinite.
    x = (torch.full((1, 64), 448.0), torch.tensor(1.0))
    weight = (torch.full((1, 64), 4.0), torch.tensor(0.5 / 448))
    assert scaled_product(*x, *weight).item() == pytest.approx(128.0)


@pytest.mark.parametrize(
    "name", ["fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2", "fp8_e4m3_weight_only"]
)
def test_a_linear_is_the_kernel_of_quantize_bit_for_bit(name: str) -> None:
    model = tiny.loaded("Qwen2ForCausalLM")
    (part,) = model.parts[Site(1, Component.ATTN_OUT)]
    choice = choice_named(part.site.component, name)
    assert choice.weight is not None
    x, static = normal(3, 32), torch.tensor(2.5)
    codes, scale = WeightCodes(model).get(part, choice.weight)
    assert scale is not None
    fmt = FORMATS[choice.input.format]
    dynamic = choice.input.granularity is Granularity.TOKEN
    largest = amax(x, Granularity.TOKEN) if dynamic else static
    want = linear_fp8(
        x, codes, scale, scale_from_amax(largest, fmt), fmt, FORMATS[choice.output]
    )
    assert_same_bits(run_linear(model, part, choice, x, static), want)


def test_a_static_scale_that_nobody_calibrated_is_an_error() -> None:
    model = tiny.loaded()
    stack = Stack({QKV: choice_named(QKV.component, "fp8_e4m3")})
    with pytest.raises(SpecError, match="static"):
        model.forward(tiny.ids(), Stacked(stack, {}, WeightCodes(model)))


def test_dynamic_scales_and_narrow_weights_need_no_calibration() -> None:
    model = tiny.loaded()
    for name in ("bf16", "fp8_e4m3_token", "fp8_e4m3_weight_only"):
        stack = Stack({QKV: choice_named(QKV.component, name)})
        logits = model.forward(tiny.ids(), Stacked(stack, {}, WeightCodes(model)))
        assert logits.isfinite().all()


def test_values_beyond_what_was_calibrated_saturate() -> None:
    x = torch.tensor([[1.0, 2.0, 50.0, -50.0]])
    codes, scale = round_operand(x, Precision("fp8_e4m3"), torch.tensor(2.0))
    assert scale is not None
    assert codes.tolist() == [[224.0, 448.0, 448.0, -448.0]]


# Rows (case B10)


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.TOKEN])
def test_a_row_has_the_same_codes_alone_and_beside_a_neighbor(
    granularity: Granularity,
) -> None:
    precision, calibrated = Precision("fp8_e4m3", granularity), torch.tensor(1.0)
    row, neighbor = torch.tensor([[1.0, 0.3]]), torch.tensor([[100.0, 7.0]])
    alone, scale = round_operand(row, precision, calibrated)
    both, scales = round_operand(torch.cat([row, neighbor]), precision, calibrated)
    assert torch.equal(both[:1], alone)
    assert scale is not None
    assert scales is not None
    assert torch.equal(scales.expand(2, 1)[:1], scale.expand(1, 1))
    values = (alone * scale).flatten().tolist()
    assert values == pytest.approx([1.0, 0.285714], rel=1e-5)


def test_a_sequence_is_rounded_alike_alone_and_in_a_batch() -> None:
    model, ids = tiny.loaded(), tiny.ids(batch=3)
    largest, weights = amaxes(calibrate(model, ids.split(1))), WeightCodes(model)
    stack = Stack({s: choice_named(s.component, narrowest(s)) for s in model.sites})

    def logits(some: Tensor) -> Tensor:
        with torch.no_grad():
            return model.forward(some, Stacked(stack, largest, weights))

    batch = logits(ids)
    for i in range(3):
        # A sum in another order may cross a tie in one place, and bf16 is coarse.
        torch.testing.assert_close(
            batch[i], logits(ids[i : i + 1])[0], rtol=0, atol=0.2
        )


def narrowest(site: Site) -> str:
    names = [c.name for c in CHOICES[site.component]]
    return next(n for n in ("fp8_e4m3_token", "fp8_e4m3", "bf16") if n in names)


# Attention


def run_scores(name: str) -> Tensor:
    some = step()
    largest = {
        (SCORES, Role.INPUT): heads_amax(some.query),
        (SCORES, Role.WEIGHT): heads_amax(some.key),
    }
    stack = Stack({SCORES: choice_named(SCORES.component, name)})
    return Stacked(stack, largest, WeightCodes(tiny.loaded())).attention(some)


@pytest.mark.parametrize(
    "name", ["fp8_e4m3", "fp8_e4m3_head", "fp8_e4m3_token", "fp8_e5m2"]
)
def test_scores_multiply_codes_with_the_scale_of_their_own_head(name: str) -> None:
    some, choice = step(), choice_named(SCORES.component, name)
    assert choice.weight is not None
    operands = []
    for x, precision in ((some.query, choice.input), (some.key, choice.weight)):
        largest = heads_amax(x)
        if precision.granularity is Granularity.HEAD:
            largest = largest.view(1, -1, 1, 1)
        elif precision.granularity is Granularity.TOKEN:
            largest = x.abs().amax(-1, keepdim=True)
        else:
            largest = largest.max()
        codes, scale = codes_by_hand(x, precision, largest)
        operands.append(codes * scale)
    assert some.mask is not None
    want = attend(*operands, some.value.double(), some.mask.double(), some.scaling)
    # exp() of scores near 40 in fp32 has 40 times the rounding of a score.
    torch.testing.assert_close(run_scores(name).double(), want, rtol=1e-4, atol=1e-4)


def test_fp32_rounds_nothing() -> None:
    model, x = tiny.loaded(), normal(3, 32)
    assert round_operand(x, Precision("fp32"), None) == (x, None)
    (part,) = model.parts[Site(0, Component.ATTN_OUT)]
    assert WeightCodes(model).get(part, Precision("fp32"))[1] is None
    fp32 = choice_named(part.site.component, "fp32")
    want = Reference().linear(part, x)
    assert torch.equal(run_linear(model, part, fp32, x, torch.ones(())), want)


def test_attention_without_a_mask_sees_everything() -> None:
    some = replace(step(), mask=None)
    q, k, v = some.query.double(), some.key.double(), some.value.double()
    want = attend(q, k, v, torch.zeros(1, 1, 6, 6).double(), some.scaling)
    got = Reference().attention(some).double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_scale_for_each_head_keeps_the_small_ones() -> None:
    # Case D1: beside a head of 10, e4m3 with one scale flushes parts of a head of 0.1.
    key = step().key
    small = key[:, 1]
    errors = {}
    for granularity in (Granularity.TENSOR, Granularity.HEAD):
        precision = Precision("fp8_e4m3", granularity)
        codes, scale = round_operand(key, precision, heads_amax(key))
        assert scale is not None
        errors[granularity] = float((codes * scale - key)[:, 1].norm() / small.norm())
    assert errors[Granularity.HEAD] < 2**-4  # half an ulp of three bits
    assert errors[Granularity.HEAD] < errors[Granularity.TENSOR]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_head", "fp8_e5m2"])
def test_values_and_probabilities_are_rounded_where_the_stack_says(name: str) -> None:
    some = step()
    choice = choice_named(VALUES.component, name)
    largest = {
        (VALUES, Role.INPUT): torch.ones(4),  # probabilities
        (VALUES, Role.WEIGHT): heads_amax(some.value),
    }
    executor = Stacked(Stack({VALUES: choice}), largest, WeightCodes(tiny.loaded()))
    got = executor.attention(some)
    assert some.mask is not None
    assert choice.weight is not None
    q, k, mask = some.query.double(), some.key.double(), some.mask.double()
    by_head = choice.weight.granularity is Granularity.HEAD
    of_value = (
        heads_amax(some.value).view(1, -1, 1, 1) if by_head else some.value.abs().max()
    )
    value, scale = codes_by_hand(some.value, choice.weight, of_value)
    out = []
    for head in range(4):
        s = (q[:, head] @ k[:, head // 2].transpose(1, 2)) * some.scaling + mask[:, 0]
        p, p_scale = codes_by_hand(s.softmax(-1).float(), choice.input, torch.ones(()))
        out.append((p * p_scale) @ (value * scale)[:, head // 2])
    want = torch.stack(out, dim=1)
    assert torch.equal(got.double(), rounded(got, FORMATS["bf16"]))
    # One bf16 rounding; a probability at a tie of e4m3 may go the other way: rare.
    near = (got.double() - want).abs() <= want.abs() * 2**-8 + 1e-6
    assert near.double().mean() > 0.97


# Made once


class Counting(Stacked):
    """Counts what is rounded."""

    def __init__(
        self,
        stack: Stack,
        largest: dict[tuple[Site, Role], Tensor],
        weights: WeightCodes,
    ) -> None:
        super().__init__(stack, largest, weights)
        self.taps: Counter[tuple[Site, Role]] = Counter()

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        self.taps[site, role] += 1
        return super().tap(site, role, x, mask)


def test_siblings_round_their_shared_input_once() -> None:
    model, ids = tiny.loaded(), tiny.ids()
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    stack = Stack({s: choice_named(s.component, "fp8_e4m3") for s in model.parts})
    executor = Counting(stack, largest, weights)
    model.forward(ids, executor)
    inputs = [executor.taps[site, Role.INPUT] for site in model.parts]
    assert inputs == [1] * len(model.parts)
    model.forward(tiny.ids(seed=1), executor)
    assert executor.taps[QKV, Role.INPUT] == 2


def test_an_executor_may_be_used_again() -> None:
    model, first, second = tiny.loaded(), tiny.ids(), tiny.ids(seed=1)
    largest, weights = amaxes(calibrate(model, [first])), WeightCodes(model)
    stack = Stack({s: choice_named(s.component, "fp8_e4m3") for s in model.parts})
    used = Stacked(stack, largest, weights)
    with torch.no_grad():
        model.forward(first, used)
        again = model.forward(second, used)
        fresh = model.forward(second, Stacked(stack, largest, weights))
    assert torch.equal(again, fresh)


def test_codes_of_a_matrix_are_made_once() -> None:
    model = tiny.loaded()
    weights = WeightCodes(model)
    head = model.parts[Site(WHOLE_MODEL, Component.LM_HEAD)][0]
    static, rows = Precision("fp8_e4m3"), Precision("fp8_e4m3", Granularity.CHANNEL)
    assert weights.get(head, static) is weights.get(head, static)
    assert weights.get(head, static) is not weights.get(head, rows)


def test_rounding_a_stack_changes_no_weight() -> None:
    model, ids = tiny.loaded("Gemma2ForCausalLM"), tiny.ids()
    before = {n: p.clone() for n, p in model.network.named_parameters()}
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    for name in ("bf16", "fp8_e4m3"):
        choices = {
            s: choice_named(s.component, name if name in known(s) else "bf16")
            for s in model.sites
        }
        with torch.no_grad():
            model.forward(ids, Stacked(Stack(choices), largest, weights))
    for name, weight in model.network.named_parameters():
        assert torch.equal(weight, before[name]), name


def known(site: Site) -> set[str]:
    return {c.name for c in CHOICES[site.component]}
