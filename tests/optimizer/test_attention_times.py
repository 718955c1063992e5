"""Attention by pairs of heads: which measured ones stand for one that was not."""

import math

import numpy as np
import pytest

from optimizer.attention_times import Section

BATCHES, TOKENS = [1, 2, 4], [128, 256, 512]


def section(times, **known):
    """Return a section whose pair takes `times[pair]` · batch · tokens microseconds."""
    work = np.outer(BATCHES, TOKENS) * 1e-6
    seconds = np.stack([t * work for t in times.values()])
    return Section.of(list(times), [BATCHES, TOKENS], seconds, **known)


def test_a_measured_pair_is_answered_exactly():
    reading = section({(8, 2): 3.0, (16, 2): 5.0}).at(8, 2, 2, 256)
    assert reading.seconds == pytest.approx(3.0 * 2 * 256 * 1e-6)
    assert reading.error == 0


def test_heads_between_two_of_as_many_kv_heads_are_on_their_chord():
    # 28 is halfway from 24 to 32; 24 itself is told from 16 and 32 as 4.0, and is 4.2.
    known = section({(16, 4): 3.0, (24, 4): 4.2, (32, 4): 5.0})
    reading = known.at(28, 4, 1, 128)
    assert reading.seconds == pytest.approx(4.6 * 128e-6)
    assert reading.error == pytest.approx(0.2 / 4.2)


def test_a_pair_of_its_own_kv_heads_is_read_along_its_ratio():
    # (20, 20) between (16, 16) and (24, 24); no pair has 20 KV heads.
    known = section({(8, 8): 1.0, (16, 16): 2.0, (24, 24): 3.0, (32, 4): 9.0})
    reading = known.at(20, 20, 1, 128)
    assert reading.seconds == pytest.approx(2.5 * 128e-6)
    assert reading.error == pytest.approx(0, abs=1e-12)


def test_a_pair_of_neither_is_read_between_two_rows():
    # (9, 3): a quarter of the way from 8 to 12 heads, halfway from 2 to 4 KV heads.
    times = {(8, 2): 1.0, (12, 2): 2.0, (8, 4): 3.0, (12, 4): 4.0}
    known = section(times, errors=[0.03, 0.04, 0.0, 0.0])
    reading = known.at(9, 3, 1, 128)
    assert reading.seconds == pytest.approx((1.25 + 3.25) / 2 * 128e-6)
    assert reading.error == pytest.approx(0.05)


@pytest.mark.parametrize("pair", [(9, 1), (9, 8), (4, 2), (13, 4), (40, 40)])
def test_a_pair_that_no_two_enclose_has_no_time(pair):
    times = {(8, 2): 1.0, (12, 2): 2.0, (8, 4): 3.0, (12, 4): 4.0}
    assert section(times, errors=[0.0] * 4).at(*pair, 1, 128) is None


def test_between_pairs_of_unknown_error_there_is_no_time():
    known = section({(16, 4): 3.0, (32, 4): 5.0})  # no third to tell it by
    assert math.isnan(known.errors[0])
    assert known.at(24, 4, 1, 128) is None


def test_where_a_neighbor_lacks_the_point_there_is_no_time():
    seconds = np.ones((2, 3, 3))
    seconds[1, 2, 2] = math.nan
    pairs = [(16, 4), (32, 4)]
    known = Section.of(pairs, [BATCHES, TOKENS], seconds, errors=[0.1] * 4)
    assert known.at(24, 4, 4, 512) is None
    assert known.at(24, 4, 1, 128) is not None


def test_the_larger_error_of_two_neighbors_counts():
    known = section({(16, 4): 3.0, (32, 4): 5.0}, errors=[0.03, 0.0, 0.0, 0.04])
    assert known.at(24, 4, 1, 192).error == pytest.approx(0.05)


def test_heads_fold_into_the_batch():
    # Folding (8, 8) in two, to (4, 4), tells 2 · 1.0 of 2.2: 9 % less.
    known = section({(4, 4): 1.0, (8, 8): 2.2})
    reading = known.at(16, 16, 1, 128)
    assert reading.seconds == pytest.approx(2.2 * 2 * 128e-6)  # (8, 8) at batch 2
    assert reading.error == pytest.approx(1 - 2 / 2.2)
    assert known.at(32, 32, 1, 128).seconds == pytest.approx(2.2 * 4 * 128e-6)


@pytest.mark.parametrize("pair", [(7, 7), (16, 1), (64, 64)])
def test_what_does_not_fold_into_what_was_measured_has_no_time(pair):
    assert section({(4, 4): 1.0, (8, 8): 2.2}).at(*pair, 1, 128) is None


def test_without_two_pairs_to_fold_there_is_no_error_and_no_time():
    assert section({(8, 8): 2.2}).at(16, 16, 1, 128) is None


def test_leaving_one_out_goes_along_batch_tokens_and_heads():
    known = section({(16, 4): 3.0, (24, 4): 4.2, (32, 4): 5.0})
    errors = known.leave_one_out()
    # 3 pairs × (3 points of tokens + 3 of batch), all exact: the times are products;
    # and 9 points of the middle pair, each told as 4.0 of 4.2.
    assert errors[:18].tolist() == pytest.approx([0] * 18, abs=1e-12)
    assert errors[18:].tolist() == pytest.approx([4 / 4.2 - 1] * 9)
