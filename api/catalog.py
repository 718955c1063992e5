"""The models and datasets that a tenant may name, and the folders behind them."""

import hashlib
import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api import db
from api.errors import APIError, Invalid, NameTaken
from api.models import Dataset, RegisteredModel
from api.schemas import NAME_PATTERN
from api.settings import settings
from optimizer import datasets
from optimizer.datasets import DISTRIBUTIONS
from optimizer.errors import DatasetError, OptimizerError

__all__ = ["DISTRIBUTIONS"]

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
    facts = [
        (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
        for entry in sorted(folder.iterdir())
        if entry.is_file()
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def weights_at(folder: Path, pointer: str) -> Weights:
    """Check a folder, all its values too. Raises Invalid naming the file or tensor."""
    try:
        with _reading:
            return _examined(folder, stamp(folder))
    except OptimizerError as error:
        raise Invalid(pointer, f"{folder.name}: {error}", error.code) from None
    except OSError as error:
        detail = f"{folder.name}: cannot be read: {error.strerror}"
        raise Invalid(pointer, detail, "model_load_failed") from None


def require_sequences(weights: Weights, tokens: int, pointer: str) -> None:
    """Raise Invalid where the model does not take sequences of so many tokens."""
    from optimizer import checkpoint

    try:
        longest = checkpoint.longest_sequence(weights.path)
    except (OptimizerError, OSError):
        return  # it was read a moment ago; the worker will say what happened to it
    if longest is not None and tokens > longest:
        raise Invalid(
            pointer,
            f"sequence_tokens is {tokens}, but {weights.name} takes at most {longest} "
            f"tokens at once (config.json): give {longest} or fewer",
        )


@lru_cache(maxsize=256)
def _examined(folder: Path, stamp: str) -> Weights:
    from optimizer import checkpoint  # and with it numpy: not at the start of the API

    found = checkpoint.inspect(folder)
    checkpoint.check_values(found)
    return Weights(
        name=re.sub(r"[^a-zA-Z0-9._-]", "_", folder.name)[:63] or "model",
        path=folder,
        stamp=stamp,
        sha256=checkpoint.fingerprint(folder),
        architecture=found.architecture,
        parameters=found.parameters,
        stored_bytes=found.stored_bytes,
        dtypes=dict(found.dtype_bytes),
    )


# -- models --------------------------------------------------------------------


def models(session: Session, tenant_id: str) -> list[RegisteredModel]:
    """Return the tenant's own models and the shared ones, by name."""
    query = select(RegisteredModel).where(_visible(tenant_id))
    return list(session.scalars(query.order_by(RegisteredModel.name)))


def model_names(session: Session, tenant_id: str) -> list[str]:
    """Return the names a tenant may use, each once."""
    return list(dict.fromkeys(model.name for model in models(session, tenant_id)))


def weights_named(session: Session, tenant_id: str, name: str) -> Weights | None:
    """Return a model's weights; the tenant's own come before shared ones.

    None: no such name. Raises Invalid if the folder is not what was registered.
    """
    query = select(RegisteredModel).where(
        _visible(tenant_id), RegisteredModel.name == name
    )
    rows = sorted(session.scalars(query), key=lambda row: row.tenant_id is None)
    if not rows:
        return _shared_folder(name)
    return _unchanged(rows[0])


def register(
    session: Session, tenant_id: str | None, name: str, weights: Weights
) -> tuple[RegisteredModel, bool]:
    """Give weights a name; None as tenant: for everybody. True: the name is new."""
    row = session.scalar(
        select(RegisteredModel).where(
            RegisteredModel.tenant_id.is_(None)
            if tenant_id is None
            else RegisteredModel.tenant_id == tenant_id,
            RegisteredModel.name == name,
        )
    )
    created = row is None
    row = row or RegisteredModel(tenant_id=tenant_id, name=name)
    for field, value in _columns(weights).items():
        setattr(row, field, value)
    session.add(row)
    session.flush()
    return row, created


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
    }


def _unchanged(row: RegisteredModel) -> Weights:
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
    return Weights(
        name=row.name,
        path=folder,
        stamp=row.stamp,
        sha256=row.sha256,
        architecture=row.architecture,
        parameters=row.parameters,
        stored_bytes=row.stored_bytes,
        dtypes=row.dtypes,
    )


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


# -- datasets ------------------------------------------------------------------


def own_datasets(session: Session, tenant_id: str) -> list[Dataset]:
    """Return the tenant's datasets, by name."""
    query = select(Dataset).where(Dataset.tenant_id == tenant_id)
    return list(session.scalars(query.order_by(Dataset.name)))


def dataset_names(session: Session, tenant_id: str) -> list[str]:
    """Return the names of the tenant's datasets."""
    return [dataset.name for dataset in own_datasets(session, tenant_id)]


def dataset(session: Session, tenant_id: str, name: str) -> Dataset | None:
    """Return the tenant's dataset, by name or by id. None: there is none."""
    query = select(Dataset).where(
        Dataset.tenant_id == tenant_id, or_(Dataset.name == name, Dataset.id == name)
    )
    return session.scalars(query).first()


def require_free_name(name: str) -> None:
    """Raise NameTaken for the name of a built-in distribution."""
    if name in DISTRIBUTIONS:
        raise NameTaken(f"{name!r} is built in: choose another name")


def store_dataset(tenant_id: str, name: str, upload: Path) -> tuple[Dataset, bool]:
    """Check an uploaded file and keep it under its sha256: jobs that use an earlier
    upload of this name still find theirs. True: the name is new. Raises Invalid.
    """
    try:
        found = datasets.load(name, upload)
    except DatasetError as error:
        raise Invalid("", str(error), error.code) from None
    folder = settings().data_dir / "datasets" / tenant_id
    folder.mkdir(parents=True, exist_ok=True)
    size = upload.stat().st_size
    path = upload.replace(folder / f"{found.sha256}.jsonl")
    with db.transaction() as session:
        query = select(Dataset).where(
            Dataset.tenant_id == tenant_id, Dataset.name == name
        )
        row = session.scalar(query)
        created = row is None
        row = row or Dataset(tenant_id=tenant_id, name=name)
        row.path, row.sha256, row.bytes = str(path), found.sha256, size
        row.samples = len(found.calibration) + len(found.validation)
        session.add(row)
        session.flush()
        return row, created
