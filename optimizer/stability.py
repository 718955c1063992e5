"""How safe a stack is to serve: what saturates, and how often a token must fall back.

A run-time fallback computes a token again in 16 bits where its FP8 computation went
beyond the format. Of a site the sweep knows the share of elements that saturate; a
token has many, so at most `share × elements of a row` of its tokens are affected, and
of the stack at most the sum over its sites. It is an upper bound: outliers sit in the
same few tokens. Where a stack was validated, the tokens that fall back and the worst
one are measured, on the held-out data.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from optimizer.choose import Chooser
from optimizer.stack import SiteShape, Stack
from optimizer.validate import Quality


@dataclass(frozen=True, slots=True)
class Stability:
    """What may go wrong with a stack in service."""

    saturated: float  # the largest share of elements that saturate at a site
    fallback: float  # share of tokens that fall back: measured, or at most
    worst_token_kl_nats: float | None  # None: not validated


def stability(
    chooser: Chooser, stack: Stack, quality: Quality | None = None
) -> Stability:
    """Return the stability of a stack, as predicted and where given as measured."""
    shapes = {s.site: s for s in chooser.model.sites}
    saturated = [
        (row.sensitivity.saturated, _row_elements(shapes[site]))
        for site, choice in stack.choices.items()
        if (row := chooser.row(site, choice)).sensitivity is not None and choice.is_fp8
    ]
    return Stability(
        saturated=max((share for share, _ in saturated), default=0.0),
        fallback=quality.fallback
        if quality
        else _at_most(share * count for share, count in saturated),
        worst_token_kl_nats=quality.worst_token_kl_nats if quality else None,
    )


def _row_elements(shape: SiteShape) -> int:
    return shape.k or shape.elements or shape.heads * shape.head_dim or 1


def _at_most(shares: Iterable[float]) -> float:
    return min(1.0, sum(shares))
