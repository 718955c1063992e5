"""The datasets that tenants uploaded. Every query on their rows is in this file.

A file is kept under the sha256 of what is in it: a job that was sent with an earlier
upload of a name still finds that one.
"""

import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from api import cursors, uses
from api.errors import NameTaken, NotFound
from api.inspection import KeptData
from api.models import Dataset
from api.settings import settings
from api.transitions import now
from api.upload_errors import InUse
from optimizer.datasets import DISTRIBUTIONS, Distribution

PURGED_AT_ONCE = 500
STRAY_S = 3600.0  # a file that no row names yet may be about to get one


def folder(tenant_id: str) -> Path:
    """Return where the tenant's files are."""
    return settings().data_dir / "datasets" / tenant_id


def names(session: Session, tenant_id: str) -> list[str]:
    """Return the names of the tenant's datasets."""
    query = select(Dataset.name).where(Dataset.tenant_id == tenant_id)
    return list(session.scalars(query.order_by(Dataset.name)))


def find(session: Session, tenant_id: str, name: str) -> Dataset | None:
    """Return the tenant's dataset, by name or by id. None: there is none."""
    query = select(Dataset).where(
        Dataset.tenant_id == tenant_id, or_(Dataset.name == name, Dataset.id == name)
    )
    rows = sorted(session.scalars(query), key=lambda row: row.name != name)
    return rows[0] if rows else None


def get(session: Session, tenant_id: str, name: str) -> Dataset:
    """Return the tenant's dataset, by name or by id. Raises NotFound."""
    row = find(session, tenant_id, name)
    if row is None:
        raise NotFound(f"no dataset {name[:64]!r}")
    return row


def page(
    session: Session, tenant_id: str, limit: int, after: str | None = None
) -> tuple[list[Distribution | Dataset], str | None]:
    """Return the built-in distributions, then the tenant's own, the newest first.

    Raises BadCursor.
    """
    kind = f"datasets:{tenant_id}"
    built_in = list(DISTRIBUTIONS)
    place = cursors.read(kind, after) if after else ""
    start = 0 if not place else len(built_in)
    if place in DISTRIBUTIONS:
        start, after = built_in.index(place) + 1, None
    first: list[Distribution | Dataset] = [
        DISTRIBUTIONS[name] for name in built_in[start : start + limit]
    ]
    if len(first) == limit:
        return first, cursors.write(kind, built_in[start + limit - 1])
    query = select(Dataset).where(Dataset.tenant_id == tenant_id)
    own, cursor = cursors.page(
        session, query, Dataset.id, kind, limit - len(first), after
    )
    return [*first, *own], cursor


def require_free_name(name: str) -> None:
    """Raise NameTaken for the name of a built-in distribution."""
    if name in DISTRIBUTIONS:
        raise NameTaken(f"{name!r} is built in: choose another name")


def require_new_name(session: Session, tenant_id: str, name: str) -> None:
    """Raise NameTaken where the name is built in, or the tenant's already."""
    require_free_name(name)
    if found := find(session, tenant_id, name):
        raise NameTaken(
            f"you have a dataset {name!r}: delete it first, or choose another name",
            dataset_id=found.id,
        )


def keep(
    session: Session,
    tenant_id: str,
    name: str,
    kept: KeptData,
    keep_s: float | None = None,
    new_id: str | None = None,
) -> tuple[Dataset, bool]:
    """Give a checked file a name, in the place of what had it. True: it is new.

    The file is moved under its sha256; `keep_s` is how long it is kept.
    """
    target = folder(tenant_id) / f"{kept.sha256}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    kept.path.replace(target)
    row = session.scalar(
        select(Dataset).where(Dataset.tenant_id == tenant_id, Dataset.name == name)
    )
    created = row is None
    if row is None:
        row = Dataset(tenant_id=tenant_id, name=name)
        row.id = new_id or row.id
    seconds = settings().dataset_kept_s if keep_s is None else keep_s
    row.expires_at = now(session) + timedelta(seconds=seconds)
    row.path, row.sha256 = str(target), kept.sha256
    row.samples, row.bytes = kept.samples, kept.bytes
    session.add(row)
    session.flush()
    return row, created


def delete(session: Session, row: Dataset) -> Path | None:
    """Delete a dataset. Returns the file that nobody needs any more, if there is one.

    Raises InUse while a job reads it under this name.
    """
    job = uses.job_on(session, row.tenant_id, "dataset_path", row.path, row.name)
    if job is not None:
        raise InUse(f"job {job} reads this dataset: wait for its end, or cancel it")
    return _drop(session, row)


def drop_expired(session: Session) -> list[Path]:
    """Delete what has expired and no job reads; return files that nobody needs."""
    query = select(Dataset).where(Dataset.expires_at < now(session))
    rows = session.scalars(query.limit(PURGED_AT_ONCE)).all()
    unread = [r for r in rows if not _is_read(session, r.tenant_id, r.path)]
    return [path for row in unread if (path := _drop(session, row))]


def strays(session: Session) -> Iterable[Path]:
    """Yield files that neither a dataset nor a job that lives has a use for."""
    for path in (settings().data_dir / "datasets").glob("*/*.jsonl"):
        tenant_id, text = path.parent.name, str(path)
        if _is_named(session, tenant_id, text) or _is_read(session, tenant_id, text):
            continue
        if time.time() - path.stat().st_mtime > STRAY_S:
            yield path


def stored_bytes(session: Session, tenant_id: str) -> int:
    """Return the disk that the tenant's datasets take."""
    query = select(func.sum(Dataset.bytes)).where(Dataset.tenant_id == tenant_id)
    return int(session.scalar(query) or 0)


def _drop(session: Session, row: Dataset) -> Path | None:
    tenant_id, path = row.tenant_id, row.path
    session.delete(row)
    session.flush()
    needed = _is_named(session, tenant_id, path) or _is_read(session, tenant_id, path)
    return None if needed else Path(path)  # `strays` has it later


def _is_named(session: Session, tenant_id: str, path: str) -> bool:
    query = select(Dataset.id).where(
        Dataset.tenant_id == tenant_id, Dataset.path == path
    )
    return session.scalar(query.limit(1)) is not None


def _is_read(session: Session, tenant_id: str, path: str) -> bool:
    return uses.job_on(session, tenant_id, "dataset_path", path) is not None
