"""Evidence beside the figures: who sets the scales, and what attention looks at.

Both are learned of a part of the calibration data, so that they stay small however
much of it there is. What other processes send arrives as JSON.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from optimizer.execute import Amaxes, Reference, WeightCodes
from optimizer.model import LoadedModel
from optimizer.pieces import Piece, Result, key_of
from optimizer.stack import CHOICES, Choice, Site, Stack
from optimizer.sums import Candidates
from optimizer.tokens import tokenizer
from optimizer.top_weight import INSIDE, Alternatives, WatchedStack, to_json
from optimizer.walk import Activations, Told, silent, walk
from optimizer.watch import Statistics, to_json as places_to_json

STATISTICS_TOKENS = 4096  # that the statistics are of: their channels take megabytes
ATTENTION_TOKENS = 256  # under every choice of its sites alone, layer by layer


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What the report says of the tensors."""

    statistics: Statistics = field(default_factory=Statistics)
    attention: Sequence[Mapping[str, Any]] = ()  # by layer, as `top_weight.to_json`
    sequence_tokens: int = 0
    text_of: Callable[[int], str] | None = None  # of a token's id

    def to_json(self) -> dict[str, Any]:
        """Return the document's section."""
        return {
            "sequence_tokens": self.sequence_tokens,
            "places": places_to_json(self.statistics, self.text_of),
            "attention": [dict(row) for row in self.attention],
        }


def packed(statistics: Statistics) -> str:
    """Return the statistics as one text: exact, and quick to pass over unread."""
    state = json.dumps(statistics.state(), sort_keys=True, allow_nan=False)
    return base64.b64encode(zlib.compress(state.encode(), 6)).decode("ascii")


def unpacked(texts: Iterable[str]) -> Statistics:
    """Return the statistics of several parts of the data together."""
    merged = Statistics()
    for text in texts:
        state = json.loads(zlib.decompress(base64.b64decode(text)))
        merged = merged.merge(Statistics.from_state(state))
    return merged


def attention_of_choices(
    model: LoadedModel,
    ids: Tensor,
    candidates: Candidates,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Told = silent,
) -> Result:
    """Return each layer's top weight: the reference's, and under each choice alone."""
    lossy: dict[Site, list[Choice]] = {
        site: [c for c in some if c.name != "fp32"]
        for site, some in candidates.items()
        if site.component in INSIDE
    }
    executor = Alternatives(lossy, amaxes, weights)
    _run(model, ids, executor, progress)
    return {"layers": to_json(executor.top, None, executor.after)}


def attention_of_stack(
    model: LoadedModel,
    ids: Tensor,
    stack: Stack,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Told = silent,
) -> Result:
    """Return the top weight of each layer of a whole stack: {"layers": {layer: mean}}."""
    executor = WatchedStack(stack, amaxes, weights)
    _run(model, ids, executor, progress)
    means = {str(layer): seen.mean for layer, seen in sorted(executor.top.items())}
    return {"layers": means}


def _run(model: LoadedModel, ids: Tensor, executor: Reference, progress: Told) -> None:
    start = ids[:, :ATTENTION_TOKENS]
    kept = Activations()
    walk(
        model,
        [start],
        executor,
        kept=kept,
        keep_all=False,
        last=False,
        progress=progress,
    )


def before_and_after(choices: Result, after: Result) -> list[dict[str, Any]]:
    """Return the rows of `attention_of_choices` with a stack's weights beside them."""
    found = after["layers"]
    return [{**row, "after": found.get(str(row["layer"]))} for row in choices["layers"]]


def attention_pieces(decides: Sequence[Any], stack: Stack) -> list[Piece]:
    """Return the pieces of `attention_of_choices` and of `attention_of_stack`.

    `decides` is what else decides their results: model, data, numerics.
    """
    key = ["attention", *decides, ATTENTION_TOKENS]
    tried = [[str(c) for c in CHOICES[component]] for component in INSIDE]
    chosen = {str(s): str(c) for s, c in sorted(stack.choices.items())}
    return [
        Piece("attention_of_choices", key_of(*key, tried), {"stack": None}),
        Piece("attention_of_stack", key_of(*key, chosen), {"stack": stack.to_json()}),
    ]


def gathered(
    parts: Iterable[str | None],
    attention: Sequence[Result],
    sequence_tokens: int,
    folder: Path,
) -> Evidence:
    """Return the evidence from the results of the pieces; `folder` has the tokenizer."""
    tok = tokenizer(folder)
    return Evidence(
        statistics=unpacked(part for part in parts if part),
        attention=before_and_after(*attention),
        sequence_tokens=sequence_tokens,
        text_of=lambda token: str(tok.decode([token])),
    )
