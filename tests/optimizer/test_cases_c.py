"""Cases C of real bug reports that no test of one file covers: structure and pipeline."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from optimizer.calibrate import amaxes, calibrate
from optimizer.choose import allowed
from optimizer.errors import ModelError
from optimizer.execute import Reference, Stacked, WeightCodes
from optimizer.formats import E4M3
from optimizer.hardware import device
from optimizer.matmul import scaled_product
from optimizer.metrics import logits_kl_nats
from optimizer.model import LoadedModel, instrument, load
from optimizer.quantize import amax, from_codes, quantize, scale_from_amax, to_codes
from optimizer.sensitivity import measure
from optimizer.spec import OptimizeSpec
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
from optimizer.stream import outline
from tests.optimizer import tiny
from tests.service import tiny_model

HEAD = Site(WHOLE_MODEL, Component.LM_HEAD)
QKV, NORMS = Site(0, Component.ATTN_QKV), Site(0, Component.NORMS)
SPEC = OptimizeSpec(model="m", model_path="", model_sha256="0" * 64, hardware="h100")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


# Case C1: one tensor, and only the head in FP8: it is stored twice, the lookup is exact.
def test_a_tied_head_in_fp8_leaves_the_lookup_alone() -> None:
    config = LlamaConfig(**tiny.COMMON, tie_word_embeddings=True)
    network = LlamaForCausalLM(config).eval().requires_grad_(False)
    model = instrument(network, "LlamaForCausalLM")
    (head,) = model.parts[HEAD]
    table: Any = model.network.get_submodule("model.embed_tokens")
    assert head.weight is table.weight
    with torch.no_grad():
        table.weight.zero_()
        table.weight[:2, :2] = torch.tensor([[0.3, 0.7], [1.0, -0.2]])
    fp8 = Stack({HEAD: choice_named(HEAD.component, "fp8_e4m3")})
    model.running = Stacked(fp8, {}, WeightCodes(model))
    looked_up = table(torch.tensor([0]))
    assert looked_up[0, 0] == torch.tensor(0.3)  # never 0.285714
    weights = WeightCodes(model).get(head, Precision("fp8_e4m3"))
    assert weights[1] is not None
    assert (weights[0] * weights[1])[0, 0] == pytest.approx(0.285714, rel=1e-5)


# Case C7: siblings that an engine fuses are rounded with the scale they will share.
def test_q_k_and_v_are_requantized_with_the_shared_scale() -> None:
    rows = {
        "q_proj": ([1.0, 0.3, -0.7], [0.9821429, 0.2901786, -0.7142857]),
        "k_proj": ([3.0, 0.1, -2.0], [2.8571429, 0.1004464, -1.9642857]),
        "v_proj": ([5.0, -0.001, 0.9], [5.0, -0.0009591, 0.8928571]),
    }
    model = tiny.loaded()
    parts = {p.name.rpartition(".")[2]: p for p in model.parts[QKV]}
    assert parts.keys() == rows.keys()  # one site: one decision for all three
    with torch.no_grad():
        for name, (values, _) in rows.items():
            parts[name].weight.zero_()
            parts[name].weight[0, :3] = torch.tensor(values)
    weights = WeightCodes(model)
    for name, (_, wanted) in rows.items():
        codes, scale = weights.get(parts[name], Precision("fp8_e4m3"))
        assert scale is not None
        assert scale.item() == pytest.approx(5 / 448)
        found = (codes * scale)[0, :3].tolist()
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("architecture", tiny.MAKERS)
def test_fused_siblings_are_one_site_in_every_architecture(architecture: str) -> None:
    model = tiny.loaded(architecture)
    names = {p.name: s for s, parts in model.parts.items() for p in parts}
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for name, site in names.items():
            if name.endswith(group[0]):
                others = {names[name.replace(group[0], other)] for other in group}
                assert others == {site}


# Case C13: nothing that comes with a model runs, whichever road leads to it.
@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("road", [load, outline], ids=["load", "outline"])
def test_code_that_comes_with_a_model_never_runs(
    folder: Path, where: str, road: Any
) -> None:
    marker = folder / "executed"
    for name in ("modeling_x", "utils_x"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()")
    document = json.loads((folder / where).read_text())
    document["auto_map"] = {
        "AutoModelForCausalLM": "modeling_x.X",
        "AutoTokenizer": ["modeling_x.T", None],
    }
    (folder / where).write_text(json.dumps(document))
    with pytest.raises(ModelError, match=f"{where} has an auto_map: code .* never run"):
        road(folder)
    assert not marker.exists()


# Case C15: what counts is stored, whatever the config declares.
def test_a_model_declared_wider_than_it_is_stored_counts_what_is_stored(
    folder: Path,
) -> None:
    file = folder / "model.safetensors"
    weights = {n: w.bfloat16() for n, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    model = load(folder)
    assert model.shape.stored_bytes == 2 * model.shape.parameters
    assert model.shape.stored_bytes == outline(folder).shape.stored_bytes
    wanted = weights["model.norm.weight"].float()
    assert torch.equal(model.network.get_parameter("model.norm.weight"), wanted)


# Case C17
KEPT = {
    "v_proj": QKV,
    "input_layernorm": NORMS,
    "norm": Site(WHOLE_MODEL, Component.NORMS),
    "embed_tokens": Site(WHOLE_MODEL, Component.EMBEDDINGS),
}


class Keeping(LlamaForCausalLM):  # type: ignore[misc]
    _keep_in_fp32_modules = [*KEPT, "rotary_emb"]  # noqa: RUF012 (as there)


def keeping() -> LoadedModel:
    network = Keeping(LlamaConfig(**tiny.COMMON)).eval().requires_grad_(False)
    network.model.register_buffer("extra", torch.ones(3), persistent=False)
    return instrument(network, "LlamaForCausalLM")


def test_modules_that_an_architecture_keeps_in_fp32_stay_there() -> None:
    model = keeping()
    verdicts = allowed(model.shape, device("h100"), SPEC, {})
    for name, site in KEPT.items():
        reasons = {c.name: no for c, no in verdicts[site].items()}
        assert reasons.pop("fp32") is None
        assert set(reasons.values()) == {f"the architecture keeps {name} in fp32"}
    others = verdicts[Site(0, Component.ATTN_OUT)]
    assert others[choice_named(Component.ATTN_OUT, "fp8_e4m3")] is None
    assert {w.dtype for w in model.network.state_dict().values()} == {torch.float32}
    assert model.network.get_buffer("model.extra").dtype is torch.float32


def test_where_a_device_cannot_multiply_in_fp32_sixteen_bits_are_left() -> None:
    verdicts = allowed(keeping().shape, device("gaudi2"), SPEC, {})
    left = [c.name for c, no in verdicts[QKV].items() if no is None]
    assert left == ["bf16"]


# Case C20: torch's CPU has few operations on FP8 tensors, and their casts differ by
# version: the pipeline has no such tensor.
class Operands(TorchDispatchMode):
    """Counts the operations by the dtypes of the tensors that go in or come out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        every = [*args, *(kwargs or {}).values(), out]
        self.seen.update({x.dtype for x in every if isinstance(x, Tensor)})
        return out


def test_no_operation_of_the_pipeline_has_an_fp8_tensor() -> None:
    model = tiny.loaded()
    sequences = [tiny.ids(12)]
    wanted = {s: list(CHOICES[s.component]) for s in model.sites}
    with Operands() as operands:
        largest = amaxes(calibrate(model, sequences))
        weights = WeightCodes(model)
        measure(model, sequences, wanted, largest, weights)
        every = zip(*(wanted[s] * 8 for s in model.sites), strict=False)
        for choices in list(every)[:8]:
            stack = Stack(dict(zip(model.sites, choices, strict=True)))
            with torch.no_grad():
                run = model.forward(sequences[0], Stacked(stack, largest, weights))
            assert run.isfinite().all()
    assert operands.seen[torch.float32] > 1000  # it does see them
    narrow = {d for d in operands.seen if d.itemsize == 1 and d.is_floating_point}
    assert narrow == set()


def test_the_emulated_product_is_that_of_a_tensor_core() -> None:
    # torch's `_scaled_mm` multiplies codes and accumulates in fp32, as the GPU does.
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(32, 64, generator=generator) for _ in range(2))
    scales = [scale_from_amax(amax(t, Granularity.TENSOR), E4M3) for t in (x, w)]
    codes = [quantize(t, s, E4M3) for t, s in zip((x, w), scales, strict=True)]
    x8, w8 = (to_codes(c, E4M3).view(torch.float8_e4m3fn) for c in codes)
    theirs = torch._scaled_mm(
        x8, w8.T, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32
    )
    ours = scaled_product(codes[0], scales[0], codes[1], scales[1])
    # Sums of 64 products in another order: the fp32 rounding of each addition.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=64 * 2**-24 * 16)
    assert torch.equal(from_codes(to_codes(codes[0], E4M3), E4M3), codes[0])


# Layers of zeros (bad input): allowed, with a scale of 1.
@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.v_proj"])
def test_a_layer_of_zeros_is_measured_without_a_nan(part: str) -> None:
    model = tiny.loaded()
    weight = model.network.get_parameter(f"model.layers.0.{part}.weight")
    nn.init.zeros_(weight)
    sequences = [tiny.ids(12)]
    largest = amaxes(calibrate(model, sequences))
    weights = WeightCodes(model)
    wanted = {s: list(CHOICES[s.component]) for s in model.sites}
    found = measure(model, sequences, wanted, largest, weights)
    assert all(value.kl_nats >= 0 for value in found.values())  # False for a NaN
    with torch.no_grad():
        reference = model.forward(sequences[0], Reference())
        for name in ("fp8_e4m3", "fp8_e4m3_token", "fp8_e4m3_weight_only"):
            choices = {
                s: choice_named(s.component, name)
                for s in model.parts
                if s.component is not Component.ROUTER
            }
            run = model.forward(sequences[0], Stacked(Stack(choices), largest, weights))
            assert logits_kl_nats(reference, run).isfinite().all()
    zeros = next(p for some in model.parts.values() for p in some if p.weight is weight)
    _, scale = weights.get(zeros, Precision("fp8_e4m3", Granularity.CHANNEL))
    assert scale is not None
    assert scale.unique().tolist() == [1.0]
