"""The memory ledger: what lies in a device's memory, row by row, and what it adds up to.

Bytes are counted, not measured: elements times their width, and the scales. What an
allocator loses to fragments, a CUDA context and an engine's own buffers are not in it.
This file has the rows of serving; `training_memory` has those of training.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from optimizer.sizes import held_bytes, size_bytes
from optimizer.spec import Workload
from optimizer.stack import Choice, Component, ModelShape, Precision, SiteShape, Stack

# A prompt goes through in pieces of at most this many tokens: the default of vLLM's
# server on GPUs of 70 GiB and more (vllm/engine/arg_utils.py); smaller ones take 2048.
CHUNK_TOKENS = 8192
LOGIT_BYTES = 4  # logits are fp32 when a token is drawn from them
MOST = 1 << 24  # sequences or tokens: no search looks further
_SPLIT_BY_INPUT = (Component.ATTN_OUT, Component.FFN_OUT)
_ENDS = (Component.EMBEDDINGS, Component.LM_HEAD)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: what it is, its bytes on one device, and how they were counted."""

    name: str
    bytes: int
    counted: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows that add up, for one of `devices`."""

    entries: tuple[Entry, ...]
    devices: int = 1

    @property
    def total_bytes(self) -> int:
        """The sum of the rows."""
        return sum(e.bytes for e in self.entries)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a row; 0 where there is none."""
        return sum(e.bytes for e in self.entries if e.name == name)


def share_of(count: int, ways: int) -> int:
    """Return the share of the device that has most."""
    return -(-count // ways)


def matrices(model: ModelShape) -> tuple[SiteShape, ...]:
    """Return the sites that hold a matrix; of tied ones the first."""
    held = [s for s in model.sites if s.weight_elements]
    if model.tied_embeddings:
        held = [s for s in held if s.site.component is not Component.LM_HEAD]
    return tuple(held)


def vectors(model: ModelShape) -> int:
    """Return the parameters in no site's matrix: norms, biases, an encoder's head."""
    return model.parameters - sum(s.weight_elements for s in matrices(model))


# --- serving -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cache:
    """K and V of some layers that are alike."""

    token_bytes: float  # of all these layers, on one device
    window: int | None


@dataclass(frozen=True, slots=True)
class Served:
    """A stack on one of `ways` devices in tensor parallel: its bytes by workload.

    Matrices and KV heads are split; norms, biases and routers lie on every device.
    """

    ways: int
    weight_bytes: int
    caches: tuple[_Cache, ...]
    chunk_bytes: float  # activations of one token
    logit_bytes: int  # of one row
    every_row: bool = False  # an encoder has logits at every position

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes of one sequence's K and V after so many tokens."""
        held = (
            c.token_bytes * (tokens if c.window is None else min(tokens, c.window))
            for c in self.caches
        )
        return math.ceil(sum(held))

    def working_bytes(self, batch: int, prompt: int) -> int:
        """Return the bytes of activations at the widest point of a pass."""
        tokens = min(batch * prompt, CHUNK_TOKENS)
        rows = tokens if self.every_row else batch
        return math.ceil(tokens * self.chunk_bytes) + rows * self.logit_bytes

    def total_bytes(self, batch: int, prompt: int, output: int) -> int:
        """Return the sum of the ledger's rows, every sequence at its end."""
        cache = batch * self.cache_bytes(prompt + output)
        return self.weight_bytes + cache + self.working_bytes(batch, prompt)

    def ledger(self, workload: Workload) -> Ledger:
        """Return the rows of a workload, every sequence at its end."""
        batch, tokens = workload.batch_size, _end(workload)
        return Ledger(
            (
                Entry("weights", self.weight_bytes, "every parameter, and the scales"),
                Entry(
                    "kv_cache",
                    batch * self.cache_bytes(tokens),
                    f"K and V of {tokens} tokens, no more than the window of a layer "
                    f"that has one; × {batch}",
                ),
                Entry(
                    "activations",
                    self.working_bytes(batch, workload.prompt_tokens),
                    "hidden states, input and output of the widest matrix, of "
                    f"{CHUNK_TOKENS} tokens at most; logits of "
                    + ("each" if self.every_row else "one row of a sequence"),
                ),
            ),
            self.ways,
        )

    def largest_batch(self, workload: Workload, room: int) -> int:
        """Return the most sequences of this length that `room` bytes hold; 0: none."""
        prompt, out = workload.prompt_tokens, workload.output_tokens

        def needed(batch: int) -> int:
            return self.total_bytes(batch, prompt, out)

        return _largest(needed, room, MOST)

    def largest_context(self, workload: Workload, room: int, limit: int) -> int:
        """Return the most tokens, prompt and output, that every sequence may have.

        0: not even the output fits. `limit` is the model's own; 0: it has none.
        """
        batch, out = workload.batch_size, workload.output_tokens

        def needed(prompt: int) -> int:
            return self.total_bytes(batch, prompt, out)

        prompt = _largest(needed, room, max(0, (limit or MOST) - out))
        return prompt + out if prompt else 0


def _end(workload: Workload) -> int:
    return workload.prompt_tokens + workload.output_tokens


def _largest(needed: Callable[[int], int], room: int, limit: int) -> int:
    """Return the largest n of 1 to `limit` whose need, which grows, fits; 0: none."""
    return bisect.bisect_right(range(1, limit + 1), room, key=needed)


Kinds = Mapping[tuple[SiteShape, Choice], int]
"""Sites that are alike in size and choice, with how many there are."""


def kinds(model: ModelShape, stack: Stack) -> Kinds:
    """Count the sites that are alike, whichever their layer: a model has a dozen."""
    found: dict[tuple[object, ...], tuple[SiteShape, Choice]] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for shape in model.sites:
        choice = stack.choices[shape.site]
        key = (shape.site.component, choice.name, *_sizes(shape))
        counts[key] += 1
        if key not in found:
            found[key] = replace(shape, site=replace(shape.site, layer=0)), choice
    return {found[key]: count for key, count in counts.items()}


_sizes = attrgetter(*(f.name for f in fields(SiteShape) if f.name != "site"))


def _of(alike: Kinds, component: Component) -> tuple[SiteShape, Choice] | None:
    """Return the first kind of a component. None: the model has none."""
    return next((k for k in alike if k[0].site.component is component), None)


def served(model: ModelShape, alike: Kinds, ways: int = 1) -> Served:
    """Return what a stack's `kinds` take on one of `ways` devices."""
    norms = _of(alike, Component.NORMS)
    assert norms is not None, "every model has a last norm"
    fmt = norms[1].output
    widest = max(_matmul_bytes(shape, choice, ways) for shape, choice in alike)
    held = sum(n * _held(s, c, model, ways) for (s, c), n in alike.items())
    rest = math.ceil(vectors(model) * size_bytes(fmt))
    return Served(
        ways=ways,
        weight_bytes=held - _shared_bytes(model, alike, ways) + rest,
        caches=tuple(_caches(alike, ways)),
        chunk_bytes=model.hidden * size_bytes(fmt) + widest,
        logit_bytes=share_of(model.vocab, ways) * LOGIT_BYTES,
        every_row=model.every_row,
    )


def _stored(choice: Choice) -> Precision:
    return choice.weight or choice.input


def _held(shape: SiteShape, choice: Choice, model: ModelShape, ways: int) -> int:
    whole = shape.site.component is Component.ROUTER
    elements = share_of(shape.weight_elements, 1 if whole else ways)
    return held_bytes(elements, shape.k or model.hidden, _stored(choice))


def _shared_bytes(model: ModelShape, alike: Kinds, ways: int) -> int:
    """Bytes that tied weights are counted twice with, where their choices agree."""
    table, head = (_of(alike, component) for component in _ENDS)
    if not model.tied_embeddings or table is None or head is None:
        return 0
    if _stored(table[1]) != _stored(head[1]):
        return 0
    return _held(*head, model, ways)


def _matmul_bytes(shape: SiteShape, choice: Choice, ways: int) -> float:
    """Bytes of one token's input and output of a matrix; 0 for what is none."""
    if not shape.k or shape.site.component in _ENDS:
        return 0.0
    k, n = shape.k, shape.n
    if shape.site.component in _SPLIT_BY_INPUT:
        k = share_of(k, ways)
    elif shape.site.component is not Component.ROUTER:
        n = share_of(n, ways)
    return k * size_bytes(choice.input.format) + n * size_bytes(choice.output)


def _caches(alike: Kinds, ways: int) -> Iterable[_Cache]:
    for (shape, choice), count in alike.items():
        if shape.site.component is Component.KV_CACHE:
            element = size_bytes(choice.input.format) + size_bytes(
                _stored(choice).format
            )
            width = share_of(shape.kv_heads, ways) * shape.head_dim
            yield _Cache(count * width * element, shape.window)
