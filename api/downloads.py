"""Artifacts over HTTP, RFC 9110: exact ETags, conditions, one range, HEAD.

An ETag is the sha256 of the content, so that a download that was cut goes on where it
ended, on another machine as well. Nothing of the database is held while bytes flow.
"""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.responses import StreamingResponse

from api import storage
from api.errors import Gone, RangeNotSatisfiable, Unavailable
from api.models import Artifact

RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.IGNORECASE)
# What is stored is made from names that customers chose: nothing in it may run.
POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes from `start` up to `stop`, of `total`."""

    start: int
    stop: int
    total: int


def response(
    request: Request,
    row: Artifact,
    *,
    attached: bool = True,
    vary: str | None = None,
    policy: str = POLICY,
) -> Response:
    """Answer a GET or HEAD for an artifact; `policy` says what may run in it.

    Raises Gone where its bytes were deleted, RangeNotSatisfiable, and Unavailable
    where the storage does not answer.
    """
    headers = _headers(row, attached, vary) | {"Content-Security-Policy": policy}
    if _matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(status_code=304, headers=_without_content(headers))
    key = storage.key(row.job_id, row.attempt, row.name)
    _require(key, row)
    span = _span(request, headers["ETag"], row.bytes)
    status = 200
    if span.stop - span.start < row.bytes:
        status = 206
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{span.total}"
    headers["Content-Length"] = str(span.stop - span.start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=row.media_type)
    return StreamingResponse(
        _bytes(key, span), status, headers=headers, media_type=row.media_type
    )


def _headers(row: Artifact, attached: bool, vary: str | None) -> dict[str, str]:
    digest = base64.b64encode(bytes.fromhex(row.sha256)).decode()
    headers = {
        "ETag": f'"{row.sha256}"',
        "Repr-Digest": f"sha-256=:{digest}:",
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
    }
    if attached:
        name = row.name.replace("/", "_")  # our own names: plain ASCII
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
    if vary:
        headers["Vary"] = vary
    return headers


def _without_content(headers: dict[str, str]) -> dict[str, str]:
    # The browser puts these in place of those that it keeps: the policy has to stay.
    kept = ("ETag", "Cache-Control", "Vary", "Content-Security-Policy")
    return {name: headers[name] for name in kept if name in headers}


def _require(key: str, row: Artifact) -> None:
    """Raise unless the bytes are there, before half an answer is out."""
    if row.purged_at is not None:
        raise Gone(f"the bytes of {row.name} were deleted on {row.purged_at:%Y-%m-%d}")
    try:
        size = storage.store().size(key)
    except FileNotFoundError:
        raise Gone(f"the bytes of {row.name} are no longer stored") from None
    except OSError:
        raise Unavailable("the storage does not answer; try again") from None
    if size != row.bytes:
        raise Gone(f"the bytes of {row.name} are not those that were published")


def _matches(header: str | None, etag: str) -> bool:
    """If-None-Match: any of the tags, compared weakly."""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return "*" in tags or etag in tags


def _span(request: Request, etag: str, total: int) -> Span:
    """Return what is asked for. What is no single range asks for everything.

    Many small ranges would cost more than the file (CVE-2025-62727).
    """
    whole = Span(0, total, total)
    wanted = RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    condition = request.headers.get("if-range")
    if wanted is None or (condition is not None and condition.strip() != etag):
        return whole
    first, last = wanted.groups()
    if not first and not last:
        return whole
    if not first:
        start, stop = max(total - int(last), 0), total
    else:
        start, stop = int(first), min(int(last) + 1 if last else total, total)
    if last and first and int(last) < int(first):
        return whole  # malformed, so it is ignored
    if start >= stop:
        raise RangeNotSatisfiable(total)
    return Span(start, stop, total)


def _bytes(key: str, span: Span) -> Iterator[bytes]:
    yield from storage.store().chunks(key, span.start, span.stop)
