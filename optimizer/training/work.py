"""The runs of one probe as pieces: kept, shared among workers, resumed in the middle.

A run is cut into segments, each a piece whose key covers all that decides it: model,
data, training, candidate, order, and the segments before. Where the weights and the
optimizer's state are small enough to be kept beside the figures, a segment goes on from
there, on whatever worker; a large model's run is one piece.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer import tokens
from optimizer.errors import DatasetError
from optimizer.pieces import Piece, Pieces, Result, key_of
from optimizer.spec import OptimizeSpec
from optimizer.tokens import Tokens
from optimizer.training.candidates import Candidate
from optimizer.training.checkpoints import figures, figures_json, resume, to_bytes
from optimizer.training.networks import network
from optimizer.training.place import executed_on
from optimizer.training.probe import Asked
from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import Batches, batches
from optimizer.training.trainer import Figures, NextToken, Problem, Run, Told

NUMERICS = 3  # raised by whoever changes what a run gives: kept ones are void
SEGMENTS = 4  # of a run that can go on from what was kept
KEPT_BYTES = 16 << 20  # of weights and optimizer state that are kept of a run
STATE_BYTES = 12  # of a parameter in fp32 under Adam, gradients left out
MOST_TOKENS = 1 << 22  # that are read of the data; a longer run sees them again
HELD_OUT = 16  # sequences that no run trains on


Heard = Callable[[Candidate, int, Sequence[float]], None]
"""Hears, after a step, of which run it was, in which order, and the losses so far."""


def silent(done: int, planned: int) -> None:
    """Tell nobody."""


def unheard(candidate: Candidate, order: int, losses: Sequence[float]) -> None:
    """Tell nobody of losses."""


@dataclass(eq=False)
class TrainingWork:
    """One probe's job, and whatever of it is loaded by now."""

    spec: OptimizeSpec
    pieces: Pieces
    told: Told = silent  # hears of steps
    on_step: Callable[[], None] = lambda: None
    heard: Heard = unheard
    _live: tuple[str, Run] | None = field(init=False, default=None)

    @property
    def how(self) -> TrainingSpec:
        """How the model is trained."""
        assert self.spec.training is not None
        return self.spec.training

    @cached_property
    def folder(self) -> Path:
        """Where the model lies."""
        return Path(self.spec.model_path)

    @cached_property
    def where(self) -> torch.device:
        """What the runs compute on: the GPU, where there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def network(self) -> nn.Module:
        """What is trained, before its first step. Drawn on the CPU: alike everywhere."""
        made = network(self.folder, self.spec.task, self.how, self.spec.seed)
        return made.to(self.where)

    @cached_property
    def tokens(self) -> Tokens:
        """The caller's data, in sequences. Raises DatasetError where it fills no batch."""
        how = self.how
        size = how.sequence_tokens
        wanted = min(how.steps * how.step_sequences * size, MOST_TOKENS)
        found = tokens.read(
            self.folder,
            self.spec.data_distribution,
            Path(self.spec.dataset_path) if self.spec.dataset_path else None,
            calibration_tokens=max(wanted, size),
            validation_tokens=HELD_OUT * size,
            sequence_tokens=size,
        )
        whole = [s for s in found.calibration.sequences if s.numel() == size]
        if len(whole) < how.step_sequences:
            raise DatasetError(
                f"{found.dataset.name}: its training half has {len(whole)} whole "
                f"sequences of {size} tokens, and one step takes {how.step_sequences} "
                "(batch_size × accumulation): give more text, shorter sequences, or a "
                "smaller batch"
            )
        return found

    def problem(self, order: int) -> Problem:
        """Return what is trained, with the data in an order."""
        held_out = [ids.to(self.where) for ids in self.tokens.validation.sequences]
        found = self.batches(order)
        there = replace(found, samples=found.samples.to(self.where))
        return Problem(self.network, NextToken(), there, held_out)

    def batches(self, order: int) -> Batches:
        """Return the data in an order."""
        sequences, how = self.tokens.calibration.sequences, self.how
        size = how.step_sequences
        return batches(sequences, size, how.steps, self.spec.seed, order)

    # -- runs

    def __call__(self, asked: Sequence[Asked]) -> list[Figures]:
        """Run each, segment by segment: a `probe.Runs`."""
        results: list[Result] = []
        for segment in range(self.segments):
            wanted = [self._piece(candidate, o, segment) for candidate, o in asked]
            share = len(wanted) * self.how.steps // self.segments
            self._before = self._there = segment * share
            self._planned = len(wanted) * self.how.steps
            results = self.pieces.run(wanted, self.compute, self._outside())
        return [figures(result["figures"]) for result in results]

    def _outside(self) -> Told:
        """Hear of whole pieces: of a run, each is as many steps as the others."""
        each = self.how.steps // self.segments

        def outside(there: int, planned: int) -> None:
            self._there = self._before + there * each
            self.told(self._there, self._planned)

        return outside

    _before = _there = _planned = 0  # steps: before this segment, by now, in all

    @cached_property
    def segments(self) -> int:
        """How many pieces a run is: one where its state is too large to be kept."""
        trained = sum(p.numel() for p in self.network.parameters() if p.requires_grad)
        return SEGMENTS if STATE_BYTES * trained <= KEPT_BYTES else 1

    def _piece(self, candidate: Candidate, order: int, segment: int) -> Piece:
        plain = {**self.how.to_json(), "candidates": [], "planned": None}
        same = {k: v for k, v in candidate.to_json().items() if k != "name"}
        key = key_of(
            "train",
            NUMERICS,
            *self._device(),
            self.spec.model_sha256,
            self.spec.task,
            self.spec.seed,
            self.tokens.dataset.sha256,
            {k: v for k, v in plain.items() if k != "without_masters"},
            same,
            order,
            [segment, self.segments],
        )
        payload = {"candidate": candidate.to_json(), "order": order, "segment": segment}
        return Piece("train", key, payload)

    def _device(self) -> list[str]:
        """Return the GPU that a run is kept for: its sums are no CPU's."""
        return [executed_on()["device"]] if self.where.type != "cpu" else []

    def compute(self, piece: Piece) -> Result:
        """Compute a segment of a run, from the one before it."""
        candidate = Candidate.from_json(piece.payload["candidate"])
        order, segment = piece.payload["order"], piece.payload["segment"]
        run = self._at(candidate, order, segment)
        until = self.how.steps * (segment + 1) // self.segments
        first = run.done

        def stepped(done: int, planned: int) -> None:
            self.told(self._there + done - first, self._planned)
            self.heard(candidate, order, run.figures.losses)
            self.on_step()

        run.run(until, stepped)
        last = segment == self.segments - 1
        self._live = None if last else (piece.key, run)
        return {
            "figures": figures_json(run.figures) if last else None,
            "state": None if last else base64.b64encode(to_bytes(run)).decode(),
        }

    def _at(self, candidate: Candidate, order: int, segment: int) -> Run:
        """Return the run where a segment begins: the live one, or made from kept bytes."""
        before = self._piece(candidate, order, segment - 1) if segment else None
        live, self._live = self._live, None
        if before is not None and live is not None and live[0] == before.key:
            return live[1]
        run = Run(self.problem(order), self.how, candidate)
        if before is not None:
            (result,) = self.pieces.run([before], self.compute, silent)
            self._live = None
            resume(run, base64.b64decode(result["state"]))
        return run

    def sizes(self) -> dict[str, int]:
        """Return the elements of every matrix."""
        from optimizer.training.gemms import matrices

        return {m.name: m.parameter.numel() for m in matrices(self.network)}

    def parameters(self) -> dict[str, int]:
        """Return how many parameters there are, and how many are trained."""
        every = list(self.network.parameters())
        return {
            "parameters": sum(p.numel() for p in every),
            "trained_parameters": sum(p.numel() for p in every if p.requires_grad),
        }

    def described(self) -> dict[str, Any]:
        """Return what the data was, in numbers."""
        found = self.batches(0)
        return {
            "sequences": len(found.samples),
            "sequence_tokens": self.how.sequence_tokens,
            "epochs": found.epochs,
            "held_out": len(self.tokens.validation.sequences),
        }
