"""Uploads and downloads of the client, cut and taken up again, against the real API."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from api import settings, transfers
from api.client import Client, ClientError
from tests.api.conftest import write_model

Json = dict[str, Any]


class Cable:
    """Goes to the API; is cut at the request that `cut` says, once."""

    def __init__(self, api: TestClient) -> None:
        self.api = api._transport
        self.sent: list[tuple[str, str]] = []
        self.cut: int | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append((request.method, request.url.path))
        puts = sum(method == "PUT" for method, _ in self.sent)
        if request.method == "PUT" and self.cut is not None and puts > self.cut:
            raise httpx.ConnectError("cut")
        found = self.api.handle_request(request)
        return httpx.Response(
            found.status_code, headers=found.headers.items(), content=found.read()
        )

    def close(self) -> None:
        pass

    def __enter__(self) -> "Cable":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def cable(client: TestClient) -> Cable:
    return Cable(client)


@pytest.fixture
def far(client: TestClient, cable: Cable) -> Client:
    """The client, at the far end of the cable."""
    key = client.headers["Authorization"].removeprefix("Bearer ")
    return Client("http://testserver", key, transport=cable, sleep=lambda s: None)  # type: ignore[arg-type]


@pytest.fixture
def folder(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of some parts, and a file that no model has."""
    monkeypatch.setenv("PRECISION_PART_BYTES", str(1 << 16))
    settings.settings.cache_clear()
    noise = np.random.default_rng(0).random((5000, 8)).astype(np.float32)
    found = write_model(tmp_path / "mine", **{"model.norm.weight": noise})
    (found / "notes.txt").write_text("mine alone")
    return found


def sent(far: Client, folder: Path, name: str) -> tuple[Json, int]:
    files, counted = transfers.model_files(folder), [0]

    def count(more: int) -> None:
        counted[0] += more

    sha256 = transfers.digests(files, lambda more: None)
    return transfers.upload(far, "models", name, files, sha256, count), counted[0]


def test_a_folder_is_sent_in_parts_and_becomes_a_model(
    folder: Path, far: Client, cable: Cable
) -> None:
    model, counted = sent(far, folder, "mine")
    assert (model["object"], model["name"]) == ("model", "mine")
    files = {file["path"]: file["bytes"] for file in far.model("mine")["files"]}
    assert "notes.txt" not in files
    assert counted == sum(files.values())
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    listed = {file["path"]: file["sha256"] for file in far.model("mine")["files"]}
    assert listed["model.safetensors"] == weights
    far.delete_model("mine")
    assert far.models() == []


def test_what_was_cut_goes_on_with_the_parts_that_are_missing(
    folder: Path, far: Client, cable: Cable
) -> None:
    cable.cut = 2
    with pytest.raises(ClientError, match="cut"):
        sent(far, folder, "mine")
    came = {path for method, path in cable.sent if method == "PUT"}
    cable.cut, cable.sent = None, []
    model, counted = sent(far, folder, "mine")
    again = [path for method, path in cable.sent if method == "PUT"]
    assert model["name"] == "mine"
    assert len(came) == 3  # the third did not arrive
    assert len(came & set(again)) == 1
    assert len(again) == len(set(again)) >= 3
    files = transfers.model_files(folder).values()
    assert counted == sum(path.stat().st_size for path in files)


def test_the_same_upload_twice_is_one_model(folder: Path, far: Client) -> None:
    first, _ = sent(far, folder, "mine")
    second, _ = sent(far, folder, "mine")
    assert second["id"] == first["id"]


def test_a_dataset_is_sent_too(far: Client, client: TestClient, tmp_path: Path) -> None:
    file = tmp_path / "my tickets.jsonl"
    lines = [{"text": f"ticket {n}: " + "words " * 60} for n in range(64)]
    file.write_text("\n".join(map(json.dumps, lines)))
    sha256 = transfers.digests({file.name: file}, lambda more: None)
    name = transfers.short_name(file, sha256)
    assert name.startswith("my-tickets-")
    made = transfers.upload(
        far, "datasets", name, {file.name: file}, sha256, lambda more: None
    )
    assert (made["name"], made["samples"]) == (name, 64)


def test_what_is_refused_says_why(far: Client, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(ClientError) as caught:
        sent(far, folder, "mine")
    assert caught.value.status == 422


# -- down ------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 1000
MADE = {
    "name": "checkpoint/model.safetensors",
    "bytes": len(CONTENT),
    "sha256": hashlib.sha256(CONTENT).hexdigest(),
}


class Halves(httpx.BaseTransport):
    """Serves CONTENT with ranges, and is cut after `each` bytes."""

    def __init__(self, each: int, *, ranges: bool = True) -> None:
        self.each, self.ranges = each, ranges
        self.asked: list[tuple[str | None, str | None]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        said = request.headers.get("range")
        self.asked.append((said, request.headers.get("if-range")))
        start = int(said.removeprefix("bytes=").removesuffix("-")) if said else 0
        if not self.ranges:
            start, self.each = 0, max(self.each, len(CONTENT) * (len(self.asked) > 1))

        def stream() -> Iterator[bytes]:
            yield CONTENT[start : start + self.each]
            if start + self.each < len(CONTENT):
                raise httpx.ReadError("cut")

        return httpx.Response(206 if start else 200, content=stream())


def client_of(transport: httpx.BaseTransport) -> Client:
    return Client("http://site", "key", transport=transport, sleep=lambda s: None)


def test_a_download_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    wire, counted = Halves(100_000), []
    found = transfers.download(client_of(wire), "job_1", MADE, tmp_path, counted.append)
    assert found == tmp_path / "checkpoint" / "model.safetensors"
    assert found.read_bytes() == CONTENT
    etag = f'"{MADE["sha256"]}"'
    assert wire.asked == [
        (None, None),
        ("bytes=100000-", etag),
        ("bytes=200000-", etag),
    ]
    assert sum(counted) == len(CONTENT)
    assert list(tmp_path.rglob("*.part")) == []


def test_half_a_file_of_yesterday_is_completed_and_a_whole_one_left(
    tmp_path: Path,
) -> None:
    half = tmp_path / "checkpoint" / "model.safetensors.part"
    half.parent.mkdir()
    half.write_bytes(CONTENT[:123])
    wire, counted = Halves(len(CONTENT)), []
    transfers.download(client_of(wire), "job_1", MADE, tmp_path, counted.append)
    assert wire.asked[0][0] == "bytes=123-"
    transfers.download(client_of(wire), "job_1", MADE, tmp_path, counted.append)
    assert len(wire.asked) == 1
    assert sum(counted) == 2 * len(CONTENT)


def test_a_service_without_ranges_starts_over(tmp_path: Path) -> None:
    wire, counted = Halves(1000, ranges=False), []
    found = transfers.download(client_of(wire), "job_1", MADE, tmp_path, counted.append)
    assert found.read_bytes() == CONTENT
    assert sum(counted) == len(CONTENT)


def test_another_content_is_no_file(tmp_path: Path) -> None:
    wrong = {**MADE, "sha256": "0" * 64}
    with pytest.raises(ClientError) as caught:
        transfers.download(
            client_of(Halves(10**9)), "job_1", wrong, tmp_path, lambda n: None
        )
    assert caught.value.code == "digest_mismatch"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_line_that_gives_nothing_is_given_up(tmp_path: Path) -> None:
    wire = Halves(0)
    with pytest.raises(ClientError, match="cut at 0 bytes"):
        transfers.download(client_of(wire), "job_1", MADE, tmp_path, lambda n: None)
    assert len(wire.asked) == transfers.CUTS


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", "a\\..\\b"])
def test_no_name_leaves_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="not a file name"):
        transfers.download(
            client_of(Halves(9)), "job_1", {**MADE, "name": name}, tmp_path, print
        )
