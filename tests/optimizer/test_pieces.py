"""Equal keys, equal bytes: what is kept is not computed again."""

from collections import OrderedDict

import pytest

from optimizer.errors import Cancelled
from optimizer.pieces import Memory, Piece, Result, key_of

THIRDS = [1 / 3, 0.1 + 0.2, 5e-324, 1.7976931348623157e308]


def pieces(*numbers: int) -> list[Piece]:
    return [Piece("sweep", key_of("sweep", n), {"n": n}) for n in numbers]


def quiet(done: int, planned: int) -> None:
    pass


def test_results_come_in_the_order_given_and_each_is_computed_once() -> None:
    computed: list[int] = []

    def compute(piece: Piece) -> Result:
        computed.append(piece.payload["n"])
        return {"square": piece.payload["n"] ** 2}

    memory = Memory()
    squares = [r["square"] for r in memory.run(pieces(3, 1, 3), compute, quiet)]
    assert squares == [9, 1, 9]
    assert memory.run(pieces(1, 2), compute, quiet) == [{"square": 1}, {"square": 4}]
    assert computed == [3, 1, 2]


def test_a_kept_float_is_the_float_that_was_computed() -> None:
    (found,) = Memory().run(pieces(1), lambda piece: {"kl_nats": THIRDS}, quiet)
    assert found == {"kl_nats": THIRDS}


def test_a_reader_cannot_change_what_is_kept() -> None:
    memory = Memory()
    (first,) = memory.run(pieces(1), lambda piece: {"losses": [1.0]}, quiet)
    first["losses"].clear()
    assert memory.run(pieces(1), lambda piece: {}, quiet) == [{"losses": [1.0]}]


def test_what_was_done_before_a_stop_is_kept() -> None:
    computed: list[int] = []

    def compute(piece: Piece) -> Result:
        computed.append(piece.payload["n"])
        return {}

    def stop_at_two(done: int, planned: int) -> None:
        if done == 2:
            raise Cancelled("the job was cancelled")

    memory = Memory()
    with pytest.raises(Cancelled):
        memory.run(pieces(1, 2, 3), compute, stop_at_two)
    memory.run(pieces(1, 2, 3), compute, quiet)
    assert computed == [1, 2, 3]


def test_progress_ends_with_everything_there() -> None:
    told: list[tuple[int, int]] = []
    Memory().run(pieces(1, 2), lambda piece: {}, lambda *at: told.append(at))
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_nan_is_no_result() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        Memory().run(pieces(1), lambda piece: {"kl_nats": float("nan")}, quiet)


def test_a_key_is_the_digest_of_canonical_json() -> None:
    # printf '["sweep",{"a":1,"b":[0.1]}]' | sha256sum
    expected = "e58b76a8601044e7ddba79d8648c5b107bc3656b76182974a3f5dd5f66db8d7d"
    assert key_of("sweep", OrderedDict(b=[0.1], a=1)) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("sweep", 1), ("sweep1",)),
        (("sweep", 1), ("sweep", 1.0)),
        (("sweep", [1, 2]), ("sweep", [2, 1])),
        (("sweep", None), ("sweep", "null")),
        ((["a"], "b"), (["a", "b"],)),
    ],
)
def test_different_parts_have_different_keys(
    one: tuple[object, ...], other: tuple[object, ...]
) -> None:
    assert key_of(*one) != key_of(*other)


def test_what_is_not_json_has_no_key() -> None:
    with pytest.raises(TypeError):
        key_of(object())
    with pytest.raises(ValueError, match="JSON compliant"):
        key_of(float("inf"))
