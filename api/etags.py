"""Versions of rows as ETags, and edits that must name the version they change."""

from api.errors import PreconditionFailed, PreconditionRequired


def etag(version: int) -> str:
    """Return the ETag of a row's version, quotes included."""
    return f'"v{version}"'


def require_match(if_match: str | None, version: int) -> None:
    """Check an `If-Match` header against the row.

    Raises PreconditionRequired where there is none, and PreconditionFailed where the
    row has changed since the caller read it.
    """
    if if_match is None:
        raise PreconditionRequired()
    named = [tag.strip() for tag in if_match.split(",")]
    if named != ["*"] and etag(version) not in named:
        raise PreconditionFailed()
