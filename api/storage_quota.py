"""Whether there is room: for a tenant, by its quota, and on the disk."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api import catalog, datasets, tenants, upload_files, uploads
from api.models import Artifact
from api.settings import settings
from api.upload_errors import StorageFull, StorageQuota


def used_bytes(session: Session, tenant_id: str) -> int:
    """Return the disk that a tenant takes: its uploads, and what its jobs left."""
    uploaded = uploads_bytes(session, tenant_id)
    return uploaded + artifacts_bytes(session, tenant_id)


def artifacts_bytes(session: Session, tenant_id: str) -> int:
    """Return the disk that the files of a tenant's jobs take; purged ones take none."""
    query = select(func.sum(Artifact.bytes)).where(
        Artifact.tenant_id == tenant_id, Artifact.purged_at.is_(None)
    )
    return int(session.scalar(query) or 0)


def uploads_bytes(session: Session, tenant_id: str) -> int:
    """Return the disk that a tenant's uploads take, or will take once they are here."""
    return (
        uploads.reserved_bytes(session, tenant_id)
        + catalog.uploaded_bytes(session, tenant_id)
        + datasets.stored_bytes(session, tenant_id)
    )


def require_room(session: Session, tenant_id: str, size: int) -> None:
    """Raise StorageQuota or StorageFull unless so many bytes fit.

    Locks the tenant: two uploads at once cannot both take the last of it.
    """
    tenants.lock(session, tenant_id)
    used, limit = used_bytes(session, tenant_id), settings().tenant_storage_bytes
    if used + size > limit:
        raise StorageQuota(size, used, limit)
    expected = uploads.expected_bytes(session)
    if upload_files.free_bytes() - expected - size < settings().storage_reserve_bytes:
        raise StorageFull(
            "the disk of the service has no room for it; tell the operator"
        )
