"""vLLM on tiny models of other architectures: what it serves, and what it refuses.

What is written is served with activations in float32, and says what the emulation of
its weights says. What `optimizer.export_scheme` refuses is written all the same, with
the refusal taken away, and vLLM refuses it or fails on it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
)

from optimizer import export_scheme
from optimizer.errors import ExportError
from optimizer.export_checkpoint import write_checkpoint
from optimizer.export_files import Target
from optimizer.export_scheme import plan
from optimizer.pieces import Memory
from optimizer.work import Work
from tests.optimizer.conftest import spec_of
from tests.optimizer.exporting import DENSE as ALL, stack_of
from tests.service import byte_tokenizer
from tests.vllm.test_served import PYTHON, InFloat32, _in_float32, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS, TOKENS = 8, 16
TOLERANCE = 5e-3  # of log p near -6; Gemma's embeddings are scaled in 16 bits
SIZES: Mapping[str, Any] = {
    "vocab_size": 272,  # what the tokenizer of bytes needs, in steps of 16
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM's CPU attention takes
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 272, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS: Mapping[str, Any] = {
    "LlamaForCausalLM": lambda: LlamaConfig(**SIZES),
    "Qwen2ForCausalLM": lambda: Qwen2Config(**SIZES),
    "Gemma2ForCausalLM": lambda: Gemma2Config(**SIZES),
    "Gemma3ForCausalLM": lambda: Gemma3TextConfig(**SIZES),
    "Phi3ForCausalLM": lambda: Phi3Config(**SIZES),
    "GPT2LMHeadModel": lambda: GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2),
    "MixtralForCausalLM": lambda: MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
}
# The CPU build has no kernel for FP8 weights alone, and none for experts in FP8.
DENSE = {n: c for n, c in ALL.items() if "weight_only" not in c}
HEAD = {"lm_head": "fp8_e4m3_token"}
SERVED: Mapping[str, Mapping[str, str]] = {
    "Qwen2ForCausalLM": {**DENSE, **HEAD},
    "Gemma2ForCausalLM": DENSE,
    "Gemma3ForCausalLM": {**DENSE, **HEAD},
    "Phi3ForCausalLM": DENSE,
    "GPT2LMHeadModel": DENSE,
}
# What we refuse: the architecture, the stack, what we say of it, and what vLLM says.
REFUSED: Mapping[str, tuple[str, Mapping[str, str], str, str]] = {
    "experts of two schemes": (
        "MixtralForCausalLM",
        {"layers.0.ffn_in": "fp8_e4m3_token"},
        "under one scheme",
        "All MoE projections need to have same quantization scheme",
    ),
    "experts by weight alone": (
        "MixtralForCausalLM",
        {f"layers.0.ffn_{d}": "fp8_e4m3_weight_only" for d in ("in", "out")},
        "no weight-only FP8 kernel",
        "For Fused MoE layers, only format: pack-quantized",
    ),
    "a head in blocks": (
        "LlamaForCausalLM",
        {"lm_head": "fp8_e4m3_block"},
        "pads the vocabulary",
        "AssertionError",
    ),
    "a head that is tied in code": (
        "Gemma2ForCausalLM",
        HEAD,
        "takes the embeddings",
        "no module or parameter named 'lm_head'",
    ),
}


def tiny(architecture: str, folder: Path) -> Work:
    """Write a model in bf16, which every reader has exactly, and open it."""
    torch.manual_seed(0)
    network: Any = getattr(transformers, architecture)(CONFIGS[architecture]())
    network.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(folder)
    return Work(spec_of(folder), Memory())


def written(work: Work, choices: Mapping[str, str], name: str, out: Path) -> Any:
    """Write a checkpoint; returns what it is planned to be."""
    stack = stack_of(work.outline.shape, choices)
    made = plan(stack, work.outline.shape)
    target = Target(out, name, "checkpoint", "vllm", [])
    source = Path(work.spec.model_path)
    write_checkpoint(
        work.model, source, stack, made, work.weights, work.amaxes(), target
    )
    return made


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Work]:
    if not PYTHON.is_file():
        pytest.skip("`make vllm` makes the environment that has it")
    folder = tmp_path_factory.mktemp("tiny")
    return {name: tiny(name, folder / name) for name in CONFIGS}


@pytest.fixture(scope="module")
def prompts(works: Mapping[str, Work]) -> torch.Tensor:
    del works  # of bytes: the same for all
    return torch.randint(3, 272, (PROMPTS, TOKENS), generator=torch.Generator())


@pytest.fixture(scope="module")
def answers(
    works: Mapping[str, Work],
    prompts: torch.Tensor,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What vLLM says to all of them: those that we write, and those that we refuse."""
    folder = tmp_path_factory.mktemp("written")
    for name, choices in SERVED.items():
        written(works[name], choices, name, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_scheme, "_refuse", lambda *_: None)
        patch.setattr(export_scheme, "_refuse_unlike_experts", lambda *_: None)
        for name, (architecture, choices, *_) in REFUSED.items():
            written(works[architecture], choices, name, folder)
    folders = {name: str(folder / name) for name in (*SERVED, *REFUSED)}
    asked = {"folders": folders, "prompts": prompts.tolist(), "dtypes": ["float32"]}
    return dict(ask(asked, folder)["float32"])


@pytest.mark.parametrize("name", SERVED)
def test_it_says_what_the_emulation_says(
    works: Mapping[str, Work],
    prompts: torch.Tensor,
    answers: dict[str, Any],
    name: str,
) -> None:
    work, found = works[name], answers[name]
    assert "error" not in found, found
    stack = plan(stack_of(work.outline.shape, SERVED[name]), work.outline.shape).served
    run = InFloat32(_in_float32(stack), work.amaxes(), work.weights)
    with torch.no_grad():
        ours = work.model.forward(prompts, run).log_softmax(-1)[:, :-1]
    likely = torch.tensor(found["likely"])
    assert float((ours.argmax(-1) == likely).float().mean()) >= 0.99
    own = ours.gather(2, prompts[:, 1:, None])[..., 0]
    torch.testing.assert_close(
        torch.tensor(found["log_p"]), own, atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_is_refused_by_us_with_the_reason(
    works: Mapping[str, Work], answers: dict[str, Any], name: str
) -> None:
    architecture, choices, said, theirs = REFUSED[name]
    shape = works[architecture].outline.shape
    with pytest.raises(ExportError, match=said):
        plan(stack_of(shape, choices), shape)
    assert theirs in answers[name]["error"]
