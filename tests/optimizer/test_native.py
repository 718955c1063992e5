from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer import native
from optimizer.errors import HardwareError
from optimizer.execute import dynamic_scale
from optimizer.formats import E4M3
from optimizer.local_run import uniform
from optimizer.native import Native, widened
from optimizer.quantize import fake_quantize, from_codes
from optimizer.sites import LinearPart, is_linear
from optimizer.stack import (
    Component,
    Granularity,
    Precision,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer import tiny

RUN = (
    "LlamaForCausalLM",
    "LlamaForCausalLM/llama3",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
)
WEIGHT_ONLY = ("fp8_e4m3_weight_only", "bf16")


def with_choice(model: Native, base: str, **choices: str) -> Stack:
    """Return a uniform stack, but for components that get another choice."""
    stack = dict(uniform(model.shape, (base,)).choices)
    for site in stack:
        if str(site.component) in choices:
            stack[site] = choice_named(site.component, choices[str(site.component)])
    return Stack(stack)


def logits(model: Native, stack: Stack, ids: Tensor, prompt: int) -> Tensor:
    """Return the logits behind a prompt, and behind every token that follows it."""
    model.use(stack)
    cache = model.cache(len(ids), ids.shape[1])
    found = [model.run(ids[:, :prompt], cache)]
    found += [model.run(ids[:, i : i + 1], cache) for i in range(prompt, ids.shape[1])]
    return torch.cat(found, dim=1).float()


def whole(network: Any, ids: Tensor, prompt: int) -> Tensor:
    with torch.no_grad():
        every: Tensor = network(ids).logits[:, prompt - 1 :]
    return every.float()


def test_widened_codes_are_the_numbers_they_stand_for() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F]).to(torch.uint8)
    assert torch.equal(widened(codes).float(), from_codes(codes, E4M3))


@pytest.mark.parametrize("architecture", RUN)
def test_in_fp32_a_prompt_and_single_tokens_give_what_transformers_gives_at_once(
    architecture: str,
) -> None:
    ids = tiny.ids(20, batch=2)
    expected = whole(tiny.network(architecture), ids, 14)
    model = Native(tiny.network(architecture))
    found = logits(model, uniform(model.shape, ("fp32",)), ids, 14)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_in_bf16_it_is_the_network_in_bf16() -> None:
    ids = tiny.ids(16)
    expected = whole(tiny.network().bfloat16(), ids, 12)
    model = Native(tiny.network())
    found = logits(model, uniform(model.shape, ("bf16",)), ids, 12)
    # Eight bits, through two layers of sums of 32 and 48.
    assert (found - expected).abs().max() < 2**-6 * expected.abs().max()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM/llama3", "Phi3ForCausalLM"])
def test_narrow_weights_are_those_of_a_network_rounded_beforehand(
    architecture: str,
) -> None:
    ids = tiny.ids(16)
    rounded = tiny.network(architecture)
    with torch.no_grad():
        for module in rounded.modules():
            if is_linear(module):
                _round(LinearPart(Site(0, Component.FFN_IN), "", module).weight)
    expected = whole(rounded.bfloat16(), ids, 12)
    model = Native(tiny.network(architecture))
    found = logits(model, uniform(model.shape, WEIGHT_ONLY), ids, 12)
    assert (found - expected).abs().max() < 2**-5 * expected.abs().max()


def _round(weight: Tensor) -> None:
    scale = dynamic_scale(weight, Precision("fp8_e4m3", Granularity.CHANNEL))
    weight.copy_(fake_quantize(weight.contiguous(), scale, E4M3))


def test_a_narrow_table_gives_rows_near_the_wide_ones() -> None:
    ids = tiny.ids(8)
    model = Native(tiny.network())
    wide = logits(model, with_choice(model, "bf16"), ids, 8)
    found = logits(model, with_choice(model, "bf16", embeddings="fp8_e4m3"), ids, 8)
    assert not torch.equal(found, wide)
    assert (found - wide).norm() < 0.2 * wide.norm()  # three bits of mantissa


def test_attention_runs_in_the_widest_format_of_its_three_sites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.dtype] = []
    fused = native.fused

    def spy(module: nn.Module, query: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append(query.dtype)
        return fused(module, query, *rest, **more)

    monkeypatch.setattr(native, "fused", spy)
    model = Native(tiny.network())
    logits(model, with_choice(model, "bf16"), tiny.ids(4), 4)
    logits(model, with_choice(model, "bf16", attn_values="fp32"), tiny.ids(4), 4)
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_the_cache_is_held_in_its_own_format_and_counts_what_it_was_filled_with() -> (
    None
):
    model = Native(tiny.network())
    model.use(with_choice(model, "fp32", kv_cache="bf16"))
    cache = model.cache(3, tokens=9, filled=5)
    model.run(tiny.ids(1, batch=3), cache)
    assert cache.get_seq_length() == 6
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert cache.layers[0].keys.shape == (3, tiny.KV_HEADS, 9, 8)


def test_every_site_says_how_long_it_took_once() -> None:
    model = Native(tiny.network())
    logits(model, uniform(model.shape, ("bf16",)), tiny.ids(4), 4)
    spent = model.spent_until_now()
    silent = {s.site for s in model.shape.sites} - spent.keys()
    assert {s.component for s in silent} == {
        Component.ATTN_SOFTMAX
    }  # with its neighbors
    assert all(seconds > 0 for seconds in spent.values())
    assert not any(model.spent_until_now().values())


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("BertForMaskedLM", "an encoder generates nothing"),
        ("MixtralForCausalLM", "experts share one module"),
        ("FalconForCausalLM", "FalconAttention multiplies on its own"),
        ("Gemma2ForCausalLM", "no fused attention kernel has a soft cap"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(
    architecture: str, why: str
) -> None:
    with pytest.raises(HardwareError, match=why):
        Native(tiny.network(architecture))


@pytest.mark.parametrize(
    "choices", [{"ffn_in": "fp8_e4m3"}, {"kv_cache": "fp8_e4m3"}, {"norms": "fp16"}]
)
def test_a_choice_that_no_kernel_here_has_is_refused_by_name(
    choices: dict[str, str],
) -> None:
    model = Native(tiny.network())
    (name,) = choices.values()
    with pytest.raises(HardwareError, match=f"{name} at .* is not run on this CPU"):
        model.use(with_choice(model, "bf16", **choices))
