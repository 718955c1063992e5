"""The parts of a job, and how each is computed: what every worker of it has.

    calibrate ──▶ sweep ──▶ validate        and beside them the contrast

Each part is a piece (`pieces.py`), found again by its key (`keyed.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from optimizer import kept_front
from optimizer.beyond import (
    ELSEWHERE,
    STACK,
    Elsewhere,
    Found,
    beyond_pieces,
    elsewhere,
    prompts,
    run_elsewhere,
    run_writes,
)
from optimizer.calibrate import amaxes, calibrate, stats_from_json, stats_to_json
from optimizer.contrast import Contrast
from optimizer.errors import ModelError
from optimizer.evidence import (
    STATISTICS_TOKENS,
    Evidence,
    attention_of_choices,
    attention_of_stack,
    attention_pieces,
    gathered,
    packed,
)
from optimizer.exact import exact
from optimizer.execute import Amaxes, WeightCodes
from optimizer.experts import ExpertCounts, ExpertTokens, counting
from optimizer.keyed import NUMERICS, Keyed, digest, where
from optimizer.on_device import executed_on
from optimizer.one_pass import generates
from optimizer.pieces import Piece, Pieces, Result, key_of
from optimizer.recode import Gain, Recoded, recode
from optimizer.sensitivity import sweep
from optimizer.spec import OptimizeSpec
from optimizer.stack import Choice, Site, Stack, choice_named
from optimizer.sums import Candidates, Sensitivities, Sums, total, wanted_roundings
from optimizer.swept import CORE, family
from optimizer.validate import (
    TokenValues,
    Truth,
    Values,
    reference_states,
    run_stack,
)
from optimizer.walk import Told, silent
from optimizer.watch import Statistics
from optimizer.wire import array, tensor, tensor_text, text, texts, token_values


@dataclass(eq=False)
class Work(Keyed):
    """One job, and whatever of it is loaded by now."""

    spec: OptimizeSpec
    pieces: Pieces
    told: Callable[[float, str], None] = lambda fraction, detail: None
    memory_bytes: int | None = None  # for the weights; None: a share of what is free
    on_layer: Callable[[int], None] = lambda layer: None
    calibration: list[Result] = field(init=False, default_factory=list)
    places: list[Result] = field(init=False, default_factory=list)  # that ran stacks
    inside: Told = field(
        init=False, default_factory=lambda: silent
    )  # hears from within a piece
    _recoded: tuple[Stack, Recoded] | None = field(init=False, default=None)

    # The parts

    def amaxes(self) -> Amaxes:
        """Calibrate: return what static scales are made from."""
        return amaxes(stats_from_json(r["stats"] for r in self._calibrated()))

    def experts(self) -> tuple[ExpertTokens, ...]:
        """Return how many calibration tokens each expert got; nothing without experts."""
        counts = ExpertCounts()
        for result in self._calibrated():
            for layer, seen in result["experts"].items():
                counts.add(int(layer), torch.tensor(seen))
        return counts.tokens(self.outline)

    def _calibrated(self) -> list[Result]:
        """Return what calibration found; asked for again and again, so kept here."""
        if not self.calibration:
            self.calibration = self._run(
                [self._piece("calibrate", p, self._learned(p)) for p in self._parts()]
            )
        return self.calibration

    def _learned(self, part: Sequence[int]) -> str:
        """Return what is learned of a part beside its amaxes: statistics, of the first."""
        before = self.tokens.calibration.sequences[: part[0]]
        early = sum(ids.numel() for ids in before) < STATISTICS_TOKENS
        return "statistics" if early else ""

    def evidence(self, stack: Stack) -> Evidence:
        """Return who sets the scales, and a stack's attention beside the reference's."""
        decides = [*self._base(), digest(self.tokens.calibration.sequences)]
        rows = self._run(attention_pieces(decides, stack))
        parts = [r["statistics"] for r in self._calibrated()]
        return gathered(parts, rows, self.spec.sequence_tokens, self.folder)

    def sensitivities(self, wanted: Candidates) -> Sensitivities:
        """Sweep: return what every wanted choice loses."""
        families = sorted({family(c) for some in wanted.values() for c in some})
        found = self._run(
            [
                self._piece("sweep", part, name)
                for name in families
                for part in self._parts()
            ]
        )
        sums = Sums()
        swept = self._candidates(families)
        for result in found:
            sums.merge(Sums.from_json(result, wanted_roundings(swept)))
        return total(sums, wanted)

    def contrast(self, wanted: Candidates) -> Contrast:
        """Sweep a little of another distribution: does the caller's data matter?"""
        families = sorted({family(c) for some in wanted.values() for c in some})
        name = "+".join(families)
        (found,) = self._run([self._piece("contrast", [0], name)])
        swept = self._candidates(families)
        sums = Sums.from_json(found, wanted_roundings(swept))
        other = self._contrast_spec().data_distribution
        return Contrast(other, sum(sums.tokens.values()), total(sums, wanted))

    def exact(
        self, pairs: Sequence[tuple[Site, Choice]]
    ) -> dict[tuple[Site, Choice], float]:
        """Run each pair alone on the calibration data; nats per token."""
        if not pairs:
            return {}
        found = self._run([self._exact_piece(part, pairs) for part in self._parts()])
        tokens = sum(result["tokens"] for result in found)
        lost = [math.fsum(sums) for sums in zip(*(r["kl"] for r in found), strict=True)]
        return {pair: kl / tokens for pair, kl in zip(pairs, lost, strict=True)}

    def validated(self, stacks: Sequence[Stack]) -> list[TokenValues]:
        """Run whole stacks over the held-out data."""
        found = self._run([self._stack_piece(stack) for stack in stacks])
        self.places += [result["executed_on"] for result in found]
        return [token_values(result) for result in found]

    @cached_property
    def elsewhere(self) -> Elsewhere:
        """What the chosen stack is run on beside the held-out data."""
        longest = self.outline.shape.max_context
        held_out = self.tokens.validation.sequences
        return elsewhere(self.spec, self.folder, held_out, longest)

    def beyond(self, stack: Stack, found: Found | None = None) -> Found:
        """Run a stack elsewhere, and let it write; what was `found` already is kept."""
        decides = [*self._held_out(), digest(self.tokens.calibration.sequences)]
        decides.append(where())
        writes = generates(self.outline.shape) and self.prompts is not None
        pieces = beyond_pieces(decides, self.elsewhere, stack, writes=writes)
        missing = {k: v for k, v in pieces.items() if k not in (found or {})}
        results = self._run(list(missing.values()))
        return {**(found or {}), **dict(zip(missing, results, strict=True))}

    @cached_property
    def prompts(self) -> Tensor | None:
        """What is continued; None: no held-out sequence is long enough."""
        return prompts(self.tokens.validation.sequences)

    def compensated(self, stack: Stack) -> tuple[TokenValues, Gain, Found]:
        """Run a stack whose FP8 weights are compensated, and its static scales fitted."""
        plain = self._stack_piece(stack)
        calibration = digest(self.tokens.calibration.sequences)
        key = key_of("compensated", plain.key, calibration)
        (found,) = self._run([Piece("compensated", key, plain.payload)])
        self.places.append(found["executed_on"])
        return token_values(found), Gain(**found["gain"]), found["beyond"]

    def front(self, asked: kept_front.Question) -> kept_front.Answer:
        """Search, or read what a job with the same numbers found."""
        piece = Piece("front", key_of("front", NUMERICS, asked), asked)
        return self._run([piece])[0]

    def reference(self) -> tuple[Values, Values]:
        """Return the reference's loss on every held-out prediction, in nats, and the
        id of its most likely token at every position.
        """
        key = key_of("truth", *self._held_out())
        (found,) = self._run([Piece("truth", key, {})])
        return array(found["nll"]), array(found["likely"])

    @cached_property
    def truth(self) -> Truth:
        """The reference on the held-out data; its layers run once for all jobs."""
        sequences = self.tokens.validation.sequences
        piece = Piece("reference", key_of("reference", *self._held_out()), {})
        (found,) = self.pieces.run([piece], self.compute, silent)
        states = [
            tensor(written, 1, ids.numel(), -1)
            for written, ids in zip(found["states"], sequences, strict=True)
        ]
        return Truth.of(self.model, sequences, states=states)

    def _reference(self) -> Result:
        sequences = self.tokens.validation.sequences
        states = reference_states(self.model, sequences, self.inside)
        return {"states": [tensor_text(state) for state in states]}

    def _run(self, pieces: Sequence[Piece]) -> list[Result]:
        """Have the pieces computed; `told` hears of whole ones and of their insides."""
        done = 0

        def outside(there: int, planned: int) -> None:
            nonlocal done
            done = there
            self.told(there / max(planned, 1), "parts")

        def inside(step: int, of: int) -> None:
            self.told((done + step / max(of, 1)) / max(len(pieces), 1), "parts")

        before, self.inside = self.inside, inside
        try:
            return self.pieces.run(pieces, self.compute, outside)
        finally:
            self.inside = before

    # Computing one

    def compute(self, piece: Piece) -> Result:
        """Compute a piece of this job. Raises what the numerics raise."""
        match piece.kind:
            case "calibrate":
                return self._calibrate(**piece.payload)
            case "sweep":
                return self._sweep(**piece.payload)
            case "contrast":
                return self._contrast(piece.payload["family"].split("+"))
            case "truth":
                return {"nll": text(self.truth.nll), "likely": text(self.truth.likely)}
            case "reference":
                return self._reference()
            case "attention_of_choices" | "attention_of_stack":
                return self._attention(**piece.payload)
            case "elsewhere":
                return self._elsewhere(Stack.from_json(piece.payload["stack"]))
            case "writes":
                return self._writes(**piece.payload)
            case "exact":
                return self._exact(**piece.payload)
            case "front":
                return kept_front.answer(piece.payload)
            case "compensated":
                return self._compensated(Stack.from_json(piece.payload["stack"]))
            case "validate":
                return self._validate(Stack.from_json(piece.payload["stack"]))
        raise ModelError(f"no worker knows how to compute a {piece.kind!r}")

    def _attention(self, stack: Mapping[str, str] | None) -> Result:
        ids = self.tokens.calibration.sequences[0]
        rounding = (self.amaxes(), self.weights, self.inside)
        if stack is None:
            wanted = self._candidates([CORE])
            return attention_of_choices(self.model, ids, wanted, *rounding)
        return attention_of_stack(self.model, ids, Stack.from_json(stack), *rounding)

    def _calibrate(self, sequences: Sequence[int], family: str) -> Result:
        every = [self.tokens.calibration.sequences[n] for n in sequences]
        learned = Statistics() if family else None
        with counting(self.model) as counts:
            stats = calibrate(
                self.model,
                every,
                self.inside,
                kept=self.kept,
                numbers=sequences,
                statistics=learned,
            )
        return {
            "stats": stats_to_json(stats),
            "experts": {str(k): v.tolist() for k, v in sorted(counts.by_layer.items())},
            "statistics": packed(learned) if learned is not None else None,
        }

    def _sweep(self, sequences: Sequence[int], family: str) -> Result:
        numbered = {n: self.tokens.calibration.sequences[n] for n in sequences}
        there = (1, sequences[0]) in self.kept  # all of a part, or nothing
        sums = sweep(
            self.model,
            numbered,
            self._candidates([family]),
            self.amaxes(),
            self.weights,
            seed=self.spec.seed,
            progress=self.inside,
            kept=self.kept if there else None,
        )
        return sums.to_json()

    def _exact(
        self, sequences: Sequence[int], pairs: Sequence[Sequence[str]]
    ) -> Result:
        every = [self.tokens.calibration.sequences[n] for n in sequences]
        named = [(Site.parse(site), name) for site, name in pairs]
        wanted: dict[Site, list[Choice]] = {}
        for site, name in named:
            wanted.setdefault(site, []).append(choice_named(site.component, name))
        largest = self.amaxes()
        found = exact(self.model, every, wanted, largest, self.weights, self.inside)
        tokens = sum(ids.numel() for ids in every)
        lost = [found[s, choice_named(s.component, n)] * tokens for s, n in named]
        return {"tokens": tokens, "kl": lost}

    def _contrast(self, families: Sequence[str]) -> Result:
        sequences = self._read(self._contrast_spec()).calibration.sequences
        largest = amaxes(calibrate(self.model, sequences))
        sums = sweep(
            self.model,
            dict(enumerate(sequences)),
            self._candidates(families),
            largest,
            self.weights,
            seed=self.spec.seed,
            progress=self.inside,
        )
        return sums.to_json()

    def recoded(self, stack: Stack) -> Recoded:
        """Return compensated weights and fitted scales; those of the last are kept."""
        if self._recoded is None or self._recoded[0] != stack:
            sequences, largest = self.tokens.calibration.sequences, self.amaxes()
            rest = (self.inside, self.spec.seed, largest)
            self._recoded = stack, recode(self.model, sequences, stack, *rest)
        return self._recoded[1]

    def _compensated(self, stack: Stack) -> Result:
        truth = self.truth
        weights, gain, fitted = self.recoded(stack)
        values = run_stack(self.model, truth, stack, fitted, weights, self.inside)
        beyond = {ELSEWHERE: self._run_elsewhere(stack, fitted, weights)}
        if generates(self.outline.shape) and self.prompts is not None:
            rounded = (stack, fitted, weights)
            beyond[STACK] = run_writes(self.model, self.prompts, rounded)
        gained = {"gain": asdict(gain), "executed_on": executed_on(), "beyond": beyond}
        return {**texts(values), **gained}

    def _elsewhere(self, stack: Stack) -> Result:
        return self._run_elsewhere(stack, self.amaxes(), self.weights)

    def _run_elsewhere(
        self, stack: Stack, largest: Amaxes, weights: WeightCodes
    ) -> Result:
        where = self.elsewhere
        return run_elsewhere(self.model, where, stack, largest, weights, self.inside)

    def _writes(self, stack: Mapping[str, str] | None) -> Result:
        assert self.prompts is not None, "a piece is made only where there are some"
        rounded = None
        if stack is not None:
            rounded = (Stack.from_json(stack), self.amaxes(), self.weights)
        return run_writes(self.model, self.prompts, rounded, self.inside)

    def _validate(self, stack: Stack) -> Result:
        truth, largest = self.truth, self.amaxes()
        values = run_stack(self.model, truth, stack, largest, self.weights, self.inside)
        return {**texts(values), "executed_on": executed_on()}
