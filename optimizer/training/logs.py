"""The log of a training run, as it could be read. Free of torch.

A record is one step: loss, gradient norm, loss scale, learning rate, any of them, and
what HealthMonitor says of layers. `log_files.py` reads files into rows of names and
values; here names get their meaning, and what cannot be used is told in `notes`.
"""

import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from optimizer.errors import OptimizerError

Row = Mapping[str, Any]

# What loggers call them, lower case, without a prefix such as train/.
ALIASES = {
    "step": (
        "step", "global_step", "iteration", "iter", "it", "_step", "num_updates",
        "train_step", "trainer_global_step",
    ),
    "loss": (
        "loss", "train_loss", "training_loss", "lm_loss", "train_loss_step",
        "total_loss", "nll_loss", "loss_step",
    ),
    "gradient_norm": (
        "grad_norm", "gradient_norm", "gnorm", "grad_norm_step", "global_grad_norm",
        "total_norm", "norm", "grad_2_0_norm_total",
    ),
    "loss_scale": (
        "loss_scale", "scale", "grad_scale", "scaler_scale", "amp_scale", "loss_scaler",
        "scaler", "lossscale",
    ),
    "learning_rate": (
        "learning_rate", "lr", "lr_group_0", "lr_adamw", "lr_adam", "lr_sgd",
    ),
    "skipped": ("skipped", "skip", "overflow", "skipped_step", "found_inf"),
}  # fmt: skip
FIGURES = ("loss", "gradient_norm", "loss_scale", "learning_rate")
NOT_TRAINING = re.compile(r"^(eval|val|valid|validation|test|dev)([/_. -]|$)", re.I)
SUMMARY = "train_runtime"  # Trainer's last line has means over the run, and this
MAX_RATE = 10.0  # no optimizer trains with more
LARGEST = sys.float_info.max
MOST_LOG2 = 64  # a loss scale of 2^64 is none; its logarithm may be


class LogError(OptimizerError):
    """A log has nothing that can be used; the message says what it has."""

    code = "log_unreadable"
    category = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step. None: the log does not say."""

    step: int
    loss: float | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    learning_rate: float | None = None
    skipped: bool | None = None
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunLog:
    """What a log says, in the order of the steps."""

    records: tuple[Record, ...]
    columns: Mapping[str, str]  # figure -> what the log calls it
    notes: tuple[str, ...]  # what could not be used, or was read in some other way
    precision: str | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """The figures that the log does not have."""
        return tuple(name for name in FIGURES if name not in self.columns)

    @property
    def every(self) -> int:
        """Steps from one record to the next: the median."""
        gaps = [b.step - a.step for a, b in pairwise(self.records)]
        return max(1, round(statistics.median(gaps))) if gaps else 1

    def series(self, figure: str) -> list[tuple[int, float]]:
        """Return (step, value) of every record that has the figure."""
        values = ((r.step, getattr(r, figure)) for r in self.records)
        return [(step, value) for step, value in values if value is not None]


def run_log(rows: Sequence[Row], notes: Iterable[str] = ()) -> RunLog:
    """Read rows of a logger. Raises LogError where no figure is in any of them."""
    told = list(notes)
    rows = [row for row in rows if SUMMARY not in row]
    columns = _columns(rows)
    if not any(name in columns for name in FIGURES):
        raise LogError(_nothing(rows, told))
    records = _records(rows, columns, told)
    for repair in (_scale_of_logarithms, _scales, _rates, _norms):
        records, columns = repair(records, columns, told)
    if not any(map(_says_something, records)):
        raise LogError(_nothing(rows, told))
    precision = next((str(r["precision"]) for r in rows if "precision" in r), None)
    names = {name: column for name, column in columns.items() if name in FIGURES}
    return RunLog(tuple(records), names, tuple(told), precision)


def _says_something(record: Record) -> bool:
    figures = any(getattr(record, figure) is not None for figure in FIGURES)
    return figures or bool(record.layers)


def _nothing(rows: Sequence[Row], told: Sequence[str]) -> str:
    names = sorted({str(name) for row in rows for name in row})[:12]
    wanted = "loss, grad_norm, loss_scale or learning_rate"
    if not names:
        return f"the log is empty: it needs lines with a step and {wanted}"
    why = f" ({'; '.join(told)})" if told else ""
    return f"the log has no usable {wanted}; it has: {', '.join(names)}{why}"


# Columns


def _columns(rows: Sequence[Row]) -> dict[str, str]:
    """Return which name of the log stands for which figure: the most frequent one."""
    counts: dict[str, int] = {}
    for row in rows:
        for name in row:
            counts[name] = counts.get(name, 0) + 1
    found: dict[str, str] = {}
    for figure, aliases in ALIASES.items():
        known = [
            n for n in counts if _plain(n) in aliases and not NOT_TRAINING.match(n)
        ]
        if known:
            order = {alias: i for i, alias in enumerate(aliases)}
            found[figure] = min(known, key=lambda n: (-counts[n], order[_plain(n)]))
    return found


def _plain(name: str) -> str:
    """train/grad-norm -> grad_norm."""
    return re.sub(r"[^a-z0-9]+", "_", name.rsplit("/", 1)[-1].lower()).strip("_")


# Records


def _records(
    rows: Sequence[Row], columns: Mapping[str, str], told: list[str]
) -> list[Record]:
    known = [row for row in rows if any(columns.get(f) in row for f in FIGURES)]
    if "step" not in columns:
        told.append("no column of steps: lines are counted instead")
    bad: dict[str, int] = {}
    records = []
    for number, row in enumerate(known):
        values = {f: _number(row, columns.get(f), bad) for f in FIGURES}
        step = _number(row, columns.get("step"), {})
        if "step" in columns and (step is None or not math.isfinite(step)):
            bad[columns["step"]] = bad.get(columns["step"], 0) + 1
            continue
        skipped = row.get(columns.get("skipped", ""))
        records.append(
            Record(
                step=number if step is None else int(step),
                skipped=None if skipped is None else bool(skipped),
                layers=_layers(row.get("layers")),
                **values,
            )
        )
    told += [
        f"{name}: {n} values are no numbers, and left out" for name, n in bad.items()
    ]
    return _in_order(records, told)


def _number(row: Row, column: str | None, bad: dict[str, int]) -> float | None:
    """Return a figure. Loggers write NaN as null, too: where there is a column, it is."""
    if column is None or column not in row:
        return None
    value = row[column]
    if value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        bad[column] = bad.get(column, 0) + 1
        return None


def _layers(value: Any) -> dict[str, dict[str, Any]]:
    """Return what HealthMonitor wrote of layers: numbers, and tables of numbers."""
    if not isinstance(value, Mapping):
        return {}
    return {
        str(name): {
            figure: _numbers(v) if isinstance(v, Mapping) else v
            for figure, v in layer.items()
            if isinstance(v, Mapping) or _is_number(v)
        }
        for name, layer in value.items()
        if isinstance(layer, Mapping)
    }


def _numbers(table: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): v for name, v in table.items() if _is_number(v)}


def _is_number(value: Any) -> bool:
    """Whether it is one that can be compared; JSON may hold integers beyond floats."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value == value and abs(value) <= LARGEST


def _in_order(records: list[Record], told: list[str]) -> list[Record]:
    """Sort by step; of two records of a step the later one counts (a resumed run)."""
    late = sum(b.step < a.step for a, b in pairwise(records))
    last = {r.step: r for r in records}
    twice = len(records) - len(last)
    if late and twice:
        told.append(
            f"{twice} steps are there twice, as after a resumed run: the later counts"
        )
    elif late:
        told.append(f"steps go back {late} times: sorted by step")
    elif twice:
        last = _merged(records)  # one line for each figure
    return sorted(last.values(), key=lambda r: r.step)


def _merged(records: list[Record]) -> dict[int, Record]:
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        values = {f: getattr(record, f) for f in (*FIGURES, "skipped")}
        at = found.setdefault(record.step, {"layers": {}})
        at |= {name: value for name, value in values.items() if value is not None}
        at["layers"] = record.layers or at["layers"]
    return {step: Record(step=step, **values) for step, values in found.items()}


# Units


_Repaired = tuple[list[Record], dict[str, str]]


def _scale_of_logarithms(
    records: list[Record], columns: dict[str, str], told: list[str]
) -> _Repaired:
    """A loss scale that moves by ones is its logarithm: 16, 15, 14 and not 65536."""
    values = [r.loss_scale for r in records if r.loss_scale is not None]
    moves = {abs(b - a) for a, b in pairwise(values) if a != b}
    if not moves or moves != {1.0} or max(values) > MOST_LOG2 or max(values) < 4:
        return records, columns
    told.append(
        f"{columns['loss_scale']} moves by ones: read as log2 of the loss scale"
    )
    return [
        _with(r, loss_scale=None if r.loss_scale is None else 2.0**r.loss_scale)
        for r in records
    ], columns


def _scales(
    records: list[Record], columns: dict[str, str], told: list[str]
) -> _Repaired:
    wrong = [r for r in records if r.loss_scale is not None and r.loss_scale <= 0]
    if not wrong:
        return records, columns
    told.append(
        f"{columns['loss_scale']} is {wrong[0].loss_scale:g} at step {wrong[0].step}, so "
        "no scale: not used"
    )
    return _without(records, columns, "loss_scale")


def _rates(
    records: list[Record], columns: dict[str, str], told: list[str]
) -> _Repaired:
    values = [r.learning_rate for r in records if r.learning_rate is not None]
    wrong = [v for v in values if not 0 <= v <= MAX_RATE]
    if not wrong:
        return records, columns
    told.append(
        f"{columns['learning_rate']} reaches {wrong[0]:g}, in some other unit: not used"
    )
    return _without(records, columns, "learning_rate")


def _norms(
    records: list[Record], columns: dict[str, str], told: list[str]
) -> _Repaired:
    negative = [r for r in records if (r.gradient_norm or 0.0) < 0]
    if not negative:
        return records, columns
    told.append(
        f"{columns['gradient_norm']} is negative at step {negative[0].step}, "
        "so no norm: not used"
    )
    return _without(records, columns, "gradient_norm")


def _without(records: list[Record], columns: dict[str, str], name: str) -> _Repaired:
    kept = {n: c for n, c in columns.items() if n != name}
    if not any(figure in kept for figure in FIGURES):
        return [], kept
    return [_with(r, **{name: None}) for r in records], kept


def _with(record: Record, **changes: Any) -> Record:
    values = {f: getattr(record, f) for f in Record.__dataclass_fields__}
    return Record(**{**values, **changes})
