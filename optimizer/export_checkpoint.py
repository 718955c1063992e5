"""A stack as a compressed-tensors checkpoint: what vLLM loads as it is.

Files are written from front to back, a tensor at a time: of the model no more is in
memory than the stage whose matrices are rounded.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor as Values

from optimizer.checkpoint import CONFIG, SMALL_FILES
from optimizer.construct import QUANTIZATION
from optimizer.errors import ExportError
from optimizer.execute import Amaxes, WeightCodes
from optimizer.export_files import Target, Write, copy, cut, header, shard_name
from optimizer.export_layout import (
    BLOCK,
    CacheScale,
    Copied,
    Entry,
    Layout,
    Matrix,
    layout,
    tensors_of,
)
from optimizer.export_scheme import Plan, Scheme
from optimizer.folder import INDEX
from optimizer.formats import E4M3, FORMATS
from optimizer.model import LoadedModel
from optimizer.quantize import round_to_format, scale_from_amax, to_codes
from optimizer.shards import Shards
from optimizer.stack import Granularity, Role, Stack

SHARD_BYTES = 5_000_000_000  # as transformers cuts
MANIFEST = "precision_export.json"  # beside them: what of the stack is not as measured
SCHEMA = "precision.export/1"
# Beside `SMALL_FILES`: what slow tokenizers read.
TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
Progress = Callable[[float], None]  # the fraction of the bytes that is written


def write_checkpoint(
    model: LoadedModel,
    source: Path,
    stack: Stack,
    plan: Plan,
    weights: WeightCodes,
    amaxes: Amaxes,
    target: Target,
    progress: Progress = lambda fraction: None,
    shard_bytes: int = SHARD_BYTES,
    room_bytes: int | None = None,
) -> Layout:
    """Write the checkpoint of a plan for `stack`, and return what is in it.

    `model` is that of the folder `source`; `weights` and `amaxes` are what the stack
    was measured with. Raises ExportError where a scale is not a finite number above 0,
    and where it takes more than `room_bytes` (None: all that is free).
    """
    opened = Shards.open(source)
    laid = layout(model, opened, plan)
    _require_room(laid, target, room_bytes)
    writer = _Writer(model, opened, stack, plan, weights, amaxes)
    _write_weights(writer, laid, target, progress, shard_bytes)
    config = configured(dict(opened.checkpoint.config), plan, laid)
    target.json(CONFIG, config)
    target.json(MANIFEST, {"schema": SCHEMA, **plan.to_json()})
    for name in (*SMALL_FILES, *TOKENIZER_FILES):
        if name not in (CONFIG, INDEX) and (source / name).is_file():
            target.copy(source / name)
    return laid


def _require_room(laid: Layout, target: Target, room_bytes: int | None) -> None:
    if room_bytes is None:
        room_bytes = shutil.disk_usage(target.folder).free
    if laid.bytes > room_bytes:
        raise ExportError(
            f"its weights take {laid.bytes / 1e9:.3g} GB, and the disk has "
            f"{max(room_bytes, 0) / 1e9:.3g} GB for exports"
        )


# Weights


class _Writer:
    """Makes the bytes of every entry."""

    def __init__(
        self,
        model: LoadedModel,
        shards: Shards,
        stack: Stack,
        plan: Plan,
        weights: WeightCodes,
        amaxes: Amaxes,
    ) -> None:
        self.model = model
        self._shards, self._stack, self._plan = shards, stack, plan
        self._weights, self._amaxes = weights, amaxes

    def write(self, entry: Entry, write: Write) -> None:
        """Append the tensors of an entry."""
        if isinstance(entry, Copied):
            self._copy(entry, write)
        elif isinstance(entry, CacheScale):
            write(_scale_bytes(self._cache_scale(entry), entry.tensor.name))
        else:
            for some in self._matrix(entry):
                write(some)

    def _copy(self, entry: Copied, write: Write) -> None:
        if entry.rounded:
            values = self._shards.get(entry.tensor.name)
            write(_base_bytes(values, self._plan.base))
            return
        stored = entry.stored
        with (self._shards.checkpoint.folder / stored.file).open("rb") as file:
            file.seek(stored.start)
            copy(file, stored.stored_bytes, write)

    def _matrix(self, entry: Matrix) -> Iterator[memoryview]:
        choice = self._stack.choices[entry.part.site]
        assert choice.weight is not None
        codes, scale = self._weights.get(entry.part, choice.weight)
        assert scale is not None, entry.name
        rows = slice(entry.start, entry.start + entry.rows)
        stored = to_codes(codes[rows], E4M3)
        yield _raw(stored.T.contiguous() if entry.transposed else stored)
        yield _scale_bytes(_stored_scale(scale, rows, entry.scheme), entry.name)
        if entry.scheme.inputs == "tensor":
            largest = self._amaxes[entry.part.site, Role.INPUT].amax()
            scale = scale_from_amax(largest, FORMATS[choice.input.format])
            yield _scale_bytes(scale, f"{entry.name}: input")

    def _cache_scale(self, entry: CacheScale) -> Values:
        largest = self._amaxes[entry.site, entry.role]
        if self._plan.cache is not Granularity.HEAD:
            largest = largest.amax()
        return scale_from_amax(largest, E4M3)


def _stored_scale(scale: Values, rows: slice, scheme: Scheme) -> Values:
    """Return the scales of some rows as they are stored: one of every block."""
    if scheme.weights == "tensor":
        return scale
    return scale[rows][::BLOCK, ::BLOCK] if scheme.weights == "block" else scale[rows]


def _scale_bytes(scale: Values, name: str) -> memoryview:
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ExportError(f"a scale of {name} is not a finite number above 0")
    return _raw(scale.float().contiguous())


def _base_bytes(values: Values, base: str) -> memoryview:
    dtype = torch.bfloat16 if base == "bf16" else torch.float16
    rounded = round_to_format(values, FORMATS[base]).to(dtype)  # exact: it is rounded
    return _raw(rounded.contiguous().view(torch.uint8))


def _raw(values: Values) -> memoryview:
    array: Any = values.reshape(-1).numpy()  # mypy knows no buffer in it
    return memoryview(array).cast("B")


def _write_weights(
    writer: _Writer,
    laid: Layout,
    target: Target,
    progress: Progress,
    shard_bytes: int,
) -> None:
    """Write every file, and which tensor is in which where they are several."""
    every = [(stage, e) for stage, some in enumerate(laid.stages) for e in some]
    sizes = [sum(t.bytes for t in tensors_of(e)) for _, e in every]
    files = cut(sizes, shard_bytes)
    total, done = sum(sizes), 0
    where: dict[str, str] = {}
    for number, part in enumerate(files):
        name = shard_name(number, len(files))
        tensors = [t for _, entry in every[part] for t in tensors_of(entry)]
        where |= {tensor.name: name for tensor in tensors}
        with target.open(name) as write:
            write(header(tensors))
            for stage, entries in groupby(every[part], key=itemgetter(0)):
                done += _write_stage(writer, stage, [e for _, e in entries], write)
                progress(done / total)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        target.json(INDEX, index)


def _write_stage(
    writer: _Writer, stage: int, entries: Sequence[Entry], write: Write
) -> int:
    """Write the entries of one stage, its weights at hand; return how many bytes."""
    rounds = any(isinstance(entry, Matrix) for entry in entries)
    held = writer.model.residency.holding(stage) if rounds else nullcontext()
    with held, torch.no_grad():
        for entry in entries:
            writer.write(entry, write)
    return sum(t.bytes for entry in entries for t in tensors_of(entry))


# Configuration


def configured(config: dict[str, Any], plan: Plan, laid: Layout) -> dict[str, Any]:
    """Return config.json with what the weights are, and the dtype that is served."""
    config.pop(QUANTIZATION, None)
    if "dtype" in config:
        config["dtype"] = DTYPES[plan.base]
    else:  # what readers of all ages know
        config["torch_dtype"] = DTYPES[plan.base]
    if plan.untied:
        config["tie_word_embeddings"] = False
    if laid.schemes or plan.cache:
        config[QUANTIZATION] = quantization(plan, laid)
    return config


def quantization(plan: Plan, laid: Layout) -> dict[str, Any]:
    """Return the quantization_config: every matrix in one group, or ignored by name."""
    modules: dict[Scheme, list[str]] = {}
    for module, scheme in laid.schemes.items():
        modules.setdefault(scheme, []).append(module)
    layouts = {scheme.layout for scheme in modules} or {"float-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": _group(scheme, names)
            for number, (scheme, names) in enumerate(modules.items())
        },
        "ignore": list(laid.ignored),
        "kv_cache_scheme": _cache_scheme(plan.cache),
    }


def _group(scheme: Scheme, modules: list[str]) -> dict[str, Any]:
    weights = {**_FLOAT8, "strategy": scheme.weights, "dynamic": False}
    if scheme.weights == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    return {
        "targets": modules,
        "weights": weights,
        "input_activations": _inputs(scheme),
        "output_activations": None,
        "format": scheme.layout,
    }


def _inputs(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.inputs is None:
        return None
    dynamic = scheme.inputs != "tensor"
    found = {**_FLOAT8, "strategy": scheme.inputs, "dynamic": dynamic}
    if scheme.inputs == "group":
        found["group_size"] = BLOCK
    return found


def _cache_scheme(cache: Granularity | None) -> dict[str, Any] | None:
    if cache is None:
        return None
    by_head = cache is Granularity.HEAD
    strategy = "attn_head" if by_head else "tensor"
    return {**_FLOAT8, "strategy": strategy, "dynamic": False}


_FLOAT8: Mapping[str, Any] = MappingProxyType(
    {"num_bits": 8, "type": "float", "symmetric": True}
)
