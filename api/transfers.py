"""Bytes up and down, in pieces that survive a cut: a folder of weights, a job's files.

What was cut is continued by the same call: the service says which parts it lacks, and
half a file that was downloaded is asked for from its end on. Digests prove the whole.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from uuid import uuid4

import httpx

from api.client import Client
from api.client_errors import ClientError
from api.model_files import MODEL_FILES, WEIGHTS

Json = dict[str, Any]
Kind = Literal["models", "datasets"]
OnBytes = Callable[[int], None]  # so many more have come
Files = Mapping[str, Path]

BLOCK = 1 << 20
CUTS = 8  # a download goes on after so many without a byte in between


def model_files(folder: Path) -> dict[str, Path]:
    """Return what a model of this folder consists of, by name. Other files stay."""
    found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    return {n: p for n, p in found.items() if n in MODEL_FILES or WEIGHTS.fullmatch(n)}


def digests(files: Files, on_bytes: OnBytes) -> dict[str, str]:
    """Return the sha256 of each file, hex."""
    return {name: _digest(path, on_bytes) for name, path in files.items()}


def short_name(path: Path, sha256: Mapping[str, str] | None = None) -> str:
    """Return a name that the service takes; with digests, one of just this content."""
    stem = path.name.removesuffix(".jsonl")
    plain = re.sub(r"[^a-zA-Z0-9._-]+|^[._-]+", "-", stem).strip("-")[:50] or "uploaded"
    if sha256 is None:
        return plain
    return f"{plain}-{hashlib.sha256(repr(sorted(sha256.items())).encode()).hexdigest()[:8]}"


# -- up ------------------------------------------------------------------------


def upload(
    client: Client,
    kind: Kind,
    name: str,
    files: Files,
    sha256: Mapping[str, str],
    on_bytes: OnBytes,
) -> Json:
    """Return the model or dataset `name` made of the files, sent where it is not there.

    Raises ClientError, e.g. with `name_taken`.
    """
    sizes = {path: file.stat().st_size for path, file in files.items()}
    ask: Json = {"name": name}
    if kind == "datasets":
        ask["bytes"] = sum(sizes.values())
    else:
        ask["files"] = [{"path": path, "bytes": n} for path, n in sizes.items()]
    opened = _opened(client, kind, ask, sha256)
    if opened.get("state") == "open":
        on_bytes(opened["bytes"] - _unsent(opened))
    while opened.get("state") == "open" and opened["missing_parts"]:
        for number in opened["missing_parts"]:
            on_bytes(_send(client, kind, opened, number, files))
        opened = client.upload(kind, opened["id"])
    if opened.get("state") == "open":
        given = {} if kind == "datasets" else sha256
        opened = client.complete(kind, opened["id"], given)
    return _checked(client, kind, opened)


def _opened(client: Client, kind: Kind, ask: Json, sha256: Mapping[str, str]) -> Json:
    """Open an upload, or find the one of the same bytes that was cut."""
    said = repr((kind, ask["name"], sorted(sha256.items())))
    key = hashlib.sha256(said.encode()).hexdigest()[:32]
    first = client.open_upload(kind, ask, key)
    try:
        found = client.upload(kind, first["id"])
    except ClientError as error:
        if error.status != 404:
            raise
        found = {"state": "failed"}
    if found.get("state") in (None, "open", "checking"):
        return found
    return client.open_upload(kind, ask, str(uuid4()))  # that one came to nothing


def _send(client: Client, kind: Kind, opened: Json, number: int, files: Files) -> int:
    path, offset, size = _place(opened, number)
    file = next(iter(files.values())) if kind == "datasets" else files[path]
    with file.open("rb") as stream:
        stream.seek(offset)
        client.put_part(kind, opened["id"], number, stream.read(size))
    return size


def _place(opened: Json, number: int) -> tuple[str, int, int]:
    """Return where a part lies: its file, its first byte there, how many it has."""
    file = next(f for f in reversed(opened["files"]) if f["first_part"] <= number)
    offset = (number - file["first_part"]) * opened["part_bytes"]
    return file["path"], offset, min(opened["part_bytes"], file["bytes"] - offset)


def _unsent(opened: Json) -> int:
    """Return how many bytes are missing; what is not listed counts as whole parts."""
    listed = opened["missing_parts"]
    more = (opened["missing_count"] - len(listed)) * opened["part_bytes"]
    sizes = sum(_place(opened, number)[2] for number in listed)
    return int(min(sizes + more, opened["bytes"]))


def _checked(client: Client, kind: Kind, found: Json) -> Json:
    """Wait until what was sent has been looked at."""
    while found.get("state") == "checking":
        found = client.upload(kind, found["id"], wait_s=20)
    if error := found.get("error"):
        raise ClientError({"title": "The files are refused", "status": 422, **error})
    return found


# -- down ----------------------------------------------------------------------


def download(
    client: Client, job_id: str, artifact: Json, folder: Path, on_bytes: OnBytes
) -> Path:
    """Return the artifact's file under `folder`; what is there already is not fetched.

    Raises ClientError: `digest_mismatch` where what came is not what was made.
    """
    target = folder / _safe(artifact["name"])
    if target.is_file() and _digest(target) == artifact["sha256"]:
        on_bytes(artifact["bytes"])
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(target.name + ".part")
    _fetch(client, job_id, artifact, half, on_bytes)
    if (found := _digest(half)) != artifact["sha256"]:
        half.unlink()
        detail = f"{artifact['name']} came with sha256 {found}: download it again"
        raise ClientError({"code": "digest_mismatch", "detail": detail})
    half.replace(target)
    return target


def _fetch(
    client: Client, job_id: str, artifact: Json, half: Path, on_bytes: OnBytes
) -> None:
    """Bring `half` to its full length; a cut connection is taken up again."""
    had = half.stat().st_size if half.exists() else 0
    on_bytes(had)
    cuts = 0
    while had < artifact["bytes"]:
        before = had
        try:
            had = _more(client, job_id, artifact, half, had, on_bytes)
        except httpx.TransportError as error:
            had = half.stat().st_size if half.exists() else 0
            cuts = cuts + 1 if had == before else 0
            if cuts >= CUTS:
                detail = f"{artifact['name']} was cut at {had} bytes: {error}"
                raise ClientError({"code": "unreachable", "detail": detail}) from None
            client.pause(cuts)
    if not half.exists():
        half.touch()


def _more(
    client: Client, job_id: str, artifact: Json, half: Path, had: int, on_bytes: OnBytes
) -> int:
    """Append what is left. Return the length; a service without ranges starts over."""
    with client.artifact(job_id, artifact["name"], had, artifact["sha256"]) as response:
        whole = response.status_code == 200
        if whole and had:
            on_bytes(-had)
        had = 0 if whole else had
        with half.open("wb" if whole else "ab") as stream:
            for block in response.iter_bytes():
                had += stream.write(block)
                on_bytes(len(block))
    return had


def _safe(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ClientError({"code": "bad_name", "detail": f"not a file name: {name!r}"})
    return path


def _digest(path: Path, on_bytes: OnBytes | None = None) -> str:
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            found.update(block)
            if on_bytes:
                on_bytes(len(block))
    return found.hexdigest()
