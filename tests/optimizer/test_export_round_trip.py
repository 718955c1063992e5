"""Exported checkpoints through their readers' own code: compressed-tensors, transformers.

transformers 5 puts a layer's experts into one tensor and keeps GPT-2's matrices in Conv1D
modules: compressed-tensors narrows neither there. Those two are read without it, their
codes multiplied by their scales by its `dequantize`, and inputs of products rounded by
its `fake_quantize`; vLLM itself is in tests/vllm.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from optimizer.execute import Stacked, apply_scale
from optimizer.export_checkpoint import write_checkpoint
from optimizer.export_files import Target
from optimizer.export_scheme import SCHEMES, plan
from optimizer.model import load
from optimizer.sites import LinearPart
from optimizer.spec import OptimizeSpec
from optimizer.stack import LINEAR, Component, Role, Site
from tests.optimizer import exporting
from tests.optimizer.conftest import spec_of
from tests.optimizer.exporting import CACHE, DENSE, EXPERTS, Exported, saved
from tests.optimizer.rounded_inputs import RoundedInputs

HEAD = {"lm_head": "fp8_e4m3_token"}
CHOICES: Mapping[str, Mapping[str, str]] = {
    "Qwen2ForCausalLM": {**DENSE, **CACHE, **HEAD},
    "Gemma2ForCausalLM": DENSE,
    "Gemma3ForCausalLM": {**DENSE, **HEAD},  # its own head now: it was tied
    "Phi3ForCausalLM": DENSE,
    "GPT2LMHeadModel": DENSE,
    "MixtralForCausalLM": EXPERTS,
}
WITHOUT = ("GPT2LMHeadModel", "MixtralForCausalLM")  # compressed-tensors
TOLERANCE = 2e-3  # of logits of size 1: an input at the edge of two codes may flip
Weights = dict[str, Tensor]


@pytest.fixture(scope="module", params=CHOICES)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    folder = saved(request.param, tmp_path_factory.mktemp("models") / "tiny")
    spec = replace(spec_of(folder), exports=("compressed_tensors",))
    choices = CHOICES[request.param]
    return exporting.exported(spec, tmp_path_factory.mktemp("out"), choices)


def architecture(made: Exported) -> str:
    return made.work.outline.architecture


# What compressed-tensors reads


def test_each_matrix_has_its_scheme_and_no_other(made: Exported) -> None:
    config = json.loads((made.checkpoint / "config.json").read_text())
    network = _modules_of(made)
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    apply_quantization_config(network, parsed)
    found = {
        name: _words(module.quantization_scheme)
        for name, module in network.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    }
    assert found == _expected(made)
    groups = config["quantization_config"]["config_groups"].values()
    targets = [name for group in groups for name in group["targets"]]
    ignored = config["quantization_config"]["ignore"]
    every = [n for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    assert sorted([*targets, *ignored]) == sorted(every)  # each by one of them


def _modules_of(made: Exported) -> nn.Module:
    """A tree with a Linear for every stored matrix, as engines that fuse nothing have."""
    root = nn.Module()
    tables = ("embed_tokens.weight", "wte.weight", "wpe.weight")
    names = [
        n for n, t in _stored(made).items() if t.ndim == 2 and n.endswith(".weight")
    ]
    names += [] if "lm_head.weight" in names else ["lm_head.weight"]  # tied
    for name in names:
        if name.endswith(tables):
            continue
        *path, last = name.removesuffix(".weight").split(".")
        inner = root
        for step in path:
            if not hasattr(inner, step):
                inner.add_module(step, nn.Module())
            inner = inner.get_submodule(step)
        inner.add_module(last, nn.Linear(1, 1))
    return root


def _words(scheme: Any) -> tuple[str, str | None]:
    inputs = scheme.input_activations
    assert scheme.weights.type == "float"
    assert scheme.weights.num_bits == 8
    if inputs is None:
        return str(scheme.weights.strategy), None
    assert inputs.dynamic is (inputs.strategy != "tensor")
    return str(scheme.weights.strategy), str(inputs.strategy)


def _expected(made: Exported) -> dict[str, tuple[str, str | None]]:
    found = {}
    for site, choice in made.stack.choices.items():
        if site.component not in LINEAR or not choice.is_narrow:
            continue
        scheme = SCHEMES[choice.name]
        for part in made.work.model.parts[site]:
            for name in _file_names(part):
                found[name] = (scheme.weights, scheme.inputs)
    return found


def _file_names(part: LinearPart) -> list[str]:
    if part.index is None:
        return [part.name]
    layer = f"model.layers.{part.site.layer}.block_sparse_moe.experts.{part.index}"
    return [f"{layer}.{w}" for w in ("w1", "w3", "w2")[slice(*_W[part.parameter])]]


_W = {"gate_up_proj": (0, 2), "down_proj": (2, 3)}


def _stored(made: Exported) -> Weights:
    return load_file(made.checkpoint / "model.safetensors")


# Bytes


def test_tensors_that_nothing_was_chosen_for_keep_their_bytes(made: Exported) -> None:
    before, after = load_file(made.work.folder / "model.safetensors"), _stored(made)
    scales = {n for n in after if n.endswith("_scale")}
    own_head = {"lm_head.weight"} - before.keys()
    assert before.keys() == after.keys() - scales - own_head
    for name, weight in before.items():
        if after[name].dtype == torch.float32:
            assert torch.equal(after[name], weight), name
            assert weight.ndim == 1, name  # of norms and biases
        elif after[name].dtype == torch.bfloat16:
            assert torch.equal(after[name], weight.to(torch.bfloat16)), name
        else:
            assert after[name].dtype == torch.float8_e4m3fn, name
            codes, wide = after[name].float(), weight
            scale = after[f"{name}_scale"]
            if architecture(made) == "GPT2LMHeadModel" and scale.ndim == 2:
                scale = scale.T
            error = (codes * scale - wide).abs()
            assert bool((error <= wide.abs() / 16 + scale * 2.0**-9).all()), name


def test_it_is_as_large_as_the_report_says(made: Exported) -> None:
    size = sum(t.numel() * t.element_size() for t in _stored(made).values())
    assert made.section["checkpoint"]["bytes"] == size


def test_untied_heads_are_said_to_be(made: Exported) -> None:
    config = json.loads((made.checkpoint / "config.json").read_text())
    tied = "lm_head.weight" not in _stored(made)
    assert config.get("tie_word_embeddings", True) is tied
    assert config.get("dtype") == "bfloat16"


def test_caches_have_scales_where_they_are_fp8(made: Exported) -> None:
    scales = [n for n in _stored(made) if n.endswith(("k_scale", "v_scale"))]
    config = json.loads((made.checkpoint / "config.json").read_text())
    scheme = config["quantization_config"]["kv_cache_scheme"]
    if architecture(made) == "Qwen2ForCausalLM":
        assert len(scales) == 2 * len(made.work.model.layers)
        assert (scheme["type"], scheme["dynamic"]) == ("float", False)
    else:
        assert (scales, scheme) == ([], None)


# Logits


class Exact(Stacked):
    """A stack without its 16-bit roundings, as a reader in float32 runs it."""

    inputs = True  # whether FP8 inputs are rounded
    tables = True  # whether embeddings are

    def tap(self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None) -> Any:
        if site.component is Component.EMBEDDINGS and role is Role.WEIGHT:
            return super().tap(site, role, x, mask) if self.tables else (x, None)
        narrow = self._choices[site].input.format.startswith("fp8")
        if self.inputs and narrow and site.component in LINEAR and role is Role.INPUT:
            return super().tap(site, role, x, mask)
        return x, None

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        choice = self._choices[part.site]
        assert choice.weight is not None
        weight = apply_scale(*self._weights.get(part, choice.weight))
        x = apply_scale(*self.tap(part.site, Role.INPUT, x))
        return functional.linear(x, weight, part.bias)


class WeightsAlone(Exact):
    inputs = False


class TablesAsStored(Exact):
    tables = False


@torch.no_grad()
def test_logits_are_those_of_the_emulation(made: Exported, tmp_path: Path) -> None:
    work, alone = made.work, architecture(made) in WITHOUT
    network = reloaded(_plain(made, tmp_path) if alone else made.checkpoint)
    model, run = work.model, WeightsAlone if alone else Exact
    if architecture(made).startswith("Gemma"):
        # It scales what it looks up, and the emulation rounds that, not the table.
        model, run = load(made.checkpoint), TablesAsStored
    executor = run(made.stack, work.amaxes(), work.weights)
    for ids in work.tokens.validation.sequences:
        theirs, ours = network(ids).logits, model.forward(ids, executor)
        difference = (theirs - ours).abs() / ours.std()
        assert float(difference.median()) < 1e-5
        assert float(difference.quantile(0.9)) < TOLERANCE


@torch.no_grad()
def test_its_loss_is_within_the_interval_of_the_report(
    made: Exported, tmp_path: Path
) -> None:
    alone = architecture(made) in WITHOUT
    network, found = reloaded(_plain(made, tmp_path) if alone else made.checkpoint), []
    with RoundedInputs(network, made.checkpoint) if alone else nullcontext():
        for index, ids in enumerate(made.work.tokens.validation.sequences):
            log_q = network(ids).logits[0].log_softmax(-1)
            log_p = made.work.truth.logits.get((0, index)).log_softmax(-1)
            found.append((log_p.exp() * (log_p - log_q)).sum(-1))
    kl = made.section["checkpoint"]["kl_nats"]
    assert kl["low"] <= float(torch.cat(found).mean()) <= kl["high"]


@torch.no_grad()
def test_rounded_inputs_are_felt(made: Exported, tmp_path: Path) -> None:
    """The comparison can fail: it does where only weights are narrow."""
    if architecture(made) not in WITHOUT:
        pytest.skip("compressed-tensors rounds its inputs itself")
    network = reloaded(_plain(made, tmp_path))
    ids = made.work.tokens.validation.sequences[0]
    plain = network(ids).logits
    with RoundedInputs(network, made.checkpoint):
        assert not torch.equal(network(ids).logits, plain)


def reloaded(folder: Path) -> Any:
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return network.eval()


def _plain(made: Exported, folder: Path) -> Path:
    """The same checkpoint in float32: codes times scales, as compressed-tensors says."""
    weights, plain = _stored(made), {}
    config = json.loads((made.checkpoint / "config.json").read_text())
    parsed = QuantizationConfig.model_validate(config.pop("quantization_config"))
    args = {n: g.weights for g in parsed.config_groups.values() for n in g.targets}
    for name, codes in weights.items():
        scale = weights.get(f"{name}_scale")
        if scale is not None:
            flip = architecture(made) == "GPT2LMHeadModel"
            how = args[name.removesuffix(".weight")]
            wide = dequantize(codes.T if flip else codes, scale, args=how)
            plain[name] = (wide.T if flip else wide).float().contiguous()
        elif not name.endswith("_scale"):
            plain[name] = codes.float()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# The real model


@pytest.mark.slow
def test_the_demo_model_goes_there_and_back(demo_model: Path, tmp_path: Path) -> None:
    choices = {f"layers.{n}.ffn_out": "fp8_e4m3_token" for n in range(0, 30, 2)}
    choices |= {f"layers.{n}.attn_qkv": "fp8_e4m3" for n in range(30)}
    choices |= {f"layers.{n}.ffn_in": "fp8_e4m3_weight_only" for n in range(10)}
    spec = replace(spec_of(demo_model), exports=("compressed_tensors",))
    made = exporting.exported(spec, tmp_path, choices)
    found = made.section["checkpoint"]
    assert found["kl_nats"] == found["emulated_kl_nats"]
    test_each_matrix_has_its_scheme_and_no_other(made)
    test_it_is_as_large_as_the_report_says(made)
    test_its_loss_is_within_the_interval_of_the_report(made, tmp_path)
    shape = made.work.outline.shape
    narrow = sum(
        s.weight_elements for s in shape.sites if made.stack.choices[s.site].is_narrow
    )
    # Two bytes a weight, one of each in FP8, and norms and scales in float32.
    wide = 2 * shape.parameters - narrow
    assert wide < found["bytes"] < wide + 2e6


# Shards


def test_shards_hold_every_tensor_once_and_the_index_says_where(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    whole = exporting.exported(spec, tmp_path / "whole", DENSE)
    work, made = whole.work, plan(whole.stack, whole.work.outline.shape)
    rounded = (work.weights, work.amaxes())
    target = Target(tmp_path, "cut", "checkpoint", "vllm", [])
    args = (work.model, work.folder, whole.stack, made, *rounded, target)
    laid = write_checkpoint(*args, shard_bytes=30_000)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one, several = _stored(whole), {}
    for file in files:
        part = load_file(tmp_path / "cut" / file)
        assert all(index["weight_map"][name] == file for name in part)
        assert not several.keys() & part.keys()
        several |= part
    assert index["metadata"]["total_size"] == laid.bytes
    assert one.keys() == several.keys() == index["weight_map"].keys()
    assert all(one[n].equal(t) for n, t in several.items() if t.element_size() > 1)
    assert {f.name for f in target.written} >= {f"cut/{file}" for file in files}
    logits = [
        reloaded(folder)(work.tokens.validation.sequences[0]).logits
        for folder in (whole.checkpoint, tmp_path / "cut")
    ]
    assert torch.equal(*logits)
