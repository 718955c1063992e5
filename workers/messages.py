"""What the computing process may say to its worker. Whatever else it says is an error.

The worker believes nothing: every field has a type, a pattern or a limit.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from optimizer.pieces import Piece
from workers.channel import LINE_CHARACTERS, Garbled

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of `pieces.key_of`
Keys = Annotated[list[Key], Field(max_length=100_000)]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,63}$")]
Outcome = (
    Literal["sla_met", "sla_not_met", "no_improvement"]
    | Literal["recommended", "recommended_with_promotions", "unstable"]  # of a training
)
Said = Annotated[str, Field(max_length=4000)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Unprotected(_Message):
    """A measure of the sandbox that this machine does not allow, and why."""

    measure: Word
    reason: Said


class Started(_Message):
    """The sandbox is closed; what was not possible of it."""

    do: Literal["started"]
    unprotected: Annotated[list[Unprotected], Field(max_length=32)]


class Tell(_Message):
    """How far a phase is."""

    do: Literal["tell"]
    phase: Word
    fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Asked(_Message):
    """A piece that is to be computed, by whoever has time."""

    kind: Word
    key: Key
    payload: dict[str, Any]

    def piece(self) -> Piece:
        """Return it as the optimizer knows it."""
        return Piece(self.kind, self.key, self.payload)


class Read(_Message):
    """Which of these results are kept? Their texts follow the answer."""

    do: Literal["read"]
    keys: Keys


class Add(_Message):
    """Let others compute these, too."""

    do: Literal["add"]
    pieces: Annotated[list[Asked], Field(max_length=100_000)]


class Claim(_Message):
    """Give me one of these that nobody computes."""

    do: Literal["claim"]
    keys: Keys


class Next(_Message):
    """Give a helper the next piece."""

    do: Literal["next"]


class Finish(_Message):
    """A piece is computed; its result follows, unless it is too long to be kept."""

    do: Literal["finish"]
    key: Key
    kept: bool = True


class Keep(_Message):
    """Keep a result of nobody's piece; it follows."""

    do: Literal["keep"]
    kind: Word
    key: Key


class Underway(_Message):
    """Is one of these still to be done?"""

    do: Literal["underway"]
    keys: Keys


class Drop(_Message):
    """The results of these were read."""

    do: Literal["drop"]
    keys: Keys


Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Loss = Annotated[float, Field(allow_inf_nan=False)]
Nats = Annotated[float, Field(ge=-1, le=1e6, allow_inf_nan=False)]


class MeasuredStack(_Message):
    """A whole stack that was run on held-out data: seconds are of the model of cost."""

    per_token_s: Seconds
    kl_nats: Nats
    kl_nats_low: Nats
    kl_nats_high: Nats
    memory_bytes: Annotated[int, Field(ge=0, le=2**60)]
    fp8_share: Annotated[float, Field(ge=0, le=1)]


class Measured(_Message):
    """Stacks were measured; their owner may see them before the end."""

    do: Literal["measured"]
    stacks: Annotated[list[MeasuredStack], Field(max_length=64)]


class Losses(_Message):
    """Losses of a training's run, as it goes; its owner may see them before the end."""

    do: Literal["losses"]
    run: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]  # the candidate
    order: Annotated[int, Field(ge=0, le=1)]  # of the data; 1: that of the noise floor
    promoted: bool  # with some products in something wider
    first: Annotated[int, Field(ge=0, le=5000)]  # the step of the first loss
    losses: Annotated[list[Loss | None], Field(max_length=5000)]  # None: not finite
    steps: Annotated[int, Field(ge=1, le=5000)]  # of the whole run


def _plain(line: str) -> str:
    if not line.isprintable():  # a control character, or one that turns the text round
        raise ValueError("a line of the log is plain text")
    return line


class Log(_Message):
    """A line of what the computation comes across; its owner may see it."""

    do: Literal["log"]
    line: Annotated[
        str, Field(min_length=1, max_length=LINE_CHARACTERS), AfterValidator(_plain)
    ]


class Done(_Message):
    """The job is computed, and its files lie in the output folder."""

    do: Literal["done"]
    outcome: Outcome | None = None
    summary: dict[str, Any] = Field(default_factory=dict)


class Problem(_Message):
    """The error that the job's owner sees."""

    code: Word
    category: Literal["user", "model", "hardware", "platform"]
    retryable: bool
    message: Said
    phase: Word
    layer: Annotated[str, Field(max_length=200)] | None = None


class Failed(_Message):
    """The job cannot be computed, or the piece a helper has."""

    do: Literal["failed"]
    problem: Problem
    name: Annotated[str, Field(pattern=r"^\w{1,64}$")] = "Exception"  # of its class


Message = (
    Started
    | Tell
    | Read
    | Add
    | Claim
    | Next
    | Finish
    | Keep
    | Underway
    | Drop
    | Measured
    | Losses
    | Log
    | Done
    | Failed
)
_messages: TypeAdapter[Message] = TypeAdapter(
    Annotated[Message, Field(discriminator="do")]
)


def parse(json: bytes) -> Message:
    """Return the message. Raises Garbled where it is none."""
    try:
        return _messages.validate_json(json)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise Garbled(f"{place}: {first['msg'][:200]}") from None
