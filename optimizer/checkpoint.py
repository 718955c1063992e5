"""A model folder, judged before anything loads it.

Everything here reads JSON and headers: no torch, no transformers, no code that came
with the model. What is refused is refused by file name, with what to do about it.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optimizer.errors import ModelError
from optimizer.quantized import (
    CodeScale,
    beside,
    refuse_unreadable_method,
    scales,
)
from optimizer.weights import (
    StoredTensor,
    read_header,
    refuse_non_finite,
    strict_json,
)

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "MistralForCausalLM": "mistral",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3_text",
        "Phi3ForCausalLM": "phi3",
        "GPT2LMHeadModel": "gpt2",
    }
)
"""The classes that may be built, with the `model_type` each goes with."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# What decides tokens and text; each counts for the fingerprint where it is there.
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 1_000
READ_BYTES = 8 << 20

_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16"}
_DTYPE_NAMES |= {"BF16": "bfloat16", "F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the files of a model folder say, and they agree with each other.

    `dtype_bytes` is stored bytes by safetensors dtype; `declared_dtype` is what
    config.json claims (None: nothing). The stored one is the truth. `tensors` is all
    that the files hold; `scales` says what the codes of an FP8 one stand for, and
    `beside` names those that only serve others.
    """

    folder: Path
    architecture: str
    model_type: str
    config: Mapping[str, Any]
    files: tuple[str, ...]  # with weights
    tensors: Mapping[str, StoredTensor]
    scales: Mapping[str, CodeScale]  # of the tensors that hold FP8 codes
    beside: frozenset[str]  # scales of weights and of activations
    parameters: int  # elements of the weights; tied ones are stored once
    stored_bytes: int  # of all tensors
    dtype_bytes: Mapping[str, int]
    declared_dtype: str | None
    warnings: tuple[str, ...]


def inspect(folder: Path) -> Checkpoint:
    """Judge a model folder by its config and the headers of its weights.

    Raises ModelError naming the file, or the tensor, that stands in the way.
    """
    if not folder.is_dir():
        raise ModelError(f"no model folder {folder.name!r}")
    _refuse_links_out(folder)
    config = _config(folder)
    architecture = _architecture(config)
    _require_tokenizer(folder)
    tensors = _tensors(folder)
    code_scales = scales(tensors, config)
    others = beside(tensors, code_scales)
    dtype_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        dtype_bytes[tensor.dtype] += tensor.stored_bytes
    declared = _declared_dtype(config)
    return Checkpoint(
        folder=folder,
        architecture=architecture,
        model_type=ARCHITECTURES[architecture],
        config=MappingProxyType(config),
        files=tuple(sorted({t.file for t in tensors.values()})),
        tensors=MappingProxyType(tensors),
        scales=MappingProxyType(code_scales),
        beside=others,
        parameters=sum(t.elements for n, t in tensors.items() if n not in others),
        stored_bytes=dtype_bytes.total(),
        dtype_bytes=MappingProxyType(dict(dtype_bytes)),
        declared_dtype=declared,
        warnings=(*_dtype_warnings(declared, dtype_bytes), *_fp8_warnings(code_scales)),
    )


def check_values(checkpoint: Checkpoint) -> None:
    """Read all weights; raise NonFiniteError, naming tensor and file, at inf or NaN."""
    refuse_non_finite(checkpoint.folder, checkpoint.tensors)


def longest_sequence(folder: Path) -> int | None:
    """Return how many tokens the config says the model takes at once. None: nothing.

    Raises ModelError where the config cannot be read.
    """
    config = _read_json(folder, CONFIG, MAX_CONFIG_BYTES)
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if type(found) is int and found > 0 else None


def fingerprint(
    folder: Path, progress: Callable[[float], None] = lambda fraction: None
) -> str:
    """Return the sha256 (hex) over names and bytes of weights, config and tokenizer.

    Two folders with one fingerprint are one model to every later step. `progress` gets
    the fraction of bytes read. Raises ModelError as `inspect` does.
    """
    small = [name for name in SMALL_FILES if (folder / name).exists()]
    names = sorted({*inspect(folder).files, *small})
    paths = [_inside(folder, name) for name in names]
    total = sum(path.stat().st_size for path in paths)
    whole, done = hashlib.sha256(), 0
    for name, path in zip(names, paths, strict=True):
        one = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                one.update(block)
                done += len(block)
                progress(done / total)
        whole.update(f"{name}\0{one.hexdigest()}\n".encode())
    return whole.hexdigest()


# --- files -------------------------------------------------------------------


def _refuse_links_out(folder: Path) -> None:
    """Raise at a link to elsewhere, whoever reads it: it could be anyone's file."""
    for path in sorted(folder.iterdir()):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ModelError(
                f"{path.name} is a link that leads out of the model folder: copy the "
                "file itself (cp -L)"
            )


def _inside(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():  # nor is a pipe, which would wait forever
        raise ModelError(f"{name} is missing from the model folder")
    return folder / name


def _read_json(folder: Path, name: str, max_bytes: int) -> dict[str, Any]:
    path = _inside(folder, name)
    if (size := path.stat().st_size) > max_bytes:
        raise ModelError(f"{name} has {size} bytes, the limit is {max_bytes}")
    try:
        return strict_json(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{name} cannot be read: {error}") from None


# --- config and tokenizer ----------------------------------------------------


def _config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder, CONFIG, MAX_CONFIG_BYTES)
    _refuse_remote_code(config, CONFIG)
    refuse_unreadable_method(config, CONFIG)
    if "transformers_weights" in config:  # would load other files than those judged
        raise ModelError(
            f"{CONFIG} redirects weights (transformers_weights): remove it"
        )
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            "adapter_config.json: this is an adapter; merge it into its base model "
            "(merge_and_unload) and give the merged folder"
        )
    return config


def _refuse_remote_code(config: Mapping[str, Any], name: str) -> None:
    if "auto_map" in config:
        raise ModelError(
            f"{name} has an auto_map: code that comes with a model is never run. If "
            "transformers itself has this architecture, remove auto_map"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ModelError(f"{CONFIG} must name one architecture, of {known}")
    architecture: str = named[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"the architecture {architecture[:80]!r} is not supported; {known} are"
        )
    model_type, wanted = config.get("model_type"), ARCHITECTURES[architecture]
    if model_type != wanted:
        raise ModelError(
            f"{CONFIG}: model_type is {str(model_type)[:80]!r}, but {architecture} goes "
            f"with {wanted!r}"
        )
    return architecture


def _require_tokenizer(folder: Path) -> None:
    if not (folder / TOKENIZER).exists():
        others = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
        found = [name for name in others if (folder / name).exists()]
        other = f" ({', '.join(found)} alone is not supported)" if found else ""
        raise ModelError(
            f"{TOKENIZER} is missing{other}: write one with transformers, "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    _inside(folder, TOKENIZER)
    if (folder / "tokenizer_config.json").exists():
        name = "tokenizer_config.json"
        _refuse_remote_code(_read_json(folder, name, MAX_CONFIG_BYTES), name)


# --- weights -----------------------------------------------------------------


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / WEIGHTS).exists():  # which transformers prefers to an index, too
        tensors = read_header(_inside(folder, WEIGHTS))
    elif (folder / INDEX).exists():
        tensors = _sharded(folder)
    else:
        raise ModelError(_no_weights(folder))
    if not tensors:
        raise ModelError("the weights hold no tensors")
    return tensors


def _no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    stray = [name for name in names if name.endswith(".safetensors")]
    if stray:
        return (
            f"{stray[0]} is there, but neither {WEIGHTS} nor {INDEX}: rename a single "
            "file, or add the index of the shards"
        )
    if pickles:
        return (
            f"{pickles[0]} is pickled: loading it could run any code, so it is never "
            "opened. Save the model as safetensors: save_pretrained(folder)"
        )
    return f"no weights: neither {WEIGHTS} nor {INDEX} is in the model folder"


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    where = _weight_map(folder)
    keys = Counter(where.values())
    missing = sorted(name for name in keys if not (folder / name).exists())
    if missing:
        lost = sum(keys[name] for name in missing)
        raise ModelError(
            f"{_few(missing)} missing from the model folder: {lost} of {len(where)} "
            "tensors are in there"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(keys):
        for name, tensor in read_header(_inside(folder, shard)).items():
            if where.get(name) != shard:
                raise ModelError(
                    f"{shard} holds {name!r}, which {INDEX} does not have there: the "
                    "files are of different checkpoints"
                )
            tensors[name] = tensor
    if absent := sorted(where.keys() - tensors.keys()):
        raise ModelError(
            f"{INDEX} has {len(absent)} tensors that its shards do not: {_few(absent)}"
        )
    return tensors


def _weight_map(folder: Path) -> dict[str, str]:
    where = _read_json(folder, INDEX, MAX_INDEX_BYTES).get("weight_map")
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
    return {name: str(file) for name, file in where.items()}


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# --- dtypes ------------------------------------------------------------------


def _declared_dtype(config: Mapping[str, Any]) -> str | None:
    """Return "bfloat16" for both spellings; transformers 5 writes `dtype`."""
    declared = config.get("dtype", config.get("torch_dtype"))
    return declared.removeprefix("torch.") if isinstance(declared, str) else None


def _dtype_warnings(declared: str | None, stored: Mapping[str, int]) -> Iterable[str]:
    floats = {_DTYPE_NAMES[d]: n for d, n in stored.items() if d in _DTYPE_NAMES}
    shares = ", ".join(f"{d} {n} bytes" for d, n in sorted(floats.items()))
    if len(floats) > 1:
        yield f"the weights are stored in several dtypes: {shares}"
    if declared is not None and declared not in ("auto", *floats):
        yield f"{CONFIG} declares {declared}, the files hold {shares}: stored counts"


def _fp8_warnings(scales: Mapping[str, CodeScale]) -> Iterable[str]:
    if scales:
        yield (
            f"{len(scales)} tensors are FP8 already: the reference is what their codes "
            "and scales stand for, not the model they were made from"
        )
