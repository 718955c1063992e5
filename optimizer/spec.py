"""What a customer asked for. Pure data: api builds it, the job row stores it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from optimizer import spread
from optimizer.errors import SpecError
from optimizer.formats import FORMATS
from optimizer.training.spec import TrainingSpec

SWEPT_FORMATS = ("bf16", "fp8_e4m3", "fp8_e5m2", "fp32")
ENGINES = ("any", "vllm", "tensorrt_llm", "transformer_engine", "torchao")
ROUNDINGS = ("nearest", "compensated")  # of FP8 weights: GPTQ feeds errors forward
# Beside stack.json, which every job leaves; `exports.py` says what each is.
EXPORTS = ("compressed_tensors", "transformer_engine", "torchao")
STACK_USES = ("validate", "start")  # of a stack that comes with a request
TASKS = ("chat", "completion", "summarization", "code")


def _plain(flat: "LatencySla | Workload | OptimizeSpec") -> dict[str, Any]:
    """Return the fields as they are: `asdict` copies each, which takes ten times as long."""
    return {name: getattr(flat, name) for name in flat.__slots__}


@dataclass(frozen=True, slots=True)
class LatencySla:
    """Seconds of the median, each optional. `per_token_s` is of one sequence's token.

    A target at a percentile is what the median has to meet for it: `at` makes one.
    """

    per_token_s: float | None = None
    first_token_s: float | None = None
    percentile: float = 0.5  # that was asked for; a share

    @classmethod
    def at(
        cls,
        percentile: float,
        per_token_s: float | None = None,
        first_token_s: float | None = None,
    ) -> "LatencySla":
        """Return the target whose `percentile` holds these seconds."""
        asked = cls(per_token_s, first_token_s, percentile)  # refuses what is no target
        each, first = asked._spreads()
        return cls(
            per_token_s and per_token_s / each,
            first_token_s and first_token_s / first,
            percentile,
        )

    @property
    def asked(self) -> dict[str, float | None]:
        """The seconds that the percentile has to hold."""
        each, first = self._spreads()
        return {
            "per_token_s": self.per_token_s and self.per_token_s * each,
            "first_token_s": self.first_token_s and self.first_token_s * first,
        }

    def _spreads(self) -> tuple[float, float]:
        return (
            spread.over_median(self.percentile, spread.P99_PER_TOKEN),
            spread.over_median(self.percentile, spread.P99_FIRST_TOKEN),
        )

    def __post_init__(self) -> None:
        if not 0.5 <= self.percentile < 1:
            raise SpecError(
                "latency_sla.percentile must be a share, from 0.5 to under 1"
            )
        for name in ("per_token_s", "first_token_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise SpecError(f"latency_sla.{name} must be a finite number > 0")


@dataclass(frozen=True, slots=True)
class Workload:
    """How the model will be served; one step of `batch_size` sequences."""

    batch_size: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 128
    tensor_parallel: int = 1  # GPUs that share every layer
    cuda_graphs: bool = True  # False: the host launches every kernel


# Prompt and output lengths that are usual for a task, where the caller says nothing.
WORKLOADS = {
    "chat": Workload(1, 512, 128),
    "completion": Workload(1, 256, 256),
    "summarization": Workload(1, 2048, 128),
    "code": Workload(1, 1024, 256),
}


@dataclass(frozen=True, slots=True)
class OptimizeSpec:
    """One optimization request, already validated and resolved."""

    model: str  # the name callers use
    model_path: str  # the folder, as the workers see it
    model_sha256: str
    hardware: str  # a device id of the catalogue, or "local"
    latency_sla: LatencySla = field(default_factory=LatencySla)
    workload: Workload = field(default_factory=Workload)
    task: str = "chat"
    data_distribution: str = "web_text"  # a built-in name, or an uploaded dataset's
    dataset_path: str | None = None  # None: built in
    formats: tuple[str, ...] = SWEPT_FORMATS
    engine: str = "any"
    rounding: str = "nearest"  # of the chosen stack's FP8 weights; of ROUNDINGS
    calibration_tokens: int = 2048
    validation_tokens: int = 2048
    sequence_tokens: int = 256
    max_memory_bytes: int | None = None  # None: the device's memory
    seed: int = 0
    exports: tuple[str, ...] = EXPORTS  # what the job leaves for engines
    stack: Mapping[str, str] | None = None  # that comes with it: a choice by site
    stack_use: str = "validate"  # it alone, or "start": measured with what is found
    training: TrainingSpec | None = None  # of a task that trains; None: it serves

    def __post_init__(self) -> None:
        unknown = sorted(set(self.formats) - FORMATS.keys())
        if unknown:
            raise SpecError(f"unknown formats: {', '.join(unknown)}")
        if self.engine not in ENGINES:
            raise SpecError(f"unknown engine {self.engine!r}: {', '.join(ENGINES)}")
        if self.rounding not in ROUNDINGS:
            known = ", ".join(ROUNDINGS)
            raise SpecError(f"unknown rounding {self.rounding!r}: {known}")
        if self.stack_use not in STACK_USES:
            raise SpecError(
                f"unknown use of a stack {self.stack_use!r}: {', '.join(STACK_USES)}"
            )
        others = sorted(set(self.exports) - {*EXPORTS})
        if others:
            raise SpecError(f"unknown exports: {', '.join(others)}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, lists for tuples."""
        nested = {
            "formats": list(self.formats),
            "exports": list(self.exports),
            "latency_sla": _plain(self.latency_sla),
            "workload": _plain(self.workload),
            "stack": dict(self.stack) if self.stack is not None else None,
            "training": self.training.to_json() if self.training else None,
        }
        return _plain(self) | nested

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "OptimizeSpec":
        """Inverse of `to_json`; keys that a later version added are ignored."""
        known = {f.name for f in fields(cls)}
        kept = {k: v for k, v in data.items() if k in known}
        training = kept.get("training")
        return cls(
            **{
                **kept,
                "training": TrainingSpec.from_json(training) if training else None,
                "formats": tuple(data["formats"]),
                "exports": tuple(data.get("exports", EXPORTS)),
                "latency_sla": LatencySla(**data["latency_sla"]),
                "workload": Workload(**data["workload"]),
            }
        )
