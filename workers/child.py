"""The process that computes one job: `python -m workers.child READ WRITE`.

Its worker starts it with a clean environment and two pipes. It builds its own walls
(`sandbox.py`), and only then reads what somebody uploaded. It knows no database, no
broker and no key: what it needs kept or shared, it asks its worker for.
"""

import faulthandler
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from api.supervise import die_with
from optimizer.errors import OptimizerError
from optimizer.pieces import Compute, Piece
from optimizer.spec import OptimizeSpec
from workers import sandbox
from workers.channel import LINE_CHARACTERS, TEXT_BYTES, Channel, Closed
from workers.failures import explain
from workers.sharing import Kept, Shared, assist

logger = logging.getLogger(__name__)

TELL_S = 0.2  # progress is told at most this often
LOSSES_TOLD = 12  # tellings of one run's losses

Reply = dict[str, Any]
Run = tuple[str, int, bool]
"""Of a training: the candidate, the order of its data, whether it was promoted."""


@dataclass(frozen=True, slots=True)
class Start:
    """The worker's first message: all that this process gets to know."""

    role: str  # "optimize", or "assist" for a helper
    spec: dict[str, Any]
    folder: str  # its own; results go to `out` in it
    worker: int  # process id: this one dies with it
    sandbox: str  # "require" | "try" | "off"
    user: str = ""  # whom to become, where it is root
    memory_bytes: int = 0  # 0: no limit
    sparing: bool = False  # memory ran out before
    threads: int = 0  # 0: all
    hardware_file: str | None = None
    profile: str | None = None  # what was measured on the device of the request
    vllm_python: str | None = None  # of an environment with vLLM, to serve exports
    room_bytes: int | None = None  # of the disk, for exports; None: what is free

    def readable(self) -> tuple[Path, ...]:
        """Return the files and folders that are the job's."""
        named = (
            self.spec["model_path"],
            self.spec["dataset_path"],
            self.hardware_file,
            self.profile,
        )
        found = [Path(name) for name in named if name]
        if self.vllm_python:  # all of its environment
            found.append(Path(self.vllm_python).parent.parent)
        return tuple(found)


class Line:
    """What this process says to its worker, and asks it. See `messages.py`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.phase = "load"
        self._told_at = 0.0
        self._heard: dict[Run, int] = {}  # losses told, by run

    def tell(self, phase: str, fraction: float, detail: str = "") -> None:
        """Say how far a phase is; called often, said now and then."""
        now = time.monotonic()
        if phase == self.phase and now - self._told_at < TELL_S:
            return
        self.phase, self._told_at = phase, now
        fraction = min(max(float(fraction), 0.0), 1.0)
        self._say("tell", phase=phase, fraction=fraction)

    def started(self, missing: sandbox.Missing) -> None:
        """Say that the walls are up, but for some."""
        said = [{"measure": m, "reason": r[:2000]} for m, r in missing.items()]
        self._say("started", unprotected=said)

    def done(self, outcome: str | None, summary: dict[str, Any]) -> None:
        """Say that everything is computed, and written."""
        self._say("done", outcome=outcome, summary=summary)

    def failed(self, error: BaseException) -> None:
        """Say what went wrong."""
        name = re.sub(r"\W", "_", type(error).__name__)[:64]
        self._say("failed", problem=explain(error, self.phase), name=name)

    # Pieces: a `sharing.Desk`, and a `sharing.Helping`

    def read(self, keys: Collection[str]) -> dict[str, str]:
        """Return the JSON text of each key that is kept."""
        reply, text = self._ask("read", keys=list(keys))
        found, at = {}, 0
        for key, length in reply["lengths"]:
            found[key] = text[at : at + length].decode()
            at += length
        return found

    def keep(self, piece: Piece, text: str) -> None:
        """Keep a result. One that is too long is not kept."""
        if len(text) <= TEXT_BYTES:
            self._ask("keep", text.encode(), kind=piece.kind, key=piece.key)

    def finish(self, key: str, text: str) -> None:
        """Keep the result of a piece that this process has."""
        kept = len(text) <= TEXT_BYTES
        self._ask("finish", text.encode() if kept else b"", key=key, kept=kept)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Have these computed."""
        self._ask("add", pieces=[asdict(piece) for piece in pieces])

    def claim(self, keys: Collection[str]) -> str | None:
        """Take one of these pieces that nobody computes. None: others have all."""
        key: str | None = self._ask("claim", keys=list(keys))[0]["key"]
        return key

    def next(self) -> Piece | bool:
        """Take a piece. True: there may be one soon; False: go."""
        reply, _ = self._ask("next")
        if reply["piece"] is None:
            return bool(reply["stay"])
        return Piece(**reply["piece"])

    def underway(self, keys: Collection[str]) -> bool:
        """Return whether one of these is still to be done."""
        return bool(self._ask("underway", keys=list(keys))[0]["underway"])

    def measured(self, stacks: list[dict[str, Any]]) -> None:
        """Tell of whole stacks that were measured."""
        self._ask("measured", stacks=stacks)

    def losses(self, run: Run, losses: Sequence[float], steps: int) -> None:
        """Tell of a run's losses, some steps at a time."""
        told = self._heard.get(run, 0)
        if len(losses) < min(steps, told + max(1, steps // LOSSES_TOLD)):
            return
        self._heard[run] = len(losses)
        new = [x if math.isfinite(x) else None for x in losses[told:]]
        name, order, promoted = run
        said: dict[str, Any] = {"run": name, "order": order, "promoted": promoted}
        self._ask("losses", **said, first=told, losses=new, steps=steps)

    def log(self, line: str) -> None:
        """Tell what the computation came across, in a line of plain text."""
        plain = "".join(c if c.isprintable() else " " for c in line)
        if plain.strip():
            self._ask("log", line=plain[:LINE_CHARACTERS])

    def drop(self, keys: Collection[str]) -> None:
        """Take these away: their results were read."""
        self._ask("drop", keys=list(keys))

    def _say(self, do: str, text: bytes = b"", **fields: Any) -> None:
        said = json.dumps({"do": do, **fields}, allow_nan=False)
        self._channel.send(said.encode(), text)

    def _ask(self, do: str, text: bytes = b"", **fields: Any) -> tuple[Reply, bytes]:
        self._say(do, text, **fields)
        reply, following = self._channel.receive()
        found: Reply = json.loads(reply)
        return found, following


Work = Callable[[Start, Line], None]


class Unsafe(OptimizerError):
    """The sandbox is required, and this machine does not allow all of it."""

    code = "sandbox_unavailable"


def serve(channel: Channel, work: Work | None = None) -> int:
    """Do what the worker's first message says. Returns the exit code."""
    line = Line(channel)
    try:
        start = Start(**json.loads(channel.receive()[0]))
        line.started(_walled(start))
        (work or WORK[start.role])(start, line)
    except Closed:
        return 1  # the worker is gone, and so is the job
    except Exception as error:
        logger.exception("this process cannot go on")
        line.failed(error)
    return 0


def _walled(start: Start) -> sandbox.Missing:
    if start.sandbox == "off":
        return {}
    walls = sandbox.Walls(
        Path(start.folder), start.readable(), start.memory_bytes, start.user
    )
    missing = sandbox.close(walls, start.worker)
    if missing and start.sandbox == "require":
        lacks = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise Unsafe(f"this worker cannot wall the job in: {lacks}")
    return missing


def optimize(start: Start, line: Line) -> None:
    """Compute a job, and write what its owner gets."""
    line.tell("load", 0.0)
    _prepare(start)
    if start.spec.get("training"):
        train(start, line)
        return
    from optimizer import kernels
    from optimizer.export_files import Outlet
    from optimizer.run import optimize
    from workers import outputs

    tables = None
    if start.profile is not None:
        tables = kernels.from_profile(json.loads(Path(start.profile).read_text()))
    spec = OptimizeSpec.from_json(start.spec)
    out = Path(start.folder) / "out"
    vllm = Path(start.vllm_python) if start.vllm_python else None
    outlet = Outlet(out, start.room_bytes, vllm if spec.engine == "vllm" else None)
    heard = line.measured, line.log
    document = optimize(spec, line.tell, Shared(line), tables, outlet, *heard)
    outputs.write(out, document)
    line.done(document["verdict"]["outcome"], outputs.summarize(document))


def train(start: Start, line: Line) -> None:
    """Probe a training, and write what its owner gets."""
    from optimizer.training.candidates import Candidate
    from optimizer.training.job import train
    from workers import training_outputs

    spec = OptimizeSpec.from_json(start.spec)
    assert spec.training is not None
    steps = spec.training.steps

    def heard(candidate: Candidate, order: int, losses: Sequence[float]) -> None:
        run = (candidate.name, order, bool(candidate.promotions))
        line.losses(run, losses, steps)

    document = train(spec, line.tell, Shared(line), heard)
    training_outputs.write(Path(start.folder) / "out", document)
    summary = training_outputs.summarize(document)
    line.done(document["verdict"]["outcome"], summary)


def help_out(start: Start, line: Line) -> None:
    """Load a job's model, and compute pieces of it until none is left."""
    _prepare(start)
    spec = OptimizeSpec.from_json(start.spec)
    assist(line, _helper(spec, Kept(line)))
    line.done(None, {})


def _helper(spec: OptimizeSpec, kept: Kept) -> Compute:
    """Return what computes a piece of a job, its model loaded."""
    if spec.training is not None:
        from optimizer.training.work import TrainingWork

        training = TrainingWork(spec, kept)
        assert training.network is not None  # reading it loads it
        return training.compute
    from optimizer.work import Work

    work = Work(spec, kept)
    work.opened()
    assert work.model is not None
    return work.compute


WORK: dict[str, Work] = {"optimize": optimize, "assist": help_out}


def _prepare(start: Start) -> None:
    import torch  # seconds, and behind the walls

    from optimizer import hardware, memory

    hardware.use(Path(start.hardware_file) if start.hardware_file else None)
    memory.use(start.memory_bytes, sparing=start.sparing)
    torch.set_num_threads(start.threads or os.cpu_count() or 1)


def main(work: Work | None = None) -> int:
    """Serve the worker on the pipes that it named."""
    reader, writer, worker = map(int, sys.argv[1:])
    die_with(worker)
    faulthandler.enable()  # a crash says where; `printed.py` reads it
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    return serve(Channel(reader, writer, trusting=True), work)


if __name__ == "__main__":
    sys.exit(main())
