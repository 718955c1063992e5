"""Which rows of a projection make Q, K and V, checked against the attention itself."""

import pytest
import torch
from torch import Tensor

from optimizer.calibrate import amaxes, calibrate
from optimizer.errors import ModelError
from optimizer.execute import Reference
from optimizer.model import AttentionStep
from optimizer.sites import LinearPart, kv_rows
from optimizer.stack import Component, Role, Site
from tests.optimizer import tiny

EVERY = sorted({**tiny.MAKERS, **tiny.FORMS})
QKV = Site(0, Component.ATTN_QKV)
# Their Q and K are normalized before positions are encoded.
NORMALIZED = ("Qwen3", "Gemma3")


class Spy(Reference):
    """Keeps what the first layer's projections read and its attention gets."""

    def __init__(self) -> None:
        self.x = torch.empty(0)
        self.step: AttentionStep | None = None

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        if part.site == QKV:
            self.x = x
        return super().linear(part, x)

    def attention(self, step: AttentionStep) -> Tensor:
        if step.layer == 0:
            self.step = step
        return super().attention(step)


def made_of(parts: list[LinearPart], which: str, x: Tensor) -> Tensor:
    """What the rows of Q, K or V alone make of x: (1, heads, tokens, head_dim)."""
    each = []
    for part in parts:
        rows = getattr(kv_rows(part), which)
        y = x @ part.weight[rows].T
        each.append(y if part.bias is None else y + part.bias[rows])
    whole = torch.cat(each, dim=-1)
    return whole.unflatten(-1, (-1, tiny.WIDTH // tiny.HEADS)).transpose(1, 2)


# Case C6: K and V are found in fused matrices, whatever their order.
@pytest.mark.parametrize("name", EVERY)
def test_rows_of_q_k_and_v_make_what_the_attention_gets(name: str) -> None:
    model, spy = tiny.loaded(name), Spy()
    with torch.no_grad():
        model.forward(tiny.ids(12), spy)
    assert spy.step is not None
    parts = model.parts[QKV]
    clip = 0.5 if name.endswith("/clipped") else torch.inf
    made = {w: made_of(parts, w, spy.x).clamp(-clip, clip) for w in "qkv"}
    torch.testing.assert_close(made["v"], spy.step.value)
    if not name.startswith(NORMALIZED):  # the first token's angles are all zero
        torch.testing.assert_close(made["q"][:, :, 0], spy.step.query[:, :, 0])
        torch.testing.assert_close(made["k"][:, :, 0], spy.step.key[:, :, 0])


@pytest.mark.parametrize("name", EVERY)
def test_every_row_is_in_one_of_the_three(name: str) -> None:
    for part in tiny.loaded(name).parts[QKV]:
        rows = kv_rows(part)
        every = torch.cat([rows.q, rows.k, rows.v]).sort().values
        assert torch.equal(every, torch.arange(part.weight.shape[0]))


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [
        ("GPT2LMHeadModel", 4),
        ("Phi3ForCausalLM", 2),
        ("GPTNeoXForCausalLM", 4),
        ("FalconForCausalLM", 1),
        ("FalconForCausalLM/groups", 2),
        ("FalconForCausalLM/heads", 4),
        ("MptForCausalLM", 4),
    ],
)
def test_fused_projections_have_the_kv_heads_of_their_model(
    name: str, kv_heads: int
) -> None:
    model = tiny.loaded(name)
    (part,) = model.parts[QKV]
    rows = kv_rows(part)
    assert len(rows.k) == len(rows.v) == kv_heads * tiny.WIDTH // tiny.HEADS
    shape = next(s for s in model.shape.sites if s.site.component in ATTENDED)
    assert shape.kv_heads == kv_heads


ATTENDED = (Component.ATTN_SCORES, Component.KV_CACHE)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MptForCausalLM"])
def test_the_caches_scale_is_the_largest_of_its_own_rows(name: str) -> None:
    # Q is made a hundred times as large: a scale that saw it would be wrong.
    model, ids, spy = tiny.loaded(name), tiny.ids(12), Spy()
    (part,) = model.parts[QKV]
    with torch.no_grad():
        part.weight[: tiny.WIDTH] *= 100
        model.forward(ids, spy)
    found = amaxes(calibrate(model, [ids]))
    cache = Site(0, Component.KV_CACHE)
    for role, which in ((Role.INPUT, "k"), (Role.WEIGHT, "v")):
        made = made_of([part], which, spy.x)
        torch.testing.assert_close(found[cache, role], made.abs().amax(dim=(0, 2, 3)))


def test_a_part_that_makes_no_keys_is_refused_by_name() -> None:
    (part,) = tiny.loaded().parts[Site(0, Component.ATTN_OUT)]
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj"):
        kv_rows(part)
