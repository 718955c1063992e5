"""Lists of pieces in the process that computes: read, computed here, or by helpers.

It has no database: a `Desk` is its worker's, behind a pipe. A job's own process asks for
a list of results (`Shared`). What is not kept is put on the desk; it computes one after
the other, and helpers do so too (`assist`), until all are there. Whoever computes a
piece, its bytes are the same.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from optimizer.pieces import Compute, Piece, Result, Told, to_json

POLL_S = 0.2  # how often others' results, or more pieces, are looked for
LINGER_S = 60.0  # a helper that has the model loaded waits this long for more pieces


class Shelf(Protocol):
    """Results that are kept of one tenant."""

    def read(self, keys: Collection[str]) -> dict[str, str]:
        """Return the JSON text of each key that is kept."""
        ...

    def keep(self, piece: Piece, text: str) -> None:
        """Keep a result. One that is too long is not kept."""
        ...


class Desk(Shelf, Protocol):
    """The pieces of a running job, which workers share."""

    def finish(self, key: str, text: str) -> None:
        """Keep the result of a piece that this process has."""
        ...

    def add(self, pieces: Sequence[Piece]) -> None:
        """Have these computed."""
        ...

    def claim(self, keys: Collection[str]) -> str | None:
        """Take one of these pieces that nobody computes. None: others have all."""
        ...

    def underway(self, keys: Collection[str]) -> bool:
        """Return whether one of these is still to be done."""
        ...

    def drop(self, keys: Collection[str]) -> None:
        """Take these away: their results were read."""
        ...


class Helping(Shelf, Protocol):
    """The same for a helper, which is given pieces."""

    def finish(self, key: str, text: str) -> None:
        """Keep the result of a piece that this process has."""
        ...

    def next(self) -> Piece | bool:
        """Take a piece. True: there may be one soon; False: go."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """Reads what is kept; computes the rest here, and keeps it."""

    shelf: Shelf

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        """Return every piece's result in the order given; see `Pieces`."""
        found = self.shelf.read([piece.key for piece in pieces])
        for piece in pieces:
            if piece.key not in found:
                progress(len(found), len(pieces))
                found[piece.key] = to_json(compute(piece))
                self.shelf.keep(piece, found[piece.key])
        return [json.loads(found[piece.key]) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Shared:
    """The pieces of one job, for its own process: helpers compute them, too."""

    desk: Desk

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        """Return every piece's result in the order given; see `Pieces`."""
        wanted = {piece.key: piece for piece in pieces}
        found = self.desk.read(wanted)
        missing = [key for key in wanted if key not in found]
        if missing:
            self.desk.add([wanted[key] for key in missing])
        while missing:
            progress(len(found), len(wanted))
            mine = self.desk.claim(missing)
            if mine is not None:
                found[mine] = to_json(compute(wanted[mine]))
                self.desk.finish(mine, found[mine])
            busy = mine is not None or self._wait(missing)
            missing = [key for key in wanted if key not in found]
            found |= self.desk.read(missing) if missing else {}
            missing = [key for key in wanted if key not in found]
            if missing and not busy:  # a result was lost since it was done
                self.desk.add([wanted[key] for key in missing])
        self.desk.drop(wanted)
        progress(len(wanted), len(wanted))
        return [json.loads(found[piece.key]) for piece in pieces]

    def _wait(self, keys: Collection[str]) -> bool:
        """Wait a moment for others. False: none of these is still to be done."""
        time.sleep(POLL_S)
        return self.desk.underway(keys)


def assist(desk: Helping, compute: Compute) -> int:
    """Compute pieces of a running job until none is left. Return how many."""
    count, end = 0, time.monotonic() + LINGER_S
    while (piece := desk.next()) is not False:
        if isinstance(piece, Piece):
            desk.finish(piece.key, to_json(compute(piece)))
            count, end = count + 1, time.monotonic() + LINGER_S
        elif time.monotonic() > end:
            break
        else:
            time.sleep(POLL_S)
    return count
