"""One request, the whole way through the API."""

import hashlib
import json

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from api import auth, db, jobs, queue, settings, storage
from api.app import create_app
from optimizer import report_script
from tests.api.conftest import BODY, REPORT, SUMMARY, Refused, jobs_in_database


@pytest.fixture
def other(client: TestClient) -> dict[str, str]:
    """Headers of another tenant."""
    with db.transaction() as session:
        key = auth.create_key(session, "other", "test")
    return {"Authorization": f"Bearer {key}"}


def test_the_flat_body_is_accepted_verbatim(
    tiny: None, client: TestClient, bells: list[str]
) -> None:
    body = {
        "model": "tiny",
        "hardware": "h100",
        "latency_sla": 0.02,
        "task": "chat",
        "data_distribution": "web_text",
    }
    response = client.post("/v1/optimize", json=body)
    job = response.json()
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert int(response.headers["retry-after"]) == job["poll_after_seconds"]
    assert bells == [job["id"]]
    assert (job["object"], job["status"], job["result"]) == ("job", "queued", None)
    assert job["request"]["latency_sla"]["per_token_s"] == 0.02
    assert len(job["request"]["model_sha256"]) == 64
    assert not {"model_path", "dataset_path"} & job["request"].keys()
    assert job["links"]["self"] == response.headers["location"]


def test_the_object_forms_mean_the_same(tiny: None, client: TestClient) -> None:
    flat = client.post("/v1/optimize", json=BODY).json()["request"]
    objects = {
        "model": {"id": "tiny"},
        "hardware": {"id": "H100 SXM5"},
        "latency_sla": {"per_token_s": 0.02},
        "task": {"type": "chat"},
        "data_distribution": {"name": "web_text"},
        "workload": {},
        "search": {"engine": "any"},
    }
    assert client.post("/v1/optimize", json=objects).json()["request"] == flat


def test_what_is_left_out_follows_from_the_task(tiny: None, client: TestClient) -> None:
    body = {
        "model": "tiny",
        "hardware": "local",
        "task": "summarization",
        "workload": {"batch_size": 4},
        "search": {"formats": ["bf16", "fp8_e4m3", "bf16"]},
        "engine": "vllm",
        "max_memory_bytes": 10**9,
        "data_distribution": {"name": "code", "calibration_tokens": 512, "seed": 7},
        "metadata": {"team": "ads"},
    }
    job = client.post("/v1/optimize", json=body).json()
    request = job["request"]
    lengths = {"prompt_tokens": 2048, "output_tokens": 128}
    served = {"tensor_parallel": 1, "cuda_graphs": True}
    assert request["workload"] == {"batch_size": 4, **lengths, **served}
    nothing = {"per_token_s": None, "first_token_s": None}
    assert request["latency_sla"] == {**nothing, "percentile": 0.5}
    assert request["formats"] == ["bf16", "fp8_e4m3"]
    assert (request["engine"], request["max_memory_bytes"]) == ("vllm", 10**9)
    assert (request["calibration_tokens"], request["seed"]) == (512, 7)
    assert job["metadata"] == {"team": "ads"}


def test_a_target_at_a_percentile_asks_more_of_the_median(
    tiny: None, client: TestClient
) -> None:
    sla = {"per_token_s": 0.01, "percentile": 0.99}
    answer = client.post("/v1/optimize", json={**BODY, "latency_sla": sla}).json()
    kept = answer["request"]["latency_sla"]
    assert kept["percentile"] == 0.99
    # The 99th percentile is stated as 1.93 / 1.51 of the median.
    assert kept["per_token_s"] == pytest.approx(0.01 * 1.51 / 1.93)
    for wrong in (0.4, 1.0, "half"):
        body = {**BODY, "latency_sla": {**sla, "percentile": wrong}}
        assert client.post("/v1/optimize", json=body).status_code == 422


def test_a_folder_under_an_allowed_root_needs_no_name(
    tiny: object, client: TestClient
) -> None:
    body = {**BODY, "model": {"path": str(tiny)}}
    assert client.post("/v1/optimize", json=body).json()["request"]["model"] == "tiny"


def test_a_broker_that_is_away_loses_nothing(
    tiny: None, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real bell, and nobody listens at that port
    monkeypatch.setenv("PRECISION_DATA_DIR", str(settings.settings().data_dir))
    monkeypatch.setenv("PRECISION_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.settings.cache_clear()
    queue.producer.cache_clear()
    assert client.post("/v1/optimize", json=BODY).status_code == 202
    assert jobs_in_database() == 1


def test_a_job_is_followed_to_its_result(done: str, client: TestClient) -> None:
    job = client.get(f"/v1/jobs/{done}").json()
    assert (job["status"], job["outcome"]) == ("succeeded", "sla_met")
    best = {"per_token_s": 0.01, "first_token_s": None, "kl_nats": 0.001}
    counted = {"trials_done": 0, "trials_planned": 0}  # by a worker; there was none
    shown = {"percent": 100.0, "eta_seconds": None, "best": best, **counted}
    assert job["progress"] == shown
    assert job["poll_after_seconds"] is None
    report = f"/v1/jobs/{done}/report?format="
    links = {"json": f"{report}json", "html": f"{report}html"}
    assert job["result"] == {**SUMMARY, "outcome": "sla_met", "report": links}
    assert client.get(links["json"]).json() == REPORT
    assert client.get(links["html"]).headers["content-type"].startswith("text/html")
    assert job["timestamps"]["finished_at"].endswith("Z")


def test_the_report_comes_as_it_is_asked_for(
    done: str, client: TestClient, refused: Refused
) -> None:
    url = f"/v1/jobs/{done}/report"
    for accept, kind in [
        ("application/json", "application/json"),
        ("text/html,application/xhtml+xml;q=0.9,*/*;q=0.8", "text/html"),
        ("*/*", "application/json"),
        ("text/*", "text/html"),
        ("application/json;q=0.1, text/html;q=0.9", "text/html"),
    ]:
        response = client.get(url, headers={"Accept": accept})
        assert response.headers["content-type"].startswith(kind), accept
        assert "sandbox" in response.headers["content-security-policy"]
    page = client.get(url, params={"format": "html"})
    assert report_script.policy() in page.headers["content-security-policy"]
    assert "allow-same-origin" not in page.headers["content-security-policy"]
    for answer in (
        client.get(url, headers={"Accept": "image/png"}),
        client.get(url, params={"format": "docx"}),
        client.get(url, params={"format": "pdf"}),  # an older job has none
    ):
        problem = refused(answer, 406, "not_acceptable")
        assert "html" in problem["detail"]
    assert problem["available"] == ["json", "html"]
    refused(client.get(url, params={"format": ""}), 406, "not_acceptable")


def test_every_form_of_the_report_has_its_type(job_id: str, client: TestClient) -> None:
    forms = {
        "json": ("report.json", "application/json"),
        "html": ("report.html", "text/html"),
        "md": ("report.md", "text/markdown"),
        "csv": ("layers.csv", "text/csv"),
        "pdf": ("report.pdf", "application/pdf"),
    }
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        stored = [
            storage.put(job_id, 1, file, form.encode())
            for form, (file, _) in forms.items()
        ]
        jobs.succeed(session, claim, "sla_met", SUMMARY, stored)
    for form, (_, kind) in forms.items():
        url = f"/v1/jobs/{job_id}/report"
        named = client.get(url, params={"format": form})
        accepted = client.get(url, headers={"Accept": kind})
        assert named.content == accepted.content == form.encode()
        assert named.headers["content-type"].startswith(kind)
        assert "script-src" not in named.headers["content-security-policy"] or (
            form == "html"
        )


def test_stack_and_front_come_from_the_report(done: str, client: TestClient) -> None:
    stack = client.get(f"/v1/jobs/{done}/stack").json()
    assert stack["precision_stack"] == REPORT["precision_stack"]
    assert stack["sites"][0]["reason"] == "kept"
    front = client.get(f"/v1/jobs/{done}/front").json()
    assert (front["chosen"], front["data"]) == ("p0", REPORT["front"])


@pytest.mark.parametrize("what", ["report", "stack", "front"])
def test_no_result_before_the_end_nor_after_a_failure(
    job_id: str, client: TestClient, refused: Refused, what: str
) -> None:
    refused(client.get(f"/v1/jobs/{job_id}/{what}"), 409, "not_final")
    assert client.get(f"/v1/jobs/{job_id}/artifacts").json()["data"] == []
    client.post(f"/v1/jobs/{job_id}/cancel")
    problem = refused(client.get(f"/v1/jobs/{job_id}/{what}"), 409, "invalid_state")
    assert problem["current_status"] == "cancelled"


def test_artifacts_carry_their_sha256(
    done: str, client: TestClient, refused: Refused
) -> None:
    listed = client.get(f"/v1/jobs/{done}/artifacts").json()["data"]
    assert [a["name"] for a in listed] == ["report.html", "report.json"]
    for artifact in listed:
        url = artifact["links"]["self"]
        whole = client.get(url)
        etag = f'"{hashlib.sha256(whole.content).hexdigest()}"'
        assert etag == f'"{artifact["sha256"]}"' == whole.headers["etag"]
        assert len(whole.content) == artifact["bytes"]
        assert "attachment" in whole.headers["content-disposition"]
        assert client.head(url).headers["etag"] == etag
        again = client.get(url, headers={"If-None-Match": etag})
        assert (again.status_code, again.content) == (304, b"")
        rest = client.get(url, headers={"Range": "bytes=5-", "If-Range": etag})
        assert (rest.status_code, rest.content) == (206, whole.content[5:])
    refused(client.get(f"/v1/jobs/{done}/artifacts/other.json"), 404, "not_found")
    refused(client.get(f"/v1/jobs/{done}/artifacts/..%2F..%2Fx"), 404, "not_found")


def test_deleted_bytes_are_gone_and_not_a_failure(
    done: str, client: TestClient, refused: Refused
) -> None:
    storage.store().remove(storage.key(done, 1, "report.json"))
    refused(client.get(f"/v1/jobs/{done}/report"), 410, "artifact_expired")


def test_cancel_is_idempotent(job_id: str, client: TestClient) -> None:
    with db.transaction() as session:
        jobs.claim(session, job_id, "worker-1")
    for _ in range(2):
        response = client.post(f"/v1/jobs/{job_id}/cancel")
        assert (response.status_code, response.json()["status"]) == (202, "cancelling")


def test_cancel_after_the_end_changes_nothing(done: str, client: TestClient) -> None:
    response = client.post(f"/v1/jobs/{done}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "succeeded")


def test_jobs_are_listed_in_pages(tiny: None, client: TestClient) -> None:
    made = [client.post("/v1/optimize", json=BODY).json()["id"] for _ in range(5)]
    first = client.get("/v1/jobs", params={"limit": 3}).json()
    after = first["next_cursor"]
    second = client.get("/v1/jobs", params={"limit": 3, "after": after}).json()
    seen = [job["id"] for job in first["data"] + second["data"]]
    assert sorted(seen, reverse=True) == seen
    assert set(seen) == set(made)
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert "result" not in first["data"][0]
    assert client.get("/v1/jobs", params={"status": "failed"}).json()["data"] == []


@pytest.mark.parametrize(
    "parameters",
    [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"status": "done"}],
)
def test_a_bad_parameter_is_named(
    client: TestClient, refused: Refused, parameters: dict[str, str]
) -> None:
    answer = client.get("/v1/jobs", params=parameters)
    problem = refused(answer, 422, "validation_error")
    assert [f["parameter"] for f in problem["errors"]] == list(parameters)


def test_a_strange_cursor_is_refused(client: TestClient, refused: Refused) -> None:
    answer = client.get("/v1/jobs", params={"after": "' OR 1=1"})
    refused(answer, 400, "bad_cursor")


def test_another_tenants_things_do_not_exist(
    done: str,
    client: TestClient,
    other: dict[str, str],
    refused: Refused,
) -> None:
    paths = ["", "/events", "/report", "/stack", "/front", "/artifacts"]
    paths.append("/artifacts/report.json")
    for path in paths:
        answer = client.get(f"/v1/jobs/{done}{path}", headers=other)
        refused(answer, 404, "not_found")
    answer = client.post(f"/v1/jobs/{done}/cancel", headers=other)
    refused(answer, 404, "not_found")
    stream = {**other, "Accept": "text/event-stream"}
    refused(client.get(f"/v1/jobs/{done}/events", headers=stream), 404, "not_found")
    assert client.get("/v1/jobs", headers=other).json()["data"] == []


def test_every_error_of_the_framework_is_a_problem(
    client: TestClient, refused: Refused
) -> None:
    refused(client.get("/nowhere"), 404, "not_found")
    refused(client.get("/v1/jobs/"), 404, "not_found")
    answer = client.delete("/v1/jobs")
    refused(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"


def test_a_defect_is_a_problem_without_a_traceback(
    client: TestClient, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode() -> None:
        raise RuntimeError("password=hunter2")

    client.app.get("/explode")(explode)  # type: ignore[attr-defined]
    answer = client.get("/explode", headers={"X-Request-Id": "mine-1"})
    refused(answer, 500, "internal_error")
    assert "hunter2" not in answer.text
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (line,) = [line for line in lines if line["event"] == "request_failed"]
    assert line["request_id"] == "mine-1"
    assert "hunter2" in line["exception"]


def test_a_database_that_is_away_is_503(client: TestClient, refused: Refused) -> None:
    with db.transaction() as session:
        session.execute(text("ALTER TABLE jobs RENAME TO lost"))
    answer = client.get("/v1/jobs")
    refused(answer, 503, "overloaded")
    assert answer.headers["retry-after"]
    assert client.get("/livez").status_code == 200


def test_every_answer_carries_a_request_id(client: TestClient) -> None:
    assert client.get("/healthz").json() == client.get("/livez").json()
    assert client.get("/livez").headers["x-request-id"].startswith("req_")
    mine = client.get("/livez", headers={"X-Request-Id": "abc.1"})
    assert mine.headers["x-request-id"] == "abc.1"
    strange = client.get("/livez", headers={"X-Request-Id": "a b;c"})
    assert strange.headers["x-request-id"].startswith("req_")


def test_ready_says_what_is_missing(
    data_dir: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.settings.cache_clear()
    with TestClient(create_app()) as client:
        assert client.get("/readyz").status_code == 503  # nothing is migrated
        db.migrate()
        answer = client.get("/readyz")
    assert answer.status_code == 200  # jobs are kept until the broker is back
    assert answer.json()["status"] == "degraded"
    assert answer.json()["checks"] == {"database": "ok", "broker": "unreachable"}


def test_metrics_count_jobs_and_requests(job_id: str, client: TestClient) -> None:
    client.get(f"/v1/jobs/{job_id}")
    client.get("/nowhere")
    lines = client.get("/metrics").text.splitlines()
    assert 'precision_jobs{status="queued"} 1.0' in lines
    assert 'precision_jobs_created_total{hardware="h100",task="chat"} 1.0' in lines
    count = "precision_http_request_duration_seconds_count"
    labels = 'method="GET",route="/v1/jobs/{job_id}",status="200"'
    assert f"{count}{{{labels}}} 1.0" in lines
    assert f'{count}{{method="GET",route="unmatched",status="404"}} 1.0' in lines
    assert job_id not in "".join(lines)


def test_the_description_is_public_and_whole(client: TestClient) -> None:
    answer = client.get("/openapi.json", headers={"Authorization": ""})
    description = answer.json()
    assert description["openapi"].startswith("3.1")
    operations = [
        operation
        for path in description["paths"].values()
        for operation in path.values()
    ]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    for operation in operations:
        problem = operation["responses"]["default"]["content"]
        assert list(problem) == ["application/problem+json"]
        assert "422" not in operation["responses"]
    text = json.dumps(description)
    for name in ("Problem", "FieldProblem", "OptimizeRequest", "JobView"):
        assert name in description["components"]["schemas"]
    assert "HTTPValidationError" not in text
