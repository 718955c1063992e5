"""A model folder, judged before anything loads it.

Everything here reads JSON and headers: no torch, no transformers, no code that came
with the model. What is refused is refused by file name, with what to do about it.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optimizer.config_rules import refuse_requests
from optimizer.errors import ModelError
from optimizer.folder import INDEX, inside, read_json, refuse_links_out, tensors
from optimizer.quantized import (
    CodeScale,
    beside,
    refuse_unreadable_method,
    scales,
)
from optimizer.weights import StoredTensor, refuse_non_finite, same_bytes

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
        "GPTNeoXForCausalLM": "gpt_neox",
        "FalconForCausalLM": "falcon",
        "MptForCausalLM": "mpt",
        "MixtralForCausalLM": "mixtral",
        "Qwen2MoeForCausalLM": "qwen2_moe",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "BertForMaskedLM": "bert",
        "RobertaForMaskedLM": "roberta",
        "DistilBertForMaskedLM": "distilbert",
    }
)
"""The classes that may be built, with the `model_type` each goes with."""

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")
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
OTHER_JSON = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
MAX_CONFIG_BYTES = 1 << 20
MAX_OTHER_BYTES = 8 << 20  # Gemma 3 lists 6,000 tokens in its 1.1 MB
MAX_TOKENIZER_BYTES = 64 << 20  # the largest we know has 35 MB
READ_BYTES = 8 << 20
# Sizes under the names that the architectures give them.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
ROWS = ("vocab_size",)
COLUMNS = ("hidden_size", "n_embd", "d_model", "dim")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)
HEADS = ("lm_head.weight", "embed_out.weight", "decoder.weight", "projector.weight")
NOT_OF_CONFIG = (
    "The weights are not those of config.json: save the model again with transformers, "
    "save_pretrained(folder)"
)

_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16"}
_DTYPE_NAMES["BF16"] = "bfloat16"


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
    refuse_links_out(folder)
    config = _config(folder)
    architecture = _architecture(config)
    _require_tokenizer(folder)
    _check_other_json(folder)
    found, said = tensors(folder)
    code_scales = scales(found, config)
    others = beside(found, code_scales)
    _refuse_other_sizes(config, found)
    dtype_bytes = _bytes_by_dtype(found.values())
    plain = (t for n, t in found.items() if n not in code_scales and n not in others)
    declared = _declared_dtype(config)
    return Checkpoint(
        folder=folder,
        architecture=architecture,
        model_type=ARCHITECTURES[architecture],
        config=MappingProxyType(config),
        files=tuple(sorted({t.file for t in found.values()})),
        tensors=MappingProxyType(found),
        scales=MappingProxyType(code_scales),
        beside=others,
        parameters=sum(t.elements for n, t in found.items() if n not in others),
        stored_bytes=dtype_bytes.total(),
        dtype_bytes=MappingProxyType(dict(dtype_bytes)),
        declared_dtype=declared,
        warnings=(
            *said,
            *_dtype_warnings(declared, _bytes_by_dtype(plain)),
            *_fp8_warnings(code_scales),
        ),
    )


def check_values(checkpoint: Checkpoint) -> None:
    """Read all weights and refuse what no header shows.

    Raises NonFiniteError, naming tensor and file, at inf or NaN, and ModelError where
    the config ties two tensors that differ.
    """
    refuse_non_finite(checkpoint.folder, checkpoint.tensors)
    _refuse_forced_apart(checkpoint)


def longest_sequence(folder: Path) -> int | None:
    """Return how many tokens the config says the model takes at once. None: nothing.

    Raises ModelError where the config cannot be read.
    """
    config = read_json(folder, CONFIG, MAX_CONFIG_BYTES)
    every = [config[name] for name in CONTEXT_NAMES if name in config]
    if not every or type(every[0]) is not int or every[0] <= 0:
        return None
    padding = config.get("pad_token_id", 1)
    if config.get("model_type") == "roberta" and type(padding) is int:
        return every[0] - padding - 1 or None  # its positions begin after padding's
    return every[0]


def fingerprint(
    folder: Path, progress: Callable[[float], None] = lambda fraction: None
) -> str:
    """Return the sha256 (hex) over names and bytes of weights, config and tokenizer.

    Two folders with one fingerprint are one model to every later step. `progress` gets
    the fraction of bytes read. Raises ModelError as `inspect` does.
    """
    return fingerprint_of(digests(inspect(folder), progress))


def digests(
    checkpoint: Checkpoint, progress: Callable[[float], None] = lambda fraction: None
) -> dict[str, str]:
    """Return the sha256 (hex) of each file that counts, by name."""
    folder = checkpoint.folder
    small = [name for name in SMALL_FILES if (folder / name).exists()]
    names = sorted({*checkpoint.files, *small})
    paths = [inside(folder, name) for name in names]
    total = sum(path.stat().st_size for path in paths)
    found, done = {}, 0
    for name, path in zip(names, paths, strict=True):
        one = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                one.update(block)
                done += len(block)
                progress(done / total)
        found[name] = one.hexdigest()
    return found


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """Return the fingerprint of a model whose files have these digests."""
    lines = (f"{name}\0{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# --- config and tokenizer ----------------------------------------------------


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder, CONFIG, MAX_CONFIG_BYTES)
    refuse_requests(config, CONFIG)
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
    if (size := inside(folder, TOKENIZER).stat().st_size) > MAX_TOKENIZER_BYTES:
        raise ModelError(
            f"{TOKENIZER} has {size} bytes, the limit is {MAX_TOKENIZER_BYTES}"
        )


def _check_other_json(folder: Path) -> None:
    """Read what libraries will read beside the config, where it is there."""
    for name in OTHER_JSON:
        if (folder / name).exists():
            refuse_requests(read_json(folder, name, MAX_OTHER_BYTES), name)


# --- weights against the config --------------------------------------------------


def _refuse_other_sizes(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> None:
    """Raise where the weights have other layers or embeddings than the config says."""
    numbers = [int(found[1]) for name in tensors if (found := _LAYER.search(name))]
    stated = _stated(config, LAYERS)
    if numbers and stated and stated[1] != max(numbers) + 1:
        raise ModelError(
            f"{CONFIG}: {stated[0]} is {stated[1]}, the weights have "
            f"{max(numbers) + 1} layers. {NOT_OF_CONFIG}"
        )
    for name, tensor in tensors.items():
        if not name.endswith(EMBEDDINGS) or len(tensor.shape) != 2:
            continue
        for keys, size in zip((ROWS, COLUMNS), tensor.shape, strict=True):
            stated = _stated(config, keys)
            if stated and stated[1] != size:
                raise ModelError(
                    f"{CONFIG}: {stated[0]} is {stated[1]}, {name!r} is "
                    f"{list(tensor.shape)}. {NOT_OF_CONFIG}"
                )


def _stated(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the first of the keys that the config has a whole number under."""
    return next(((k, config[k]) for k in keys if type(config.get(k)) is int), None)


def forced_apart(target: str, source: str) -> ModelError:
    """Return the error of two tied weights of which the files hold two versions."""
    return ModelError(
        f"{CONFIG} ties {target} to {source}, and the files hold two different "
        "tensors: set tie_word_embeddings to false if each is its own, or remove "
        f"{target} from the files"
    )


def _refuse_forced_apart(checkpoint: Checkpoint) -> None:
    """Raise where the config ties what the files have twice, and not alike."""
    if checkpoint.config.get("tie_word_embeddings") is not True:
        return  # a class that ties without being told is asked when it is loaded
    names = [n for n in checkpoint.tensors if n not in checkpoint.beside]
    heads = [n for n in names if n.endswith(HEADS)]
    tables = [n for n in names if n.endswith(EMBEDDINGS)]
    for head in heads:
        for table in tables:
            one, other = checkpoint.tensors[head], checkpoint.tensors[table]
            if not same_bytes(checkpoint.folder, one, other):
                raise forced_apart(head, table)


# --- dtypes ------------------------------------------------------------------


def _declared_dtype(config: Mapping[str, Any]) -> str | None:
    """Return "bfloat16" for both spellings; transformers 5 writes `dtype`."""
    declared = config.get("dtype", config.get("torch_dtype"))
    return declared.removeprefix("torch.") if isinstance(declared, str) else None


def _bytes_by_dtype(every: Iterable[StoredTensor]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in every:
        found[tensor.dtype] += tensor.stored_bytes
    return found


def _dtype_warnings(declared: str | None, stored: Mapping[str, int]) -> Iterable[str]:
    floats = {_DTYPE_NAMES[d]: n for d, n in stored.items() if d in _DTYPE_NAMES}
    shares = ", ".join(f"{d} {n} bytes" for d, n in sorted(floats.items()))
    if len(floats) > 1:
        yield f"the weights are stored in several dtypes: {shares}"
    if floats and declared is not None and declared not in ("auto", *floats):
        yield f"{CONFIG} declares {declared}, the files hold {shares}: stored counts"


def _fp8_warnings(scales: Mapping[str, CodeScale]) -> Iterable[str]:
    if scales:
        yield (
            f"{len(scales)} tensors are FP8 already: the reference is what their codes "
            "and scales stand for, not the model they were made from"
        )
