"""The memory ledger of training: what every parameter and every token costs a device.

State follows Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054): classic mixed precision
holds 2 + 2 + 4 + 8 = 16 bytes for each parameter under Adam, and plain fp32 4 + 4 + 8,
which is 16 as well. ZeRO divides it among data-parallel devices by stage.

Activations follow the count of Korthikanti et al. 2022 (arXiv:2205.05198): what the
backward pass needs of each matrix, norm and activation function, in 16 bits. For GPT's
layer that is their 34·s·b·h bytes less the two dropout masks, which models of today are
trained without; the terms are those of the sites, so grouped heads, gates and experts
are counted as they are. Under tensor parallelism the inputs of norms and of the first
matrices lie on every device, the rest is divided (their equation 2).
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from optimizer.errors import SpecError
from optimizer.ledger import Entry, Ledger, matrices, share_of, vectors
from optimizer.stack import LINEAR, WHOLE_MODEL, Component, ModelShape, SiteShape

BLOCK = 256  # elements of an 8-bit state under one fp32 scale (bitsandbytes, blockwise)
LOGIT_BYTES = 4  # the loss is computed in fp32
# An assumption of common advice, measured by nobody that we could find: below both,
# mixed precision is said not to pay. The figures beside it are counted.
SMALL_PARAMETERS = 100_000_000
SHORT_TOKENS = 512


class Arithmetic(StrEnum):
    """What a training step computes in, and so what it holds for each parameter."""

    FP32 = "fp32"
    MIXED = "mixed"  # 16-bit weights and gradients beside an fp32 master copy
    FP8 = "fp8"  # mixed, with FP8 operands: Transformer Engine keeps the same state


class Optimizer(StrEnum):
    """Which state an optimizer keeps for each parameter."""

    ADAM = "adam"  # AdamW holds the same
    ADAM_8BIT = "adam_8bit"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd_momentum"


class Checkpointing(StrEnum):
    """Which activations are kept for the backward pass."""

    NONE = "none"  # all, attention's scores among them
    SELECTIVE = "selective"  # all but those of attention: what fused kernels do, too
    FULL = "full"  # the input of each layer; one layer at a time is computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained; `batch_size` is the micro-batch of one device."""

    arithmetic: Arithmetic = Arithmetic.MIXED
    optimizer: Optimizer = Optimizer.ADAM
    checkpointing: Checkpointing = Checkpointing.SELECTIVE
    zero_stage: int = 0
    data_parallel: int = 1
    tensor_parallel: int = 1
    batch_size: int = 1
    sequence_tokens: int = 2048
    lora_rank: int | None = None  # None: every parameter is trained

    def __post_init__(self) -> None:
        if self.zero_stage not in range(4):
            raise SpecError(f"zero_stage is {self.zero_stage}; the stages are 0 to 3")


def training(model: ModelShape, how: Training) -> Ledger:
    """Return the rows of one device of `tensor_parallel` × `data_parallel`."""
    total = held_parameters(model, how.tensor_parallel)
    adapters = 0 if how.lora_rank is None else lora_parameters(model, how.lora_rank)
    trained = total if how.lora_rank is None else adapters
    entries = [
        *_frozen(total, how),
        *_state(trained, how, model),
        *activations(model, how),
    ]
    return Ledger(
        tuple(e for e in entries if e.bytes),
        how.tensor_parallel * how.data_parallel,
    )


def held_parameters(model: ModelShape, ways: int) -> int:
    """Return the parameters on one of `ways` tensor-parallel devices.

    Matrices are split; norms, biases and routers lie on every device.
    """
    split = (
        share_of(s.weight_elements, 1 if s.site.component is Component.ROUTER else ways)
        for s in matrices(model)
    )
    return sum(split) + vectors(model)


def lora_parameters(model: ModelShape, rank: int) -> int:
    """Return the parameters of adapters at every matrix of the layers.

    A matrix of n × k gets n × rank and rank × k (Hu et al. 2021, arXiv:2106.09685).
    """
    every = (
        (s.weight_elements, s.parts)
        for s in model.sites
        if s.site.component in LINEAR and s.site.component is not Component.LM_HEAD
    )
    # Parts of one site have equal inputs (q, k, v) or equal outputs (experts).
    return sum(
        rank * (sum(parts) + len(parts) * elements // sum(parts))
        for elements, parts in every
    )


def _frozen(total: int, how: Training) -> list[Entry]:
    """Weights under adapters: read, never changed."""
    if how.lora_rank is None:
        return []
    width = 4 if how.arithmetic is Arithmetic.FP32 else 2
    held = _sharded(total, 3, how)
    return [Entry("frozen_weights", width * held, f"{width} bytes × {held} parameters")]


def _state(trained: int, how: Training, model: ModelShape) -> list[Entry]:
    """Weights, gradients, master copy and optimizer state of what is trained.

    Adapters are trained in fp32 (as PEFT has them), whatever the arithmetic.
    """
    mixed = how.arithmetic is not Arithmetic.FP32 and how.lora_rank is None
    width = 2 if mixed else 4
    kept, graded, stated = (_sharded(trained, stage, how) for stage in (3, 2, 1))
    small = vectors(model) if how.lora_rank is None else 0
    state = optimizer_bytes(how.optimizer, stated, _sharded(small, 1, how))
    rows = [
        Entry("weights", width * kept, f"{width} bytes × {kept} parameters"),
        Entry("gradients", width * graded, f"{width} bytes × {graded} parameters"),
        Entry("optimizer_state", state, _said(how.optimizer, stated)),
    ]
    if mixed:
        master = Entry("master_weights", 4 * stated, f"4 bytes × {stated} parameters")
        rows.insert(2, master)
    return rows


def _sharded(count: int, from_stage: int, how: Training) -> int:
    """Return how many of `count` a device holds that ZeRO divides from a stage on."""
    return share_of(count, how.data_parallel if how.zero_stage >= from_stage else 1)


def optimizer_bytes(optimizer: Optimizer, parameters: int, small: int) -> int:
    """Return the bytes of the state of so many parameters, `small` of them in vectors.

    8-bit states have an fp32 scale for each block; those of vectors stay in fp32, as
    bitsandbytes keeps every tensor of less than 4096 elements.
    """
    match optimizer:
        case Optimizer.SGD:
            return 0
        case Optimizer.SGD_MOMENTUM:
            return 4 * parameters
        case Optimizer.ADAM:
            return 8 * parameters
        case Optimizer.ADAM_8BIT:
            narrow = parameters - small
            return 2 * (narrow + 4 * share_of(narrow, BLOCK)) + 8 * small


def _said(optimizer: Optimizer, parameters: int) -> str:
    each = {
        Optimizer.ADAM: "two fp32 moments",
        Optimizer.ADAM_8BIT: f"two 8-bit moments, a scale for {BLOCK}",
        Optimizer.SGD: "none",
        Optimizer.SGD_MOMENTUM: "one fp32 moment",
    }
    return f"{each[optimizer]} × {parameters} parameters"


# --- activations ---------------------------------------------------------------


def activations(model: ModelShape, how: Training) -> list[Entry]:
    """Return the rows of what the backward pass needs of `batch_size` sequences."""
    width = _width(how)
    tokens = how.batch_size * how.sequence_tokens
    logits = LOGIT_BYTES * share_of(model.vocab, how.tensor_parallel)
    last = tokens * (2 * width * model.hidden + logits)
    rows = [Entry("logits", last, "last norm, input of lm_head, logits in fp32")]
    layers = _layers_bytes(model, how)
    if how.checkpointing is Checkpointing.FULL:
        inputs = tokens * width * model.hidden * model.layers
        again = Entry("recomputed_layer", max(layers), "one layer, computed again")
        return [Entry("activations", inputs, "the input of each layer"), again, *rows]
    kept = how.checkpointing is Checkpointing.NONE
    scores = "kept" if kept else "computed again"
    said = f"of {model.layers} layers; attention's scores are {scores}"
    return [Entry("activations", sum(layers), said), *rows]


def _width(how: Training) -> int:
    return 4 if how.arithmetic is Arithmetic.FP32 else 2


def _layers_bytes(model: ModelShape, how: Training) -> list[int]:
    """Return the bytes that each layer keeps, by its sites."""
    tokens = how.batch_size * how.sequence_tokens
    kept = how.checkpointing is Checkpointing.NONE
    pairs = how.batch_size * how.sequence_tokens**2 if kept else 0
    elements = [0.0] * model.layers
    for shape in model.sites:
        if shape.site.layer == WHOLE_MODEL:
            continue
        each, heads = _kept(shape, how.tensor_parallel)
        elements[shape.site.layer] += tokens * each + pairs * heads
    return [math.ceil(_width(how) * count) for count in elements]


def _kept(shape: SiteShape, ways: int) -> tuple[float, float]:
    """Return the elements kept of each token, and of each query-key pair."""
    match shape.site.component:
        case Component.NORMS:
            return shape.elements, 0
        case Component.ATTN_QKV | Component.FFN_IN:
            return shape.k + shape.n / ways, 0  # its input, and what follows reads
        case Component.ATTN_OUT | Component.FFN_OUT:
            return shape.k / ways, 0
        case Component.ATTN_SOFTMAX:
            return 0, shape.heads / ways
        case _:
            return 0, 0  # Q, K, V are counted; a router's scores are a few numbers


# --- does mixed precision pay? ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gain:
    """What 16 bits save in memory, which is counted, and in time, which is not."""

    fp32_bytes: int
    mixed_bytes: int
    pays: bool
    said: str
    folklore: bool  # whether `pays` rests on advice without a known measurement

    @property
    def saved_share(self) -> float:
        """The share of fp32's memory that mixed precision does without."""
        return 1 - self.mixed_bytes / self.fp32_bytes


def gain(model: ModelShape, how: Training) -> Gain:
    """Say what mixed precision saves beside fp32, all else equal.

    The state of Adam is as large in both, so activations alone shrink: where there are
    few, little is won. Whether a small model's steps get faster is not modelled.
    """
    fp32, mixed = (
        training(model, replace(how, arithmetic=a)).total_bytes
        for a in (Arithmetic.FP32, Arithmetic.MIXED)
    )
    saved = f"{mixed / 1e9:.2f} GB where fp32 needs {fp32 / 1e9:.2f} GB"
    small = model.parameters < SMALL_PARAMETERS and how.sequence_tokens <= SHORT_TOKENS
    if small:
        why = (
            f"is said not to pay under {SMALL_PARAMETERS // 10**6}M parameters with "
            f"sequences of {SHORT_TOKENS} tokens or fewer (folklore: no measurement is "
            f"known to us): {saved}"
        )
        return Gain(fp32, mixed, False, why, True)
    return Gain(fp32, mixed, True, f"saves memory: {saved}", False)
