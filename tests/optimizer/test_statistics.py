"""What calibration learns of a place: outliers, sinks, positions, magnitudes."""

import json
import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizer.statistics import (
    BUCKETS,
    KEPT,
    SAMPLE,
    Layout,
    Sink,
    SiteStats,
    bucket_of,
    sampled_rows,
)
from tests.optimizer.numbers import normal
from tests.optimizer.test_calibrate import padded


def seen(
    x: Tensor,
    keep: Tensor | None = None,
    ids: Tensor | None = None,
    layout: Layout = Layout.ROWS,
) -> SiteStats:
    stats = SiteStats(layout)
    stats.add(x, keep, ids)
    return stats


def facts(stats: SiteStats) -> dict[str, Any]:
    """Everything that is kept, comparable."""
    channels = None if stats.channels is None else stats.channels.tolist()
    return {
        "count": stats.count,
        "magnitudes": stats.magnitudes.counts.tolist(),
        "tokens": stats.token_amax.counts.tolist(),
        "positions": stats.positions.tolist(),
        "seen": stats.seen.tolist(),
        "channels": channels,
        "sinks": stats.sinks,
    }


# Sinks and outliers (case B4)


@pytest.mark.parametrize("outlier", [3e3, 3e4, 3e5])
def test_sink_token_and_channel_are_named(outlier: float) -> None:
    # Case B4: 512 tokens of 256 channels, N(0,1) but for one value.
    x = normal(512, 256)
    x[0, 7] = outlier
    ids = torch.arange(100, 612)[None]
    stats = seen(x[None], ids=ids)
    channel, largest, times = stats.outlier_channels()[0]
    assert (channel, largest) == (7, outlier)
    median = float(torch.cat([x[1:].abs().amax(0)]).median())
    assert times == pytest.approx(outlier / median, rel=0.05)
    sink, of_median = stats.sink_tokens()[0]
    assert sink == Sink(outlier, position=0, token=100)
    by_token = float(x.abs().amax(1).median())
    assert of_median == pytest.approx(outlier / by_token, rel=1 / 8)  # a bin
    told = stats.to_json({100: "<s>"}.get)  # type: ignore[arg-type]
    assert told["tokens"] == [
        {
            "position": 0,
            "token": 100,
            "text": "<s>",
            "amax": outlier,
            "times_median": pytest.approx(of_median, rel=1e-5),
        }
    ]
    assert [c["channel"] for c in told["channels"]] == [7]


def test_no_one_is_named_where_no_one_stands_out() -> None:
    told = seen(normal(1, 512, 256)).to_json()
    assert told["tokens"] == told["channels"] == []


def test_each_position_is_named_once_with_its_largest_token() -> None:
    x = torch.ones(3, 4, 2)
    x[0, 0], x[1, 0], x[2, 0], x[1, 3] = 50.0, 70.0, 60.0, 65.0
    ids = torch.arange(12).view(3, 4)
    stats = seen(x, ids=ids)
    assert stats.sinks[:2] == (Sink(70.0, 0, 4), Sink(65.0, 3, 7))
    assert len(stats.sinks) == 4


def test_the_first_position_of_many_sequences_hides_no_other() -> None:
    x = torch.ones(40, 6, 2)
    x[:, 0], x[7, 4] = 100.0, 9.0
    assert [s.position for s in seen(x).sinks[:2]] == [0, 4]


def test_only_the_largest_are_kept() -> None:
    x = normal(1, 100, 50)
    stats = seen(x)
    want = x[0].abs().amax(1).sort(descending=True)
    assert [s.position for s in stats.sinks] == want.indices[:KEPT].tolist()
    channels = x[0].abs().amax(0).sort(descending=True).indices[:KEPT].tolist()
    assert [c[0] for c in stats.outlier_channels()] == channels


def test_channels_of_heads_are_named_by_head() -> None:
    x = normal(1, 3, 20, 8)  # (batch, heads, tokens, channels)
    x[0, 2, 5, 1] = 90.0
    told = seen(x, layout=Layout.HEADS).to_json()
    assert (told["channels"][0]["head"], told["channels"][0]["channel"]) == (2, 1)
    assert told["tokens"][0]["position"] == 5
    assert told["tokens"][0]["token"] is None


def test_keys_are_no_channels_and_queries_are_the_positions() -> None:
    p = torch.full((1, 2, 6, 6), 0.1)
    p[0, 1, 4, 0] = 0.9  # query 4 looks at key 0
    stats = seen(p, layout=Layout.SCORES)
    assert stats.channels is None
    assert stats.sinks[0].position == 4
    assert stats.to_json()["channels"] == []


# Positions (case B5)


def test_buckets_are_powers_of_two() -> None:
    at = torch.tensor([0, 1, 2, 3, 4, 7, 8, 511, 512, 1 << 40])
    assert bucket_of(at).tolist() == [0, 1, 2, 2, 3, 3, 4, 9, 10, BUCKETS - 1]
    every = torch.arange(5000)
    assert bucket_of(every).tolist() == [p.bit_length() for p in range(5000)]


def test_amax_by_position_shows_growth_with_length() -> None:
    # Case B5: four times as wide after position 512.
    x = normal(2048, 64)
    x[512:] *= 4.0
    long, short = seen(x[None]), seen(x[None, :512])
    amaxes = long.position_amaxes()
    assert len(amaxes) == 12  # 0, 1, 2-3, ..., 1024-2047
    for bucket, largest in enumerate(amaxes):
        part = x[int(2 ** (bucket - 1)) : 2**bucket]
        assert largest == float(part.abs().max())
    assert amaxes[10] == pytest.approx(4 * (amaxes[9] or 0.0), rel=0.2)
    assert short.growth() == pytest.approx(1.0, abs=0.2)
    assert seen(x[None, :1024]).growth() == pytest.approx(4.0, rel=0.2)


def test_growth_needs_positions() -> None:
    assert seen(normal(1, 16, 4)).growth() is None
    assert seen(normal(64, 4)).growth() is None  # routed to an expert
    assert seen(torch.zeros(1, 64, 4)).growth() is None


def test_a_bucket_that_nobody_reached_is_unknown_and_not_zero() -> None:
    assert seen(torch.zeros(1, 3, 2)).position_amaxes() == [0.0, 0.0, 0.0]
    assert SiteStats().position_amaxes() == []


# Padding (case B3)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("pad", [50.0, math.inf, math.nan])
def test_padding_is_not_seen(pad: float, layout: Layout, left: bool) -> None:
    lengths = (3, 7)
    shape = {Layout.ROWS: (4,), Layout.HEADS: (2, 4), Layout.SCORES: (2, 5)}[layout]
    rows = [normal(n, *shape, seed=n) for n in lengths]
    batch, keep = padded(rows, pad, left)
    numbers = [torch.arange(n) + 10 * n for n in lengths]
    ids, _ = padded(numbers, 0, left)

    def turned(x: Tensor) -> Tensor:
        return x if layout is Layout.ROWS else x.transpose(1, 2)

    together = seen(turned(batch), keep, ids, layout)
    alone = [
        seen(turned(row[None]), None, n[None], layout)
        for row, n in zip(rows, numbers, strict=True)
    ]
    assert facts(together) == facts(alone[0].merge(alone[1]))
    assert together.count == sum(row.numel() for row in rows)


def test_a_sequence_of_padding_alone_says_nothing() -> None:
    nothing = torch.zeros(1, 5, dtype=torch.bool)
    stats = seen(torch.full((1, 5, 4), 50.0), nothing)
    assert (stats.amax, stats.count, stats.sinks) == (0.0, 0, ())
    assert stats.position_amaxes() == []


# Merging


SHAPES: dict[Layout, Callable[[int], tuple[int, ...]]] = {
    Layout.ROWS: lambda n: (1, n, 6),
    Layout.HEADS: lambda n: (1, 2, n, 3),
    Layout.SCORES: lambda n: (1, 2, n, n),
}


def parts(layout: Layout) -> list[SiteStats]:
    shape = SHAPES[layout]
    return [seen(normal(*shape(n), seed=n), layout=layout) for n in (3, 20, 9)]


@pytest.mark.parametrize("layout", list(Layout))
def test_statistics_merge_in_any_order(layout: Layout) -> None:
    merged = [a.merge(b).merge(c) for a, b, c in permutations(parts(layout))]
    merged += [a.merge(b.merge(c)) for a, b, c in permutations(parts(layout))]
    assert all(facts(m) == facts(merged[0]) for m in merged)


def test_streaming_is_merging() -> None:
    stream = SiteStats()
    batches = [normal(2, n, 4, seed=n) for n in (5, 30)]
    for x in batches:
        stream.add(x)
    one, two = (seen(x) for x in batches)
    assert facts(stream) == facts(one.merge(two))


def test_an_empty_place_adds_nothing() -> None:
    stats = seen(normal(1, 9, 4))
    assert facts(SiteStats().merge(stats)) == facts(stats.merge(SiteStats()))
    assert facts(SiteStats().merge(stats)) == facts(stats)


# Size and sampling (case B7)


def test_the_size_does_not_grow_with_what_passes() -> None:
    def size(batches: int) -> int:
        stats = SiteStats()
        for i in range(batches):
            stats.add(normal(1, 40, 16, seed=i))
        kept = facts(stats)
        return sum(len(v) for v in kept.values() if isinstance(v, list | tuple))

    assert size(1) == size(30)


def test_large_tensors_are_sampled_for_the_histogram_alone() -> None:
    x = normal(1, 4096, 64)
    stats = seen(x)
    assert stats.count == x.numel()
    assert SAMPLE / 2 <= stats.magnitudes.nonzero <= SAMPLE * 1.1
    assert stats.amax == float(x.abs().max())
    share = float((x.abs() < 0.1).float().mean())
    error = math.sqrt(share / stats.magnitudes.nonzero)  # of counting
    assert stats.magnitudes.below(0.1) == pytest.approx(share, abs=4 * error)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("wanted", [1, 3, 4, 16])
def test_some_rows_are_sampled_whatever_their_number(rows: int, wanted: int) -> None:
    got = len(sampled_rows(torch.zeros(rows, 5), wanted * 5))
    assert min(rows, wanted) / 2 <= got <= max(rows / wanted, 1) * wanted + 1


def test_a_row_longer_than_the_sample_is_counted() -> None:
    assert seen(normal(1, 2, 3 * SAMPLE)).magnitudes.nonzero == 3 * SAMPLE


# Between processes


@pytest.mark.parametrize("layout", list(Layout))
def test_statistics_survive_json_exactly(layout: Layout) -> None:
    one, two, three = parts(layout)
    again = SiteStats.from_state(json.loads(json.dumps(two.state(), allow_nan=False)))
    assert facts(again) == facts(two)
    assert again.to_json() == two.to_json()
    assert facts(one.merge(again).merge(three)) == facts(one.merge(two).merge(three))


def test_a_place_that_saw_nothing_survives_json() -> None:
    assert facts(SiteStats.from_state(SiteStats().state())) == facts(SiteStats())
