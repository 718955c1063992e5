"""What is said of a stack beyond the mean: by place, by data, by its worst tokens."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from optimizer.beyond import LONG, Elsewhere
from optimizer.document_beyond import by_position, generation
from optimizer.spec import OptimizeSpec
from optimizer.validate import TokenValues, Values
from optimizer.worst import worst_tokens
from tests.optimizer.conftest import Document


def sequences(*lengths: int) -> list[Tensor]:
    starts = np.cumsum([0, *lengths])
    return [torch.arange(a, b)[None] for a, b in itertools.pairwise(starts)]


def values(kl: Sequence[float]) -> TokenValues:
    array: Values = np.array(kl, np.float64)
    return TokenValues(array, array, array, np.zeros(1), np.arange(len(kl)) + 100.0)


def text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def test_values_are_split_by_where_their_tokens_are_from() -> None:
    where = Elsewhere(
        {LONG: tuple(sequences(6)), "chat": tuple(sequences(3, 3)), "code": ()}
    )
    # Twelve tokens; a sequence of T makes T - 1 predictions: 5, then 2 and 2.
    whole = TokenValues(
        np.arange(12.0), np.arange(9.0), np.arange(12.0), np.zeros(1), np.arange(12.0)
    )
    parts = where.split(whole)
    assert [len(parts[n].kl) for n in (LONG, "chat", "code")] == [6, 6, 0]
    assert parts["chat"].kl.tolist() == [6.0, 7, 8, 9, 10, 11]
    assert parts["chat"].nll.tolist() == [5.0, 6, 7, 8]


def test_positions_beyond_the_held_out_sequences_are_of_the_long_one() -> None:
    spec = OptimizeSpec("m", "m", "0" * 64, "h100", sequence_tokens=64)
    held_out = values([0.1] * 32 + [0.2] * 32)
    long = values([9.0] * 64 + [0.4] * 64 + [0.8] * 32)
    rows = by_position(spec, held_out, sequences(64), {LONG: long})
    shown = [(r["from"], r["to"], r["tokens"], r["kl_nats"]["value"]) for r in rows]
    assert shown == [
        (0, 31, 32, pytest.approx(0.1)),
        (32, 63, 32, pytest.approx(0.2)),
        (64, 127, 64, pytest.approx(0.4)),
        (128, 159, 32, pytest.approx(0.8)),
    ]


def test_worst_tokens_stand_in_their_own_sequence_and_not_beside_each_other() -> None:
    kl = [0.0] * 20
    kl[5], kl[6], kl[19], kl[12] = 5.0, 4.9, 3.0, 1.0
    found = worst_tokens(values(kl), np.arange(20.0), sequences(10, 10), text)
    assert [f["kl_nats"] for f in found[:3]] == [5.0, 3.0, 1.0]  # 6 is beside 5
    first, last, third = found[:3]
    assert (first["sequence"], first["position"]) == (0, 5)
    assert first["before"] == "0 1 2 3 4 5"
    assert first["next"] == "6"
    assert (first["reference"], first["stack"]) == ("5", "105")
    assert (last["sequence"], last["next"]) == (1, None)  # nothing follows
    assert third["before"] == "10 11 12"  # the other sequence's text is not its context


def test_continuations_stand_side_by_side_with_what_repeats() -> None:
    plain, looping = list(range(10, 30)), [10, 11, *[1, 2, 3] * 6]
    found = generation([[5, 6], [7, 8]], [plain, plain], [looping, plain], {29}, text)
    one, two = found["continuations"]
    assert one["prompt"] == "5 6"
    assert one["same_tokens"] == 2
    assert one["stack"]["loop"] == {"start": 2, "period": 3}
    assert two["reference"]["tokens"] == two["same_tokens"] == 19  # 29 ends it
    assert found["loops"] == {"reference": 0, "stack": 1}
    # 17 four-grams, of which 10 11 1 2, 11 1 2 3 and a cycle's three are new
    assert found["repeated"]["stack"] == pytest.approx((1 - 5 / 17) / 2)


def test_a_report_looks_beyond_the_mean(
    document_of: Callable[[str], Document],
) -> None:
    document = document_of("h100")
    names = [r["distribution"] for r in document["by_distribution"]]
    assert names[0] == "web_text"
    assert {"chat", "code", "math", "multilingual"} == set(names[1:])
    reach = [(r["from"], r["to"], r["source"]) for r in document["by_position"]]
    assert reach == [
        (0, 31, "held-out sequences"),
        (32, 63, "held-out sequences"),
        (64, 127, "one long sequence"),  # of the 128 tokens that there are
    ]
    worst = [w["kl_nats"] for w in document["worst_tokens"]]
    assert worst == sorted(worst, reverse=True)
    assert worst[0] == document["stability"]["worst_token_kl_nats"]
    written = document["generation"]["continuations"]
    assert [len(w["prompt"]) > 0 for w in written] == [True] * 2
    assert all(w["reference"]["tokens"] <= 64 for w in written)


def test_what_computes_in_fp8_says_up_to_which_fallback_it_pays(
    document_of: Callable[[str], Document],
) -> None:
    stability = document_of("h100")["stability"]
    assert 0.0 <= stability["fallback"] <= 1.0
    assert stability["narrow_sites"] == sum(c["sites"] for c in stability["components"])
    for row in stability["components"]:
        for share in ("saturated", "flushed", "collapsed"):
            assert 0.0 <= row[share]["median"] <= row[share]["largest"] <= 1.0
