"""What 8 bits in attention and in its cache cost: all layers at once, one kind at a time.

    python -m tests.bench.attention

KL in nats per token on built-in text, against the same model in fp32, and the mean
share of the largest attention weight in the rows of the softmax, before and after.
Static scales are calibrated on other text than is measured. Roundings are given by
place and precision, since some of them (a scale of 1 for probabilities) are no
choices of the product.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import Amaxes, Operand, Reference, round_operand
from optimizer.formats import E4M3
from optimizer.metrics import logits_kl_nats
from optimizer.model import LoadedModel
from optimizer.stack import Component, Granularity, Precision, Role, Site
from tests.bench._inputs import inputs, options

SCORES, VALUES = Component.ATTN_SCORES, Component.ATTN_VALUES
SOFTMAX, CACHE = Component.ATTN_SOFTMAX, Component.KV_CACHE
Q_P, K_V, OUT = Role.INPUT, Role.WEIGHT, Role.OUTPUT  # K of scores and cache's V
HEAD, TOKEN = Granularity.HEAD, Granularity.TOKEN
NARROW, WIDE_RANGE = Precision("fp8_e4m3"), Precision("fp8_e5m2")

Kind = tuple[Component, Role]


@dataclass(frozen=True)
class Case:
    """What is rounded in every layer, and static amaxes other than calibration's."""

    roundings: Mapping[Kind, Precision]
    largest: Mapping[Kind, float] = field(default_factory=dict)


def both(component: Component, precision: Precision) -> Case:
    return Case({(component, Q_P): precision, (component, K_V): precision})


def softmax(role: Role, precision: Precision, largest: float | None = None) -> Case:
    place = (SOFTMAX, role)
    return Case({place: precision}, {} if largest is None else {place: largest})


CASES: dict[str, Case] = {
    "QK e4m3 per tensor": both(SCORES, NARROW),
    "QK e4m3 per head": both(SCORES, Precision("fp8_e4m3", HEAD)),
    "QK e4m3 per token and head": both(SCORES, Precision("fp8_e4m3", TOKEN)),
    "QK e5m2 per tensor": both(SCORES, WIDE_RANGE),
    "PV e4m3 per tensor": both(VALUES, NARROW),
    "PV e5m2 per tensor": both(VALUES, WIDE_RANGE),
    "softmax input e4m3": softmax(Q_P, NARROW),
    "softmax output e4m3, scale 1/448": softmax(OUT, NARROW, 1.0),
    "softmax output e4m3, scale 1": softmax(OUT, NARROW, E4M3.max),
    "softmax in bf16": Case({(SOFTMAX, r): Precision("bf16") for r in (Q_P, OUT)}),
    "KV cache e4m3 per tensor": both(CACHE, NARROW),
    "KV cache e4m3 per head": both(CACHE, Precision("fp8_e4m3", HEAD)),
    "KV cache e5m2 per tensor": both(CACHE, WIDE_RANGE),
}


class Rounded(Reference):
    """Runs a case, and adds up the largest weight of each row of the softmax."""

    def __init__(self, case: Case, largest: Amaxes) -> None:
        self._case = case
        self._largest = largest
        self._top = 0.0
        self._rows = 0

    @property
    def top(self) -> float:
        return self._top / self._rows

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        kind = (site.component, role)
        precision = self._case.roundings.get(kind)
        operand: Operand = (x, None)
        if precision is not None:
            given = self._case.largest.get(kind)
            known = self._largest.get((site, role))
            static = known if given is None else torch.tensor(given)
            operand = round_operand(x, precision, static)
        if kind == (SOFTMAX, OUT):
            weights = operand[0] if operand[1] is None else operand[0] * operand[1]
            self._top += float(weights.amax(dim=-1).sum(dtype=torch.float64))
            self._rows += weights[..., 0].numel()
        return operand


def main() -> None:
    arguments = options(__doc__.split("\n")[0], sequence=512).parse_args()
    loaded, read = inputs(arguments)
    largest = amaxes(calibrate(loaded, read.calibration.sequences))
    figures = measure(loaded, read.validation.sequences, largest)
    print(json.dumps({"tokens": read.validation.tokens, "cases": figures}))


@torch.no_grad()
def measure(
    loaded: LoadedModel, sequences: Sequence[Tensor], largest: Amaxes
) -> dict[str, dict[str, float]]:
    """Print a row for each case as it is measured, and return them all."""
    plain = Rounded(Case({}), largest)
    references = [loaded.forward(ids, plain)[0] for ids in sequences]
    count = sum(ids.numel() for ids in sequences)
    print(f"{'all layers, ' + str(count) + ' tokens':34} {'KL nats':>9}  top weight")
    print(f"{'fp32':34} {0.0:9.5f}  {plain.top:.4f}")
    figures = {"fp32": {"kl_nats": 0.0, "top_weight": plain.top}}
    for name, case in CASES.items():
        executor, total = Rounded(case, largest), 0.0
        for ids, reference in zip(sequences, references, strict=True):
            logits = loaded.forward(ids, executor)[0]
            total += float(logits_kl_nats(reference, logits).sum(dtype=torch.float64))
        figures[name] = {"kl_nats": total / count, "top_weight": executor.top}
        print(f"{name:34} {total / count:9.5f}  {executor.top:.4f}", flush=True)
    return figures


if __name__ == "__main__":
    main()
