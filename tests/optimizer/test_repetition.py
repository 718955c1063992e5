"""What counts as saying it again, by hand."""

from optimizer.repetition import Loop, loop, repeated


def test_half_of_the_pairs_were_there_before() -> None:
    assert repeated([1, 2, 1, 2, 1], 2) == 0.5  # 12 21 12 21


def test_a_text_without_repetition_has_none() -> None:
    assert repeated(list(range(40))) == 0.0
    assert repeated([1, 2]) == 0.0  # too short for any
    assert loop(list(range(40))) is None


def test_a_loop_is_found_with_its_period_and_where_it_begins() -> None:
    assert loop([7, 8, *[1, 2, 3, 4] * 4]) == Loop(2, 4)
    assert loop([5] * 20) == Loop(0, 1)


def test_a_cycle_that_is_cut_off_is_a_loop() -> None:
    assert loop([9, *[1, 2, 3, 4, 5] * 3, 1, 2]) == Loop(1, 5)


def test_two_rounds_are_no_loop_and_an_ellipsis_is_none() -> None:
    assert loop([*range(30), *range(40, 50), *range(40, 50)]) is None
    assert loop([*range(30), 77, 77, 77]) is None


def test_what_ends_is_no_loop() -> None:
    assert loop([*[1, 2, 3] * 8, 4]) is None
