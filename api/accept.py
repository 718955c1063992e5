"""Content negotiation: which of the media types on offer a caller likes best."""

from collections.abc import Sequence

from api.errors import NotAcceptable


def preferred(accept: str | None, offered: Sequence[str]) -> str:
    """Return the best offer; equals go to the first. Raises NotAcceptable.

    `accept` is the header, RFC 9110 §12.5.1; None or empty: anything will do.
    """
    ranges = [_parse(part) for part in (accept or "*/*").split(",") if part.strip()]
    quality, best = max(
        ((_quality(offer, ranges), offer) for offer in offered),
        key=lambda rank: rank[0],
    )
    if quality <= 0:
        raise NotAcceptable(f"available are: {', '.join(offered)}")
    return best


def _parse(part: str) -> tuple[str, float]:
    media_range, *parameters = (piece.strip().lower() for piece in part.split(";"))
    quality = 1.0
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                quality = min(max(float(parameter[2:]), 0.0), 1.0)
            except ValueError:
                quality = 0.0
    return media_range, quality


def _quality(offer: str, ranges: Sequence[tuple[str, float]]) -> float:
    """Return the quality that the most exact range gives to the offer."""
    for wanted in (offer, f"{offer.partition('/')[0]}/*", "*/*"):
        for media_range, quality in ranges:
            if media_range == wanted:
                return quality
    return 0.0
