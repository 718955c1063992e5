import json

from optimizer import search
from optimizer.kept_front import answer, question
from optimizer.pieces import Memory, Piece, Result, key_of
from tests.optimizer.toy import chooser


def test_a_front_survives_json() -> None:
    some = chooser()
    options = [group.options for group in some.groups]
    asked = question(options, 12, some.edges, some.max_bytes)
    direct = search.front(options, 12, edges=some.edges, max_bytes=some.max_bytes)
    found = answer(json.loads(json.dumps(asked)))
    assert found == {"picks": [list(picks) for picks in direct.picks]}


def test_a_second_search_with_the_same_numbers_is_read() -> None:
    computed, kept = [], Memory()

    def searched(asked: Result) -> Result:
        def compute(piece: Piece) -> Result:
            computed.append(piece.key)
            return answer(piece.payload)

        piece = Piece("front", key_of("front", asked), asked)
        return kept.run([piece], compute, lambda done, planned: None)[0]

    first, second = chooser(), chooser()
    first.searched = second.searched = searched
    assert first.front(8) == second.front(8)
    assert len(computed) == 1
    assert first.front(9)
    assert len(computed) == 2
