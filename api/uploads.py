"""Uploads: models and datasets on their way in. Every query on their rows is here.

An upload is open until its parts are all there, is checked then, and ends complete or
failed. Callers commit (`db.transaction`), and time is the database's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from api import ids, part_plan
from api.errors import APIError, InvalidState, NameTaken, NotFound, QuotaExceeded
from api.models import Upload, UploadPart, UploadState
from api.settings import settings
from api.transitions import now
from api.upload_errors import PartsMissing

MODELS = ("model", "folder")
DATASETS = ("dataset",)
LIVE = (UploadState.OPEN, UploadState.CHECKING)
MAX_OPEN = 50  # of one tenant at a time
PURGED_AT_ONCE = 500
HUB = "hub"  # a worker brings it; nobody sends parts
PREFIXES = {"model": "mdl", "folder": "mdl", "dataset": "ds", HUB: "mdl"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wants to upload."""

    kind: str
    name: str
    files: Sequence[Mapping[str, Any]] = field(default_factory=list)  # {path, bytes}
    keep_s: float | None = None
    id: str | None = None  # None: a new one

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file["bytes"] for file in self.files)


def create(session: Session, tenant_id: str, actor: str, asked: Asked) -> Upload:
    """Open an upload; a folder, which is there already, is to be checked at once.

    Raises QuotaExceeded, and NameTaken while another upload has the name.
    """
    kinds = DATASETS if asked.kind in DATASETS else (*MODELS, HUB)
    if other := _live_named(session, tenant_id, kinds, asked.name):
        raise NameTaken(
            f"an upload of {asked.name!r} is {other.state}: go on with it, or delete it",
            upload_id=other.id,
        )
    live = Upload.tenant_id == tenant_id, Upload.state.in_(LIVE)
    count = session.scalar(select(func.count()).select_from(Upload).where(*live)) or 0
    if count >= MAX_OPEN:
        raise QuotaExceeded("open_uploads", count, MAX_OPEN, 60)
    at = now(session)
    upload = Upload(
        id=asked.id or ids.new(PREFIXES[asked.kind]),
        tenant_id=tenant_id,
        kind=asked.kind,
        name=asked.name,
        files=[dict(file) for file in asked.files],
        bytes=asked.bytes,
        part_bytes=settings().part_bytes,
        keep_s=asked.keep_s,
        state=UploadState.CHECKING if asked.kind == "folder" else UploadState.OPEN,
        created_by=actor,
        created_at=at,
        expires_at=at + timedelta(seconds=settings().upload_limit_s),
    )
    session.add(upload)
    session.flush()
    return upload


def get(
    session: Session,
    tenant_id: str,
    kinds: Collection[str],
    upload_id: str,
    *,
    lock: bool = False,
) -> Upload:
    """Return the tenant's upload. Raises NotFound."""
    query = select(Upload).where(
        Upload.id == upload_id, Upload.tenant_id == tenant_id, Upload.kind.in_(kinds)
    )
    found = session.scalar(query.with_for_update() if lock else query)
    if found is None:
        raise NotFound(f"no upload {upload_id[:64]!r}")
    return found


def find(
    session: Session, tenant_id: str, kinds: Collection[str], name: str
) -> Upload | None:
    """Return the upload of this id, or the one under way of this name."""
    try:
        return get(session, tenant_id, kinds, name)
    except NotFound:
        return _live_named(session, tenant_id, kinds, name)


def parts(session: Session, upload_id: str) -> dict[int, UploadPart]:
    """Return the parts that are there, by number."""
    query = select(UploadPart).where(UploadPart.upload_id == upload_id)
    return {part.number: part for part in session.scalars(query)}


def missing(session: Session, upload: Upload) -> list[int]:
    """Return the numbers of the parts that are not there."""
    there = parts(session, upload.id).keys()
    count = part_plan.count(upload.files, upload.part_bytes)
    return [number for number in range(1, count + 1) if number not in there]


def require_open(upload: Upload) -> None:
    """Raise InvalidState unless parts may come in."""
    if upload.state is not UploadState.OPEN:
        detail = f"the upload is {upload.state}: it takes no parts"
        raise InvalidState(detail, current_status=upload.state)


def keep_part(
    session: Session, upload: Upload, part: part_plan.Part, sha256: str
) -> str | None:
    """Write down that a part is there; return the digest of the one it replaces.

    Raises InvalidState. The upload's row must be locked.
    """
    require_open(upload)
    row = session.get(UploadPart, (upload.id, part.number))
    before = row.sha256 if row else None
    row = row or UploadPart(upload_id=upload.id, number=part.number)
    row.sha256, row.bytes, row.created_at = sha256, part.bytes, now(session)
    session.add(row)
    session.flush()
    return None if before == sha256 else before


def begin_check(session: Session, upload: Upload, digests: Mapping[str, str]) -> None:
    """Close an open upload; `digests` are what the client says its files have.

    One that is checked already is left alone. Raises PartsMissing and InvalidState.
    """
    if upload.state in (UploadState.CHECKING, UploadState.COMPLETE):
        return
    require_open(upload)
    if absent := missing(session, upload):
        shown = ", ".join(map(str, absent[:10])) + (", …" if absent[10:] else "")
        raise PartsMissing(
            f"{len(absent)} parts are missing: {shown}", missing=absent[:1000]
        )
    upload.files = [
        {**file, "sha256": digests.get(file["path"])} for file in upload.files
    ]
    upload.state = UploadState.CHECKING
    session.flush()


def brought(session: Session, upload_id: str) -> None:
    """Say that all bytes are there, which nobody sent in parts."""
    session.get_one(Upload, upload_id).state = UploadState.CHECKING


def finish(session: Session, upload: Upload) -> None:
    """Say that what was uploaded is a model or a dataset by now."""
    row = session.get_one(Upload, upload.id)
    row.state = UploadState.COMPLETE
    _forget_parts(session, row.id)


def fail(session: Session, upload_id: str, error: APIError) -> None:
    """Say why what was uploaded is refused; its name is free again."""
    row = session.get_one(Upload, upload_id)
    row.state = UploadState.FAILED
    row.error = {"code": error.code, "detail": error.detail}
    _forget_parts(session, row.id)


def remove(session: Session, upload: Upload) -> None:
    """Forget an upload. Raises InvalidState while it is looked at."""
    if upload.state is UploadState.CHECKING:
        detail = "the upload is being checked: wait for the end of that"
        raise InvalidState(detail, current_status=upload.state)
    forget(session, upload.id)


def forget(session: Session, upload_id: str) -> None:
    """Forget an upload, if there is one of this id."""
    _forget_parts(session, upload_id)
    session.execute(delete(Upload).where(Upload.id == upload_id))


def under_check(session: Session) -> list[str]:
    """Return the ids of uploads that somebody should be looking at."""
    query = select(Upload.id).where(Upload.state == UploadState.CHECKING)
    return list(session.scalars(query.order_by(Upload.id)))


def reserved_bytes(session: Session, tenant_id: str) -> int:
    """Return the bytes of a tenant's uploads under way."""
    query = select(func.sum(Upload.bytes)).where(
        Upload.tenant_id == tenant_id, Upload.state.in_(LIVE), Upload.kind != "folder"
    )
    return int(session.scalar(query) or 0)


def expected_bytes(session: Session) -> int:
    """Return the bytes that open uploads of everybody have yet to bring."""
    query = select(func.sum(Upload.bytes)).where(Upload.state == UploadState.OPEN)
    there = select(func.sum(UploadPart.bytes)).join(
        Upload, Upload.id == UploadPart.upload_id
    )
    there = there.where(Upload.state == UploadState.OPEN)
    return int(session.scalar(query) or 0) - int(session.scalar(there) or 0)


def expired(session: Session) -> list[str]:
    """Return the ids of uploads whose time is over, however they ended."""
    query = select(Upload.id).where(Upload.expires_at < now(session))
    return list(session.scalars(query.limit(PURGED_AT_ONCE)))


def every_id(session: Session) -> set[str]:
    """Return the ids of all uploads."""
    return set(session.scalars(select(Upload.id)))


def _live_named(
    session: Session, tenant_id: str, kinds: Collection[str], name: str
) -> Upload | None:
    query = select(Upload).where(
        Upload.tenant_id == tenant_id,
        Upload.kind.in_(kinds),
        Upload.name == name,
        Upload.state.in_(LIVE),
        or_(Upload.state == UploadState.CHECKING, Upload.expires_at > now(session)),
    )
    return session.scalars(query).first()


def _forget_parts(session: Session, upload_id: str) -> None:
    session.execute(delete(UploadPart).where(UploadPart.upload_id == upload_id))
