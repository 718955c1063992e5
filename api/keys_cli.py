"""`precision keys` and `precision tenants`: the operator's, on the database itself."""

import json
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api import console
from api.operate import DATA_DIR, AsJson, DataDir, OperateError, database

if TYPE_CHECKING:
    from api.models import ApiKey

OPERATOR = "operator"  # the actor of what is done here, in the audit log
CREATED = "created (UTC)"
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

keys = typer.Typer(
    no_args_is_help=True, help="API keys, in the database of --data-dir."
)
tenants = typer.Typer(
    no_args_is_help=True, help="Tenants and their limits, in the same database."
)

KeyId = Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")]
TenantName = Annotated[str, typer.Argument(help="The tenant's name.")]


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Option(help="What the key is for.")] = "key",
    tenant: Annotated[str, typer.Option(help="Whose jobs it sees.")] = "default",
    words: Annotated[
        str | None,
        typer.Option(
            "--scopes",
            help="What it may do: jobs:read,models:*; all but admin if not said.",
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="personal, or service.")] = "personal",
    expires_in: Annotated[
        str | None, typer.Option(help="How long it works: 90d, 12h. Else it stays.")
    ] = None,
    as_json: AsJson = False,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Print a new key. It is shown once; only its hash is stored."""
    from api import auth

    held, ends = _scopes(words), _end(expires_in)
    _require(kind in ("personal", "service"), "--kind", "personal or service", kind)
    _require_name(tenant, "--tenant")
    with database(data_dir) as session:
        key = auth.create_key(session, tenant, name, held, kind, ends)
        row = auth.by_id(session, auth.key_id(key))
        _note(session, row, "api_key.created", name=name, scopes=row.scopes, kind=kind)
    made = {"id": row.kid, "key": key, "tenant": tenant, "scopes": row.scopes}
    typer.echo(json.dumps(made) if as_json else key)


@keys.command("list")
def list_keys(as_json: AsJson = False, data_dir: DataDir = DATA_DIR) -> None:
    """List the keys by id; the keys themselves are stored nowhere."""
    from api import auth

    with database(data_dir) as session:
        found = [
            {
                "id": key.kid,
                "name": key.name,
                "tenant": tenant,
                "kind": key.kind,
                "scopes": " ".join(key.scopes or ["all but admin"]),
                "created_at": key.created_at.isoformat(timespec="seconds"),
                "expires_at": key.expires_at
                and key.expires_at.isoformat(timespec="seconds"),
                "status": auth.status(key),
                "revoked": key.revoked_at is not None,
            }
            for key, tenant in auth.keys(session)
        ]
    title = ("id", "name", "tenant", "kind", "scopes", CREATED, "status")
    _show(title, found, as_json)


@keys.command("rotate")
def rotate_key(
    kid: KeyId,
    overlap: Annotated[
        str, typer.Option(help="How long the old key still works: 24h, 0s.")
    ] = "24h",
    as_json: AsJson = False,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Print a new key like this one, which works on for --overlap."""
    from api import auth
    from api.errors import APIError

    stays = _duration(overlap, "--overlap")
    with database(data_dir) as session:
        try:
            owner = auth.by_id(session, kid).tenant_id
            new, key, old = auth.rotate(session, owner, kid, stays)
        except APIError as error:
            raise OperateError(f"{error}; `precision keys list` shows them") from None
        _note(session, old, "api_key.rotated", new=new.kid)
    assert old.expires_at is not None  # rotating set it
    ends = old.expires_at.isoformat(timespec="seconds")
    made = {"id": new.kid, "key": key, "replaces": kid, "old_expires_at": ends}
    typer.echo(json.dumps(made) if as_json else key)


@keys.command("revoke")
def revoke_key(
    kid: KeyId, as_json: AsJson = False, data_dir: DataDir = DATA_DIR
) -> None:
    """Make a key worthless, in running services within five seconds."""
    from api import auth
    from api.errors import NotFound

    with database(data_dir) as session:
        try:
            row = auth.revoke(session, kid)
        except NotFound as error:
            raise OperateError(f"{error}; `precision keys list` shows them") from None
        _note(session, row, "api_key.revoked")
    said = (
        json.dumps({"id": kid, "revoked": True}) if as_json else f"revoked {row.name}"
    )
    typer.echo(said)


@tenants.command("list")
def list_tenants(as_json: AsJson = False, data_dir: DataDir = DATA_DIR) -> None:
    """List the tenants with their limits; a limit not shown is the setting's."""
    from api import tenants as rows

    with database(data_dir) as session:
        found = [
            {
                "id": tenant.id,
                "name": tenant.name,
                "created_at": tenant.created_at.isoformat(timespec="seconds"),
                "max_queued": tenant.max_queued,
                "max_running": tenant.max_running,
            }
            for tenant in rows.everyone(session)
        ]
    _show(("id", "name", CREATED, "max_queued", "max_running"), found, as_json)


@tenants.command("create")
def create_tenant(
    name: TenantName, as_json: AsJson = False, data_dir: DataDir = DATA_DIR
) -> None:
    """Make a tenant; one that is there already is left alone."""
    from api import audit, tenants as rows

    _require_name(name, "NAME")
    with database(data_dir) as session:
        there = rows.find(session, name)
        tenant = there or rows.named(session, name)
        if there is None:
            audit.record(session, tenant.id, OPERATOR, "tenant.created", tenant.id)
    made = {"id": tenant.id, "name": name}
    typer.echo(json.dumps(made) if as_json else tenant.id)


@tenants.command("limits")
def limit_tenant(
    name: TenantName,
    max_queued: Annotated[
        str | None, typer.Option(help="Jobs that may wait at a time, or `default`.")
    ] = None,
    max_running: Annotated[
        str | None, typer.Option(help="Jobs that may run at a time, or `default`.")
    ] = None,
    as_json: AsJson = False,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Show, or set, how much a tenant may have at a time."""
    from api import audit, tenants as rows
    from api.errors import NotFound

    asked = {"max_queued": max_queued, "max_running": max_running}
    limits = {k: _count(v, k) for k, v in asked.items() if v is not None}
    with database(data_dir) as session:
        try:
            tenant = rows.get(session, name)
        except NotFound as error:
            raise OperateError(
                f"{error}; `precision tenants list` shows them"
            ) from None
        queued, running = rows.limit(session, tenant, limits)
        if limits:
            audit.record(
                session, tenant.id, OPERATOR, "tenant.limited", tenant.id, **limits
            )
    found = {"name": name, "max_queued": queued, "max_running": running}
    _show(tuple(found), [found], as_json)


def _scopes(words: str | None) -> tuple[str, ...]:
    from api import scopes

    if words is None:
        return scopes.EVERYDAY
    said = tuple(word.strip() for word in words.split(",") if word.strip())
    strange = scopes.unknown(said)
    known = ", ".join(scopes.KNOWN)
    _require(bool(said) and not strange, "--scopes", known, ", ".join(strange) or words)
    return said


def _end(expires_in: str | None) -> datetime | None:
    from api.models import now

    return None if expires_in is None else now() + _duration(expires_in, "--expires-in")


def _duration(text: str, option: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    _require(match is not None, option, "a time such as 90d, 12h, 30m, 0s", text)
    assert match is not None
    return timedelta(seconds=int(match[1]) * UNITS_S[match[2]])


def _count(text: str, name: str) -> int | None:
    if text == "default":
        return None
    option = f"--{name.replace('_', '-')}"
    right = text.isascii() and text.isdigit() and len(text) < 8
    _require(right, option, "a number such as 20, or default", text)
    return int(text)


def _require(right: bool, option: str, wanted: str, given: str) -> None:
    if not right:
        raise typer.BadParameter(
            f"{given!r} is not one of: {wanted}", param_hint=option
        )


def _require_name(name: str, option: str) -> None:
    from api import tenants as rows

    right = rows.NAME.fullmatch(name) is not None
    _require(right, option, "letters, digits, . _ -", name)


def _note(session: Any, row: "ApiKey", action: str, **details: Any) -> None:
    from api import audit

    audit.record(session, row.tenant_id, OPERATOR, action, row.kid, **details)


def _show(title: tuple[str, ...], found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        shown = [
            {**row, CREATED: console.moment(row.get("created_at", ""))} for row in found
        ]
        console.rows(title, [[row[column] for column in title] for row in shown])
