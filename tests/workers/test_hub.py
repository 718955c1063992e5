"""Models that a worker fetches from a hub: a real one, on this machine."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import auth, db, hub as addresses, jobs, settings, upload_files
from api.app import create_app
from api.models import Job, RegisteredModel, Status, Upload
from api.transitions import Claim
from optimizer import checkpoint
from optimizer.errors import Cancelled
from tests.hub_server import Hub, answer, part, serving
from tests.optimizer.example_document import example_document
from tests.service import BODY, service, tiny_model
from tests.workers import in_thread
from workers import beat, hub as fetching, relay
from workers.tasks import run_job

COMMIT = "0123456789abcdef0123456789abcdef01234567"
URI = f"hf://acme/tiny@{COMMIT}"
FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def hub(
    database: str, model: Path, bells: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A hub that has the tiny model, among other things, and that we may ask."""
    monkeypatch.setattr(fetching, "PAUSE_S", 0.01)
    monkeypatch.setattr(fetching, "POLL_S", 0.01)
    monkeypatch.setattr(fetching, "STRETCH_BYTES", 100_000)
    monkeypatch.setenv("PRECISION_CHECK_WAIT_S", "60")
    with serving() as running:
        content = {path.name: path.read_bytes() for path in model.iterdir()}
        more = ["pytorch_model.bin", "model.fp16.safetensors", "onnx/model.onnx"]
        more += ["../config.json", "modeling_tiny.py", "README.md"]
        content |= dict.fromkeys(more, b"x")
        running.repositories["acme/tiny", COMMIT] = content
        operate(
            monkeypatch,
            HUB_URL=running.url,
            HUB_MODELS="acme/*, other/one",
            HUB_ALLOW="127.0.0.1",
        )
        yield running


def operate(monkeypatch: pytest.MonkeyPatch, **said: str) -> None:
    for name, value in said.items():
        monkeypatch.setenv(f"PRECISION_{name}", value)
    settings.settings.cache_clear()


@pytest.fixture
def numerics(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a job's process computes with, in the place of the real one."""
    in_thread.use(monkeypatch)
    seen: list[Any] = []
    run, torch = ModuleType("optimizer.run"), ModuleType("torch")
    torch.set_num_threads = lambda count: None  # type: ignore[attr-defined]

    def optimize(spec: Any, *_: object) -> Any:
        seen.append(spec)
        return example_document(layers=2)

    run.optimize = optimize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optimizer.run", run)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return seen


def request(model: object = URI) -> dict[str, Any]:
    return {**BODY, "model": model}


def submit(client: TestClient, model: object = URI) -> str:
    made = client.post("/v1/optimize", json=request(model))
    assert made.status_code == 202, made.text
    return str(made.json()["id"])


def claimed(job_id: str) -> Claim:
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "test")
    assert claim is not None
    return claim


def bring(claim: Claim, told: Any = lambda share: None) -> Any:
    return fetching.bring(claim, lambda: None, told)


def failed(claim: Claim) -> dict[str, Any]:
    with pytest.raises(relay.Refused) as refused:
        bring(claim)
    assert refused.value.problem["phase"] == "fetch"
    return refused.value.problem


def row(job_id: str) -> Job:
    with db.reading() as session:
        return session.get_one(Job, job_id)


def stored() -> list[RegisteredModel]:
    with db.reading() as session:
        return session.query(RegisteredModel).all()


# -- what is asked for -------------------------------------------------------------


@pytest.mark.parametrize("named", [URI, {"uri": URI}, {"id": URI}])
def test_a_job_may_name_a_commit_of_an_allowed_repository(
    hub: Hub, client: TestClient, named: object
) -> None:
    job = row(submit(client, named))
    assert (job.spec["model"], job.spec["model_path"]) == (URI, "")
    assert hub.asked == []  # the API fetches nothing


# -- what is fetched ----------------------------------------------------------------


def test_a_worker_fetches_it_once_and_it_is_the_tenants(
    hub: Hub, client: TestClient, numerics: list[Any], model: Path
) -> None:
    def slow(handler: BaseHTTPRequestHandler) -> bool:
        time.sleep(1.5 if "/api/" in handler.path else 0)  # the beat tells of it
        return False

    hub.disturb = slow
    job_id = submit(client)
    run_job(job_id)
    job = row(job_id)
    assert job.status is Status.SUCCEEDED, job.error
    assert sorted(hub.files_asked()) == FILES
    (spec,) = numerics
    assert spec.model_sha256 == checkpoint.fingerprint(model)
    assert job.spec["model_path"] == spec.model_path
    assert {p.name for p in Path(spec.model_path).iterdir()} == set(FILES)
    events = client.get(f"/v1/jobs/{job_id}/events").json()["data"]
    phases = [e["data"]["phase"] for e in events if e["type"] == "job.phase_changed"]
    assert phases[0] == "fetch"
    (listed,) = client.get("/v1/models").json()["data"]
    assert listed["name"] == f"tiny-{COMMIT[:12]}"
    before = len(hub.asked)
    again = submit(client)
    assert row(again).spec["model_sha256"] == spec.model_sha256  # known at once
    run_job(again)
    assert row(again).status is Status.SUCCEEDED
    assert len(hub.asked) == before
    retried = client.post(f"/v1/jobs/{job_id}/retry")
    assert retried.status_code == 202, retried.text


def test_what_was_deleted_is_fetched_again(
    hub: Hub, client: TestClient, numerics: list[Any]
) -> None:
    run_job(submit(client))
    (found,) = stored()
    assert client.delete(f"/v1/models/{found.id}").status_code == 204
    before = len(hub.asked)
    job_id = submit(client)
    run_job(job_id)
    assert row(job_id).status is Status.SUCCEEDED
    assert len(hub.asked) > before


def test_each_tenant_fetches_its_own(hub: Hub, client: TestClient) -> None:
    bring(claimed(submit(client)))
    with db.transaction() as session:
        key = auth.create_key(session, "umbrella", "test", ["admin"])
    before = len(hub.asked)
    headers = {"Authorization": f"Bearer {key}"}
    with TestClient(create_app(), headers=headers) as other:
        job_id = submit(other)
        assert row(job_id).spec["model_sha256"] == ""  # nothing tells of the others'
        bring(claimed(job_id))
    assert len(hub.asked) == 2 * before
    assert len({found.tenant_id for found in stored()}) == len(stored()) == 2


def test_jobs_at_once_fetch_it_once(hub: Hub, client: TestClient) -> None:
    claims = [claimed(submit(client)) for _ in range(2)]
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda claim=claim: found.append(bring(claim)))
        for claim in claims
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert found[0].path == found[1].path
    ranges = [asked for asked in hub.asked if "/cdn" in asked[0]]
    assert len(ranges) == len(set(ranges))  # no stretch came twice


def test_a_name_that_is_taken_is_not_taken_away(
    hub: Hub, client: TestClient, model: Path
) -> None:
    claim = claimed(submit(client))
    where = addresses.address(URI)
    with db.transaction() as session:
        session.add(
            RegisteredModel(
                tenant_id=claim.tenant_id,
                name=where.name,
                path=str(model),
                stamp="",
                sha256="0" * 64,
                architecture="x",
                parameters=1,
                stored_bytes=1,
                dtypes={},
            )
        )
    assert bring(claim).name == where.id(claim.tenant_id)


# -- what goes wrong -----------------------------------------------------------------


def test_a_connection_that_breaks_goes_on_where_it_was(
    hub: Hub, client: TestClient
) -> None:
    cut = iter([40_000, 70_000])
    content = hub.repositories["acme/tiny", COMMIT]["model.safetensors"]

    def disturb(handler: BaseHTTPRequestHandler) -> bool:
        if "/cdn" in handler.path and (length := next(cut, 0)):
            part(handler, content, length)
            return True
        return False

    hub.disturb = disturb
    shares: list[float] = []
    found = bring(claimed(submit(client)), shares.append)
    assert (found.path / "model.safetensors").read_bytes() == content
    begun = [r for path, r in hub.asked if "/cdn" in path]
    assert begun[:3] == ["bytes=0-99999", "bytes=40000-139999", "bytes=110000-209999"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_cancelled_job_leaves_what_came_to_the_next(
    hub: Hub,
    client: TestClient,
    numerics: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beat, "PATIENCE_S", 60.0)  # else this very process would go
    operate(monkeypatch, BEAT_S="0.1")
    job_id = submit(client)

    def disturb(handler: BaseHTTPRequestHandler) -> bool:
        if "/cdn" in handler.path and handler.headers["Range"] == "bytes=100000-199999":
            client.post(f"/v1/jobs/{job_id}/cancel")
            threading.Event().wait(2)  # the beat hears of it meanwhile
        return False

    hub.disturb = disturb
    run_job(job_id)
    assert row(job_id).status is Status.CANCELLED
    assert stored() == []
    hub.disturb = lambda handler: False
    hub.asked.clear()
    bring(claimed(submit(client)))
    assert hub.asked[0] != ("", "")
    assert not any("/api/models" in path for path, _ in hub.asked)  # it is known
    assert next(r for path, r in hub.asked if "/cdn" in path) != "bytes=0-99999"
    with db.reading() as session:
        assert [upload.state for upload in session.query(Upload)] == ["complete"]


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "model_not_found"), (401, "model_not_open"), (403, "model_not_open")],
)
def test_what_the_hub_does_not_give_is_the_models_fault(
    hub: Hub, client: TestClient, numerics: list[Any], status: int, code: str
) -> None:
    hub.disturb = lambda handler: answer(handler, status)
    job_id = submit(client)
    run_job(job_id)
    job = row(job_id)
    assert (job.status, numerics) == (Status.FAILED, [])
    assert job.error is not None
    assert (job.error["code"], job.error["category"]) == (code, "model")
    assert (job.error["retryable"], job.error["phase"]) == (False, "fetch")
    assert URI in job.error["message"]
    assert len(hub.asked) == 1


def test_a_hub_that_is_down_may_be_asked_later(hub: Hub, client: TestClient) -> None:
    hub.disturb = lambda handler: answer(handler, 503)
    job_id = submit(client)
    problem = failed(claimed(job_id))
    assert (problem["code"], problem["category"]) == ("hub_unreachable", "platform")
    assert problem["retryable"]
    assert "503" in problem["message"]
    assert len(hub.asked) == fetching.TRIES


def test_a_hub_that_comes_back_is_enough(hub: Hub, client: TestClient) -> None:
    left = iter([503, 429, 500])
    hub.disturb = lambda handler: bool(
        (status := next(left, 0)) and answer(handler, status)
    )
    assert bring(claimed(submit(client))).architecture == "LlamaForCausalLM"


def test_a_hub_that_nobody_answers_for(
    hub: Hub, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    operate(monkeypatch, HUB_URL="http://127.0.0.1:1")
    problem = failed(claimed(submit(client)))
    assert (problem["code"], problem["retryable"]) == ("hub_unreachable", True)


def test_a_private_hub_must_be_allowed(
    hub: Hub, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    operate(monkeypatch, HUB_ALLOW="")
    problem = failed(claimed(submit(client)))
    assert "refused" in problem["message"]
    operate(monkeypatch, HUB_URL=f"https://127.0.0.1:{hub.port}")
    assert "PRECISION_HUB_ALLOW" in failed(claimed(submit(client)))["message"]
    assert hub.asked == []


@pytest.mark.parametrize(
    "elsewhere",
    [
        "https://169.254.169.254/latest/meta-data",
        "https://[64:ff9b::a9fe:a9fe]/",
        "http://10.0.0.1/x",
        "file:///etc/passwd",
        "/acme/tiny/for/ever",
        "",
    ],
)
def test_a_redirect_leads_nowhere_that_is_not_allowed(
    hub: Hub, client: TestClient, elsewhere: str
) -> None:
    def disturb(handler: BaseHTTPRequestHandler) -> bool:
        if "/api/" in handler.path:
            return False
        return answer(handler, 302, Location=elsewhere)

    hub.disturb = disturb
    problem = failed(claimed(submit(client)))
    assert problem["code"] == "hub_unreachable"
    assert "refused" in problem["message"] or "sends us on" in problem["message"]
    assert stored() == []


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"[]",
        b'{"sha": "x", "siblings": []}',
        b'{"sha": "0123456789abcdef0123456789abcdef01234567"}',
        b" " * (fetching.LISTING_BYTES + 1),
    ],
    ids=["nothing", "a list", "another commit", "no files", "no end"],
)
def test_a_list_that_is_none_is_the_hubs_fault(
    hub: Hub, client: TestClient, listing: bytes
) -> None:
    hub.disturb = lambda handler: answer(handler, 200, listing)
    problem = failed(claimed(submit(client)))
    assert (problem["code"], problem["category"]) == ("hub_answer_invalid", "platform")


def test_more_bytes_than_there_are_to_be_are_not_taken(
    hub: Hub, client: TestClient
) -> None:
    def disturb(handler: BaseHTTPRequestHandler) -> bool:
        if not handler.path.endswith("/config.json"):
            return False
        return answer(handler, 206, b"x" * 2**20, Content_Range="bytes 0-9/10")

    hub.disturb = disturb
    assert "more of config.json" in failed(claimed(submit(client)))["message"]


def test_a_repository_without_weights_that_we_take(
    hub: Hub, client: TestClient
) -> None:
    del hub.repositories["acme/tiny", COMMIT]["model.safetensors"]
    problem = failed(claimed(submit(client)))
    assert problem["code"] == "unsupported_model_format"
    assert (problem["category"], problem["retryable"]) == ("model", False)
    assert hub.files_asked() == []


def test_the_preflight_comes_before_anything_else(hub: Hub, client: TestClient) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 1
    header += b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    evil = len(header).to_bytes(8, "little") + header + bytes(4)
    hub.repositories["acme/tiny", COMMIT]["model.safetensors"] = evil
    problem = failed(claimed(submit(client)))
    assert (problem["code"], problem["category"]) == ("model_header_invalid", "model")
    assert stored() == []
    hub.asked.clear()
    failed(claimed(submit(client)))  # what was refused is looked at anew
    assert "/api/models" in hub.asked[0][0]


def test_other_bytes_than_the_hub_says_are_refused(
    hub: Hub, client: TestClient
) -> None:
    hub.lies["model.safetensors"] = "0" * 64
    problem = failed(claimed(submit(client)))
    assert (problem["code"], problem["category"]) == ("digest_mismatch", "model")


@pytest.mark.parametrize(
    ("setting", "code", "category"),
    [
        ("TENANT_STORAGE_BYTES", "storage_quota_exceeded", "user"),
        ("MAX_MODEL_BYTES", "model_too_large", "model"),
    ],
)
def test_what_does_not_fit_is_not_fetched(
    hub: Hub,
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    code: str,
    category: str,
) -> None:
    operate(monkeypatch, **{setting: "100000"})
    problem = failed(claimed(submit(client)))
    assert (problem["code"], problem["category"]) == (code, category)
    assert hub.files_asked() == []


def test_what_is_not_allowed_any_more_is_not_fetched(
    hub: Hub, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(client)
    operate(monkeypatch, HUB_MODELS="")
    problem = failed(claimed(job_id))
    assert (problem["code"], problem["category"]) == ("model_uri_not_allowed", "user")
    assert hub.asked == []


def test_who_looks_up_may_stop_it_while_others_fetch(
    hub: Hub, client: TestClient
) -> None:
    claim = claimed(submit(client))
    where = addresses.address(URI)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise Cancelled

    with upload_files.locked(where.id(claim.tenant_id)) as mine:
        assert mine
        with pytest.raises(Cancelled):
            fetching.bring(claim, look, lambda share: None)
    assert hub.asked == []


@pytest.mark.service
@pytest.mark.slow
def test_the_whole_service_optimizes_a_model_of_a_hub(
    model: Path, tmp_path: Path
) -> None:
    """With real numerics, in a process that has no network."""
    with serving() as running:
        content = {path.name: path.read_bytes() for path in model.iterdir()}
        running.repositories["acme/tiny", COMMIT] = content
        own = {
            "PRECISION_HUB_URL": running.url,
            "PRECISION_HUB_MODELS": "acme/tiny",
            "PRECISION_HUB_ALLOW": "127.0.0.1",
        }
        with service(tmp_path, environment=own) as started:
            job_id = started.client.optimize({**BODY, "model": {"uri": URI}})["id"]
            job = started.client.wait(job_id)
            assert job["status"] == "succeeded", job["error"]
            report = started.client.report(job_id)
    assert report["model"]["sha256"] == checkpoint.fingerprint(model)
