"""A dataset that is none is refused, and leaves no file."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api import settings
from api.app import create_app
from tests.api.conftest import Refused

pytestmark = pytest.mark.usefixtures("nothing_is_queued")
LINES = b'{"text": "one"}\n{"text": "two"}\n'
JSONL = {"Content-Type": "application/jsonl"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 of 0"),
        (b"\n\n", "0 of 0"),
        (b'{"text": "  "}\n', "0 of 1"),
        (b'{"text": "one"}\n{"txt": "two"}\n', "line 2"),
        (b"\xff\n", "line 1"),
        (b'{"text": "one"}\nnonsense\n', "line 2"),
    ],
)
def test_an_empty_or_broken_dataset_is_refused(
    client: TestClient, refused: Refused, data_dir: Path, content: bytes, named: str
) -> None:
    answer = client.put("/v1/datasets/mine", content=content, headers=JSONL)
    problem = refused(answer, 422, "calibration_data_empty")
    assert named in problem["detail"]
    assert client.get("/v1/datasets").json()["data"][-1]["built_in"]
    assert list((data_dir / "datasets").glob(".*")) == []


def test_a_dataset_of_a_bad_name_type_or_size_is_refused(
    client: TestClient,
    refused: Refused,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = client.put("/v1/datasets/.x", content=LINES, headers=JSONL)
    refused(answer, 422, "validation_error")
    answer = client.put("/v1/datasets/web_text", content=LINES, headers=JSONL)
    refused(answer, 409, "name_taken")
    answer = client.put("/v1/datasets/mine", json={"text": "one"})
    refused(answer, 415, "unsupported_media_type")
    monkeypatch.setenv("PRECISION_MAX_DATASET_BYTES", "1024")
    settings.settings.cache_clear()
    with TestClient(create_app(), headers={"Authorization": f"Bearer {key}"}) as small:
        url = "/v1/datasets/mine"
        answer = small.put(url, content=LINES * 100, headers=JSONL)
        refused(answer, 413, "body_too_large")
        answer = small.put(url, content=iter([LINES] * 100), headers=JSONL)
        refused(answer, 413, "body_too_large")
