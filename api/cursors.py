"""Places in lists: opaque to callers, signed, and good for one kind of list alone.

Every list is ordered by ids, which sort by time; a cursor is the last id of a page.
"""

import base64
import hmac
from typing import Any, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from api import secret
from api.errors import BadCursor

TAG_BYTES = 12

Row = TypeVar("Row")


def write(kind: str, place: str) -> str:
    """Return the cursor of a place in lists of this kind and this tenant.

    `kind` may hold whatever the place is only good for, as "jobs:ten_…".
    """
    text = place.encode()
    return base64.urlsafe_b64encode(_tag(kind, text) + text).decode().rstrip("=")


def read(kind: str, cursor: str) -> str:
    """Inverse of `write`. Raises BadCursor where it was not written for this list.

    What is compared is the whole text: the last letter of Base64 has bits that stand
    for nothing, and a cursor is refused with any of them changed.
    """
    padded = cursor + "=" * (-len(cursor) % 4)
    try:
        raw = base64.b64decode(padded, altchars=b"-_", validate=True)
        place = raw[TAG_BYTES:].decode()
    except ValueError:
        place = ""
    if not place or not hmac.compare_digest(
        cursor.encode(), write(kind, place).encode()
    ):
        raise BadCursor("'after' is not a cursor that this list gave out")
    return place


def page(
    session: Session,
    query: Select[Row],
    column: InstrumentedAttribute[Any],
    kind: str,
    limit: int,
    after: str | None = None,
    ascending: bool = False,
) -> tuple[list[Row], str | None]:
    """Return a page of rows ordered by `column`, and the next page's cursor.

    The newest first, or the oldest where `ascending`. Raises BadCursor.
    """
    if after is not None:
        place = read(kind, after)
        query = query.where(column > place if ascending else column < place)
    query = query.order_by(column.asc() if ascending else column.desc())
    rows = list(session.scalars(query.limit(limit + 1)))
    if len(rows) <= limit:
        return rows, None
    return rows[:limit], write(kind, str(getattr(rows[limit - 1], column.key)))


def _tag(kind: str, text: bytes) -> bytes:
    message = f"{kind}\0".encode() + text
    return secret.sign("cursor", message)[:TAG_BYTES]
