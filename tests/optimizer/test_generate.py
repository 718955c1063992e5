"""A continuation with a cache is the one that whole passes give, whatever the model."""

import pytest
import torch

from optimizer.execute import Amaxes, Reference, Stacked, WeightCodes
from optimizer.generate import continued, cut
from optimizer.model import LoadedModel
from optimizer.stack import CHOICES, Stack, roundings
from tests.optimizer import tiny

WRITERS = [
    name
    for name in {**tiny.MAKERS, **tiny.FORMS}
    if "MaskedLM" not in name.split("/")[0]
]
TOKENS = 12  # past the window of 8 that some of them have


def prompts(batch: int = 3, tokens: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, tiny.VOCAB, (batch, tokens), generator=generator)


def by_whole_passes(
    model: LoadedModel, ids: torch.Tensor, executor: Reference, tokens: int
) -> list[list[int]]:
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(tokens):
            likely = model.forward(ids, executor)[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, likely], 1)
    return ids[:, start:].tolist()


@pytest.mark.parametrize("name", WRITERS)
def test_tokens_are_those_of_whole_passes(name: str) -> None:
    model = tiny.loaded(name)
    found = continued(model, prompts(), Reference(), TOKENS)
    assert found == by_whole_passes(model, prompts(), Reference(), TOKENS)


def test_a_stack_writes_what_its_whole_passes_would() -> None:
    model = tiny.loaded("LlamaForCausalLM")
    narrow = {
        s: next(c for c in CHOICES[s.component] if c.is_narrow)
        for s in model.sites
        if any(c.is_narrow for c in CHOICES[s.component])
    }
    stack = Stack(narrow)
    largest: Amaxes = {  # too small on purpose: what is clipped shows in the text
        (site, role): torch.tensor(0.5)
        for site, choice in stack.choices.items()
        for role, _ in roundings(site.component, choice)
    }
    run = Stacked(stack, largest, WeightCodes(model))
    found = continued(model, prompts(), run, TOKENS)
    assert found == by_whole_passes(model, prompts(), run, TOKENS)
    assert found != continued(model, prompts(), Reference(), TOKENS)


def test_a_text_ends_where_the_model_says_so() -> None:
    assert cut([5, 9, 2, 5], frozenset({2, 3})) == [5, 9]
    assert cut([5, 9], frozenset()) == [5, 9]
