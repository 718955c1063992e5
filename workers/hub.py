"""Fetches a model that a job names by its place at a hub, before anything computes.

    GET {hub}/api/models/{org}/{repo}/revision/{commit}?blobs=true    which files
    GET {hub}/{org}/{repo}/resolve/{commit}/{file}                    a stretch of one

Only files that a model is made of, from addresses that were checked, also after each
redirect; into an upload, so that quotas, the preflight and the move to where models live
are those of models that somebody sends. What came stays: who is stopped goes on there.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar
from urllib.parse import quote, urljoin

import httpcore
from pydantic import BaseModel, Field, ValidationError

from api import catalog, checks, hub, storage_quota, upload_files, uploads
from api.db import reading, transaction
from api.errors import APIError
from api.hub import Address
from api.metrics import service_version
from api.model_files import MAX_SMALL_BYTES, MODEL_FILES, NEEDED
from api.models import Upload, UploadState
from api.settings import settings
from api.transitions import Claim
from api.uploads import Asked
from api.webhook_urls import Rules
from workers import outgoing
from workers.outgoing import NotSent
from workers.relay import Refused

logger = logging.getLogger(__name__)

ACTOR = "hub"
WEIGHTS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
REDIRECTS = (301, 302, 303, 307, 308)
MOST_HOPS = 3
MOST_FILES = 1000
LISTING_BYTES = 8 * 2**20
STRETCH_BYTES = 64 * 2**20  # of a file, in one request
LISTING_S, STRETCH_S = 30.0, 300.0  # no longer than this for one request
TRIES = 4
PAUSE_S = 1.0  # after the first try that failed; then twice as long each time
POLL_S = 0.2
MODEL, PLATFORM, USER = "model", "platform", "user"

T = TypeVar("T")
Look = Callable[[], object]
"""Called often; raises to stop."""
Told = Callable[[float], None]
"""Called with the share of the bytes that are here."""


class _Lfs(BaseModel):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Sibling(BaseModel):
    rfilename: str
    size: Annotated[int, Field(ge=0)] | None = None
    lfs: _Lfs | None = None


class _Listing(BaseModel):
    sha: str
    siblings: list[_Sibling]


def refuse(code: str, category: str, message: str) -> NoReturn:
    """Raise what the job's owner is told."""
    problem = {
        "code": code,
        "category": category,
        "retryable": category == PLATFORM,
        "message": message[:2000],
        "phase": "fetch",
    }
    raise Refused(problem, "NotFetched")


def bring(claim: Claim, look: Look, told: Told) -> catalog.Weights:
    """Return the model of a job's address, fetched where the tenant does not have it.

    Raises Refused with what the job's owner is told, and what `look` raises.
    """
    where = hub.address(claim.spec.model)
    upload_id = where.id(claim.tenant_id)
    while True:
        look()
        with reading() as session:
            found = hub.found(session, claim.tenant_id, where)
        if found is not None:
            return found
        with _said(), upload_files.locked(upload_id) as mine:
            if mine:  # else another job's worker is at it
                _fetch(claim.tenant_id, where, look, told)
        if mine:
            _check(upload_id, look)
        time.sleep(POLL_S)


@contextmanager
def _said() -> Iterator[None]:
    """Say to the job's owner what the API would have answered, or what the hub did not."""
    try:
        yield
    except NotSent as error:
        refuse("hub_unreachable", PLATFORM, f"the hub cannot be asked: {error}")
    except APIError as error:
        category = PLATFORM if error.status >= 500 else USER
        refuse(error.code, category, error.detail)


def _check(upload_id: str, look: Look) -> None:
    """Have what came looked at, as uploads are. Raises Refused where it is no model."""
    done = checks.start(upload_id)
    while not done.done():
        look()
        time.sleep(POLL_S)
    with _said():
        done.result()
    with reading() as session:
        upload = session.get(Upload, upload_id)
    if upload is not None and upload.state is UploadState.FAILED:
        said = upload.error or {}
        refuse(said.get("code", "model_load_failed"), MODEL, said.get("detail", ""))


def _fetch(tenant_id: str, where: Address, look: Look, told: Told) -> None:
    """Bring all bytes of a model that are not here, and say that they are."""
    if not hub.allows(where):  # any more
        refuse(hub.NOT_ALLOWED, USER, f"{where.repository} is not allowed here")
    upload = _open(tenant_id, where, look)
    if upload.state is not UploadState.OPEN:
        return
    folder = upload_files.folder(upload.id) / "files"
    folder.mkdir(parents=True, exist_ok=True)
    before = 0
    for file in upload.files:
        target, size = folder / file["path"], file["bytes"]
        for here in _stretches(where, target, size, look):
            told((before + here) / max(upload.bytes, 1))
        before += size
    with transaction() as session:
        uploads.brought(session, upload.id)


def _open(tenant_id: str, where: Address, look: Look) -> Upload:
    """Return the upload that the model comes into: the one that was begun, or a new one."""
    upload_id = where.id(tenant_id)
    with transaction() as session:
        there = session.get(Upload, upload_id)
        if there is not None and there.state in uploads.LIVE:
            return there
        uploads.forget(session, upload_id)
    files = _files(where, look)
    with transaction() as session:
        taken = catalog.own(session, tenant_id, where.name) is not None
        name = upload_id if taken else where.name
        asked = Asked(uploads.HUB, name, files, id=upload_id)
        storage_quota.require_room(session, tenant_id, asked.bytes)
        return uploads.create(session, tenant_id, ACTOR, asked)


# -- which files ---------------------------------------------------------------------


def _files(where: Address, look: Look) -> list[dict[str, Any]]:
    """Return path, bytes and, where the hub says it, sha256 of each file of a model."""
    url = f"{settings().hub_url}/api/models/{where.repository}/revision/{where.commit}"
    text = _patiently(lambda: _listing(f"{url}?blobs=true", where), look)
    try:
        listing = _Listing.model_validate_json(text)
    except ValidationError:
        refuse("hub_answer_invalid", PLATFORM, "the hub's list of files is none")
    if listing.sha != where.commit:
        refuse("hub_answer_invalid", PLATFORM, "the hub lists another commit's files")
    found = [file for file in listing.siblings if _is_wanted(file.rfilename)]
    _require_model(where, found)
    return [
        {
            "path": file.rfilename,
            "bytes": file.size,
            "sha256": file.lfs.sha256 if file.lfs else None,
        }
        for file in found
    ]


def _listing(url: str, where: Address) -> bytes:
    with _followed(url, {"Accept": "application/json"}, LISTING_S) as response:
        _require_ok(response, where, "no such repository, or it has no such commit")
        text = bytearray()
        for part in response.iter_stream():
            text += part
            if len(text) > LISTING_BYTES:
                refuse(
                    "hub_answer_invalid", PLATFORM, "the hub's list of files is long"
                )
        return bytes(text)


def _is_wanted(path: str) -> bool:
    return path in MODEL_FILES or WEIGHTS.fullmatch(path) is not None


def _require_model(where: Address, files: list[_Sibling]) -> None:
    """Raise Refused unless the files are a model that we take, of a size that we take."""
    names = {file.rfilename for file in files}
    absent = [name for name in NEEDED if name not in names]
    if absent or not any(map(WEIGHTS.fullmatch, names)):
        lacks = ", ".join(absent) or "model.safetensors"
        refuse("unsupported_model_format", MODEL, f"{where.repository} has no {lacks}")
    for file in files:
        small = WEIGHTS.fullmatch(file.rfilename) is None
        if file.size is None or (small and file.size > MAX_SMALL_BYTES):
            name = f"{file.rfilename} of {where.repository}"
            refuse(
                "model_too_large", MODEL, f"{name} is too large, or of no known size"
            )
    total, limit = sum(file.size or 0 for file in files), settings().max_model_bytes
    if total > limit or len(files) > MOST_FILES:
        said = f"{where.repository} has {total} bytes in {len(files)} files"
        refuse("model_too_large", MODEL, f"{said}, the limit is {limit} bytes")


# -- their bytes ---------------------------------------------------------------------


def _stretches(where: Address, target: Path, size: int, look: Look) -> Iterator[int]:
    """Bring what a file lacks, stretch by stretch; yield how much is here."""
    target.touch()
    url = f"{settings().hub_url}/{where.repository}/resolve/{where.commit}/"
    while (here := target.stat().st_size) < size:
        yield here
        _patiently(
            lambda: _stretch(url + quote(target.name), where, target, size, look), look
        )
    if here > size:
        target.unlink()
        refuse("hub_answer_invalid", PLATFORM, f"{target.name} came with {here} bytes")
    yield here


def _stretch(url: str, where: Address, target: Path, size: int, look: Look) -> None:
    """Add the next bytes to a file. What came is kept, also where the rest does not."""
    begin = target.stat().st_size
    end = min(begin + STRETCH_BYTES, size)
    asked = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with _followed(url, asked, STRETCH_S) as response, target.open("ab") as file:
        _require_ok(response, where, f"it has no {target.name}")
        whole = response.status == 200 and begin == 0 and end == size
        part_of = _header(response, b"content-range").startswith(f"bytes {begin}-")
        if not whole and not (response.status == 206 and part_of):
            raise NotSent(
                "the hub does not send the part of a file that it is asked for"
            )
        for part in response.iter_stream():
            look()
            if file.tell() + len(part) > end:
                raise NotSent(f"more of {target.name} came than was asked for")
            with upload_files.room():
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    if target.stat().st_size < end:
        raise NotSent(f"the rest of {target.name} did not come")


@contextmanager
def _followed(
    url: str, headers: Mapping[str, str], limit_s: float
) -> Iterator[httpcore.Response]:
    """Give the answer at the end of a few redirects, each held against the same rules."""
    for _ in range(MOST_HOPS + 1):
        said = {"User-Agent": f"precision/{service_version()}", **headers}
        with outgoing.get(url, said, Rules.of_hub(), limit_s) as response:
            if response.status not in REDIRECTS:
                yield response
                return
            url = urljoin(url, _header(response, b"location"))
    raise NotSent(f"the hub sends us on more than {MOST_HOPS} times")


def _header(response: httpcore.Response, name: bytes) -> str:
    known = {each.lower(): value for each, value in response.headers}
    return known.get(name, b"").decode("latin-1")


def _require_ok(response: httpcore.Response, where: Address, missing: str) -> None:
    match response.status:
        case 200 | 206:
            return
        case 404 | 410:
            refuse("model_not_found", MODEL, f"{where.text}: {missing}")
        case 401 | 403:
            said = "it is not open to everybody, or there is none of that name"
            refuse("model_not_open", MODEL, f"{where.text}: {said}")
        case status:
            raise NotSent(f"the hub answered {status}")


def _patiently(ask: Callable[[], T], look: Look) -> T:
    """Return what `ask` does; where nobody answers, ask again a few times."""
    for attempt in range(TRIES - 1):
        try:
            return ask()
        except NotSent as error:
            logger.warning("the hub is asked again: %s", error)
        until = time.monotonic() + PAUSE_S * 2**attempt
        while time.monotonic() < until:
            look()
            time.sleep(POLL_S)
    return ask()
