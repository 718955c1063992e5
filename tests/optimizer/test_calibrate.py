import gc
import math
from itertools import permutations
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

from optimizer import batches
from optimizer.calibrate import Observer, Stats, amaxes, calibrate, observe
from optimizer.errors import NonFiniteError
from optimizer.execute import Operand, Reference
from optimizer.formats import E4M3
from optimizer.metrics import sqnr_db
from optimizer.model import LoadedModel
from optimizer.quantize import fake_quantize, saturated_share, scale_from_amax
from optimizer.stack import WHOLE_MODEL, Component, Role, Site
from optimizer.walk import Activations
from tests.optimizer import tiny
from tests.optimizer.numbers import normal

SITE = Site(0, Component.FFN_IN)
EVERYWHERE = (0, 1, 2)
Place = tuple[Site, Role]


def with_largest(x: Tensor, largest: float) -> Tensor:
    return x * (largest / x.abs().max())


def padded(rows: list[Tensor], pad: float, left: bool) -> tuple[Tensor, Tensor]:
    """Return rows of one length, and a mask that is False where they were filled."""
    longest = max(len(r) for r in rows)
    batch = torch.full((len(rows), longest, *rows[0].shape[1:]), pad).to(rows[0].dtype)
    keep = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(longest - len(row), None) if left else slice(len(row))
        batch[i, where], keep[i, where] = row, True
    return batch, keep


class Keep(Reference):
    """Runs the reference and keeps every tensor, for small ones."""

    def __init__(self) -> None:
        self.seen: dict[Place, Tensor] = {}

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        self.seen[site, role] = x.clone()
        return x, None


# Padding (case B3)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pad", [50.0, math.inf, math.nan])
def test_padding_sets_no_scale(pad: float, left: bool) -> None:
    rows = [with_largest(normal(n, 4, seed=n), 2.0) for n in (3, 7)]
    batch, keep = padded(rows, pad, left)
    stats = observe(batch, keep.unsqueeze(-1), EVERYWHERE)
    assert float(scale_from_amax(stats.amax, E4M3)) == pytest.approx(2 / 448, rel=1e-7)
    alone = [observe(row[None], None, EVERYWHERE) for row in rows]
    both = alone[0].merge(alone[1])
    assert torch.equal(stats.amax, both.amax)
    assert stats.count == both.count == (3 + 7) * 4


def test_a_sample_of_padding_alone_sets_no_scale() -> None:
    x = torch.full((1, 5, 4), 50.0)
    stats = observe(x, torch.zeros(1, 5, 1, dtype=torch.bool), EVERYWHERE)
    assert (float(stats.amax), stats.count) == (0.0, 0)
    real = Stats(torch.tensor(2.0), 8)
    assert float(real.merge(stats).amax) == 2.0


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_padded_batch_is_calibrated_as_its_rows_alone(
    architecture: str, left: bool
) -> None:
    model = tiny.loaded(architecture)
    with torch.no_grad():  # a pad embedding that would drown everything if it were seen
        embeddings = model.network.get_input_embeddings()  # type: ignore[operator]
        embeddings.weight[0] = 25.0
    rows = [tiny.ids(n, seed=n)[0] for n in (3, 7)]
    batch, keep = padded(rows, 0, left)
    together = calibrate(model, [batch], masks=[keep.long()])
    alone = calibrate(model, [row[None] for row in rows])
    assert together.keys() == alone.keys()
    for place, stats in alone.items():
        # The same sums of up to 48 products in another order, through two layers.
        torch.testing.assert_close(
            together[place].amax, stats.amax, rtol=1e-4, atol=1e-5, msg=str(place)
        )


# Long context (case B5)


def test_scales_from_short_sequences_clip_what_comes_later() -> None:
    x = normal(8192, 64)
    x[512:] *= 4.0  # what happens in models beyond the length that was calibrated
    short, long = (observe(x[:n], None, (0, 1)).amax for n in (512, 2048))
    assert float(long) == pytest.approx(4 * float(short), rel=0.1)  # 4 times as wide
    scales = [scale_from_amax(a, E4M3) for a in (short, long)]
    # 15/16 of the tokens are 4 N(0,1), and clipped beyond the short amax.
    beyond = 2 * NormalDist().cdf(-float(short) / 4) * 15 / 16
    clipped = saturated_share(x, scales[0], E4M3)
    error = math.sqrt(beyond / x.numel())
    assert clipped == pytest.approx(beyond, abs=3 * error)
    assert 0.2 < clipped < 0.3
    quality = [sqnr_db(x, fake_quantize(x, s, E4M3)) for s in scales]
    assert quality[0] < 10.0  # dB: the clipped values are what is lost
    # Rounding alone: a relative error of 2^-4 at most, evenly spread: about 31.5 dB.
    assert quality[1] == pytest.approx(31.5, abs=0.2)


# What is kept (case B7)


def live_bytes() -> int:
    """Bytes of every tensor that is alive."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta
    }
    return sum(storages.values())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GRAPH_TOKENS", 32)
    model = tiny.loaded()

    def held(samples: int) -> int:
        """Bytes of tensors that a pass adds, but for the tokens themselves."""
        sequences = [tiny.ids(32, seed=i) for i in range(samples)]
        gc.collect()
        before, during = live_bytes(), 0

        def progress(done: int, planned: int) -> None:
            nonlocal during
            if done == planned:
                gc.collect()
                during = live_bytes()

        kept = Activations(budget_bytes=0)  # what passes between layers, in a file
        calibrate(model, sequences, progress, kept=kept)
        return during - before

    assert held(16) == held(2)


def test_stats_have_one_size_whatever_passed() -> None:
    def kept(batches: int) -> list[int]:
        stats = calibrate(tiny.loaded(), [tiny.ids(8, seed=i) for i in range(batches)])
        return [s.amax.numel() for s in stats.values()]

    assert kept(1) == kept(5)
    assert max(kept(1)) == 4  # one for each head at most


def test_calibration_leaves_nothing_on_the_model() -> None:
    model = tiny.loaded()
    before = {n: p.clone() for n, p in model.network.named_parameters()}
    calibrate(model, [tiny.ids()])
    for module in model.network.modules():
        assert len(module._forward_hooks) == 0
        assert len(module._forward_pre_hooks) == 0
    for name, weight in model.network.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None
        assert not weight.requires_grad
    assert model.running is None


# Weights that come and go (case B8)


def test_weights_filled_during_the_pass_give_the_same_bits() -> None:
    # accelerate's hooks: on the meta device until the module runs, and again after.
    want = calibrate(tiny.loaded(), [tiny.ids()])
    model = tiny.loaded()
    for module in model.network.modules():
        if isinstance(module, nn.Linear):
            offload(module)
    assert any(p.is_meta for p in model.network.parameters())
    got = calibrate(model, [tiny.ids()])
    assert got.keys() == want.keys()
    assert all(torch.equal(got[k].amax, want[k].amax) for k in want)


def offload(module: nn.Module) -> None:
    weight = module.weight
    away = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)  # type: ignore[arg-type]
    module.weight = away

    def fill(m: nn.Module, *_: object) -> None:
        m.weight = weight

    def empty(m: nn.Module, *_: object) -> None:
        m.weight = away

    module.register_forward_pre_hook(fill)
    module.register_forward_hook(empty)


# Batches (case B10)


def test_streaming_is_all_at_once() -> None:
    batches = [normal(2, 5, 4, seed=i) for i in range(6)]
    observer = Observer()
    for x in batches:
        observer.tap(SITE, Role.INPUT, x)
        observer.forget()
    (stats,) = observer.stats.values()
    once = observe(torch.cat(batches), None, EVERYWHERE)
    assert torch.equal(stats.amax, once.amax)
    assert stats.count == once.count


def test_stats_merge_in_any_order() -> None:
    parts = [observe(normal(n, 4, seed=n), None, (0, 1)) for n in (1, 3, 8)]
    merged = [a.merge(b).merge(c) for a, b, c in permutations(parts)]
    merged += [a.merge(b.merge(c)) for a, b, c in permutations(parts)]
    for stats in merged:
        assert torch.equal(stats.amax, merged[0].amax)
        assert stats.count == merged[0].count


def test_static_scales_do_not_depend_on_the_batch() -> None:
    rows = [normal(1, 6, 4, seed=i) for i in range(4)]
    one, four = Observer(), Observer()
    for row in rows:
        one.tap(SITE, Role.INPUT, row)
    four.tap(SITE, Role.INPUT, torch.cat(rows))
    scales = [
        scale_from_amax(o.stats[SITE, Role.INPUT].amax, E4M3) for o in (one, four)
    ]
    assert torch.equal(scales[0], scales[1])


def test_a_model_is_calibrated_alike_by_one_and_by_four() -> None:
    model, ids = tiny.loaded(), tiny.ids(24, batch=4)
    one, four = calibrate(model, ids.split(1)), calibrate(model, [ids])
    for place, stats in one.items():
        # The matmul library may sum 96 rows in another order than 24.
        torch.testing.assert_close(
            four[place].amax, stats.amax, rtol=1e-5, atol=1e-6, msg=str(place)
        )


def test_a_shared_input_is_counted_once() -> None:
    # q, k and v read one tensor: it is one observation.
    stats = calibrate(tiny.loaded(), [tiny.ids(24)])
    assert stats[Site(0, Component.ATTN_QKV), Role.INPUT].count == 24 * 32
    # Two matrices of 48 outputs each.
    assert stats[SITE, Role.OUTPUT].count == 2 * 24 * 48


# What is seen


def run_and_keep(model: LoadedModel, ids: Tensor) -> dict[Place, Tensor]:
    keep = Keep()
    with torch.no_grad():
        model.forward(ids, keep)
    return keep.seen


def test_attention_operands_have_an_amax_for_each_head() -> None:
    model, ids = tiny.loaded(), tiny.ids()
    seen, largest = run_and_keep(model, ids), amaxes(calibrate(model, [ids]))
    for component, role, heads in (
        (Component.ATTN_SCORES, Role.INPUT, 4),
        (Component.ATTN_SCORES, Role.WEIGHT, 2),  # grouped queries
        (Component.ATTN_VALUES, Role.WEIGHT, 2),
    ):
        place = (Site(1, component), role)
        assert largest[place].shape == (heads,)
        by_hand = [float(head.abs().max()) for head in seen[place].unbind(1)]
        assert largest[place].tolist() == by_hand


def test_scores_that_the_causal_mask_removes_set_no_scale() -> None:
    model, ids = tiny.loaded(), tiny.ids(seed=2)
    place = (Site(0, Component.ATTN_SOFTMAX), Role.INPUT)
    scores = run_and_keep(model, ids)[place]  # (1, heads, tokens, tokens)
    largest = amaxes(calibrate(model, [ids]))[place]
    assert float(largest) == float(scores.tril().abs().max())
    assert float(largest) < float(scores.abs().max())  # or the case shows nothing


def test_every_place_that_gets_a_static_scale_is_calibrated() -> None:
    model = tiny.loaded()
    places = set(calibrate(model, [tiny.ids()]))
    for site in model.sites:
        if site.component not in (Component.EMBEDDINGS, Component.NORMS):
            assert (site, Role.INPUT) in places
    assert (Site(WHOLE_MODEL, Component.EMBEDDINGS), Role.OUTPUT) in places


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_with_its_site_and_sample(
    value: float,
) -> None:
    model = tiny.loaded()
    with torch.no_grad():
        model.network.get_input_embeddings().weight[50, 3] = value  # type: ignore[operator]
    first, second = torch.tensor([[3, 4, 5]]), torch.tensor([[6, 50, 7]])
    with pytest.raises(NonFiniteError, match="embeddings weight, sample 1"):
        calibrate(model, [first, second])
    assert model.running is None  # the model can be used again


def test_what_first_overflows_inside_a_layer_is_named() -> None:
    model = tiny.loaded()
    mlp = model.layers[1].mlp
    with torch.no_grad():  # silu(gate) · up overflows float32, and only there
        for part in (mlp.gate_proj, mlp.up_proj):  # type: ignore[union-attr]
            part.weight.abs_().mul_(1e20)  # type: ignore[operator, union-attr]
        model.layers[1].post_attention_layernorm.weight.fill_(1.0)  # type: ignore[operator, union-attr]
    with pytest.raises(NonFiniteError, match=r"layers\.1\.ffn_out input, sample 0"):
        calibrate(model, [tiny.ids()])
