"""An exported checkpoint read back from its files: as an engine gets it, run as a stack.

Codes and scales are those of the files, so what is measured is what was written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimizer.execute import Amaxes, Operand, WeightCodes
from optimizer.export_layout import BLOCK, CacheScale, Layout, Matrix
from optimizer.formats import E4M3, FORMATS
from optimizer.model import LoadedModel
from optimizer.shards import Shards
from optimizer.sites import LinearPart
from optimizer.stack import Precision, Role, Site


class StoredCodes(WeightCodes):
    """The matrices of a model that was exported and loaded again: FP8 as it is stored."""

    def __init__(self, model: LoadedModel, folder: Path, laid: Layout) -> None:
        super().__init__(model)
        self._shards = Shards.open(folder)
        self._matrices: dict[str, list[Matrix]] = {}
        for entry in laid.entries:
            if isinstance(entry, Matrix):
                self._matrices.setdefault(entry.part.name, []).append(entry)

    def _round(self, part: LinearPart, precision: Precision) -> Operand:
        matrices = self._matrices.get(part.name)
        if matrices is None or precision.format != E4M3.name:
            return super()._round(part, precision)
        matrices.sort(key=lambda matrix: matrix.start)
        codes = torch.cat([self._codes(matrix) for matrix in matrices])
        return codes, self._scales(matrices)

    def _codes(self, matrix: Matrix) -> Tensor:
        codes = self._shards.codes(matrix.name)
        return codes.T.contiguous() if matrix.transposed else codes

    def _scales(self, matrices: Sequence[Matrix]) -> Tensor:
        each = [self._shards.get(f"{matrix.name}_scale") for matrix in matrices]
        match matrices[0].scheme.weights:
            case "tensor":
                return each[0].reshape(())
            case "block":
                return torch.cat(
                    [_spread(*pair) for pair in zip(each, matrices, strict=True)]
                )
            case _:
                return torch.cat(each)


def _spread(scales: Tensor, matrix: Matrix) -> Tensor:
    """Return a scale for every code of a matrix of blocks."""
    rows = scales.repeat_interleave(BLOCK, 0)[: matrix.rows]
    return rows.repeat_interleave(BLOCK, 1)[:, : matrix.part.weight.shape[1]]


def stored_amaxes(folder: Path, laid: Layout) -> Amaxes:
    """Return what the static scales in the files are the scales of."""
    shards = Shards.open(folder)
    found: dict[tuple[Site, Role], Tensor] = {}
    for entry in laid.entries:
        if isinstance(entry, CacheScale):
            scale = shards.get(entry.tensor.name).flatten()
            shape = scale if scale.numel() > 1 else scale.reshape(())
            found[entry.site, entry.role] = shape * FORMATS["fp8_e4m3"].max
        elif isinstance(entry, Matrix) and entry.scheme.inputs == "tensor":
            name = f"{entry.name.removesuffix('.weight')}.input_scale"
            scale = shards.get(name).reshape(())
            found[entry.part.site, Role.INPUT] = scale * FORMATS["fp8_e4m3"].max
    made: Mapping[tuple[Site, Role], Tensor] = found
    return made
