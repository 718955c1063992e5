"""Tasks that train: what may be said of them, and what a probe's job shows."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import jobs, storage
from api.db import transaction
from api.page_losses import drawn
from optimizer.training.spec import TASKS, TASKS_OF
from tests.api.conftest import Refused

pytestmark = pytest.mark.usefixtures("tiny")
BODY = {"model": "tiny", "hardware": "h100", "task": "finetune"}
REPORT: dict[str, Any] = {
    "schema": "precision.training_report/1",
    "verdict": {"outcome": "recommended", "chosen": "bf16"},
    "precision_stack": {"lm_head": "bf16"},
    "stack": [
        {
            "matrix": "lm_head",
            "layer": "lm_head",
            "component": "lm_head",
            "fprop": "bf16",
            "dgrad": "bf16",
            "wgrad": "bf16",
            "reason": "follows the fp32 baseline",
        }
    ],
    "candidates": [
        {"name": "bf16", "status": "safe", "unusable": None},
        {"name": "fp8_current", "status": None, "unusable": "no units"},
    ],
}
SUMMARY = {
    "outcome": "recommended",
    "precision_stack": REPORT["precision_stack"],
    "front": [],
    "chosen": {},
    "training": {
        "precision": "bf16",
        "sentence": "Train in bf16: it follows fp32.",
        "held_out_loss": {"value": 0.001, "low": 0.0, "high": 0.002, "floor": 0.003},
        "candidates": [{"name": "bf16", "status": "safe", "unusable": None}],
        "loss_scaling": {"needed": False, "initial": 65536.0},
    },
}


def post(client: TestClient, **changes: Any) -> Any:
    """Send JSON as Python writes it: NaN and Infinity too."""
    content = json.dumps({**BODY, **changes})
    headers = {"Content-Type": "application/json"}
    return client.post("/v1/optimize", content=content, headers=headers)


@pytest.mark.parametrize("task", TASKS)
def test_a_training_is_queued_with_what_is_usual_for_it(
    client: TestClient, task: str
) -> None:
    answer = post(client, task=task)
    assert answer.status_code == 202, answer.text
    asked = answer.json()["request"]
    assert asked["task"] == task
    assert asked["training"] == TASKS_OF[task].to_json()


def test_how_it_trains_may_be_said(client: TestClient) -> None:
    said = {
        "type": "lora",
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "warmup_steps": 3,
        "batch_size": 2,
        "accumulation": 4,
        "sequence_tokens": 64,
        "steps": 50,
        "clip": None,
        "lora_rank": 4,
        "candidates": ["fp16", "fp8_delayed"],
        "without_masters": True,
    }
    planned = {"arithmetic": "fp16", "loss_scaling": "static", "initial_scale": 1024}
    answer = post(client, task={**said, "planned": planned})
    assert answer.status_code == 202, answer.text
    training = answer.json()["request"]["training"]
    assert {k: training[k] for k in said if k != "type"} == {
        k: v for k, v in said.items() if k != "type"
    }
    assert training["planned"]["initial_scale"] == 1024


@pytest.mark.parametrize(
    ("pointer", "task"),
    [
        ("/task/steps", {"steps": 0}),
        ("/task/steps", {"steps": 1_000_000}),
        ("/task/learning_rate", {"learning_rate": 0}),
        ("/task/learning_rate", {"learning_rate": float("nan")}),
        ("/task/learning_rate", {"learning_rate": 1e9}),
        ("/task/learning_rate", {"learning_rate": "fast"}),
        ("/task/batch_size", {"batch_size": 0}),
        ("/task/sequence_tokens", {"sequence_tokens": 10**6}),
        ("/task/candidates", {"candidates": []}),
        ("/task/momentum", {"momentum": 0.9}),
        ("/task/planned/initial_scale", {"planned": {"initial_scale": -1}}),
    ],
)
def test_an_absurd_training_is_refused_where_it_was_written(
    client: TestClient, refused: Refused, pointer: str, task: dict[str, Any]
) -> None:
    answer = post(client, task={"type": "finetune", **task})
    refused(answer, 422, "validation_error", pointer)


def test_a_step_of_too_many_sequences_is_refused(
    client: TestClient, refused: Refused
) -> None:
    task = {"type": "finetune", "batch_size": 1024, "accumulation": 2}
    problem = refused(post(client, task=task), 422, "bad_spec", "/task")
    assert "batch_size × accumulation is 2048" in json.dumps(
        problem, ensure_ascii=False
    )


@pytest.mark.parametrize(
    ("field", "given"), [("optimizer", "adm"), ("candidates", ["fp9"])]
)
def test_an_unknown_word_is_told_the_known_ones(
    client: TestClient, refused: Refused, field: str, given: Any
) -> None:
    answer = post(client, task={"type": "finetune", field: given})
    problem = refused(answer, 422, f"unknown_{field}", f"/task/{field}")
    assert "there are:" in json.dumps(problem)


@pytest.mark.parametrize(
    ("pointer", "changes"),
    [
        ("/latency_sla", {"latency_sla": 0.02}),
        ("/workload", {"workload": {"batch_size": 2}}),
        ("/engine", {"engine": "vllm"}),
        ("/search/formats", {"search": {"formats": ["bf16"]}}),
        (
            "/data_distribution/calibration_tokens",
            {"data_distribution": {"name": "chat", "calibration_tokens": 512}},
        ),
    ],
)
def test_what_only_serving_has_is_refused(
    client: TestClient, refused: Refused, pointer: str, changes: dict[str, Any]
) -> None:
    refused(post(client, **changes), 422, "validation_error", pointer)


def test_a_task_that_serves_has_no_learning_rate(
    client: TestClient, refused: Refused
) -> None:
    answer = post(client, task={"type": "chat", "learning_rate": 0.1})
    refused(answer, 422, "validation_error", "/task/learning_rate")


# -- what a job shows


@pytest.fixture
def done(client: TestClient) -> str:
    """A probe's job that succeeded, with its report."""
    job_id = str(post(client).json()["id"])
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        assert claim.spec.training == TASKS_OF["finetune"]
        stored = [storage.put(job_id, 1, "report.json", json.dumps(REPORT).encode())]
        jobs.succeed(session, claim, "recommended", SUMMARY, stored)
    return job_id


def test_every_part_of_a_probes_job_answers(client: TestClient, done: str) -> None:
    job = client.get(f"/v1/jobs/{done}").json()
    assert job["result"]["training"]["precision"] == "bf16"
    assert job["progress"]["best"] is None
    stack = client.get(f"/v1/jobs/{done}/stack").json()
    assert stack["chosen"] == "bf16"
    assert stack["sites"][0]["site"] == "lm_head"
    assert client.get(f"/v1/jobs/{done}/front").json()["data"] == []
    trials = client.get(f"/v1/jobs/{done}/trials").json()["data"]
    assert [(t["id"], t["chosen"], t["refused"]) for t in trials] == [
        ("bf16", True, None),
        ("fp8_current", False, "no units"),
    ]
    assert client.get(f"/v1/jobs/{done}/report").json()["schema"] == REPORT["schema"]


def test_the_page_of_a_probes_job_speaks_of_training(
    client: TestClient, done: str
) -> None:
    page = client.get(f"/ui/jobs/{done}").text
    assert "Train in bf16: it follows fp32." in page
    assert "Held-out loss against fp32" in page
    assert "Recommended" in page
    for of_serving in ("Pareto front", "KL from the reference", "Per output token"):
        assert of_serving not in page


def test_losses_are_drawn_as_they_come(client: TestClient) -> None:
    job_id = str(post(client).json()["id"])
    address = f"/ui/jobs/{job_id}"
    assert "No step is done yet" in client.get(address).text
    one = {"order": 0, "promoted": False, "steps": 4}
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        for told in (
            {**one, "run": "fp32", "first": 0, "losses": [3.0, 2.0, 1.5, 1.0]},
            {**one, "run": "fp32", "order": 1, "first": 0, "losses": [3.0, 2.5]},
            {**one, "run": "fp16", "first": 0, "losses": [3.0, None]},
            {**one, "run": "fp16", "first": 2, "losses": [2.5]},
        ):
            assert jobs.trained(session, claim, told)
    page = client.get(address).text
    for name in ("fp32", "fp32, other order", "fp16"):
        assert f"<title>{name}</title>" in page
    assert "No step is done yet" not in page
    assert "Candidates" in page  # a phase, as a probe calls it
    events = client.get(f"/v1/jobs/{job_id}/events").json()["data"]
    assert [e["type"] for e in events].count("job.losses") == 4


def test_a_curve_by_hand() -> None:
    def told(run: str, first: int, *losses: float | None) -> dict[str, Any]:
        plain = {"order": 0, "promoted": False, "steps": 3}
        return {"run": run, "first": first, "losses": [*losses], **plain}

    # Losses of 0 to 1 on a scale from -0.06 to 1.18: y = 350 - 334 (loss + 0.06) / 1.24
    found = drawn([told("fp32", 0, 1.0, 0.5), told("fp32", 2, 0.0)])
    assert found is not None
    assert [c.path for c in found.curves] == ["M64.0 64.5L474.0 199.2L884.0 333.8"]
    again = drawn([told("fp32", 0, 9.0, 9.0), told("fp32", 0, 1.0, 0.5, 0.0)])
    assert again == found  # a run that begins again takes the place of what was told
    assert drawn([]) is None
    assert drawn([told("fp32", 0, None, None)]) is None


def test_a_probes_job_can_be_compared(client: TestClient, done: str) -> None:
    answer = client.get("/ui/compare", params={"job": [done, done]})
    assert answer.status_code < 500
