"""A checkpoint that is quantized already: FP8 with its scales is read, the rest refused.

FP8 codes say nothing without their scales: W = code * scale, whatever the scale is
called (`weight_scale_inv` of DeepSeek is the factor too, not its inverse). Integer
schemes are refused by name: the model they were made from is the one to optimize.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.errors import ModelError
from optimizer.weights import StoredTensor

CODES = ("F8_E4M3", "F8_E5M2")
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
SCALE_DTYPES = ("F32", "BF16", "F16")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Scales of activations: calibration finds its own.
OTHER_SCALES = frozenset(
    {"input_scale", "output_scale", "q_scale", "k_scale", "v_scale", "input_scale_ub"}
)
BLOCK = (128, 128)  # rows and columns, where the config does not say
TRANSPOSED = frozenset({"gpt2"})  # model types whose matrices are stored (in, out)
GIVE_THE_ORIGINAL = "give the model it was made from"

_FP8_METHODS = {"fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"}
_LEFT_BY = {  # what each leaves in the files, by the end of the tensors' names
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors with packed integers",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_scale_2": "NVFP4",
}


@dataclass(frozen=True, slots=True)
class CodeScale:
    """Where the scales of a weight's codes are, and how many codes share one.

    `rows`, `columns`: of the block of the weight (its last two dimensions) that one
    scale covers. A scale for the whole tensor covers all of them.
    """

    name: str
    rows: int
    columns: int


def refuse_unreadable_method(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError naming the method where `config` asks for other than FP8.

    `config` is all of config.json; without a quantization_config nothing is asked.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        quantization = {}
    method = str(quantization.get("quant_method") or "no quant_method")[:40]
    if method not in _FP8_METHODS:
        raise ModelError(
            f"{where} has a quantization_config ({method}): of models that are already "
            f"quantized only FP8 is read; {GIVE_THE_ORIGINAL}"
        )
    if other := _other_than_fp8(method, quantization):
        raise ModelError(
            f"{where} has a quantization_config ({method}, {other}): of models that are "
            f"already quantized only FP8 is read; {GIVE_THE_ORIGINAL}"
        )


def _other_than_fp8(method: str, quantization: Mapping[str, Any]) -> str | None:
    """Return what makes it not FP8: "pack-quantized", say. None: it is FP8."""
    if method == "modelopt":
        algorithm = str(quantization.get("quant_algo"))
        return None if algorithm.startswith("FP8") else algorithm[:40]
    if method != "compressed-tensors":
        return None
    groups = quantization.get("config_groups")
    every = groups.values() if isinstance(groups, dict) else ()
    for group in every:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind, bits = weights.get("type"), weights.get("num_bits")
        if (kind, bits) != ("float", 8):
            return f"{bits}-bit {str(kind)[:20]}"
    layout = quantization.get("format")
    if layout not in (None, "float-quantized", "naive-quantized", "mixed-precision"):
        return str(layout)[:40]
    for extra in ("sparsity_config", "transform_config"):  # change what codes stand for
        if quantization.get(extra) and quantization[extra] != {"format": "dense"}:
            return extra
    return None


def scales(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, CodeScale]:
    """Return the scale of every tensor of FP8 codes, by its name.

    Raises ModelError naming the tensor that has no scale, or one of a shape that
    fits neither the tensor, nor its rows, nor its blocks, and for integer schemes.
    """
    for name, tensor in tensors.items():
        _refuse_other_schemes(name, tensor)
    block = _block(config)
    transposed = config.get("model_type") in TRANSPOSED
    return {
        name: _scale(name, tensor, tensors, block, transposed)
        for name, tensor in tensors.items()
        if tensor.dtype in CODES
    }


def _refuse_other_schemes(name: str, tensor: StoredTensor) -> None:
    """Raise for what another scheme leaves, and for integers that would be weights."""
    scheme = next((s for end, s in _LEFT_BY.items() if name.endswith(end)), None)
    if scheme is None and name.endswith(".weight") and tensor.dtype in INTEGERS:
        scheme = f"integers ({tensor.dtype})"
    if scheme is not None:
        raise ModelError(
            f"{tensor.file}: {name!r} is a tensor of {scheme}: of models that are "
            f"already quantized only FP8 is read; {GIVE_THE_ORIGINAL}"
        )


def beside(names: Iterable[str], scales: Mapping[str, CodeScale]) -> frozenset[str]:
    """Return the names that are no weights of the model: scales, where there are any."""
    if not scales:
        return frozenset()
    others = (n for n in names if n.rpartition(".")[2] in OTHER_SCALES)
    return frozenset({scale.name for scale in scales.values()}.union(others))


def _scale(
    name: str,
    codes: StoredTensor,
    tensors: Mapping[str, StoredTensor],
    block: tuple[int, int],
    transposed: bool,
) -> CodeScale:
    found = [name + end for end in SCALE_SUFFIXES if name + end in tensors]
    if len(found) != 1:
        wanted = " or ".join(repr(name + end) for end in SCALE_SUFFIXES)
        what = "two scales" if found else "no scale"
        raise ModelError(
            f"{codes.file}: {name!r} holds {codes.dtype} codes and has {what}: {wanted} "
            "must say what they stand for"
        )
    scale = tensors[found[0]]
    if scale.dtype not in SCALE_DTYPES:
        raise ModelError(
            f"{scale.file}: the scale {found[0]!r} is {scale.dtype}, not one of "
            f"{', '.join(SCALE_DTYPES)}"
        )
    if transposed and scale.shape == (codes.shape[-1], 1):
        return CodeScale(found[0], codes.shape[0], 1)
    return CodeScale(found[0], *_covered(found[0], codes, scale, block))


def _covered(
    name: str, codes: StoredTensor, scale: StoredTensor, block: tuple[int, int]
) -> tuple[int, int]:
    """Return rows and columns of the codes that one element of the scale covers."""
    if scale.elements == 1:
        rows, columns = (1, 1, *codes.shape)[-2:]
        return rows, columns
    if len(codes.shape) == 2:
        rows, columns = codes.shape
        if scale.shape in ((rows,), (rows, 1)):
            return 1, columns
        if scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    raise ModelError(
        f"{scale.file}: the scale {name!r} has the shape {list(scale.shape)}, which "
        f"is neither one for the tensor of {list(codes.shape)}, nor one a row, nor one "
        f"a block of {block[0]}×{block[1]}"
    )


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the block that the config names, in either of its two spellings."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return BLOCK
    named = [quantization.get("weight_block_size")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        named.append(weights.get("block_structure") if isinstance(weights, dict) else 0)
    for block in named:
        if isinstance(block, list) and len(block) == 2:
            rows, columns = block
            if type(rows) is int and type(columns) is int and min(block) > 0:
                return rows, columns
    return BLOCK
