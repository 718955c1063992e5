"""What an executor is handed, whatever the architecture around it does with it."""

import pytest
import torch
from torch import Tensor

from optimizer.execute import Reference
from optimizer.model import AttentionStep, LoadedModel
from optimizer.sites import LinearPart
from optimizer.stack import Role, Site
from tests.optimizer import tiny

EVERY = sorted(tiny.MAKERS)


class Keeps(Reference):
    """Keeps inputs and outputs of every matrix, with their gradients."""

    def __init__(self) -> None:
        self.inputs: dict[int, Tensor] = {}  # by identity: siblings share one
        self.made: list[tuple[LinearPart, Tensor, Tensor]] = []

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x.requires_grad_(True)
        y = super().linear(part, x)
        for tensor in (x, y):
            tensor.retain_grad()
        self.inputs[id(x)] = x
        self.made.append((part, x, y))
        return y


@pytest.mark.parametrize("name", EVERY)
def test_an_input_has_the_gradient_of_its_own_site(name: str) -> None:
    # BERT's blocks read the residual stream, Falcon's two read one norm's output, and
    # routers read what the experts read: none of that may count at the site.
    model, keeps = tiny.loaded(name), Keeps()
    for weight in model.network.parameters():
        weight.requires_grad_(True)
    model.forward(tiny.ids(6), keeps).square().sum().backward()
    for key, x in keeps.inputs.items():
        own = [(part, y) for part, seen, y in keeps.made if id(seen) == key]
        assert len({part.site for part, _ in own}) == 1
        wanted = sum(grad(y) @ part.weight for part, y in own)
        torch.testing.assert_close(grad(x), wanted, rtol=1e-4, atol=1e-4)


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


class Remembers(Reference):
    """Keeps what leaves every site, and a copy of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Site, Tensor, Tensor]] = []

    def elementwise(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        self.seen.append((site, x, x.clone()))
        return x


@pytest.mark.parametrize("name", EVERY)
def test_nothing_that_an_executor_saw_changes_afterwards(name: str) -> None:
    model, remembers = tiny.loaded(name), Remembers()
    with torch.no_grad():
        model.forward(tiny.ids(6), remembers)
    for site, x, copy in remembers.seen:
        assert torch.equal(x, copy), str(site)


class Bare:
    """An executor of nothing but the three methods that it must have."""

    def __init__(self) -> None:
        self.reference = Reference()

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        return self.reference.linear(part, x)

    def attention(self, step: AttentionStep) -> Tensor:
        return self.reference.attention(step)

    def elementwise(self, site: Site, role: Role, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("name", EVERY)
def test_three_methods_make_an_executor(name: str) -> None:
    model, ids = tiny.loaded(name), tiny.ids(6)
    with torch.no_grad():
        found = model.forward(ids, Bare())
        assert torch.equal(found, model.forward(ids, Reference()))


class Steps(Reference):
    """Keeps the masks of every attention."""

    def __init__(self) -> None:
        self.masks: list[Tensor | None] = []

    def attention(self, step: AttentionStep) -> Tensor:
        self.masks.append(step.mask)
        return super().attention(step)


def masks_of(model: LoadedModel) -> list[Tensor | None]:
    steps = Steps()
    with torch.no_grad():
        model.forward(tiny.ids(12), steps)
    return steps.masks


@pytest.mark.parametrize(
    "name", sorted({*tiny.MAKERS, "FalconForCausalLM/alibi"} - {"BertForMaskedLM"})
)
def test_a_mask_is_negative_where_a_token_is_hidden_and_only_there(name: str) -> None:
    # Observers leave out what a mask hides, and alibi rides on it.
    for mask in masks_of(tiny.loaded(name)):
        if mask is None:
            assert name.endswith("MaskedLM")
            continue
        hidden = torch.ones(12, 12).triu(1).bool()
        visible = mask[..., ~hidden]
        assert (mask[..., hidden] < -1e30).all()
        assert ((visible >= 0) | (visible < -1e30)).all()  # or beyond a window


def test_an_encoder_sees_both_ways() -> None:
    model, ids = tiny.loaded("BertForMaskedLM"), tiny.ids(12)
    other = ids.clone()
    other[0, -1] = 3 if int(ids[0, -1]) != 3 else 4
    with torch.no_grad():
        first, second = (model.forward(x, Reference())[0, 0] for x in (ids, other))
    assert not torch.equal(first, second)
    assert masks_of(model) == [None, None]
