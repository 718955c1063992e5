"""Which tensors an exported checkpoint has, and what each is made of.

Names are those of the model's own files: engines know them. A matrix in FP8 keeps its
name and gets scales beside it; every other tensor is copied, byte by byte.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from optimizer.errors import ExportError
from optimizer.export_files import Tensor
from optimizer.export_scheme import CONV1D, Plan, Scheme
from optimizer.model import LoadedModel
from optimizer.shards import Shards
from optimizer.sites import LinearPart, attention_module, name_of
from optimizer.stack import (
    GROUP_SIZES,
    WHOLE_MODEL,
    Component,
    Granularity,
    Role,
    Site,
)
from optimizer.stored import Source, sources
from optimizer.weights import StoredTensor

BLOCK = GROUP_SIZES[Granularity.BLOCK]
WEIGHT = ".weight"
BASE_DTYPES = {"bf16": "BF16", "fp16": "F16"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor of the model's files: as it is, or rounded to the plan's 16 bits."""

    tensor: Tensor
    stored: StoredTensor
    rounded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A stored matrix in FP8: some rows of a part, and what is beside them."""

    part: LinearPart
    module: str  # as engines call it
    name: str  # of the weight, in the files
    scheme: Scheme
    start: int  # the first row of the part that is stored under this name
    rows: int
    transposed: bool  # stored (in, out)

    def tensors(self) -> Iterator[Tensor]:
        """Yield weight, weight scale and, where it is static, input scale."""
        k = self.part.weight.shape[1]
        shape = (k, self.rows) if self.transposed else (self.rows, k)
        yield Tensor(self.name, "F8_E4M3", shape, self.rows * k)
        scales = self.scale_shape
        count = scales[0] * (scales[1] if len(scales) > 1 else 1)
        yield Tensor(f"{self.name}_scale", "F32", scales, 4 * count)
        if self.scheme.inputs == "tensor":
            beside = self.name.removesuffix(WEIGHT)
            yield Tensor(f"{beside}.input_scale", "F32", (1,), 4)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the weight's scales, as compressed-tensors has it."""
        match self.scheme.weights:
            case "channel":
                return self.rows, 1
            case "block":
                return -(-self.rows // BLOCK), -(-self.part.weight.shape[1] // BLOCK)
            case _:
                return (1,)


@dataclass(frozen=True, slots=True)
class CacheScale:
    """The scale of K or V in a layer's cache."""

    tensor: Tensor
    site: Site
    role: Role  # INPUT is K, WEIGHT is V


Entry = Copied | Matrix | CacheScale


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Everything that the files of a checkpoint hold, in order, by stage."""

    stages: list[list[Entry]]
    schemes: Mapping[str, Scheme]  # by module, as engines call it
    ignored: tuple[str, ...]  # the other Linears

    @property
    def entries(self) -> list[Entry]:
        """All of it."""
        return [entry for some in self.stages for entry in some]

    @property
    def bytes(self) -> int:
        """What all tensors take, scales included."""
        return sum(t.bytes for entry in self.entries for t in tensors_of(entry))


def tensors_of(entry: Entry) -> list[Tensor]:
    """Return what an entry puts into a file, in order."""
    return list(entry.tensors()) if isinstance(entry, Matrix) else [entry.tensor]


def layout(model: LoadedModel, shards: Shards, plan: Plan) -> Layout:
    """Lay the tensors out. Raises ExportError where no engine would find one."""
    found = sources(model.network, shards)
    matrices = [
        matrix
        for site, scheme in plan.schemes.items()
        for part in model.parts[site]
        for matrix in _matrices(model, part, found, scheme, plan)
    ]
    stages: list[list[Entry]] = [[] for _ in range(model.stages)]
    made = {matrix.name for matrix in matrices}
    rounded = {*_in_sixteen_bits(model, found), *shards.checkpoint.scales}
    for name in shards.checkpoint.tensors:
        if name not in made and name not in shards.checkpoint.beside:
            entry = _copied(name, shards, plan, name in rounded)
            stages[_stage(name, model)].append(entry)
    for matrix in matrices:
        stages[stage_of(matrix.part.site, model)].append(matrix)
    for layer in range(len(model.layers) if plan.cache else 0):
        stages[layer + 1] += _cache_scales(model, layer, plan)
    for some in stages:
        some.sort(key=lambda entry: tensors_of(entry)[0].name)
    schemes = {matrix.module: matrix.scheme for matrix in matrices}
    return Layout(stages, schemes, tuple(_ignored(model, found, schemes)))


def _stage(name: str, model: LoadedModel) -> int:
    found = _LAYER.search(name)
    return min(int(found[1]) + 1, model.stages - 1) if found else 0


def stage_of(site: Site, model: LoadedModel) -> int:
    """Return the stage of a pass that has the weights of a site."""
    return model.stages - 1 if site.layer == WHOLE_MODEL else site.layer + 1


def _in_sixteen_bits(model: LoadedModel, found: Mapping[str, Source]) -> Iterator[str]:
    """Yield the stored weights of matrices and tables: what a site's format is of."""
    for path, module in model.network.named_modules():
        if isinstance(module, nn.Embedding):
            yield from found[path + WEIGHT].names[0]
    for some in model.parts.values():
        for part in some:
            for names in found[_parameter(part)].names:
                yield from names


def _copied(name: str, shards: Shards, plan: Plan, rounded: bool) -> Copied:
    stored, dtype = shards.checkpoint.tensors[name], BASE_DTYPES[plan.base]
    if not rounded or stored.dtype == dtype:
        tensor = Tensor(name, stored.dtype, stored.shape, stored.stored_bytes)
        return Copied(tensor, stored)
    return Copied(Tensor(name, dtype, stored.shape, 2 * stored.elements), stored, True)


def _matrices(
    model: LoadedModel,
    part: LinearPart,
    found: Mapping[str, Source],
    scheme: Scheme,
    plan: Plan,
) -> Iterator[Matrix]:
    """Yield the stored matrices that a part is: gate and up of an expert are two."""
    rows = part.weight.shape[0]
    if part.site.component is Component.LM_HEAD:
        name = part.name + WEIGHT  # its own, which tied files do not have
        yield Matrix(part, part.name, name, scheme, 0, rows, False)
        return
    names = _stored_names(part, found)
    transposed = model.architecture in CONV1D
    each = rows // len(names)
    for index, name in enumerate(names):
        module = _module(name, model)
        yield Matrix(part, module, name, scheme, index * each, each, transposed)


def _stored_names(part: LinearPart, found: Mapping[str, Source]) -> tuple[str, ...]:
    source = found[_parameter(part)]
    if part.index is None:
        return source.names[0]
    if not source.stacked:
        raise ExportError(
            f"{source.names[0][0]} holds all experts in one tensor, and vLLM reads FP8 "
            "experts one by one: save the model again with transformers"
        )
    return source.names[part.index]


def _parameter(part: LinearPart) -> str:
    """Return the name of the parameter that holds a part, perhaps with others."""
    module = part.name
    if part.index is not None:
        module = module.removesuffix(f".{part.index}.{part.parameter}")
    return f"{module}.{part.parameter}"


def _module(stored: str, model: LoadedModel) -> str:
    """Return what engines call the module of a stored weight: with its base's name."""
    network: Any = model.network
    name, prefix = stored.removesuffix(WEIGHT), f"{network.base_model_prefix}."
    without = not name.startswith(prefix) and _has(model.network, prefix + name)
    return prefix + name if without else name


def _has(network: nn.Module, name: str) -> bool:
    try:
        network.get_submodule(name)
    except AttributeError:
        return False
    return True


def _cache_scales(model: LoadedModel, layer: int, plan: Plan) -> Iterator[CacheScale]:
    where = name_of(model.network, attention_module(model.layers[layer]))
    site = Site(layer, Component.KV_CACHE)
    shape: tuple[int, ...] = (1,)
    if plan.cache is Granularity.HEAD:
        heads = next(s.kv_heads for s in model.shape.sites if s.site == site)
        shape = (heads, 1, 1)
    for letter, role in (("k", Role.INPUT), ("v", Role.WEIGHT)):
        tensor = Tensor(f"{where}.{letter}_scale", "F32", shape, 4 * shape[0])
        yield CacheScale(tensor, site, role)


def _ignored(
    model: LoadedModel, found: Mapping[str, Source], schemes: Mapping[str, Scheme]
) -> Iterator[str]:
    """Yield every matrix that stays in 16 bits, as engines call it, each once."""
    names: dict[str, None] = {}
    for some in model.parts.values():
        for part in some:
            if part.site.component is Component.LM_HEAD:
                names[part.name] = None
            else:
                source = _wide_names(part, found)
                names |= dict.fromkeys(_module(name, model) for name in source)
    for unknown in model.unrecognized:
        names[unknown.module] = None
    yield from (name for name in names if name not in schemes)


def _wide_names(part: LinearPart, found: Mapping[str, Source]) -> tuple[str, ...]:
    try:
        return _stored_names(part, found)
    except ExportError:  # all of them in one tensor, which is fine in 16 bits
        return (part.name,)
