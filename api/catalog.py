"""The models that a tenant may name, and the folders behind them."""

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from sqlalchemy import ColumnElement, and_, bindparam, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api import cursors, db, uses
from api.errors import APIError, Invalid, NameTaken
from api.ids import NAME_PATTERN
from api.models import RegisteredModel
from api.settings import settings
from api.transitions import now
from api.upload_errors import InUse
from optimizer.errors import OptimizerError

PURGED_AT_ONCE = 500

log = structlog.get_logger()
_reading = threading.Lock()  # weights are read by one thread at a time


@dataclass(frozen=True, slots=True)
class Weights:
    """A model folder that has been checked; `stamp` changes when a file does."""

    name: str
    path: Path
    stamp: str
    sha256: str
    architecture: str
    parameters: int
    stored_bytes: int
    dtypes: dict[str, int]
    details: dict[str, Any] = field(default_factory=dict)  # files, tensors, warnings


class Registered(NamedTuple):
    """What a job needs of a model's row: not `details`, which lists every tensor."""

    name: str
    path: str
    stamp: str
    sha256: str
    architecture: str
    parameters: int
    stored_bytes: int
    dtypes: dict[str, int]


# -- folders -------------------------------------------------------------------


def allowed_folder(text: str, pointer: str) -> Path:
    """Return the folder if it lies under an allowed root, links followed.

    Raises Invalid at `pointer`; what lies outside is not told from what is not there.
    """
    folder = Path(text).expanduser()
    try:
        resolved = folder.resolve()
        inside = any(resolved.is_relative_to(root) for root in settings().model_roots)
        found = folder.is_absolute() and inside and resolved.is_dir()
    except (OSError, RuntimeError):  # too long, a loop of links
        found = False
    if not found:
        raise Invalid(
            pointer,
            "no such folder under the allowed roots (setting PRECISION_MODEL_ROOTS); "
            "give an absolute path as the service sees it",
            "model_folder_not_allowed",
        )
    return resolved


def stamp(folder: Path) -> str:
    """Return a hash of names, sizes and times of the files: cheap, for "unchanged?"."""
    with os.scandir(folder) as entries:
        facts = [
            (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
            for entry in entries
            if entry.is_file()
        ]
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()


def weights_at(folder: Path, pointer: str) -> Weights:
    """Check a folder, all its values too. Raises Invalid naming the file or tensor."""
    with _named(folder, pointer), _reading:
        return _examined(folder, stamp(folder))


def require_headers(folder: Path, pointer: str) -> None:
    """Raise Invalid for what the headers show: that takes no time, values do."""
    from optimizer import checkpoint

    with _named(folder, pointer):
        checkpoint.inspect(folder)


@contextmanager
def _named(folder: Path, pointer: str) -> Iterator[None]:
    """Raise Invalid, with the folder's name, for what is wrong with it."""
    try:
        yield
    except OptimizerError as error:
        raise Invalid(pointer, f"{folder.name}: {error}", error.code) from None
    except OSError as error:
        detail = f"{folder.name}: cannot be read: {error.strerror}"
        raise Invalid(pointer, detail, "model_load_failed") from None


def require_sequences(weights: Weights, tokens: int, pointer: str) -> None:
    """Raise Invalid where the model does not take sequences of so many tokens."""
    try:
        longest = _longest_sequence(weights.path, weights.stamp)
    except (OptimizerError, OSError):
        return  # it was read a moment ago; the worker will say what happened to it
    if longest is not None and tokens > longest:
        raise Invalid(
            pointer,
            f"sequence_tokens is {tokens}, but {weights.name} takes at most {longest} "
            f"tokens at once (config.json): give {longest} or fewer",
        )


@lru_cache(maxsize=256)
def _longest_sequence(folder: Path, stamp: str) -> int | None:
    from optimizer import checkpoint

    return checkpoint.longest_sequence(folder)


@lru_cache(maxsize=256)
def _examined(folder: Path, stamp: str) -> Weights:
    from optimizer import preflight

    name = re.sub(r"[^a-zA-Z0-9._-]", "_", folder.name)[:63] or "model"
    return found_at(folder, name, preflight.look_at_model(folder))


def found_at(folder: Path, name: str, found: dict[str, Any]) -> Weights:
    """Return the weights of a folder in which `optimizer.preflight` found this."""
    return Weights(name=name, path=folder, stamp=stamp(folder), **found)


# -- models --------------------------------------------------------------------


def page(
    session: Session, tenant_id: str, limit: int, after: str | None = None
) -> tuple[list[RegisteredModel], str | None]:
    """Return the tenant's own models and the shared ones, the newest first."""
    query = select(RegisteredModel).where(_visible(tenant_id))
    kind = f"models:{tenant_id}"
    return cursors.page(session, query, RegisteredModel.id, kind, limit, after)


def model_names(session: Session, tenant_id: str) -> list[str]:
    """Return the names a tenant may use, each once."""
    query = select(RegisteredModel.name).where(_visible(tenant_id))
    return sorted(set(session.scalars(query)))


_CALLED = and_(  # statements are made once, for every request
    or_(
        RegisteredModel.tenant_id == bindparam("tenant"),
        RegisteredModel.tenant_id.is_(None),
    ),
    or_(
        RegisteredModel.name == bindparam("name"),
        RegisteredModel.id == bindparam("name"),
    ),
)
_NEAREST = (
    RegisteredModel.name != bindparam("name"),
    RegisteredModel.tenant_id.is_(None),
)
_FIND = select(RegisteredModel).where(_CALLED).order_by(*_NEAREST)
_READ = select(*(getattr(RegisteredModel, column) for column in Registered._fields))
_READ = _READ.where(_CALLED).order_by(*_NEAREST)


def find(session: Session, tenant_id: str, name: str) -> RegisteredModel | None:
    """Return a model by name or by id; the tenant's own come before shared ones."""
    return session.scalars(_FIND, {"tenant": tenant_id, "name": name}).first()


def weights_named(session: Session, tenant_id: str, name: str) -> Weights | None:
    """Return a model's weights; the tenant's own come before shared ones.

    None: no such name. Raises Invalid if the folder is not what was registered.
    """
    which = {"tenant": tenant_id, "name": name}
    row = session.connection().execute(_READ, which).first()
    return _unchanged(Registered(*row)) if row else _shared_folder(name)


def own(session: Session, tenant_id: str | None, name: str) -> RegisteredModel | None:
    """Return the tenant's own model of this name. None as tenant: the shared one."""
    owner = (
        RegisteredModel.tenant_id.is_(None)
        if tenant_id is None
        else RegisteredModel.tenant_id == tenant_id
    )
    query = select(RegisteredModel).where(owner, RegisteredModel.name == name)
    return session.scalar(query)


def require_new_name(session: Session, tenant_id: str, name: str) -> None:
    """Raise NameTaken where the tenant has a model of this name."""
    if found := own(session, tenant_id, name):
        raise NameTaken(
            f"you have a model {name!r}: delete it first, or choose another name",
            model_id=found.id,
        )


def register(
    session: Session, tenant_id: str | None, name: str, weights: Weights
) -> tuple[RegisteredModel, bool]:
    """Give a folder a name; None as tenant: for everybody. True: the name is new.

    Raises NameTaken where the name is that of an upload, whose bytes would be lost.
    """
    row = own(session, tenant_id, name)
    if row is not None and row.uploaded:
        raise NameTaken(f"{name!r} is an uploaded model: delete it first")
    created = row is None
    row = row or RegisteredModel(tenant_id=tenant_id, name=name)
    for column, value in _columns(weights).items():
        setattr(row, column, value)
    session.add(row)
    session.flush()
    return row, created


def register_upload(
    session: Session,
    tenant_id: str,
    model_id: str,
    weights: Weights,
    keep_s: float | None,
) -> RegisteredModel:
    """Make an uploaded folder a model of the tenant. Raises NameTaken."""
    require_new_name(session, tenant_id, weights.name)
    row = RegisteredModel(
        id=model_id, tenant_id=tenant_id, name=weights.name, uploaded=True
    )
    for column, value in _columns(weights).items():
        setattr(row, column, value)
    if keep_s is not None:
        row.expires_at = now(session) + timedelta(seconds=keep_s)
    session.add(row)
    session.flush()
    return row


def delete(session: Session, tenant_id: str, row: RegisteredModel) -> Path | None:
    """Delete a model of the tenant. Returns the folder to remove, if it is ours.

    Raises InUse while a job reads it, and for a shared one, which is the operator's.
    """
    if row.tenant_id != tenant_id:
        raise InUse(f"{row.name!r} is shared: only the operator can remove it")
    if job := uses.job_on(session, tenant_id, "model_path", row.path):
        raise InUse(f"job {job} reads this model: wait for its end, or cancel it")
    session.delete(row)
    session.flush()
    return Path(row.path) if row.uploaded else None


def drop_expired(session: Session) -> list[Path]:
    """Delete models that have expired and no job reads; return folders to remove."""
    query = select(RegisteredModel).where(
        RegisteredModel.expires_at < now(session),
        RegisteredModel.tenant_id.is_not(None),
    )
    gone: list[Path] = []
    for row in session.scalars(query.limit(PURGED_AT_ONCE)).all():
        if not uses.job_on(session, row.tenant_id, "model_path", row.path):
            session.delete(row)
            gone += [Path(row.path)] if row.uploaded else []
    session.flush()
    return gone


def uploaded_bytes(session: Session, tenant_id: str) -> int:
    """Return the disk that the tenant's uploaded models take."""
    query = select(RegisteredModel).where(
        RegisteredModel.tenant_id == tenant_id, RegisteredModel.uploaded
    )
    return sum(files_bytes(row.details) for row in session.scalars(query))


def files_bytes(details: dict[str, Any] | None) -> int:
    """Return the bytes of all files that a model's row lists."""
    files: Sequence[dict[str, Any]] = (details or {}).get("files", ())
    return sum(file["bytes"] for file in files)


def register_folders() -> None:
    """Register every folder of `data_dir/models` for everybody, under its own name.

    A folder that is refused is logged; the others are registered.
    """
    root = settings().data_dir / "models"
    for config in sorted(root.glob("*/config.json")):
        try:
            _share(config.parent)
        except APIError as error:
            log.warning("model_refused", folder=config.parent.name, why=error.detail)
        except IntegrityError:  # another process was faster
            log.info("model_registered_elsewhere", folder=config.parent.name)


def _visible(tenant_id: str) -> ColumnElement[bool]:
    return or_(
        RegisteredModel.tenant_id == tenant_id, RegisteredModel.tenant_id.is_(None)
    )


def _columns(weights: Weights) -> dict[str, Any]:
    return {
        "path": str(weights.path),
        "stamp": weights.stamp,
        "sha256": weights.sha256,
        "architecture": weights.architecture,
        "parameters": weights.parameters,
        "stored_bytes": weights.stored_bytes,
        "dtypes": weights.dtypes,
        "details": weights.details,
    }


def _unchanged(row: Registered) -> Weights:
    folder = Path(row.path)
    try:
        same = stamp(folder) == row.stamp
    except OSError:
        raise Invalid(
            "/model",
            f"the folder of model {row.name!r} ({folder.name}) is gone: register it again",
            "model_load_failed",
        ) from None
    if not same:
        raise Invalid(
            "/model",
            f"the files of model {row.name!r} ({folder.name}) changed since it was "
            "registered: register it again",
            "model_load_failed",
        )
    return Weights(**{**row._asdict(), "path": folder})


def _shared_folder(name: str) -> Weights | None:
    """Return a folder of `data_dir/models` that no start has registered yet."""
    root = settings().data_dir / "models"
    folder = root / name
    if not re.fullmatch(NAME_PATTERN, name) or not (folder / "config.json").is_file():
        return None
    return weights_at(folder.resolve(), "/model")


def _share(folder: Path) -> None:
    with db.reading() as session:
        query = select(RegisteredModel.stamp).where(
            RegisteredModel.tenant_id.is_(None), RegisteredModel.name == folder.name
        )
        if session.scalar(query) == stamp(folder):
            return
    weights = weights_at(folder.resolve(), "/model")
    with db.transaction() as session:
        register(session, None, folder.name, weights)
