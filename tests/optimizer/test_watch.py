"""A model's places while it runs: which are watched, and what their statistics say."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from optimizer.execute import Operand, Reference
from optimizer.stack import WHOLE_MODEL, Component, Role, Site
from optimizer.statistics import layout_of
from optimizer.watch import SAME, Statistics, to_json, watched
from tests.optimizer import tiny
from tests.optimizer.test_statistics import facts


class Watch(Reference):
    """Runs the reference and shows every tensor to the statistics."""

    def __init__(self, keep: Tensor | None = None) -> None:
        self.statistics = Statistics()
        self.keep = keep
        self.tensors: dict[tuple[Site, Role], Tensor] = {}

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        if self.tensors.get((site, role)) is not x:
            self.tensors[site, role] = x
            visible = x if mask is None else x.masked_fill(mask < 0, 0.0)
            self.statistics.see(site, role, visible, self.keep)
        return x, None


@pytest.fixture(scope="module")
def watch() -> Watch:
    executor = Watch()
    executor.statistics.ids = tiny.ids()
    with torch.no_grad():
        tiny.loaded().forward(tiny.ids(), executor)
    return executor


def test_every_static_scale_has_statistics(watch: Watch) -> None:
    for (site, role), x in watch.tensors.items():
        if not watched(site, role):
            continue
        stats = watch.statistics.places[site, role]
        assert stats.layout is layout_of(site, role)
        if site.component not in (Component.ATTN_SOFTMAX, Component.NORMS):
            assert stats.amax == float(x.abs().max())
    components = {site.component for site, _ in watch.statistics.places}
    assert components == {c for c in Component if str(c) not in ("router", "kv_cache")}


def test_the_probabilities_of_pv_are_those_of_the_softmax(watch: Watch) -> None:
    values = watch.statistics.of(Site(1, Component.ATTN_VALUES))
    softmax = watch.statistics.of(Site(1, Component.ATTN_SOFTMAX))
    assert values[Role.INPUT] is softmax[Role.OUTPUT]
    assert set(values) == {Role.INPUT, Role.WEIGHT}


def test_the_cache_holds_the_keys_and_values_of_attention() -> None:
    assert SAME["kv_cache", Role.INPUT] == (Component.ATTN_SCORES, Role.WEIGHT)
    assert SAME["kv_cache", Role.WEIGHT] == (Component.ATTN_VALUES, Role.WEIGHT)


def test_tokens_are_named_by_their_ids(watch: Watch) -> None:
    place = (Site(WHOLE_MODEL, Component.EMBEDDINGS), Role.OUTPUT)
    for sink in watch.statistics.places[place].sinks:
        assert sink.token == int(tiny.ids()[0, sink.position])


def test_the_document_holds_every_place_in_order(watch: Watch) -> None:
    rows = to_json(watch.statistics, str)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert [(r["site"], r["role"]) for r in rows] == [
        (str(s), str(r)) for s, r in sorted(watch.statistics.places)
    ]
    for row in rows:
        assert sum(row["exponents"]["counts"]) > 0
        assert row["amax"] >= row["median_token_amax"] > 0


def test_statistics_of_a_model_survive_json(watch: Watch) -> None:
    state = json.loads(json.dumps(watch.statistics.state(), allow_nan=False))
    again = Statistics.from_state(state)
    assert again.places.keys() == watch.statistics.places.keys()
    assert all(
        facts(again.places[p]) == facts(s) for p, s in watch.statistics.places.items()
    )


def test_two_halves_of_the_data_merge_to_the_whole() -> None:
    model, halves = tiny.loaded(), [tiny.ids(seed=i) for i in (1, 2)]
    watches = [Watch(), Watch(), Watch()]
    with torch.no_grad():
        for watch_, some in zip(watches, [halves, halves[:1], halves[1:]], strict=True):
            for ids in some:
                watch_.statistics.ids = ids
                model.forward(ids, watch_)
    whole, one, two = (w.statistics for w in watches)
    merged = one.merge(two)
    assert merged.places.keys() == whole.places.keys()
    assert all(facts(merged.places[p]) == facts(s) for p, s in whole.places.items())


def test_norms_of_heads_stand_beside_those_of_layers() -> None:
    executor = Watch()
    with torch.no_grad():
        tiny.loaded("Qwen3ForCausalLM").forward(tiny.ids(), executor)
    stats = executor.statistics.places[Site(0, Component.NORMS), Role.INPUT]
    assert stats.channels is not None
    assert len(stats.channels) == 32  # of the residual stream, which came first
    assert np.isfinite(stats.amax)
