"""Who owns things. Every query on `tenants` is in this file."""

import re

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.errors import NotFound
from api.models import Tenant

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


def named(session: Session, name: str) -> Tenant:
    """Return the tenant, and make it if there is none of this name."""
    tenant = find(session, name)
    if tenant is None:
        tenant = Tenant(name=name)
        session.add(tenant)
        session.flush()
    return tenant


def find(session: Session, name: str) -> Tenant | None:
    """Return the tenant of this name. None: there is none."""
    return session.scalar(select(Tenant).where(Tenant.name == name))


def one(session: Session, tenant_id: str) -> Tenant:
    """Return the tenant of this id, which somebody's key or token named."""
    return session.scalars(select(Tenant).where(Tenant.id == tenant_id)).one()


def lock(session: Session, tenant_id: str) -> Tenant:
    """Return the tenant; who locks the same one waits until this transaction ends."""
    query = select(Tenant).where(Tenant.id == tenant_id).with_for_update()
    return session.scalars(query).one()


def everyone(session: Session) -> list[Tenant]:
    """Return all tenants by name."""
    return list(session.scalars(select(Tenant).order_by(Tenant.name)))


def get(session: Session, name: str) -> Tenant:
    """Return the tenant of this name. Raises NotFound."""
    tenant = find(session, name)
    if tenant is None:
        raise NotFound(f"no tenant {name[:64]}")
    return tenant


def limit(
    session: Session, tenant: Tenant, limits: dict[str, int | None]
) -> tuple[int | None, int | None]:
    """Set `max_queued` or `max_running` of a tenant, and return both.

    None: what the settings say.
    """
    for column, value in limits.items():
        setattr(tenant, column, value)
    session.flush()
    return tenant.max_queued, tenant.max_running
