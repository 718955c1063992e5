"""Qualcomm AIMET's mixed precision: one group of quantizers narrow at a time, then greedy.

Its candidates are what the algorithm takes: 8-bit integers (it has no automatic choice
of 8-bit floats) and 16-bit floats. The score is -KL, the measure of the benchmark. The
order of phase 1 decides the stack for given bits; phase 2, which only measures along
that order, is not run (and not timed).
"""

# ruff: noqa: E402  # what stands in for torchvision must be there first

import sys
import tempfile
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from exchange import NARROW_BITS, WIDE_BITS, Clock, answer, batches, linears, load
from torch import Tensor, nn

# Stands in for torchvision, whose compiled operators want the torch they were made
# for: AIMET looks up three names for pictures. Gone again before transformers looks.
torchvision = ModuleType("torchvision")
torchvision.datasets = SimpleNamespace()
torchvision.transforms = SimpleNamespace(Resize=type("Resize", (), {}))
torchvision.ops = SimpleNamespace(RoIPool=type("RoIPool", (), {}))
sys.modules["torchvision"] = torchvision

import aimet_torch
from aimet_torch._base.amp.mixed_precision_algo import GreedyMixedPrecisionAlgo
from aimet_torch.amp.utils import _mock_v1_quantizers
from aimet_torch.common.defs import CallbackFunc, QuantizationDataType, QuantScheme
from aimet_torch.quantization.affine import QuantizeDequantize
from aimet_torch.quantsim import QuantizationSimModel

del sys.modules["torchvision"]

INT8 = (NARROW_BITS, QuantizationDataType.int)
FP16 = (WIDE_BITS, QuantizationDataType.float)
NARROW, WIDE = (INT8, INT8), (FP16, FP16)


class Logits(nn.Module):
    """The model as a function of ids alone: what can be traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def run(request: dict[str, Any]) -> dict[str, Any]:
    model = load(request)
    sizes = linears(model)
    data = batches(request)
    clock = Clock()
    network = Logits(model).eval()
    truth = [network(ids).log_softmax(-1) for ids in data]
    sim = simulation(network, data[0])

    def score(quantized: nn.Module) -> float:
        """Return -KL in nats per token."""
        total, tokens = 0.0, 0
        for ids, p in zip(data, truth, strict=True):
            q = quantized(ids).log_softmax(-1)
            total -= float((p.exp() * (p - q)).sum())
            tokens += ids.numel()
        return total / tokens

    def calibrate(quantized: nn.Module) -> None:
        for ids in data:
            quantized(ids)

    sim.compute_encodings(calibrate)
    order = accuracy_order(sim, data[0], score, calibrate)
    took = clock()
    stacks = {str(bits): prefix(order, sizes, bits) for bits in request["bits"]}
    return {**took, "narrow": stacks, "version": aimet_torch.__version__}


def simulation(network: nn.Module, ids: Tensor) -> QuantizationSimModel:
    """Return the model with quantizers at inputs and weights of its matrices alone."""
    sim = QuantizationSimModel(network, ids, quant_scheme=QuantScheme.min_max)
    for path, module in sim.named_qmodules():
        linear = isinstance(module, nn.Linear) and not path.endswith("lm_head")
        for index in range(len(module.output_quantizers)):
            module.output_quantizers[index] = None
        for index in range(len(module.input_quantizers)):
            module.input_quantizers[index] = int8(symmetric=False) if linear else None
        for name in module.param_quantizers:
            weight = linear and name == "weight"
            module.param_quantizers[name] = int8(symmetric=True) if weight else None
    return sim


def int8(*, symmetric: bool) -> QuantizeDequantize:
    """Return a static quantizer of one scale."""
    return QuantizeDequantize(shape=(), bitwidth=NARROW_BITS, symmetric=symmetric)


def accuracy_order(
    sim: QuantizationSimModel, ids: Tensor, score: Any, calibrate: Any
) -> list[list[str]]:
    """Return groups of modules, the least sensitive first, as phase 1 ranks them."""
    with tempfile.TemporaryDirectory() as scratch, _mock_v1_quantizers(sim):
        algorithm = GreedyMixedPrecisionAlgo(
            sim,
            ids,
            [WIDE, NARROW],
            score,
            score,
            scratch,
            True,
            CallbackFunc(lambda model, _: calibrate(model)),
            use_all_amp_candidates=True,
            phase1_optimize=True,
        )
        algorithm.set_baseline(fp32_accuracy=0.0, baseline_candidate=WIDE)
        ranked = algorithm._create_and_save_accuracy_list_optimized(WIDE)
    return [modules(group) for group, candidate, *_ in ranked if candidate == NARROW]


def modules(group: Any) -> list[str]:
    names = set(group.parameter_quantizers)
    return sorted(name.removeprefix("model.") for name in names)


def prefix(order: list[list[str]], sizes: dict[str, int], bits: float) -> list[str]:
    """Narrow groups in the order of AIMET until the mean is at most `bits`."""
    total = sum(sizes.values())
    left = (bits - NARROW_BITS) / (WIDE_BITS - NARROW_BITS) * total  # may stay wide
    wide, narrow = float(total), set()
    for group in order:
        if wide <= left:
            break
        narrow |= set(group)
        wide -= sum(sizes[name] for name in group)
    return [name for name in sizes if name in narrow]


if __name__ == "__main__":
    answer(run)
