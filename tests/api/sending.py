"""Uploads as a client sends them: what tests of uploads share."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
from fastapi.testclient import TestClient

Json = dict[str, Any]


def content_digest(content: bytes) -> dict[str, str]:
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    return {"Content-Digest": f"sha-256=:{digest}:"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def ask(name: str, files: Mapping[str, bytes], **more: Any) -> Json:
    listed = [{"path": path, "bytes": len(content)} for path, content in files.items()]
    return {"name": name, "files": listed, **more}


def opened(client: TestClient, name: str, files: Mapping[str, bytes]) -> Json:
    answer = client.post("/v1/models", json=ask(name, files))
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def pieces(upload: Json, files: Mapping[str, bytes]) -> dict[int, bytes]:
    """Return the bytes of every part by number, as the upload says they are cut."""
    found = {}
    for file in upload["files"]:
        content, size = files[file["path"]], upload["part_bytes"]
        for index in range(file["parts"]):
            number = file["first_part"] + index
            found[number] = content[index * size : (index + 1) * size]
    return found


def put(
    client: TestClient, upload: Json, number: int, content: bytes, **headers: str
) -> httpx.Response:
    url = upload["links"]["self"] + f"/parts/{number}"
    return client.put(
        url, content=content, headers={**content_digest(content), **headers}
    )


def send(
    client: TestClient,
    upload: Json,
    files: Mapping[str, bytes],
    numbers: Iterable[int] | None = None,
) -> None:
    parts = pieces(upload, files)
    for number in parts if numbers is None else numbers:
        answer = put(client, upload, number, parts[number])
        assert answer.status_code == 200, answer.text


def complete(
    client: TestClient, upload: Json, body: Json | None = None
) -> httpx.Response:
    return client.post(upload["links"]["self"] + "/complete", json=body or {})


def uploaded(client: TestClient, name: str, files: Mapping[str, bytes]) -> Json:
    """Upload a model whole; gives the model."""
    upload = opened(client, name, files)
    send(client, upload, files)
    answer = complete(client, upload)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())
