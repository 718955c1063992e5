"""What memory is left decides where weights lie, and nothing else."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from optimizer import memory
from optimizer.pieces import Memory
from optimizer.run import optimize
from optimizer.spec import OptimizeSpec
from optimizer.walk import Activations
from optimizer.work import Work
from tests.optimizer.conftest import quiet


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    memory.use()


def test_a_limit_counts_where_it_is_less_than_what_is_free() -> None:
    free = memory.resident_bytes()
    memory.use(2**20)
    assert memory.resident_bytes() == int(0.4 * 2**20) < free
    memory.use(2**60)
    assert memory.resident_bytes() > 2**20


def test_where_memory_ran_out_weights_stay_in_their_files(spec: OptimizeSpec) -> None:
    assert Work(spec, Memory()).model.residency.whole
    memory.use(sparing=True)
    assert not Work(spec, Memory()).model.residency.whole


def test_hidden_states_beyond_the_budget_come_back_bit_for_bit() -> None:
    memory.use(sparing=True)
    kept = Activations()
    assert kept.budget_bytes == memory.SPARING_BYTES < memory.ACTIVATIONS_BYTES
    kept.budget_bytes = 0
    x = torch.randn(3, 5)
    kept.put((0, 0), x)
    assert torch.equal(kept.get((0, 0)), x)


@pytest.mark.slow
def test_sparing_memory_changes_no_byte_of_the_report(
    spec: OptimizeSpec, document_of: Callable[[str], dict[str, Any]]
) -> None:
    whole = {**document_of("h100")}
    memory.use(sparing=True)
    streamed = optimize(replace(spec), quiet)
    assert streamed.pop("generation") is None  # each token would read all weights
    assert whole.pop("generation") is not None
    for document in (streamed, whole):
        document["warnings"] = [w for w in document["warnings"] if "loop" not in w]
    assert json.dumps(streamed) == json.dumps(whole)
