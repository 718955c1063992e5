"""Training's memory: bytes of each parameter and of each token, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from optimizer.architectures import PUBLISHED
from optimizer.configs import shape_of
from optimizer.errors import SpecError
from optimizer.stack import ModelShape
from optimizer.training_memory import (
    Arithmetic,
    Checkpointing,
    Optimizer,
    Training,
    activations,
    gain,
    held_parameters,
    lora_parameters,
    optimizer_bytes,
    training,
)

QWEN = PUBLISHED["qwen2-7b"].shape
STATE = ("frozen_weights", "weights", "gradients", "master_weights", "optimizer_state")
HOW = st.builds(
    Training,
    arithmetic=st.sampled_from(Arithmetic),
    optimizer=st.sampled_from(Optimizer),
    checkpointing=st.sampled_from(Checkpointing),
    zero_stage=st.integers(0, 3),
    data_parallel=st.integers(1, 64),
    tensor_parallel=st.integers(1, 8),
    batch_size=st.integers(1, 64),
    sequence_tokens=st.integers(1, 32_768),
    lora_rank=st.none() | st.integers(1, 256),
)


def state_bytes(how: Training, model: ModelShape = QWEN) -> int:
    ledger = training(model, how)
    return sum(ledger.bytes_of(name) for name in STATE)


def gpt(layers: int = 2, hidden: int = 64, heads: int = 4) -> ModelShape:
    """GPT-2's layer, which Korthikanti et al. count."""
    return shape_of(
        {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": 256,
            "vocab_size": 1000,
        }
    )


@given(name=st.sampled_from(sorted(PUBLISHED)), how=HOW)
def test_rows_of_training_add_up(name: str, how: Training) -> None:
    ledger = training(PUBLISHED[name].shape, how)
    assert sum(e.bytes for e in ledger.entries) == ledger.total_bytes
    assert len({e.name for e in ledger.entries}) == len(ledger.entries)
    assert all(e.bytes > 0 and e.counted for e in ledger.entries)
    assert ledger.devices == how.tensor_parallel * how.data_parallel


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_adam_is_sixteen_bytes_for_each_parameter_in_either_precision(
    arithmetic: Arithmetic,
) -> None:
    # 4 + 4 + 8 in fp32; 2 + 2 + 4 + 8 in mixed precision. 7e9 of them: 112 GB.
    assert state_bytes(Training(arithmetic=arithmetic)) == 16 * QWEN.parameters
    assert 16 * 7_000_000_000 == 112_000_000_000


@pytest.mark.parametrize(
    ("optimizer", "mixed", "fp32"),
    [
        (Optimizer.ADAM, 2 + 2 + 4 + 8, 4 + 4 + 8),
        (Optimizer.SGD_MOMENTUM, 2 + 2 + 4 + 4, 4 + 4 + 4),
        (Optimizer.SGD, 2 + 2 + 4, 4 + 4),
    ],
)
def test_bytes_of_each_parameter_by_optimizer(
    optimizer: Optimizer, mixed: int, fp32: int
) -> None:
    for arithmetic, each in ((Arithmetic.MIXED, mixed), (Arithmetic.FP32, fp32)):
        how = Training(optimizer=optimizer, arithmetic=arithmetic)
        assert state_bytes(how) == each * QWEN.parameters


def test_states_of_eight_bits_have_a_scale_for_each_block() -> None:
    # 1000 elements: 2 × 1000 bytes, 2 × 4 blocks × 4 bytes; 24 more in vectors: 8 each.
    assert optimizer_bytes(Optimizer.ADAM_8BIT, 1024, 24) == 2000 + 32 + 192


def test_zero_divides_by_stage() -> None:
    # Rajbhandari et al., figure 1: 7.5e9 parameters on 64 devices take 120 GB, 31.4,
    # 16.6 and 1.9. Here 2 + 2 + 12 bytes, each divided from its stage on.
    p, n = QWEN.parameters, 64
    share = -(-p // n)
    wanted = [16 * p, 4 * p + 12 * share, 2 * p + 14 * share, 16 * share]
    found = [state_bytes(Training(zero_stage=z, data_parallel=n)) for z in range(4)]
    assert found == wanted
    billions = [round(7.5 * b / p, 1) for b in found]
    assert billions == [120.0, 31.4, 16.6, 1.9]


def test_there_is_no_fourth_stage() -> None:
    with pytest.raises(SpecError, match="0 to 3"):
        Training(zero_stage=4)


def test_tensor_parallel_devices_share_the_matrices() -> None:
    assert held_parameters(QWEN, 1) == QWEN.parameters
    norms_and_biases = 28 * (4608 + 2 * 3584) + 3584
    matrices = QWEN.parameters - norms_and_biases
    assert held_parameters(QWEN, 4) == matrices // 4 + norms_and_biases


def test_lora_trains_little_and_freezes_the_rest() -> None:
    # One layer at rank 8: q 3584 + 3584, k and v 512 + 3584, o as q; gate and up
    # 18944 + 3584, down the same.
    layer = 8 * (2 * 7168 + 2 * 4096 + 3 * 22_528)
    assert lora_parameters(QWEN, 8) == 28 * layer
    ledger = training(QWEN, Training(lora_rank=8))
    assert ledger.bytes_of("frozen_weights") == 2 * QWEN.parameters
    assert state_bytes(Training(lora_rank=8)) == 2 * QWEN.parameters + 16 * 28 * layer
    whole = Training(lora_rank=8, arithmetic=Arithmetic.FP32)
    assert training(QWEN, whole).bytes_of("frozen_weights") == 4 * QWEN.parameters


def test_adapters_of_experts_have_the_experts_sizes() -> None:
    # Mixtral, one layer: each of 8 experts has gate and up fused, 2·14336 rows of 4096
    # inputs, and down, 4096 rows of 14336.
    mixtral = PUBLISHED["mixtral-8x7b"].shape
    attention = 2 * 8192 + 2 * (1024 + 4096)
    experts = 8 * (2 * 14_336 + 4096 + 4096 + 14_336)
    assert lora_parameters(mixtral, 1) == 32 * (attention + experts)


def kept(model: ModelShape, how: Training) -> int:
    return {e.name: e.bytes for e in activations(model, how)}["activations"]


def test_a_gpt_layer_keeps_34_sbh_less_its_dropout_masks() -> None:
    # Korthikanti et al. 2022, section 4.1: attention 11sbh + 5as²b, MLP 19sbh, norms
    # 4sbh. Without dropout: two masks of sbh less, and of the 5as²b the 2 of softmax.
    s, b, h, a, layers = 128, 3, 64, 4, 2
    how = Training(batch_size=b, sequence_tokens=s)
    model = gpt(layers, h, a)
    assert kept(model, how) == layers * s * b * h * (34 - 2)
    with_scores = replace(how, checkpointing=Checkpointing.NONE)
    assert kept(model, with_scores) == layers * (s * b * h * 32 + 2 * a * s * s * b)
    whole = replace(how, checkpointing=Checkpointing.FULL)
    assert kept(model, whole) == layers * 2 * s * b * h
    again = {e.name: e.bytes for e in activations(model, whole)}["recomputed_layer"]
    assert again == s * b * h * 32


def test_tensor_parallel_leaves_8_sbh_on_every_device() -> None:
    # Their equation 2: sbh (10 + 24/t), of which the two dropout masks are 2.
    how = Training(batch_size=1, sequence_tokens=128, tensor_parallel=4)
    assert kept(gpt(), how) == 2 * 128 * 64 * (8 + 24 / 4)


def test_logits_are_counted_as_they_count_them() -> None:
    # Section 4.3: 4sbh (1 + v/h) for last norm, input of the head and fp32 logits.
    rows = {e.name: e.bytes for e in activations(gpt(), Training(sequence_tokens=10))}
    assert rows["logits"] == 4 * 10 * 64 * (1 + 1000 / 64)


def test_activations_in_fp32_are_twice_as_large() -> None:
    how = Training(sequence_tokens=100)
    fp32 = replace(how, arithmetic=Arithmetic.FP32)
    assert kept(QWEN, fp32) == 2 * kept(QWEN, how)


def test_a_gated_layer_keeps_gate_and_up() -> None:
    # Qwen2-7B, each token of a layer: norms 2h, inputs of qkv and gate 2h, Q, K, V
    # 4608, input of o 3584, gate, up and their product 3 × 18944; two bytes each.
    each = 2 * (4 * 3584 + 4608 + 3584 + 3 * 18_944)
    assert kept(QWEN, Training(sequence_tokens=100)) == 28 * 100 * each


def test_mixed_precision_pays_by_activations_alone() -> None:
    found = gain(QWEN, Training(sequence_tokens=4096, batch_size=4))
    assert found.pays
    assert not found.folklore
    saved = found.fp32_bytes - found.mixed_bytes
    assert saved == kept(QWEN, Training(sequence_tokens=4096, batch_size=4)) + (
        4 * 4096 * 2 * 2 * 3584
    )
    assert found.saved_share == saved / found.fp32_bytes


def test_a_small_model_with_short_sequences_is_folklores_case() -> None:
    found = gain(gpt(), Training(sequence_tokens=128))
    assert not found.pays
    assert found.folklore
    assert "folklore" in found.said


def test_frozen_weights_shrink_too() -> None:
    found = gain(QWEN, Training(lora_rank=8, sequence_tokens=1))
    assert found.pays
    assert found.fp32_bytes - found.mixed_bytes > 2 * QWEN.parameters
