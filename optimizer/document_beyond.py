"""What the document says of a stack beyond the held-out mean: where, and how it shows.

By position and by distribution, the worst tokens in context, and what the stack
writes beside the reference.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from optimizer import repetition
from optimizer.beyond import (
    ELSEWHERE,
    LONG,
    NEW_TOKENS,
    PROMPT_TOKENS,
    REFERENCE,
    STACK,
    Elsewhere,
    Found,
    prompts,
)
from optimizer.checkpoint import Checkpoint
from optimizer.generate import cut
from optimizer.spec import OptimizeSpec
from optimizer.tokens import Half, tokenizer
from optimizer.validate import (
    BLOCK_TOKENS,
    Quality,
    TokenValues,
    Values,
    interval,
    quality,
)
from optimizer.wire import token_values
from optimizer.worst import worst_tokens

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    """What was looked at beyond the held-out mean, ready for the document."""

    distributions: Sequence[Json] = ()
    positions: Sequence[Json] = ()
    worst: Sequence[Json] = ()
    generation: Json | None = None  # None: nothing was written


def looked(
    spec: OptimizeSpec,
    checkpoint: Checkpoint,
    held_out: Half,
    measured: tuple[Quality, TokenValues, Values],
    where: Elsewhere,
    found: Found,
) -> Looked:
    """Return the sections of a stack.

    `measured` is its quality and its values on the held-out data, and the reference's
    most likely tokens there; `found` is what `beyond_pieces` gave.
    """
    mine, values, likely = measured
    tok = tokenizer(checkpoint.folder)
    there = where.split(token_values(found[ELSEWHERE]))
    decode: Decode = lambda ids: str(tok.decode(list(ids)))  # noqa: E731
    return Looked(
        distributions=by_distribution(spec, (held_out.tokens, mine), there),
        positions=by_position(spec, values, held_out.sequences, there),
        worst=worst_tokens(values, likely, held_out.sequences, decode),
        generation=_generation(held_out, found, _ends(checkpoint), decode),
    )


def _generation(
    held_out: Half, found: Found, ends: Collection[int], decode: Decode
) -> Json | None:
    starts = prompts(held_out.sequences)
    plain, narrow = (found.get(name, {}).get("ids") for name in (REFERENCE, STACK))
    if starts is None or plain is None or narrow is None:
        return None
    return generation(starts.tolist(), plain, narrow, ends, decode)


def _ends(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the ids that end a text, as config.json has them: one, several or none."""
    ends = checkpoint.config.get("eos_token_id")
    some = ends if isinstance(ends, list) else [ends]
    return frozenset(e for e in some if isinstance(e, int))


def by_distribution(
    spec: OptimizeSpec,
    held_out: tuple[int, Quality],
    found: Mapping[str, TokenValues],
) -> list[Json]:
    """Return the stack's figures on the caller's data, then on every other.

    `held_out` is the tokens of the caller's half and what the stack does there.
    """
    count, mine = held_out
    rows = [_distribution(spec.data_distribution, count, mine)]
    for name, values in found.items():
        if name != LONG:
            there = quality(values, spec.seed)
            rows.append(_distribution(name, len(values.kl), there))
    return rows


def _distribution(name: str, count: int, found: Quality) -> Json:
    kept = ("kl_nats", "top1_agreement", "worst_token_kl_nats", "p99_token_kl_nats")
    said = asdict(found)
    return {"distribution": name, "tokens": count, **{k: said[k] for k in kept}}


def by_position(
    spec: OptimizeSpec,
    held_out: TokenValues,
    sequences: Sequence[Tensor],
    found: Mapping[str, TokenValues],
) -> list[Json]:
    """Return the figures by how many tokens stand before: [0, 32), [32, 64), [64, 128)…

    Positions that the held-out sequences reach are theirs; those behind are of the
    one long sequence.
    """
    places = np.concatenate([np.arange(ids.numel()) for ids in sequences])
    rows = _ranges(held_out, places, spec.seed, "held-out sequences")
    long = found.get(LONG)
    if long is not None:
        behind = np.arange(len(long.kl))
        behind[: spec.sequence_tokens] = -1
        rows += _ranges(long, behind, spec.seed, "one long sequence")
    return rows


def _ranges(values: TokenValues, places: Any, seed: int, source: str) -> list[Json]:
    rows, start = [], 0
    while start <= places.max():
        stop = max(2 * start, BLOCK_TOKENS)
        here = (places >= start) & (places < stop)
        if here.any():
            rows.append(_range(values, here, places, seed) | {"source": source})
        start = stop
    return rows


def _range(values: TokenValues, here: Any, places: Any, seed: int) -> Json:
    kl: Values = values.kl[here]
    return {
        "from": int(places[here].min()),
        "to": int(places[here].max()),  # the last, included
        "tokens": int(here.sum()),
        "kl_nats": asdict(interval(kl, seed)),
        "top1_agreement": asdict(interval(values.agree[here], seed)),
        "worst_token_kl_nats": float(kl.max()),
    }


def generation(
    starts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    stack: Sequence[Sequence[int]],
    ends: Collection[int],
    decode: Decode,
) -> Json:
    """Return both continuations of each prompt side by side, and how they repeat."""
    stop = frozenset(ends)
    pairs = [
        (start, cut(a, stop), cut(b, stop))
        for start, a, b in zip(starts, reference, stack, strict=True)
    ]
    rows = [
        {
            "prompt": decode(start),
            "same_tokens": _same(a, b),
            "reference": _written(a, decode),
            "stack": _written(b, decode),
        }
        for start, a, b in pairs
    ]
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "ngram": repetition.NGRAM,
        "continuations": rows,
        "repeated": {w: _mean(rows, w) for w in ("reference", "stack")},
        "loops": {w: _loops(rows, w) for w in ("reference", "stack")},
    }


def _written(ids: Sequence[int], decode: Decode) -> Json:
    loop = repetition.loop(ids)
    return {
        "text": decode(ids),
        "tokens": len(ids),
        "repeated": repetition.repeated(ids),
        "loop": asdict(loop) if loop else None,
    }


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _mean(rows: Sequence[Json], who: str) -> float:
    return sum(float(row[who]["repeated"]) for row in rows) / len(rows)


def _loops(rows: Sequence[Json], who: str) -> int:
    return sum(row[who]["loop"] is not None for row in rows)
