"""`precision doctor` on a terminal of 80 columns, and POST /v1/diagnose."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.cli import main
from tests.api.conftest import Refused

Run = Callable[..., tuple[int, str, str]]


def rows() -> list[dict[str, Any]]:
    """A run whose scale is halved at every step, with losses that are finite."""
    return [
        {
            "step": n,
            "loss": 5.0 - 0.01 * n,
            "grad_norm": math.inf,
            "loss_scale": 2.0 ** (80 - n),
            "skipped": True,
        }
        for n in range(40)
    ]


def text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in lines)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(("doctor", *arguments))
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


def test_a_finding_is_told_with_evidence_and_what_to_do(
    doctor: Run, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text(rows()) + '{"step": 4')
    code, out, _ = doctor(str(path))
    assert code == 3
    assert out.splitlines()[0] == "backoff loop (certain)"
    assert "- 40 of 40 steps were left out (100.0 %), the first at step 0" in out
    assert "first: Begin with a scale of 65536" in out
    assert "not in it: learning_rate" in out
    assert "note: the last line (41) is cut, and left out" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_run_that_is_well_ends_with_zero(doctor: Run, tmp_path: Path) -> None:
    well = [{"step": n, "loss": 5 * 0.9**n, "grad_norm": 1.0} for n in range(40)]
    (tmp_path / "run.jsonl").write_text(text(well))
    code, out, _ = doctor(str(tmp_path))
    assert (code, out.splitlines()[0]) == (0, "nothing wrong (likely)")


def test_json_is_the_answer_of_the_service(
    doctor: Run, tmp_path: Path, client: TestClient
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text(rows()))
    _, out, _ = doctor(str(path), "--json")
    headers = {"Content-Type": "application/jsonl"}
    answer = client.post("/v1/diagnose", content=path.read_bytes(), headers=headers)
    assert answer.status_code == 200
    assert answer.json() == json.loads(out)
    finding = answer.json()["findings"][0]
    assert set(finding) == {
        "verdict", "sure", "said", "evidence", "first", "steps", "layers"
    }  # fmt: skip
    assert finding["steps"] == [0, 1, 2, 3, 4]


def test_what_is_no_log_is_refused_and_says_what_would_be_one(
    doctor: Run, tmp_path: Path
) -> None:
    path = tmp_path / "run.log"
    path.write_text("epoch one went well\n")
    code, out, err = doctor(str(path))
    assert (code, out) == (1, "")
    assert "trainer_state.json" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "the log is empty"), (b'{"accuracy": 1}\n', "it has: accuracy")],
)
def test_a_log_without_figures_is_refused(
    client: TestClient, refused: Refused, content: bytes, said: str
) -> None:
    headers = {"Content-Type": "application/x-ndjson"}
    answer = client.post("/v1/diagnose", content=content, headers=headers)
    refused(answer, 422, "log_unreadable")
    assert said in answer.json()["detail"]


def test_a_body_of_another_kind_is_refused(
    client: TestClient, refused: Refused
) -> None:
    answer = client.post(
        "/v1/diagnose", content=b"x", headers={"Content-Type": "text/csv"}
    )
    refused(answer, 415, "unsupported_media_type")


def test_who_has_no_key_gets_no_diagnosis(client: TestClient, refused: Refused) -> None:
    del client.headers["Authorization"]
    headers = {"Content-Type": "application/jsonl"}
    answer = client.post("/v1/diagnose", content=b"{}", headers=headers)
    refused(answer, 401, "unauthenticated")
