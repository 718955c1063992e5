"""What a stack does beyond the held-out data that chose it: is it as good elsewhere?

Three looks, at the chosen stack alone: a sequence as long as the workload's, a little
of every other built-in distribution, and what it writes when nobody corrects it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimizer import datasets, tokens
from optimizer.execute import Amaxes, Reference, Stacked, WeightCodes
from optimizer.generate import continued
from optimizer.model import LoadedModel
from optimizer.pieces import Piece, Result, key_of
from optimizer.spec import OptimizeSpec
from optimizer.stack import Stack
from optimizer.validate import TokenValues, Truth, run_stack
from optimizer.walk import Told, silent
from optimizer.wire import texts

LONG_TOKENS = 1024  # of the longest sequence: its cost grows with the square
OTHER_TOKENS = 128  # of each other distribution
PROMPTS, PROMPT_TOKENS = 4, 32
NEW_TOKENS = 64  # loops show after some fifty
LONG = "length"  # the name of the long sequence among the distributions

Found = dict[str, Result]  # by the name of the piece: ELSEWHERE, REFERENCE, STACK
ELSEWHERE, REFERENCE, STACK = "elsewhere", "reference_writes", "stack_writes"


@dataclass(frozen=True, slots=True, eq=False)
class Elsewhere:
    """Sequences of ids (1, tokens) by the name of where they come from."""

    named: Mapping[str, tuple[Tensor, ...]]

    @property
    def sequences(self) -> list[Tensor]:
        """All of them, in the order of the names."""
        return [ids for some in self.named.values() for ids in some]

    def split(self, values: TokenValues) -> dict[str, TokenValues]:
        """Return what a stack does to the tokens, by name."""
        found, token, predicted = {}, 0, 0
        for name, some in self.named.items():
            count = sum(ids.numel() for ids in some)
            made = slice(predicted, predicted + count - len(some))
            every = slice(token, token + count)
            found[name] = TokenValues(
                values.kl[every],
                values.nll[made],
                values.agree[every],
                np.zeros(0),
                values.likely[every],
            )
            token, predicted = token + count, made.stop
        return found


def elsewhere(
    spec: OptimizeSpec, folder: Path, held_out: Sequence[Tensor], max_context: int
) -> Elsewhere:
    """Return a sequence as long as the workload's, and some of other distributions."""
    named: dict[str, tuple[Tensor, ...]] = {}
    longest = _long(spec, held_out, max_context)
    if longest is not None:
        named[LONG] = (longest,)
    wanted = min(OTHER_TOKENS, spec.validation_tokens)
    for name in datasets.DISTRIBUTIONS:
        if name != spec.data_distribution or spec.dataset_path is not None:
            read = tokens.read(
                folder,
                name,
                None,
                calibration_tokens=datasets.MIN_SEQUENCE_TOKENS,
                validation_tokens=wanted,
                sequence_tokens=spec.sequence_tokens,
            )
            named[name] = read.validation.sequences
    return Elsewhere(named)


def _long(
    spec: OptimizeSpec, held_out: Sequence[Tensor], max_context: int
) -> Tensor | None:
    """Return held-out sequences joined: they were cut from one text. None: no longer."""
    workload = spec.workload
    most = min(workload.prompt_tokens + workload.output_tokens, LONG_TOKENS)
    joined = torch.cat(list(held_out), 1)[:, : min(most, max_context or most)]
    return joined if joined.shape[1] > spec.sequence_tokens else None


def run_elsewhere(
    model: LoadedModel,
    where: Elsewhere,
    stack: Stack,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Told = silent,
) -> Result:
    """Run the reference and a stack over the sequences; return what `texts` makes."""
    truth = Truth.of(model, where.sequences)
    values = run_stack(model, truth, stack, amaxes, weights, progress)
    return dict(texts(values))


def prompts(held_out: Sequence[Tensor]) -> Tensor | None:
    """Return the starts of held-out sequences (prompts, tokens). None: none is so long."""
    starts = [ids[:, :PROMPT_TOKENS] for ids in held_out]
    enough = [ids for ids in starts if ids.shape[1] == PROMPT_TOKENS]
    return torch.cat(enough[:PROMPTS]) if enough else None


def run_writes(
    model: LoadedModel,
    starts: Tensor,
    rounded: tuple[Stack, Amaxes, WeightCodes] | None,
    progress: Told = silent,
) -> Result:
    """Return the greedy continuations {"ids"} of a stack; `rounded` None: the reference's.

    "ids" is None where the model is streamed: each token would read all of it. None is
    written beyond the model's context: learned positions end there.
    """
    longest = model.shape.max_context or LONG_TOKENS
    tokens = min(NEW_TOKENS, longest - starts.shape[1])
    if not model.residency.whole or tokens < 1:
        return {"ids": None}
    executor = Reference() if rounded is None else Stacked(*rounded)
    return {"ids": continued(model, starts, executor, tokens, progress)}


def beyond_pieces(
    decides: Sequence[Any], where: Elsewhere, stack: Stack, *, writes: bool
) -> dict[str, Piece]:
    """Return the pieces of a stack by name; without `writes` nothing is continued.

    `decides` is what else decides their results: model, data, numerics.
    """
    chosen = {str(s): str(c) for s, c in sorted(stack.choices.items())}
    there = [ids.flatten().tolist() for ids in where.sequences]
    key, payload = [ELSEWHERE, *decides, there, chosen], {"stack": stack.to_json()}
    found = {ELSEWHERE: Piece(ELSEWHERE, key_of(*key), payload)}
    if writes:
        for name, some in ((REFERENCE, {"stack": None}), (STACK, payload)):
            said = [PROMPTS, PROMPT_TOKENS, NEW_TOKENS]
            key = ["writes", *decides, said, chosen if some["stack"] else None]
            found[name] = Piece("writes", key_of(*key), some)
    return found
