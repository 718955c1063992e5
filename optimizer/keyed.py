"""Which pieces a job has, and what decides the result of each: its key.

A key covers the model, the data and whatever else decides the result, and nothing of
the hardware or the target. So another job on the same model and data finds them done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from optimizer.on_device import executed_on
from optimizer.opened import Opened
from optimizer.pieces import Piece, key_of
from optimizer.spec import OptimizeSpec
from optimizer.stack import Choice, Site, Stack
from optimizer.swept import choices

# Raised by whoever changes what the numerics give: kept results of before are void.
NUMERICS = 6
PIECE_TOKENS = 1024  # of a part of the calibration data: what is lost with a worker
CONTRAST_TOKENS = 256  # enough to compare components, an eighth of a sweep


class Keyed(Opened):
    """A job's model and data, cut into pieces."""

    def _parts(self) -> list[list[int]]:
        """Cut the calibration sequences into runs of up to PIECE_TOKENS tokens."""
        parts: list[list[int]] = [[]]
        room = PIECE_TOKENS
        for number, ids in enumerate(self.tokens.calibration.sequences):
            if parts[-1] and room < ids.numel():
                parts.append([])
                room = PIECE_TOKENS
            parts[-1].append(number)
            room -= ids.numel()
        return parts

    def _base(self) -> list[Any]:
        return [NUMERICS, self.spec.model_sha256, self.spec.sequence_tokens]

    def _piece(self, kind: str, part: Sequence[int], name: str = "") -> Piece:
        key = [kind, *self._base(), name]
        if kind == "contrast":
            key += [self._contrast_spec().data_distribution, CONTRAST_TOKENS]
        else:
            key.append(digest(self.tokens.calibration.sequences[n] for n in part))
        if kind == "sweep":  # static scales come from all of the calibration data
            key.append(digest(self.tokens.calibration.sequences))
        if kind != "calibrate":
            swept = self._candidates(name.split("+"))
            key += [
                self.spec.seed,
                {str(s): [str(c) for c in some] for s, some in swept.items()},
            ]
        return Piece(kind, key_of(*key), {"sequences": list(part), "family": name})

    def _exact_piece(
        self, part: Sequence[int], pairs: Sequence[tuple[Site, Choice]]
    ) -> Piece:
        every = self.tokens.calibration.sequences
        run = [[str(site), choice.name] for site, choice in pairs]
        key = key_of(
            "exact",
            *self._base(),
            digest(every[n] for n in part),
            digest(every),
            [
                [site, str(choice)]
                for (site, _), (_, choice) in zip(run, pairs, strict=True)
            ],
        )
        return Piece("exact", key, {"sequences": list(part), "pairs": run})

    def _held_out(self) -> list[Any]:
        return [*self._base(), digest(self.tokens.validation.sequences)]

    def _stack_piece(self, stack: Stack) -> Piece:
        named = {str(s): str(c) for s, c in sorted(stack.choices.items())}
        calibration = digest(self.tokens.calibration.sequences)
        key = key_of("validate", *self._held_out(), calibration, named, where())
        return Piece("validate", key, {"stack": stack.to_json()})

    def _contrast_spec(self) -> OptimizeSpec:
        other = "chat" if self.spec.data_distribution == "code" else "code"
        return replace(
            self.spec,
            data_distribution=other,
            dataset_path=None,
            calibration_tokens=CONTRAST_TOKENS,
            validation_tokens=CONTRAST_TOKENS,
        )

    def _candidates(self, families: Sequence[str]) -> dict[Site, list[Choice]]:
        """Return every choice of some families, whatever the hardware runs of them."""
        return choices(self.outline.shape.sites, families)


def digest(sequences: Iterable[Tensor]) -> str:
    """Return what names the tokens of some sequences."""
    return key_of([ids.flatten().tolist() for ids in sequences])


def where() -> str:
    """Return the device that stacks run on; "": they are emulated, alike everywhere."""
    here = executed_on()  # a device's own sums are no emulation's
    return "" if here["emulated"] else str(here["device"])
