import pytest
import torch
from torch import Tensor

from optimizer.errors import NonFiniteError
from optimizer.execute import Reference
from optimizer.hessians import FisherHessians, Hessians, Key, key_of
from optimizer.labels import draw
from optimizer.model import LoadedModel
from optimizer.sites import LinearPart
from optimizer.stack import Component, Site
from tests.optimizer import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums, not of the same order
ANY: Key = (Site(0, Component.FFN_IN), "")


class Inputs(Reference):
    """Keeps what goes into every matrix, of every sibling again."""

    def __init__(self) -> None:
        self.by_part: dict[str, list[Tensor]] = {}

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        self.by_part.setdefault(part.name, []).append(x.flatten(0, -2))
        return super().linear(part, x)


@torch.no_grad()
def run(model: LoadedModel, executor: Reference, batches: list[Tensor]) -> None:
    for ids in batches:
        model.forward(ids, executor)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_every_matrix_finds_the_mean_of_its_inputs_outer_products(
    architecture: str,
) -> None:
    model = tiny.loaded(architecture)
    batches = [tiny.ids(batch=2, seed=s) for s in range(3)]
    hessians, inputs = Hessians(), Inputs()
    run(model, hessians, batches)
    run(model, inputs, batches)
    for part in (p for some in model.parts.values() for p in some):
        x = torch.cat(inputs.by_part[part.name]).double()
        found = hessians.hessian(key_of(part))
        assert found.dtype == torch.float64
        # float32 products of 144 rows, each of at most this size
        bound = torch.finfo(torch.float32).eps * len(x) * float(x.square().amax())
        torch.testing.assert_close(found, x.T @ x / len(x), rtol=0, atol=bound)
        assert (
            hessians.seen(key_of(part)) == len(x) == 3 * 2 * 24
        )  # siblings count once


def test_only_the_sites_that_are_named_take_memory() -> None:
    model = tiny.loaded()
    wanted = Site(1, Component.FFN_OUT)
    hessians = Hessians([wanted])
    run(model, hessians, [tiny.ids()])
    seen = [k for s in model.parts for k in {(s, "")} if hessians.seen(k)]
    assert seen == [(wanted, "")]


def test_the_order_of_the_data_and_the_way_it_is_split_do_not_matter() -> None:
    x = random(90, 16)
    whole = Hessians()
    whole.add(ANY, x)
    first, second = Hessians(), Hessians()
    first.add(ANY, x[70:])
    second.add(ANY, x[:30])
    second.add(ANY, x[30:70])
    first.merge(second)
    # float32 sums of 90 products
    bound = 90 * torch.finfo(torch.float32).eps * float(x.square().amax())
    torch.testing.assert_close(
        first.hessian(ANY), whole.hessian(ANY), rtol=0, atol=bound
    )
    assert first.seen(ANY) == 90


def test_merging_takes_over_what_only_the_other_has_seen() -> None:
    one, other = Hessians(), Hessians()
    other.add(ANY, random(5, 4))
    one.merge(other)
    assert torch.equal(one.hessian(ANY), other.hessian(ANY))


def test_padding_is_not_seen() -> None:
    x = random(2, 6, 4)
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    padded, text = Hessians(), Hessians()
    padded.add(ANY, x.masked_fill(keep[..., None] == 0, 1e4), keep)
    text.add(ANY, x[keep.bool()])
    torch.testing.assert_close(padded.hessian(ANY), text.hessian(ANY), **CLOSE)
    assert padded.seen(ANY) == 10


def test_padding_of_a_batch_is_not_seen() -> None:
    model = tiny.loaded()
    ids = tiny.ids()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    alone, padded = Hessians(), Hessians()
    run(model, alone, [ids[:, 7:]])
    padded.tokens = mask.bool()
    with torch.no_grad():
        model.forward(ids, padded, mask)
    key = (Site(0, Component.ATTN_QKV), "")
    torch.testing.assert_close(padded.hessian(key), alone.hessian(key), **CLOSE)


def test_tokens_count_by_their_weight() -> None:
    x = random(6, 4)
    counts = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 1.0])
    weighted, repeated = Hessians(), Hessians()
    weighted.add(ANY, x, weights=counts)
    repeated.add(ANY, x.repeat_interleave(counts.long(), 0))
    # The weights add up to 6, as many as there are tokens in both.
    torch.testing.assert_close(weighted.hessian(ANY), repeated.hessian(ANY), **CLOSE)


def test_what_was_dropped_was_never_seen() -> None:
    hessians = Hessians()
    hessians.add(ANY, random(5, 4))
    hessians.drop(ANY)
    hessians.drop(ANY)
    assert hessians.seen(ANY) == 0
    with pytest.raises(KeyError):
        hessians.hessian(ANY)


def test_an_input_with_a_nan_is_refused_by_the_name_of_its_site() -> None:
    x = random(5, 4)
    x[2, 1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"layers\.0\.ffn_in"):
        Hessians().add(ANY, x)


def test_tokens_weigh_what_an_error_of_their_outputs_costs() -> None:
    # Of one token: H = |g|² x xᵀ.
    model = tiny.loaded()
    ids = tiny.ids(tokens=1)
    hessians = FisherHessians()
    part = model.parts[Site(1, Component.FFN_OUT)][0]
    hessians.run(model, ids, torch.Generator().manual_seed(0))
    inputs = Inputs()
    run(model, inputs, [ids])
    (x,) = inputs.by_part[part.name]
    logits = model.forward(ids, Reference())[0]
    drawn = torch.Generator().manual_seed(0)
    label = draw(logits.softmax(-1), 1, drawn)[0]
    assert hessians.seen(key_of(part)) == 1
    found = hessians.hessian(key_of(part))
    weight = float(found.trace() / x.double().square().sum())
    torch.testing.assert_close(found, weight * (x.T @ x).double(), **CLOSE)
    assert weight == pytest.approx(squared_gradient(model, ids, part, label), rel=1e-3)


def squared_gradient(
    model: LoadedModel, ids: Tensor, part: LinearPart, label: Tensor
) -> float:
    """Σ over the outputs of (∂ -log p(label) / ∂ output)², by autograd on its own."""

    class Shifted(Reference):
        def __init__(self) -> None:
            self.shift = torch.zeros(len(part.weight), requires_grad=True)

        def linear(self, other: LinearPart, x: Tensor) -> Tensor:
            y = super().linear(other, x)
            return y + self.shift if other.name == part.name else y

    executor = Shifted()
    with torch.enable_grad():
        loss = -model.forward(ids, executor)[0].log_softmax(-1)[0, label]
        (gradient,) = torch.autograd.grad(loss, executor.shift)
    return float(gradient.square().sum())


def test_tokens_count_once_however_many_parts_they_go_to() -> None:
    model = tiny.loaded()
    first, second = FisherHessians(), FisherHessians()
    first.run(model, tiny.ids(seed=1), torch.Generator().manual_seed(0))
    second.run(model, tiny.ids(seed=2), torch.Generator().manual_seed(0))
    first.merge(second)
    for part in (p for some in model.parts.values() for p in some):
        assert first.seen(key_of(part)) == 2 * 24
