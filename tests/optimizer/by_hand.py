"""Writes safetensors files and model folders byte by byte, right ones and wrong ones."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from optimizer.folder import INDEX, WEIGHTS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
}
NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
}


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_file(path: Path, header: object, content: bytes = b"") -> None:
    """Write a safetensors file: 8 bytes of length, the header, the values."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """Write tensors that all have the safetensors dtype `dtype`."""
    write_mixed(path, {name: (dtype, values) for name, values in tensors.items()})


def write_mixed(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Write tensors, each with the safetensors dtype beside it."""
    header, content = {}, b""
    for name, (dtype, values) in tensors.items():
        stored = values.astype(NUMPY[dtype]).tobytes()
        end = len(content) + len(stored)
        header[name] = entry(dtype, list(values.shape), len(content), end)
        content += stored
    write_file(path, header, content)


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def write_folder(folder: Path) -> Path:
    """Make a small, good model: one file of weights with w (2×3) and b (3)."""
    folder.mkdir()
    write_config(folder)
    (folder / "tokenizer.json").write_text("{}")
    write_tensors(folder / WEIGHTS, {"w": np.ones((2, 3)), "b": np.zeros(3)}, "F32")
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index that says which shard has which tensor."""
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
