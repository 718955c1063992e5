from pathlib import Path

import pytest
import torch
from torch import nn

from optimizer.calibrate import calibrate
from optimizer.construct import refuse_unusable_weights
from optimizer.cost import site_cost
from optimizer.errors import ModelError, NonFiniteError
from optimizer.execute import Reference, Stacked, WeightCodes
from optimizer.formats import BF16
from optimizer.hardware import device
from optimizer.model import instrument, load
from optimizer.quantize import round_to_format
from optimizer.spec import Workload
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Component,
    Granularity,
    Precision,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer import tiny


def test_layers_that_a_stack_leaves_out_are_untouched() -> None:
    model = tiny.loaded()
    ids = tiny.ids()
    with torch.no_grad():
        empty = model.forward(ids, Stacked(Stack(), {}, WeightCodes(model)))
        assert torch.equal(empty, model.forward(ids, Reference()))


def test_gpt2_conv1d_has_a_scale_for_each_output() -> None:
    # C4: Conv1D stores (in, out); the wrong axis would give 32 scales and lose 1e-4.
    model = tiny.loaded("GPT2LMHeadModel")
    (part,) = model.parts[Site(0, Component.ATTN_QKV)]
    assert part.weight.shape == (96, 32)
    with torch.no_grad():
        part.module.weight.fill_(1e-4)  # type: ignore[operator, union-attr]
        part.module.weight[:, 2] = 100.0  # type: ignore[operator, index]
    precision = Precision("fp8_e4m3", Granularity.CHANNEL)
    codes, scale = WeightCodes(model).get(part, precision)
    assert scale is not None
    assert scale.shape == (96, 1)
    kept = (codes * scale)[0]
    torch.testing.assert_close(kept, torch.full((32,), 1e-4), rtol=2**-4, atol=0.0)


def test_square_conv1d_multiplies_as_gpt2_does() -> None:
    # c_proj is 32×32: the shape cannot tell a transposed weight from a right one.
    model = tiny.loaded("GPT2LMHeadModel")
    (part,) = model.parts[Site(0, Component.ATTN_OUT)]
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    want = x @ part.module.weight + part.module.bias  # type: ignore[operator]
    torch.testing.assert_close(Reference().linear(part, x), want)


def test_fused_siblings_share_their_per_tensor_scale() -> None:
    # C7: an engine stores q, k, v as one matrix with one scale.
    model = tiny.loaded()
    q, k, v = model.parts[Site(0, Component.ATTN_QKV)]
    with torch.no_grad():
        for part, largest in ((q, 1.0), (k, 3.0), (v, 5.0)):
            part.weight.mul_(largest / part.weight.abs().max())
    weights = WeightCodes(model)
    scales = [weights.get(p, Precision("fp8_e4m3"))[1] for p in (q, k, v)]
    assert [float(s) for s in scales if s is not None] == pytest.approx([5 / 448] * 3)


def test_what_is_not_recognized_is_listed_with_a_reason() -> None:
    network = tiny.network()
    network.model.layers[0].mlp.adapter = nn.Linear(32, 8)  # type: ignore[union-attr, index]
    network.model.layers[1].mlp.table = nn.Bilinear(2, 3, 4)  # type: ignore[union-attr, index]
    model = instrument(network, "LlamaForCausalLM")
    assert [u.module for u in model.unrecognized] == [
        "model.layers.0.mlp.adapter",
        "model.layers.1.mlp.table",
    ]
    assert all(u.reason for u in model.unrecognized)
    extra = (32 * 8 + 8) + (2 * 3 * 4 + 4)
    total = sum(p.numel() for p in network.parameters())
    assert model.coverage_percent == pytest.approx(100 * (total - extra) / total)


def test_a_matrix_that_is_no_linear_layer_is_listed_too() -> None:
    class Duck(nn.Module):  # C5: it multiplies, and only its weight says so
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 32))

    network = tiny.network()
    network.model.layers[0].mlp.gate_proj = Duck()  # type: ignore[union-attr, index]
    (found,) = instrument(network, "LlamaForCausalLM").unrecognized
    assert found.module == "model.layers.0.mlp.gate_proj"
    assert "Duck" in found.reason
    assert found.parameters == 8 * 32


def test_subclasses_of_linear_are_linear() -> None:
    class FalconLinear(nn.Linear):  # C5
        pass

    network = tiny.network()
    mlp = network.model.layers[0].mlp  # type: ignore[union-attr, index]
    mlp.down_proj = FalconLinear(48, 32, bias=False)  # type: ignore[union-attr]
    model = instrument(network, "LlamaForCausalLM")
    assert Site(0, Component.FFN_OUT) in model.parts
    assert model.unrecognized == ()


def test_tied_weights_count_once() -> None:
    gemma, llama = tiny.loaded("Gemma2ForCausalLM"), tiny.loaded()
    assert gemma.shape.tied_embeddings
    assert not llama.shape.tied_embeddings
    assert gemma.shape.parameters == sum(p.numel() for p in gemma.network.parameters())


def test_norm_arithmetic_is_fp32_and_rounds_once() -> None:
    # A13: Gemma's 1 + w with w = 15.8125 is 16.8125; in bf16 it would be 16.75.
    model = tiny.loaded("Gemma2ForCausalLM")
    norm = model.network.model.norm  # type: ignore[union-attr]
    with torch.no_grad():
        norm.weight.fill_(15.8125)  # type: ignore[union-attr, operator]
    site = Site(WHOLE_MODEL, Component.NORMS)
    stack = Stack({site: choice_named(site.component, "bf16")})
    x = round_to_format(tiny_hidden(), BF16)
    model.running = Stacked(stack, {}, WeightCodes(model))
    got = norm(x.clone())  # type: ignore[operator]
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * 16.8125
    assert torch.equal(got, round_to_format(got, BF16))
    torch.testing.assert_close(got, exact, rtol=BF16.eps / 2 * 1.01, atol=0.0)


def tiny_hidden() -> torch.Tensor:
    return torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))


def test_norms_are_never_offered_eight_bits() -> None:
    assert not any(c.is_fp8 for c in CHOICES[Component.NORMS])


def test_a_rounded_residual_stream_is_what_the_layers_add_to() -> None:
    # In a bf16 engine the residual itself is bf16, not only what the norm sees.
    model = tiny.loaded()
    site = Site(0, Component.NORMS)
    stack = Stack({site: choice_named(site.component, "bf16")})
    model.running = Stacked(stack, {}, WeightCodes(model))
    x = tiny_hidden()
    model.layers[0].input_layernorm(x)  # type: ignore[operator]
    assert torch.equal(x, round_to_format(tiny_hidden(), BF16))


def test_a_weight_on_the_meta_device_is_named() -> None:
    network = tiny.network()
    mlp = network.model.layers[1].mlp  # type: ignore[union-attr, index]
    mlp.up_proj.weight = nn.Parameter(torch.empty(48, 32, device="meta"))  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight.*meta"):
        refuse_unusable_weights(network)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    network = tiny.network()
    with torch.no_grad():
        network.model.layers[0].mlp.down_proj.weight[3, 5] = value  # type: ignore[union-attr, index]
    with pytest.raises(NonFiniteError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        refuse_unusable_weights(network)


def test_rotary_angles_stay_fp32_in_a_bf16_checkpoint(tmp_path: Path) -> None:
    # A14: angles in bf16 are off by whole turns at position 2000.
    network = tiny.network().bfloat16()
    network.config.architectures = ["LlamaForCausalLM"]  # type: ignore[union-attr]
    network.save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "tokenizer.json").write_text("{}")
    model = load(tmp_path)
    rotary = model.network.model.rotary_emb  # type: ignore[union-attr]
    fresh = tiny.network().model.rotary_emb  # type: ignore[union-attr]
    assert rotary.inv_freq.dtype == torch.float32  # type: ignore[union-attr]
    assert torch.equal(rotary.inv_freq, fresh.inv_freq)  # type: ignore[union-attr, arg-type]
    assert {p.dtype for p in model.network.parameters()} == {torch.float32}
    assert model.shape.stored_bytes == 2 * model.shape.parameters


def test_attention_rows_that_see_nothing_do_no_harm() -> None:
    # A15: with padding on the left, the first rows see only padding.
    model = tiny.loaded()
    ids, mask = tiny.ids(12), torch.ones(1, 12, dtype=torch.long)
    mask[0, :4] = 0
    stats = calibrate(model, [ids], masks=[mask])
    assert all(s.amax.isfinite().all() for s in stats.values())


@pytest.mark.parametrize("component", [Component.EMBEDDINGS, Component.LM_HEAD])
def test_a_table_in_eight_bits_has_a_scale_for_each_token(component: Component) -> None:
    model = tiny.loaded("Gemma2ForCausalLM")  # tied: one tensor, of one size
    shape = next(s for s in model.shape.sites if s.site.component is component)
    narrow = "fp8_e4m3" if component is Component.EMBEDDINGS else "fp8_e4m3_weight_only"
    choice = choice_named(component, narrow)
    cost = site_cost(shape, choice, device("h100"), Workload(), model.shape)
    assert cost.weight_bytes == tiny.VOCAB * 32 + 4 * tiny.VOCAB
