"""Which precision to train in, by what a device can do and what the training is for.

No table of devices: a tier follows from what the catalogue says that its matrix units
multiply. Every reason names where it comes from; what many say and nobody is known to
have measured is called folklore.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from optimizer.hardware import Device

# Units that only pack two fp16 numbers into an fp32 lane reach twice the rate; matrix
# units reach more (V100: 125 against 15.7 TFLOP/s, P100: 21.2 against 10.6).
PACKED_RATE = 2.0


class Tier(StrEnum):
    """The narrowest arithmetic that a device's matrix units have for training."""

    FP32 = "fp32"  # no matrix units: P100
    FP16 = "fp16"  # V100, T4
    BF16 = "bf16"  # A100
    FP8 = "fp8"  # H100
    FP4 = "fp4"  # B200


class Scenario(StrEnum):
    """What a training is for."""

    PRETRAINING = "pretraining"
    FINETUNING = "finetuning"  # of every weight, at a small learning rate
    LORA = "lora"
    ALIGNMENT = "alignment"  # preference and reinforcement learning
    SMALL_MODEL = "small_model"  # under 100M parameters, short sequences
    REPRODUCTION = "reproduction"


@dataclass(frozen=True, slots=True)
class Reason:
    """A claim, and where it comes from."""

    claim: str
    source: str
    folklore: bool = False  # said by many; no derivation or measurement is known


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Dynamic loss scaling, which fp16's range needs: its usual constants."""

    initial: float = 2.0**16
    growth: float = 2.0
    growth_interval: int = 2000  # clean steps
    backoff: float = 0.5  # at an overflow
    rules: tuple[str, ...] = (
        "unscale the gradients before they are clipped",
        "keep the scaler's state in the checkpoint",
    )
    source: str = "torch.amp.GradScaler's defaults; docs.pytorch.org/docs/stable/notes/amp_examples"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to train in on a device, and why."""

    scenario: Scenario
    tier: Tier
    precision: str
    reasons: tuple[Reason, ...]
    loss_scaling: LossScaling | None  # None: none is needed
    kept_fp32: tuple[Reason, ...]


def tier(device: Device) -> Tier:
    """Return what the matrix units of a device have, by what they multiply."""
    if device.multiplies("fp8_e4m3"):
        return Tier.FP4 if device.multiplies("fp4_e2m1") else Tier.FP8
    if "bf16" in device.native:
        return Tier.BF16
    peak = device.peak_flops
    fast = peak.get("fp16", 0.0) > PACKED_RATE * peak.get("fp32", 0.0)
    return Tier.FP16 if fast else Tier.FP32


FP8_FORMATS = (
    "Micikevicius et al. 2022, FP8 Formats for Deep Learning, arXiv:2209.05433"
)
DEEPSEEK = "DeepSeek-V3 Technical Report, section 3.3, arXiv:2412.19437"
MIXED = "Micikevicius et al. 2017, Mixed Precision Training, arXiv:1710.03740"
BFLOAT = "Kalamkar et al. 2019, A Study of BFLOAT16 for Training, arXiv:1905.12322"
NVFP4 = "NVIDIA 2025, Pretraining Large Language Models with NVFP4, arXiv:2509.25149"
AUTOCAST = "docs.pytorch.org/docs/stable/amp: ops that autocast to float32"
COUNTED = "arithmetic"
CATALOGUE = "the device's row in the catalogue"

KEPT_FP32 = (
    Reason("parameters and arithmetic of norms", AUTOCAST),
    Reason("the sum under a softmax", AUTOCAST),
    Reason("the logarithm in the loss", AUTOCAST),
    Reason(
        "the sum of gradients over devices",
        "Megatron-LM, --accumulate-allreduce-grads-in-fp32",
    ),
    Reason("master weights and the optimizer's state", MIXED),
)
_NO_UNITS = Reason(
    "fp16 runs at no more than twice the rate of fp32 and there is no bf16: loss "
    "scaling would buy little",
    CATALOGUE,
)
_FP16_RANGE = Reason(
    "there is no bf16; fp16 ends at 65504 and gradients under 6e-8 vanish, so the loss "
    "is scaled",
    MIXED,
)
_BF16_RANGE = Reason("bf16 has fp32's exponents: no loss scaling is needed", BFLOAT)
_SQRT2 = Reason(
    "some multiply the learning rate by √2 in bf16: nothing is known to support it; "
    "keep the rate",
    "no source",
    folklore=True,
)
_WIDTH: Mapping[Tier, tuple[str, Reason]] = MappingProxyType(
    {
        Tier.FP32: ("fp32", _NO_UNITS),
        Tier.FP16: ("fp16 with loss scaling", _FP16_RANGE),
        Tier.BF16: ("bf16", _BF16_RANGE),
        Tier.FP8: ("bf16", _BF16_RANGE),
        Tier.FP4: ("bf16", _BF16_RANGE),
    }
)
_FP8_PRETRAINING = (
    Reason(
        "matrices multiply e4m3 forward; e5m2, or e4m3 with fine-grained scales, for "
        "gradients: losses match 16 bits up to 175 billion parameters",
        FP8_FORMATS,
    ),
    Reason(
        "embeddings, the head, norms, attention and routers stay in 16 or 32 bits; "
        "the loss was within 0.25 % of bf16's",
        DEEPSEEK,
    ),
)
_FP4_PRETRAINING = Reason(
    "NVFP4 was shown for one 12-billion model over 10 trillion tokens, with some "
    "layers in bf16: an experiment, not a default",
    NVFP4,
)
_LORA = (
    Reason(
        "the frozen weights are read and never changed, so 16 bits lose nothing; the "
        "adapters are small and stay in fp32",
        "Hu et al. 2021, LoRA, arXiv:2106.09685; PEFT's autocast_adapter_dtype",
    ),
    Reason(
        "FP8 buys little: the adapters' products have the rank as a side, far under "
        "what fills a matrix unit",
        COUNTED,
    ),
)
_SMALL_STEPS = Reason(
    "steps are small: at a weight of w bf16 loses a change under w/512 (half its "
    "spacing), so the update needs an fp32 master copy",
    COUNTED,
)
_FINETUNING_FP8 = Reason(
    "what was shown of FP8 is of training from nothing; whether these weights follow in "
    "it, a probe of some hundred steps tells",
    FP8_FORMATS,
)
_ALIGNMENT = (
    _SMALL_STEPS,
    Reason(
        "policy and reference, and training and generation, must round alike: their "
        "difference is the signal",
        "Qi et al. 2025, Defeating the Training-Inference Mismatch via FP16, "
        "arXiv:2510.26788, which finds fp16 steadier than bf16 here",
    ),
)
_SMALL = Reason(
    "under 100 million parameters with short sequences mixed precision is said not to "
    "pay; measure a step of both",
    "no source",
    folklore=True,
)
_ADAM = Reason(
    "under Adam the state is 16 bytes a parameter in either: only activations shrink",
    COUNTED,
)
_REPRODUCTION = (
    Reason("what is to be repeated sets the precision", COUNTED),
    Reason(
        "equal bits need one device type and one library version; TF32 must be as it "
        "was, for fp32 matmuls change by it",
        "docs.pytorch.org/docs/stable/notes/randomness and notes/cuda#tf32",
    ),
)


def training_advice(device: Device, scenario: Scenario) -> Advice:
    """Return what to train in, and why; no device is asked that could not train it."""
    found = tier(device)
    precision, width = _WIDTH[found]
    reasons: tuple[Reason, ...] = (width,)
    match scenario:
        case Scenario.PRETRAINING if found in (Tier.FP8, Tier.FP4):
            precision = "bf16 with FP8 matrices"
            more = (_FP4_PRETRAINING,) if found is Tier.FP4 else ()
            reasons = (*_FP8_PRETRAINING, *more, width, _SQRT2)
        case Scenario.PRETRAINING:
            reasons = (width, _SQRT2) if precision == "bf16" else reasons
        case Scenario.FINETUNING:
            more = (_FINETUNING_FP8,) if found in (Tier.FP8, Tier.FP4) else ()
            reasons = (_SMALL_STEPS, width, *more)
        case Scenario.LORA:
            reasons = (*_LORA, width)
        case Scenario.ALIGNMENT:
            reasons = (*_ALIGNMENT, width)
        case Scenario.SMALL_MODEL:
            precision, reasons = "fp32", (_SMALL, _ADAM)
        case Scenario.REPRODUCTION:
            precision, reasons = "that of the original run", _REPRODUCTION
    scaled = precision.startswith("fp16")
    return Advice(
        scenario,
        found,
        precision,
        reasons,
        LossScaling() if scaled else None,
        KEPT_FP32,
    )
