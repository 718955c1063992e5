"""Downloads by RFC 9110: conditions, one range, HEAD, and what is gone."""

import base64
import hashlib
import random
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api import jobs, storage
from api.db import transaction
from api.models import Artifact
from api.transitions import now
from tests.api.conftest import SUMMARY, Refused

CONTENT = random.Random(0).randbytes(2**20 + 4321)  # in every process of the tests
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ETAG = f'"{SHA256}"'


@pytest.fixture
def url(job_id: str, client: TestClient) -> str:
    """A large artifact of a job that succeeded."""
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        stored = storage.put(job_id, 1, "out/w.safetensors", CONTENT, "checkpoint")
        jobs.succeed(session, claim, "sla_met", SUMMARY, [stored])
    return f"/v1/jobs/{job_id}/artifacts/out/w.safetensors"


def test_the_whole_file_with_its_digests(url: str, client: TestClient) -> None:
    answer = client.get(url)
    assert (answer.status_code, answer.content) == (200, CONTENT)
    digest = base64.b64encode(bytes.fromhex(SHA256)).decode()
    assert answer.headers["etag"] == ETAG
    assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-length"] == str(len(CONTENT))
    said = answer.headers["content-disposition"]
    assert said == 'attachment; filename="out_w.safetensors"'
    assert "sandbox" in answer.headers["content-security-policy"]


def test_head_says_the_same_without_the_bytes(url: str, client: TestClient) -> None:
    whole, head = client.get(url), client.head(url)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "repr-digest"):
        assert head.headers[name] == whole.headers[name]


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=-5", len(CONTENT) - 5, len(CONTENT)),
        ("bytes=100-", 100, len(CONTENT)),
        ("Bytes = 5-99999999999", 5, len(CONTENT)),
        ("bytes=-99999999999", 0, len(CONTENT)),
    ],
)
def test_one_range(
    url: str, client: TestClient, asked: str, start: int, stop: int
) -> None:
    answer = client.get(url, headers={"Range": asked})
    assert answer.content == CONTENT[start:stop]
    if stop - start < len(CONTENT):
        assert answer.status_code == 206
        span = f"bytes {start}-{stop - 1}/{len(CONTENT)}"
        assert answer.headers["content-range"] == span


@pytest.mark.parametrize(
    "asked",
    ["bytes=0-1,5-6", "bytes=5-2", "lines=1-2", "bytes=", "bytes=-", "bytes=a-b", "x"],
)
def test_what_is_no_single_range_gets_everything(
    url: str, client: TestClient, asked: str
) -> None:
    answer = client.get(url, headers={"Range": asked})
    assert (answer.status_code, len(answer.content)) == (200, len(CONTENT))


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=1052897-", "bytes=-0"])
def test_a_range_behind_the_end_is_a_problem(
    url: str, client: TestClient, refused: Refused, asked: str
) -> None:
    answer = client.get(url, headers={"Range": asked})
    refused(answer, 416, "range_not_satisfiable")
    assert answer.headers["content-range"] == f"bytes */{len(CONTENT)}"


def test_a_download_that_was_cut_goes_on(url: str, client: TestClient) -> None:
    half = len(CONTENT) // 2
    first = client.get(url, headers={"Range": f"bytes=0-{half - 1}"})
    going_on = {"Range": f"bytes={half}-", "If-Range": first.headers["etag"]}
    rest = client.get(url, headers=going_on)
    assert rest.status_code == 206
    assert hashlib.sha256(first.content + rest.content).hexdigest() == SHA256


def test_another_file_by_now_comes_whole(url: str, client: TestClient) -> None:
    stale = {"Range": "bytes=5-", "If-Range": '"something else"'}
    answer = client.get(url, headers=stale)
    assert (answer.status_code, len(answer.content)) == (200, len(CONTENT))


@pytest.mark.parametrize("tag", [ETAG, f"W/{ETAG}", f'"x", {ETAG}', "*"])
def test_what_the_caller_has_is_not_sent(
    url: str, client: TestClient, tag: str
) -> None:
    answer = client.get(url, headers={"If-None-Match": tag})
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["etag"] == ETAG
    # Browsers take these headers for those that they keep: a page must not lose its own.
    policy = client.get(url).headers["content-security-policy"]
    assert answer.headers["content-security-policy"] == policy


def test_what_the_caller_has_not_is_sent(url: str, client: TestClient) -> None:
    answer = client.get(url, headers={"If-None-Match": '"other"'})
    assert answer.status_code == 200


def test_bytes_that_are_gone_or_cut_are_not_sent(
    url: str, client: TestClient, refused: Refused, data_dir: Path
) -> None:
    (file,) = data_dir.glob("artifacts/*/1/out/w.safetensors")
    file.write_bytes(CONTENT[:-1])
    refused(client.get(url), 410, "artifact_expired")
    file.unlink()
    refused(client.get(url), 410, "artifact_expired")


def test_a_purged_file_says_when(
    url: str, client: TestClient, refused: Refused
) -> None:
    with transaction() as session:
        for row in session.query(Artifact):
            row.purged_at = now(session)
    assert "deleted on" in refused(client.get(url), 410, "artifact_expired")["detail"]
    (listed,) = client.get(url.rsplit("/out", 1)[0]).json()["data"]
    assert listed["purged_at"] is not None
    assert (listed["kind"], listed["bytes"]) == ("checkpoint", len(CONTENT))


def test_a_storage_that_is_away_is_no_defect_of_the_job(
    url: str, client: TestClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> int:
        raise storage.StorageUnavailable("away")

    monkeypatch.setattr(storage.Local, "size", away)
    refused(client.get(url), 503, "overloaded")
