"""The weights of a checkpoint, read one tensor at a time as float32.

A tensor is read at the place its header gives, a piece at a time, so nothing but the
result stays in memory and no file stays mapped. Narrow formats are widened exactly;
FP8 codes become what their scales say.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from optimizer.checkpoint import Checkpoint, inspect
from optimizer.errors import ModelError
from optimizer.formats import E4M3, E5M2
from optimizer.quantize import check_finite, from_codes
from optimizer.quantized import CodeScale
from optimizer.weights import CHUNK_BYTES, ITEM_BYTES, StoredTensor

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
CODE_FORMATS = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The files of a checkpoint, open to be read tensor by tensor."""

    checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """Judge the folder by its headers. Raises ModelError as `inspect` does."""
        return cls(inspect(folder))

    def names(self) -> tuple[str, ...]:
        """Return the weights by name, as the files spell it.

        Scales are not among them, nor are integers: masks and positions of old files.
        """
        found = self.checkpoint.tensors.keys() - self.checkpoint.beside
        return tuple(sorted(name for name in found if self._is_float(name)))

    def get(self, name: str) -> Tensor:
        """Return a weight: float32, contiguous, memory of its own.

        Raises ModelError for a name that the files do not have or integers, and
        NonFiniteError, naming tensor and file, for inf or NaN.
        """
        values = self._read(name)
        scale = self.checkpoint.scales.get(name)
        if scale is not None:
            _scale_in_place(values, self._read(scale.name), scale)
        stored = self.checkpoint.tensors[name]
        check_finite(values, f"tensor {name} of {stored.file}")
        return values

    def codes(self, name: str) -> Tensor:
        """Return the values of FP8 codes without their scale; raises as `get` does."""
        return self._read(name)

    def _is_float(self, name: str) -> bool:
        dtype = self.checkpoint.tensors[name].dtype
        return dtype in FLOATS or dtype in CODE_FORMATS

    def _read(self, name: str) -> Tensor:
        """Return the values that are stored, of codes without their scale."""
        stored = self.checkpoint.tensors.get(name)
        if stored is None:
            raise ModelError(f"no tensor {name} in {self.checkpoint.folder.name}")
        if not self._is_float(name):
            raise ModelError(
                f"tensor {name} of {stored.file} is {stored.dtype}, not a float"
            )
        out = torch.empty(stored.elements)
        item = ITEM_BYTES[stored.dtype]
        with (self.checkpoint.folder / stored.file).open("rb") as file:
            file.seek(stored.start)
            for piece in out.split(CHUNK_BYTES // item) if stored.elements else ():
                raw = np.fromfile(file, np.uint8, piece.numel() * item)
                if raw.size < piece.numel() * item:
                    raise ModelError(f"{stored.file} became shorter while it was read")
                piece.copy_(_widened(torch.from_numpy(raw), stored))
        return out.view(stored.shape)


def _widened(raw: Tensor, stored: StoredTensor) -> Tensor:
    """Return the numbers in these bytes; `copy_` makes float32 of the float ones."""
    if stored.dtype in CODE_FORMATS:
        return from_codes(raw, CODE_FORMATS[stored.dtype])
    return raw.view(FLOATS[stored.dtype])


def _scale_in_place(codes: Tensor, scales: Tensor, scale: CodeScale) -> None:
    """Multiply codes (…, out, in) by the scale of the block that each lies in."""
    if scales.numel() == 1:
        codes.mul_(scales.reshape(()))
        return
    columns = codes.shape[1]
    if scale.rows == 1 and scale.columns == columns:
        codes.mul_(scales.reshape(-1, 1))
        return
    for index, rows in enumerate(codes.split(scale.rows)):
        row = scales.view(-(-codes.shape[0] // scale.rows), -1)[index]
        rows.mul_(row.repeat_interleave(scale.columns)[:columns])
