"""The JSON that comes in. Every field is bounded, and unknown ones are refused.

A string or a number is short for the object that it would be the first field of:
`"model": "m"` is `"model": {"id": "m"}`.
"""

from collections.abc import Callable
from typing import Annotated, Any, LiteralString, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from api import hub
from api.ids import NAME_PATTERN
from api.settings import settings

MAX_SLA_S = 3600.0
MAX_TOKENS = 131_072
MAX_SECONDS = 30 * 86_400
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # of metadata

Word = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
HubAddress = Annotated[str, StringConstraints(pattern=hub.PATTERN)]
FolderPath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
SlaSeconds = Annotated[float, Field(gt=0, le=MAX_SLA_S, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Devices = Annotated[int, Field(ge=1, le=64)]
DataTokens = Annotated[int, Field(ge=64, le=262_144)]


class Body(BaseModel):
    """What every body has in common. A frozen default is shared, not copied deeply
    for each request.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def left_out(value: Any) -> Any:
    """Return the default of a field that stays as it is where it is left out.

    The description does not show it: it means nothing.
    """
    return Field(default=value, json_schema_extra=_hide_default)


def _hide_default(shown: dict[str, Any]) -> None:
    shown.pop("default", None)


def _one_of(first: object, second: object, names: LiteralString) -> None:
    if (first is None) == (second is None):
        raise PydanticCustomError("one_of", f"give exactly one of {names}")


class ModelRef(Body):
    """A registered model by its name, a folder under an allowed root, or, where the
    operator allows some, a commit of a repository at the hub.
    """

    id: Word | None = None
    path: FolderPath | None = None
    uri: HubAddress | None = left_out(None)

    @model_validator(mode="before")
    @classmethod
    def _no_address(cls, given: Any) -> Any:
        """Refuse addresses by what they are where nothing is fetched for a caller."""
        if not isinstance(given, dict):
            return given
        short = "://" in str(given.get("id", ""))
        if (short or "uri" in given) and not settings().hub_models:
            raise PydanticCustomError(
                "model_uri_not_allowed",
                "this service fetches no models: upload it (POST /v1/models), or name "
                "one that GET /v1/models lists",
            )
        if short and "uri" not in given:
            given = {
                **{k: v for k, v in given.items() if k != "id"},
                "uri": given["id"],
            }
        if "uri" in given and not hub.is_address(str(given["uri"])):
            raise PydanticCustomError(
                "model_uri_invalid",
                "a model at the hub is hf://org/repo@ and the 40 hexadecimal digits of "
                "a commit",
            )
        return given

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.uri is None:
            _one_of(self.id, self.path, "id and path")
        elif self.id is not None or self.path is not None:
            raise PydanticCustomError("one_of", "give exactly one of id, path and uri")
        return self


class HardwareRef(Body):
    """A device of the catalog, or `local`: the worker's own."""

    id: Word


class Sla(Body):
    """Limits in seconds; one of them at least."""

    per_token_s: SlaSeconds | None = None
    first_token_s: SlaSeconds | None = None
    percentile: Annotated[float, Field(ge=0.5, lt=1)] = 0.5

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.per_token_s is None and self.first_token_s is None:
            raise PydanticCustomError("empty_sla", "give per_token_s or first_token_s")
        return self


class PlannedBody(Body):
    """The precision that a training is planned in: one more candidate of its probe."""

    arithmetic: Word = "fp16"
    masters: bool = True
    loss_scaling: Word = "dynamic"
    initial_scale: Annotated[float, Field(gt=0, le=2.0**100, allow_inf_nan=False)] = (
        65536.0
    )
    scaling: Word = "delayed"


class TaskRef(Body):
    """What the model is for; it decides the default workload.

    `pretrain`, `finetune` and `lora` are probed: how they train may be said, and what
    is left out is what is usual for them. `clip` null clips nothing.
    """

    type: Word
    optimizer: Word | None = None
    learning_rate: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = (
        None
    )
    warmup_steps: Annotated[int, Field(ge=0, le=5000)] | None = None
    weight_decay: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = (
        None
    )
    clip: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    accumulation: Annotated[int, Field(ge=1, le=1024)] | None = None
    sequence_tokens: Annotated[int, Field(ge=8, le=8192)] | None = None
    steps: Annotated[int, Field(ge=4, le=5000)] | None = None
    lora_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    candidates: Annotated[list[Word], Field(min_length=1, max_length=8)] | None = None
    without_masters: bool | None = None
    planned: PlannedBody | None = None


class WorkloadBody(Body):
    """How the model will be served. What is left out follows from the task.

    `tensor_parallel` devices share every layer; times are of all of them together.
    """

    batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    tensor_parallel: Devices | None = None


class DataRef(Body):
    """A built-in distribution or an uploaded dataset, and how much of it to use."""

    name: Word | None = None
    dataset_id: Word | None = None
    calibration_tokens: DataTokens = 2048
    validation_tokens: DataTokens = 2048
    sequence_tokens: Annotated[int, Field(ge=32, le=8192)] = 256
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _one_of(self.name, self.dataset_id, "name and dataset_id")
        if self.sequence_tokens > min(self.calibration_tokens, self.validation_tokens):
            raise PydanticCustomError(
                "too_long",
                "sequence_tokens must not exceed calibration_tokens or validation_tokens",
            )
        return self


class Search(Body):
    """What the search may choose from, and how long it may take.

    `formats` beyond the usual ones, fp6_e3m2, fp4_e2m1, int8 and int4, are candidates
    for linear layers where they are named and the device has them.
    """

    formats: Annotated[list[Word], Field(min_length=1, max_length=16)] | None = None
    engine: Word | None = None
    rounding: Word = "nearest"
    max_runtime_seconds: Annotated[int, Field(ge=1, le=MAX_SECONDS)] | None = None


class StackRef(Body):
    """A stack.json to measure as it is (`validate`), or to search from (`start`)."""

    file: dict[str, Any]
    use: Word = "validate"


class WebhookRef(Body):
    """The endpoint that hears of the job, instead of all that subscribed."""

    endpoint_id: Word


def _short(field: str, *kinds: type) -> Callable[[Any], Any]:
    def widen(value: Any) -> Any:
        plain = isinstance(value, kinds) and not isinstance(value, bool)
        return {field: value} if plain else value

    return widen


def _as_file(value: Any) -> Any:
    bare = isinstance(value, dict) and "schema" in value
    return {"file": value} if bare else value


Stack = Annotated[
    StackRef,
    BeforeValidator(_as_file, json_schema_input_type=StackRef | dict[str, Any]),
]
Model = Annotated[
    ModelRef, BeforeValidator(_short("id", str), json_schema_input_type=str | ModelRef)
]
Hardware = Annotated[
    HardwareRef,
    BeforeValidator(_short("id", str), json_schema_input_type=str | HardwareRef),
]
LatencySla = Annotated[
    Sla,
    BeforeValidator(
        _short("per_token_s", int, float), json_schema_input_type=float | Sla
    ),
]
Task = Annotated[
    TaskRef, BeforeValidator(_short("type", str), json_schema_input_type=str | TaskRef)
]
DataDistribution = Annotated[
    DataRef, BeforeValidator(_short("name", str), json_schema_input_type=str | DataRef)
]
MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=MAX_KEY)]
MetadataValue = Annotated[str, StringConstraints(max_length=MAX_VALUE)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_PAIRS)]


class OptimizeRequest(Body):
    """Body of POST /v1/optimize. Only `model` and `hardware` are required.

    A `stack`, as a job's stack.json has it, is measured and exported instead of one
    that is searched for; the search starts from it with `{"file": …, "use": "start"}`.
    `exports` says what the job leaves beside report and stack.json: a checkpoint for
    vLLM (`compressed_tensors`), a module plan for `transformer_engine`, a configuration
    for `torchao`; all of them where it is left out.
    A job of a higher `priority` starts before the tenant's others; one that has not
    started after `expires_in` seconds expires.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "smollm2-135m",
                    "hardware": "h100",
                    "latency_sla": 0.02,
                    "task": "chat",
                    "data_distribution": "web_text",
                }
            ]
        }
    )

    model: Model
    hardware: Hardware
    latency_sla: LatencySla | None = None
    workload: WorkloadBody = Field(default_factory=WorkloadBody)
    task: Task = TaskRef(type="chat")
    data_distribution: DataDistribution = DataRef(name="web_text")
    search: Search = Search()
    engine: Word | None = None
    stack: Stack | None = None
    exports: Annotated[list[Word], Field(max_length=16)] | None = None
    max_memory_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    expires_in: Annotated[int, Field(ge=1, le=MAX_SECONDS)] | None = None
    webhook: WebhookRef | None = None
    metadata: Metadata = Field(default_factory=dict)
