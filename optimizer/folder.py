"""The files of a model folder: which there must be, and the tensors they hold.

Only headers and JSON are read. What is refused is refused by file name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimizer import strict_json
from optimizer.errors import FormatError, ModelError
from optimizer.weights import MAX_TENSORS, StoredTensor, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 1_000
MAX_OBJECTS = 20_000  # lists and objects of one JSON file; braces of chat templates too
MAX_VALUES = 400_000  # an index has two for each tensor
SAVE_OR_COPY = "Copy all files of one of them, or save the model again"

Tensors = dict[str, StoredTensor]


def refuse_links_out(folder: Path) -> None:
    """Raise at a link to elsewhere, whoever reads it: it could be anyone's file."""
    for path in sorted(folder.iterdir()):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ModelError(
                f"{path.name} is a link that leads out of the model folder: copy the "
                "file itself (cp -L)"
            )


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file that must be there. Raises ModelError naming it."""
    if not (folder / name).is_file():  # nor is a pipe, which would wait forever
        raise ModelError(f"{name} is missing from the model folder")
    return folder / name


def read_json(folder: Path, name: str, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError naming the file."""
    path = inside(folder, name)
    if (size := path.stat().st_size) > max_bytes:
        raise ModelError(f"{name} has {size} bytes, the limit is {max_bytes}")
    try:
        content = path.read_bytes()
        _refuse_bombs(content)
        return strict_json.parse(content)
    except ValueError as error:
        raise ModelError(f"{name} cannot be read: {error}") from None


def _refuse_bombs(content: bytes) -> None:
    """Count before parsing: a million empty lists would take 64 bytes for each two."""
    lists_and_objects = content.count(b"[") + content.count(b"{")
    if lists_and_objects > MAX_OBJECTS or content.count(b",") > MAX_VALUES:
        raise ValueError(
            f"more than {MAX_OBJECTS} lists and objects, or {MAX_VALUES} values"
        )


def tensors(folder: Path) -> tuple[Tensors, tuple[str, ...]]:
    """Return all tensors of the weights, and warnings about the files around them.

    Raises ModelError naming the file that is missing, or that contradicts another.
    """
    if (folder / WEIGHTS).exists():  # which transformers prefers to an index, too
        found, stated = read_header(inside(folder, WEIGHTS)), None
    elif (folder / INDEX).exists():
        found, stated = _sharded(folder)
    else:
        raise _no_weights(folder)
    if not found:
        raise ModelError("the weights hold no tensors")
    return found, tuple(_warnings(folder, found, stated))


def _warnings(folder: Path, found: Tensors, stated: object) -> Iterable[str]:
    """Say what is unused, and where the index states another size than there is."""
    used = {tensor.file for tensor in found.values()}
    others = {path.name for path in folder.glob("*.safetensors")} - used
    if INDEX in {path.name for path in folder.iterdir()} and used == {WEIGHTS}:
        others.add(INDEX)
    if others:
        yield f"{_few(sorted(used))}: the weights; not read: {_few(sorted(others))}"
    held = sum(tensor.stored_bytes for tensor in found.values())
    if isinstance(stated, int | float) and stated != held:
        yield (
            f"{INDEX} states a total_size of {stated:.0f} bytes, its shards hold "
            f"{held}: it may be of another save; every tensor it names is there"
        )


def _no_weights(folder: Path) -> ModelError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    stray = [name for name in names if name.endswith(".safetensors")]
    if stray:
        return ModelError(
            f"{stray[0]} is there, but neither {WEIGHTS} nor {INDEX}: rename a single "
            "file, or add the index of the shards"
        )
    if pickles:
        return FormatError(
            f"{pickles[0]} is pickled: loading it could run any code, so it is never "
            "opened. Save the model as safetensors: save_pretrained(folder)"
        )
    return ModelError(
        f"no weights: neither {WEIGHTS} nor {INDEX} is in the model folder"
    )


def _sharded(folder: Path) -> tuple[Tensors, object]:
    """Return the tensors of all shards, and the size that the index states."""
    where, stated = _index(folder)
    keys = Counter(where.values())
    missing = sorted(name for name in keys if not (folder / name).exists())
    if missing:
        lost = sum(keys[name] for name in missing)
        raise ModelError(
            f"{_few(missing)} missing from the model folder: {lost} of {len(where)} "
            "tensors are in there. Copy every shard that the index names"
        )
    found: Tensors = {}
    for shard in sorted(keys):
        for name, tensor in read_header(inside(folder, shard)).items():
            if name in found:
                raise ModelError(
                    f"{found[name].file} and {shard} both hold {name!r}: the files are "
                    f"of different checkpoints. {SAVE_OR_COPY}"
                )
            found[name] = tensor
        if len(found) > MAX_TENSORS:
            raise ModelError(f"the shards hold more than {MAX_TENSORS} tensors")
    _refuse_a_stale_index(where, found)
    return found, stated


def _refuse_a_stale_index(where: Mapping[str, str], found: Tensors) -> None:
    if absent := sorted(where.keys() - found.keys()):
        raise ModelError(
            f"{INDEX} has {len(absent)} tensors that its shards do not: "
            f"{_few(absent)}. {SAVE_OR_COPY}"
        )
    for name, tensor in found.items():
        if where.get(name) != tensor.file:
            raise ModelError(
                f"{tensor.file} holds {name!r}, which {INDEX} does not have there: the "
                f"files are of different checkpoints. {SAVE_OR_COPY}"
            )


def _index(folder: Path) -> tuple[dict[str, str], object]:
    """Return the file of each tensor, and the stated size. Raises ModelError."""
    index = read_json(folder, INDEX, MAX_INDEX_BYTES)
    where, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(where, dict) or not where:
        raise ModelError(f"{INDEX} has no weight_map")
    files = set(map(str, where.values()))
    if len(files) > MAX_SHARDS:
        raise ModelError(f"{INDEX} names {len(files)} files, the limit is {MAX_SHARDS}")
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{INDEX} names {file[:80]!r}: it must be a .safetensors file beside it"
            )
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    return {name: str(file) for name, file in where.items()}, stated


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
