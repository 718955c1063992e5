"""What a job leaves for engines: written, read back, and measured again as it was read.

An export that its engine would refuse is refused here first; the rest is written, and
the answer stands. The checkpoint is then loaded from its files and run on the held-out
data: that is the loss to expect from it, beside that of the emulated stack.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from optimizer import export_te, export_torchao
from optimizer.engines import served_seconds
from optimizer.errors import ExportError, HardwareError
from optimizer.execute import Amaxes, WeightCodes
from optimizer.export_checkpoint import write_checkpoint
from optimizer.export_files import Exported, Outlet, Target
from optimizer.export_layout import Layout
from optimizer.export_reload import StoredCodes, stored_amaxes
from optimizer.export_scheme import Deviation, Plan, plan
from optimizer.hardware import LOCAL
from optimizer.one_pass import generates
from optimizer.pieces import Memory
from optimizer.stack import Stack
from optimizer.validate import Interval, Quality, quality, run_stack
from optimizer.work import Work

CHECKPOINT = "checkpoint"
WRITTEN_SHARE = 0.3  # of the time; the rest is reading back and running
Told = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The stack that is exported, and what was measured of its emulation."""

    stack: Stack
    rounding: str  # that its weights were measured with; of ROUNDINGS
    quality: Quality | None  # None: it was not measured, and the files will not be


@dataclass(slots=True)
class Found:
    """What came of every export."""

    files: list[Exported] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    deviations: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: dict[str, Any] | None = None

    def deviates(self, export: str, every: tuple[Deviation, ...]) -> None:
        """Note where an engine runs something else than was measured."""
        self.deviations += [{"export": export, **asdict(one)} for one in every]


def export(
    work: Work, chosen: Chosen, outlet: Outlet, told: Told = lambda part, said: None
) -> dict[str, Any]:
    """Write what was asked for, and return the report's section on it."""
    found, run = Found(), _Export(work, chosen, outlet, told)
    for name in work.spec.exports:
        try:
            getattr(run, name)(found)
        except ExportError as error:
            found.refused.append({"export": name, "reason": str(error)})
    return {
        "asked": list(work.spec.exports),
        "files": [asdict(file) for file in found.files],
        "refused": found.refused,
        "deviations": found.deviations,
        "checkpoint": found.checkpoint,
    }


class _Export:
    """The exports by name, each with what it needs of the job."""

    def __init__(self, work: Work, chosen: Chosen, outlet: Outlet, told: Told) -> None:
        self._work, self._chosen = work, chosen
        self._outlet, self._told = outlet, told

    def compressed_tensors(self, found: Found) -> None:
        """Write the checkpoint that vLLM loads, and measure it as it lies there."""
        work, chosen = self._work, self._chosen
        made = plan(chosen.stack, work.outline.shape)
        amaxes, weights = self._rounded()
        target = self._target(CHECKPOINT, "checkpoint", "vllm")
        try:
            laid = write_checkpoint(
                work.model,
                work.folder,
                chosen.stack,
                made,
                weights,
                amaxes,
                target,
                lambda part: self._told(WRITTEN_SHARE * part, "checkpoint"),
                room_bytes=self._outlet.room_bytes,
            )
        except ExportError:
            shutil.rmtree(target.folder)
            raise
        found.files += target.written
        found.deviates("compressed_tensors", made.deviations)
        found.checkpoint = {
            "base": made.base,
            "untied_head": made.untied,
            "bytes": laid.bytes,
            "served": made.served.to_json(),
        }
        if self._outlet.vllm is not None and work.spec.hardware == LOCAL:
            found.checkpoint["served_seconds"] = self._served(target.folder)
        if chosen.quality is not None:
            kl = chosen.quality.kl_nats
            found.checkpoint |= self._measured(target.folder, made, laid, kl)

    def transformer_engine(self, found: Found) -> None:
        """Write which recipe every module gets."""
        made = export_te.plan(self._chosen.stack, self._work.model)
        amaxes, weights = self._rounded()
        target = self._target("", "module_plan", "transformer_engine")
        name = self._work.spec.model
        rounded = (self._chosen.stack, weights, amaxes)
        export_te.write_plan(made, name, self._work.model, *rounded, target)
        found.files += target.written
        found.deviates("transformer_engine", made.deviations)

    def torchao(self, found: Found) -> None:
        """Write what torchao makes of every matrix."""
        stack, model = self._chosen.stack, self._work.outline
        whole, deviations = export_torchao.configuration(stack, model)
        target = self._target("", "configuration", "torchao")
        export_torchao.write_configuration(whole, target)
        found.files += target.written
        found.deviates("torchao", deviations)

    def _served(self, folder: Path) -> dict[str, Any]:
        """Have vLLM serve the files here, and return what it took, or why it does not."""
        assert self._outlet.vllm is not None
        workload = self._work.spec.workload
        try:
            return asdict(served_seconds(self._outlet.vllm, folder, workload))
        except HardwareError as error:
            return {"error": str(error)}

    def _target(self, below: str, kind: str, consumer: str) -> Target:
        return Target(self._outlet.folder, below, kind, consumer, [])

    def _rounded(self) -> tuple[Amaxes, WeightCodes]:
        """Return the scales and the weights that the stack was measured with."""
        if self._chosen.rounding == "nearest":
            return self._work.amaxes(), self._work.weights
        found = self._work.recoded(self._chosen.stack)
        return found.amaxes, found.weights

    def _measured(
        self, folder: Path, made: Plan, laid: Layout, emulated: Interval
    ) -> dict[str, Any]:
        """Load the files, run what an engine makes of them, and return its figures."""
        work = self._work
        spec = replace(work.spec, model_path=str(folder))
        back = Work(spec, Memory(), on_layer=work.on_layer)
        weights = StoredCodes(back.model, folder, laid)
        amaxes = stored_amaxes(folder, laid)

        def told(step: int, of: int) -> None:
            share = (1 - WRITTEN_SHARE) * step / max(of, 1)
            self._told(WRITTEN_SHARE + share, "read back")

        values = run_stack(back.model, work.truth, made.served, amaxes, weights, told)
        found = quality(values, spec.seed)
        words = asdict(found.perplexity) if generates(back.outline.shape) else None
        return {
            "kl_nats": asdict(found.kl_nats),
            "top1_agreement": asdict(found.top1_agreement),
            "perplexity": words,
            "emulated_kl_nats": asdict(emulated),
            "as_emulated": emulated.low <= found.kl_nats.value <= emulated.high,
        }
