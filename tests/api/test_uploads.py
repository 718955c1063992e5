"""A model comes in parts: sent again, cut off, doubled, mixed up, and whole in the end."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import checks, db, upload_files, uploads
from api.models import AuditEvent, Upload, UploadState
from api.settings import settings
from tests.api.conftest import BODY, Refused, write_model
from tests.api.sending import (
    ask,
    complete,
    content_digest,
    files_of,
    opened,
    pieces,
    put,
    send,
    uploaded,
)
from tests.service import tiny_model

PART_BYTES = 65536


@pytest.fixture(autouse=True)
def _small_parts(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_PART_BYTES", str(PART_BYTES))
    settings.cache_clear()


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A real model of two layers: its weights are several parts."""
    return files_of(tiny_model(tmp_path_factory.mktemp("sent") / "tiny"))


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model of which each file is one part."""
    return files_of(write_model(tmp_path_factory.mktemp("sent") / "small"))


def left(data_dir: Path) -> list[Path]:
    """Return every file of uploads that still lies somewhere."""
    return [path for path in (data_dir / "uploads").rglob("*") if path.is_file()]


# -- the way it should go ----------------------------------------------------------


def test_a_model_in_parts_is_a_model(
    client: TestClient, data_dir: Path, files: dict[str, bytes]
) -> None:
    upload = opened(client, "mine", files)
    weights = next(f for f in upload["files"] if f["path"] == "model.safetensors")
    assert weights["parts"] == -(-weights["bytes"] // PART_BYTES) > 3
    assert upload["missing_parts"] == list(range(1, upload["parts"] + 1))
    assert (upload["state"], upload["part_bytes"]) == ("open", PART_BYTES)
    send(client, upload, files, reversed(upload["missing_parts"][1:]))
    again = client.get("/v1/models/mine").json()
    assert (again["id"], again["missing_parts"]) == (upload["id"], [1])
    send(client, upload, files, [1])
    answer = complete(client, upload)
    model = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/models/{upload['id']}"
    assert (model["id"], model["name"], model["uploaded"]) == (
        upload["id"],
        "mine",
        True,
    )
    assert model["architecture"] == "LlamaForCausalLM"
    assert (model["tensors"], model["dtypes"].keys()) == (20, {"F32"})
    digests = {file["path"]: file["sha256"] for file in model["files"]}
    assert digests == {p: hashlib.sha256(c).hexdigest() for p, c in files.items()}
    assert client.get(f"/v1/models/{upload['id']}").json() == model
    assert left(data_dir) == []
    folder = next((data_dir / "tenants").glob("*/models/*"))
    assert files_of(folder) == files


@pytest.mark.parametrize("by", ["id", "name"])
def test_a_job_names_an_upload_by_its_id_or_name(
    client: TestClient, small: dict[str, bytes], by: str
) -> None:
    model = uploaded(client, "mine", small)
    answer = client.post("/v1/optimize", json={**BODY, "model": model[by]})
    assert answer.status_code == 202, answer.text
    request = answer.json()["request"]
    assert (request["model"], request["model_sha256"]) == ("mine", model["sha256"])


def test_a_deleted_model_is_gone_with_its_bytes(
    client: TestClient, data_dir: Path, small: dict[str, bytes], refused: Refused
) -> None:
    model = uploaded(client, "mine", small)
    assert client.delete(f"/v1/models/{model['id']}").status_code == 204
    for name in (model["id"], "mine"):
        refused(client.get(f"/v1/models/{name}"), 404, "not_found")
        refused(client.delete(f"/v1/models/{name}"), 404, "not_found")
    assert [*(data_dir / "tenants").glob("*/models/*")] == []
    uploaded(client, "mine", small)  # the name is free again


def test_what_happened_is_written_down(
    client: TestClient, small: dict[str, bytes]
) -> None:
    model = uploaded(client, "mine", small)
    client.delete("/v1/models/mine")
    with db.reading() as session:
        rows = session.query(AuditEvent).order_by(AuditEvent.id).all()
    found = [(row.action, row.target, row.details["name"]) for row in rows]
    assert found == [
        ("model.created", model["id"], "mine"),
        ("model.deleted", model["id"], "mine"),
    ]


# -- parts -------------------------------------------------------------------------


def test_a_part_may_be_sent_again(client: TestClient, files: dict[str, bytes]) -> None:
    upload = opened(client, "mine", files)
    send(client, upload, files)
    send(client, upload, files, [1, 2, 2])
    assert complete(client, upload).status_code == 201


def test_the_last_of_two_versions_of_a_part_counts(
    client: TestClient, data_dir: Path, small: dict[str, bytes]
) -> None:
    upload = opened(client, "mine", small)
    send(client, upload, small)
    parts = pieces(upload, small)
    number = next(n for n, c in parts.items() if c == small["tokenizer.json"])
    assert put(client, upload, number, b"[]").status_code == 200
    assert len(left(data_dir)) == len(parts)  # the old version is gone
    assert complete(client, upload).status_code == 201
    folder = next((data_dir / "tenants").glob("*/models/*"))
    assert (folder / "tokenizer.json").read_bytes() == b"[]"


def test_a_part_that_is_not_as_it_must_be_leaves_nothing(
    client: TestClient, data_dir: Path, small: dict[str, bytes], refused: Refused
) -> None:
    upload = opened(client, "mine", small)
    content = pieces(upload, small)[1]
    url = upload["links"]["self"] + "/parts/1"

    def sent(content: bytes, **headers: str) -> Any:
        return put(client, upload, 1, content, **headers)

    wrong = "sha-256=:" + "A" * 43 + "=:"
    refused(sent(content, **{"Content-Digest": wrong}), 422, "digest_mismatch")
    refused(sent(content[:-1]), 400, "length_mismatch")
    refused(sent(content + b"x"), 413, "body_too_large")
    refused(
        sent(content, **{"Content-Encoding": "gzip"}), 415, "unsupported_media_type"
    )
    for header in ("", "sha-256=:short:", "md5=:AAAA:", "sha-256=" + "A" * 44):
        answer = sent(content, **{"Content-Digest": header})
        problem = refused(answer, 422, "validation_error")
        assert problem["errors"][0]["parameter"] == "Content-Digest"
    refused(client.put(url, content=content), 422, "validation_error")
    assert left(data_dir) == []
    both = f"md5=:AAAA:, {sent_digest(content)}"
    assert sent(content, **{"Content-Digest": both}).status_code == 200


def sent_digest(content: bytes) -> str:
    return content_digest(content)["Content-Digest"]


@pytest.mark.parametrize(
    ("number", "status"),
    [("4", 404), ("0", 422), ("-1", 422), ("x", 422), ("9" * 30, 422)],
)
def test_a_part_that_is_none_is_refused(
    client: TestClient, small: dict[str, bytes], number: str, status: int
) -> None:
    upload = opened(client, "mine", small)
    url = f"{upload['links']['self']}/parts/{number}"
    answer = client.put(
        url, content=b"x", headers={"Content-Digest": sent_digest(b"x")}
    )
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_two_clients_may_send_one_part_at_once(
    client: TestClient, data_dir: Path, files: dict[str, bytes]
) -> None:
    upload = opened(client, "mine", files)
    parts = pieces(upload, files)
    send(client, upload, files, [n for n in parts if n != 2])
    versions = [bytes([i]) * len(parts[2]) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda v: put(client, upload, 2, v), versions))
    assert {answer.status_code for answer in answers} == {200}
    with db.reading() as session:
        kept = uploads.parts(session, upload["id"])[2].sha256
    file = upload_files.part_file(upload["id"], 2, kept)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == kept
    assert len([p for p in left(data_dir) if p.name.startswith("2-")]) == 1


# -- the end -----------------------------------------------------------------------


def test_missing_parts_are_named(
    client: TestClient, files: dict[str, bytes], refused: Refused
) -> None:
    upload = opened(client, "mine", files)
    send(client, upload, files, [n for n in upload["missing_parts"] if n not in (2, 4)])
    problem = refused(complete(client, upload), 409, "parts_missing")
    assert problem["missing"] == [2, 4]
    assert "2, 4" in problem["detail"]


def test_complete_may_be_said_twice_and_at_once(
    client: TestClient, small: dict[str, bytes], refused: Refused
) -> None:
    upload = opened(client, "mine", small)
    send(client, upload, small)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: complete(client, upload), range(4)))
    assert {answer.status_code for answer in answers} <= {201, 202}
    assert complete(client, upload).json()["id"] == upload["id"]
    assert len(client.get("/v1/models").json()["data"]) == 1
    refused(put(client, upload, 1, b"x"), 409, "invalid_state")


def test_files_are_what_the_client_says_or_are_refused(
    client: TestClient, data_dir: Path, small: dict[str, bytes], refused: Refused
) -> None:
    right = [
        {"path": path, "sha256": hashlib.sha256(content).hexdigest()}
        for path, content in small.items()
    ]
    upload = opened(client, "mine", small)
    send(client, upload, small)
    strange = {"files": [{"path": "other.json", "sha256": "0" * 64}]}
    refused(complete(client, upload, strange), 422, "validation_error")
    wrong = [*right[1:], {**right[0], "sha256": "0" * 64}]
    problem = refused(
        complete(client, upload, {"files": wrong}), 422, "digest_mismatch"
    )
    assert right[0]["path"] in problem["detail"]
    assert client.get(f"/v1/models/{upload['id']}").json()["state"] == "failed"
    assert left(data_dir) == []
    upload = opened(client, "mine", small)  # the name is free again
    send(client, upload, small)
    assert complete(client, upload, {"files": right}).status_code == 201


@pytest.mark.parametrize(
    ("path", "content", "code", "named"),
    [
        (
            "model.safetensors",
            b"\x80\x04K\x01." + bytes(99),
            "unsupported_model_format",
            "a pickle",
        ),
        (
            "model.safetensors",
            b"PK\x03\x04" + bytes(99),
            "unsupported_model_format",
            "zip",
        ),
        ("model.safetensors", b"\xff" * 8 + b"{}", "model_header_invalid", "truncated"),
        ("config.json", b'{"auto_map": {}}', "model_load_failed", "auto_map"),
        ("config.json", b"{" * 500_000, "model_load_failed", "config.json"),
        ("tokenizer_config.json", b'{"a": 1, "a": 2}', "model_load_failed", "twice"),
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(
    client: TestClient,
    data_dir: Path,
    small: dict[str, bytes],
    refused: Refused,
    path: str,
    content: bytes,
    code: str,
    named: str,
) -> None:
    bad = {**small, path: content}
    upload = opened(client, "bad", bad)
    send(client, upload, bad)
    problem = refused(complete(client, upload), 422, code)
    assert path in problem["detail"]
    assert named in problem["detail"]
    shown = client.get(f"/v1/models/{upload['id']}").json()
    assert (shown["state"], shown["error"]["code"]) == ("failed", code)
    assert left(data_dir) == []
    assert client.get("/v1/models").json()["data"] == []
    refused(complete(client, upload), 409, "invalid_state")
    assert client.delete(f"/v1/models/{upload['id']}").status_code == 204


def test_a_check_goes_on_where_a_process_was_killed(
    client: TestClient, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = opened(client, "mine", files)
    send(client, upload, files)
    taken: list[Path] = []

    def put_two(source: Path, *rest: Any) -> None:
        if len(taken) == 2:
            raise KeyboardInterrupt  # as a kill would: nothing is written after it
        taken.append(source)
        really_put(source, *rest)

    really_put = upload_files._put
    monkeypatch.setattr(upload_files, "_put", put_two)
    with db.transaction() as session:
        row = session.get_one(Upload, upload["id"])
        uploads.begin_check(session, row, {})
    with pytest.raises(KeyboardInterrupt):
        checks.start(upload["id"]).result(30)
    assert client.get("/v1/models/mine").json()["state"] == "checking"
    monkeypatch.setattr(upload_files, "_put", really_put)
    checks.resume()
    model = client.get("/v1/models/mine?wait=30").json()
    assert (model["id"], model["object"]) == (upload["id"], "model")
    assert {f["path"]: f["bytes"] for f in model["files"]} == {
        path: len(content) for path, content in files.items()
    }


def test_a_long_check_is_polled(
    client: TestClient, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = opened(client, "mine", small)
    send(client, upload, small)
    monkeypatch.setattr(settings(), "check_wait_s", 0.0)
    answer = complete(client, upload)
    assert answer.status_code == 202
    assert answer.headers["retry-after"] == "2"
    assert (answer.json()["state"], answer.json()["poll_after_seconds"]) == (
        "checking",
        2,
    )
    assert client.get(f"/v1/models/{upload['id']}?wait=30").json()["name"] == "mine"


def test_an_upload_that_is_given_up_leaves_nothing(
    client: TestClient, data_dir: Path, small: dict[str, bytes], refused: Refused
) -> None:
    upload = opened(client, "mine", small)
    send(client, upload, small, [1])
    problem = refused(
        client.post("/v1/models", json=ask("mine", small)), 409, "name_taken"
    )
    assert problem["upload_id"] == upload["id"]
    assert client.delete("/v1/models/mine").status_code == 204
    assert left(data_dir) == []
    refused(put(client, upload, 1, b"x"), 404, "not_found")
    with db.reading() as session:
        assert session.query(Upload).filter_by(state=UploadState.OPEN).count() == 0
