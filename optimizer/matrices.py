"""What roundings of matrices cost: their own gradient squared, times δ².

The gradient of a matrix is summed over a sequence, since one δ acts on every token:
G = Σ g xᵀ over its tokens. It is made when a stage has been passed, from the gradients
of the outputs and from the inputs, one matrix in memory at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.collapse import COLLAPSE_ROWS
from optimizer.execute import WeightCodes
from optimizer.matmul import rough
from optimizer.model import LoadedModel
from optimizer.rounded import Whole, count, rounding_error
from optimizer.sites import LinearPart
from optimizer.stack import Precision, Role
from optimizer.sums import Place, Rounding, Sums
from optimizer.totals import sums_of_squares

ERROR_BYTES = 600 << 20  # of the errors of one matrix's roundings at once
AT_ONCE = 1 << 21  # elements of a gradient: products of few rows take twice the time
PRODUCT_BYTES = 256 << 20  # of activations and gradients that wait to be scored


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What a matrix was multiplied with in some sequences, and the gradient after it."""

    part: LinearPart
    sequences: Sequence[int]
    gradient: Tensor  # (..., out)
    rows: Tensor  # (tokens, in), as the gradient in the precision of estimates

    @property
    def bytes(self) -> int:
        """Size of what is kept."""
        kept = self.gradient.numel() + self.rows.numel()
        return kept * self.rows.element_size()

    def gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the matrix's own gradient over each sequence, some rows at a time.

        (sequences, rows, in), in the precision of estimates.
        """
        many, (out, width) = len(self.sequences), self.part.weight.shape
        transposed = self.gradient.reshape(many, -1, out).transpose(1, 2)
        rows = self.rows.view(many, -1, width)
        step = max(1, AT_ONCE // (many * width))
        for start in range(0, out, step):
            part = slice(start, start + step)
            yield part, transposed[:, part].contiguous() @ rows


class Matrices:
    """The products of the stage that is swept, and what is counted of its matrices."""

    def __init__(
        self,
        model: LoadedModel,
        weights: WeightCodes,
        wanted: Mapping[Place, Sequence[Precision]],
        sums: Sums,
    ) -> None:
        self._resident = model.residency.whole
        self._weights = weights
        self._wanted = wanted
        self._sums = sums
        self._products: list[Product] = []
        self._counted: set[tuple[str, Precision]] = set()
        self._whole: Whole | None = None  # of the matrix scored last

    def note(self, product: Product) -> None:
        """Keep a product until it is scored."""
        self._products.append(product)

    @property
    def full(self) -> bool:
        """Whether what waits takes much memory."""
        return sum(p.bytes for p in self._products) > PRODUCT_BYTES

    @torch.no_grad()
    def score(self) -> None:
        """Score the matrices of the products noted, one matrix in memory at a time."""
        by_name: dict[str, list[Product]] = {}
        for product in self._products:
            by_name.setdefault(product.part.name, []).append(product)
        self._products.clear()
        for products in by_name.values():
            part = products[0].part
            wanted = self._wanted[part.site, Role.WEIGHT]
            room = ERROR_BYTES if self._resident else 0
            at_once = max(1, room // (4 * part.weight.numel()))
            for start in range(0, len(wanted), at_once):
                self._score(products, wanted[start : start + at_once])
        self._whole = None

    def _score(
        self, products: Sequence[Product], precisions: Sequence[Precision]
    ) -> None:
        every = [self._error(products[0].part, p) for p in precisions]
        errors = [(sums, rough(error)) for sums, error in every if error is not None]
        if not errors:
            return
        for product in products:
            for part, gradients in product.gradients():
                for rounding, error in errors:
                    lost = sums_of_squares(gradients * error[part])
                    for number, some in zip(product.sequences, lost, strict=True):
                        rounding.lose(number, some)

    def _error(
        self, part: LinearPart, precision: Precision
    ) -> tuple[Rounding, Tensor | None]:
        """Return δ of a rounding of a matrix, with its running sums; None: all 0."""
        weight = part.weight
        operand = self._weights.get(part, precision)
        sums = self._sums.at((part.site, Role.WEIGHT, precision))
        error = rounding_error(weight, operand)
        if (part.name, precision) not in self._counted:
            self._counted.add((part.name, precision))
            if self._whole is None or self._whole.x is not weight:
                self._whole = Whole(weight, COLLAPSE_ROWS)
            count(sums, self._whole, operand, error, precision)
        if not self._resident:
            self._weights.drop()  # a matrix may be a large part of a stage
        return sums, error
