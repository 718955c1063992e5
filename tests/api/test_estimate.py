"""POST /v1/estimate: an answer without a job, and refusals that say what would do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from optimizer.hardware import DEVICES
from tests.api.conftest import CONFIG, Refused, jobs_in_database, write_model

Json = dict[str, Any]
BODY: Json = {"model": "qwen2-7b", "hardware": "h100"}
SIZES = {  # what `tiny` of the fixtures lacks
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _nothing_is_queued(client: TestClient, bells: list[str]) -> Iterator[None]:
    yield
    assert jobs_in_database() == 0
    assert bells == []


def post(client: TestClient, **changes: Any) -> Any:
    return client.post("/v1/estimate", json={**BODY, **changes})


def answered(client: TestClient, **changes: Any) -> Json:
    response = post(client, **changes)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    json.dumps(found, allow_nan=False)
    return found


def test_the_flat_body_of_a_job_is_estimated(client: TestClient) -> None:
    found = answered(
        client, latency_sla=0.02, task="chat", data_distribution="web_text"
    )
    assert found["model"]["parameters"] == 7_615_616_512
    assert found["model"]["source"].startswith("https://huggingface.co/Qwen/Qwen2-7B")
    assert found["workload"]["prompt_tokens"] == 512
    rows = {row["name"]: row for row in found["formats"]}
    assert rows.keys() == {"fp32", "bf16", "fp8_weight_only", "fp8", "fp8_kv_cache"}
    bf16 = rows["bf16"]
    assert bf16["memory"]["rows"][0]["bytes"] == 2 * 7_615_616_512
    assert bf16["memory"]["total_bytes"] == sum(
        row["bytes"] for row in bf16["memory"]["rows"]
    )
    assert bf16["per_token_s"] >= bf16["limits"]["per_token"]["seconds"]
    assert bf16["basis"] in ("kernels", "roofline")
    assert bf16["tokens_per_s"] == 1 / bf16["per_token_s"]
    assert found["basis"]["engine"] == "vllm"
    assert found["fp8"]["pays"]
    assert found["latency_sla"]["met_by"] == list(rows)
    assert found["latency_sla"]["asked"]["per_token_s"] == 0.02
    assert found["recommendation"]["stack"] == "bf16"
    assert found["training"] is None
    assert found["training_advice"]["lora"]["precision"] == "bf16"
    assert found["training_advice"]["pretraining"]["tier"] == "fp8"
    assert found["warnings"] == []


def test_a_device_without_tables_says_that_its_figures_are_modelled(
    client: TestClient,
) -> None:
    found = answered(client, hardware="v100")
    assert found["basis"]["engine"] is None
    assert {row["basis"] for row in found["formats"]} == {"roofline"}
    assert found["refused"].keys() == {"fp8_weight_only", "fp8", "fp8_kv_cache"}
    assert found["latency_sla"] is None
    assert {row["meets_sla"] for row in found["formats"]} == {None}


def test_a_registered_model_is_estimated_by_its_config(
    client: TestClient, data_dir: Path
) -> None:
    folder = write_model(data_dir / "models" / "own")
    config = {**CONFIG, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    for ref in ("own", {"path": str(folder)}):
        found = answered(client, model=ref)
        # Two layers: q, k, v, o of 8 × 8, three matrices of 8 × 16, two norms; table,
        # head and last norm.
        layers = 2 * (4 * 64 + 3 * 128 + 16)
        assert found["model"]["parameters"] == layers + 2 * 128 + 8
        assert found["model"]["source"] in ("registered", "folder")


def test_a_config_that_says_too_little_is_named(
    client: TestClient, tiny: Path, refused: Refused
) -> None:
    problem = refused(post(client, model="tiny"), 422, "model_load_failed", "/model")
    assert "num_hidden_layers" in problem["detail"]
    ref = {"path": str(tiny)}
    refused(post(client, model=ref), 422, "model_load_failed", "/model/path")


def test_an_unknown_model_is_told_the_closest_and_the_kinds(
    client: TestClient, tiny: Path, refused: Refused
) -> None:
    problem = refused(post(client, model="Qwen/qwen2-8b"), 422, "unknown_model")
    assert "did you mean" in problem["detail"]
    assert "qwen2-7b" in problem["detail"].partition("?")[0]
    for kind in ("registered", "published", "folder"):
        assert kind in problem["detail"]
    problem = refused(post(client, model="xyz"), 422, "unknown_model", "/model")
    assert "did you mean" not in problem["detail"]


def test_an_unknown_device_is_told_the_closest(
    client: TestClient, refused: Refused
) -> None:
    problem = refused(post(client, hardware="h1000"), 422, "unknown_hardware")
    assert "h100" in problem["detail"]
    problem = refused(post(client, hardware="local"), 422, "unknown_hardware")
    assert "worker" in problem["detail"]


def test_a_target_under_the_physical_limit_is_told_what_sets_it(
    client: TestClient, refused: Refused
) -> None:
    answer = post(client, latency_sla=0.001)
    problem = refused(
        answer, 422, "sla_below_physical_limit", "/latency_sla/per_token_s"
    )
    assert "memory bandwidth sets" in problem["detail"]
    assert "3350 GB/s" in problem["detail"]
    answer = post(client, latency_sla={"first_token_s": 1e-4})
    problem = refused(
        answer, 422, "sla_below_physical_limit", "/latency_sla/first_token_s"
    )


def test_a_target_that_nothing_meets_is_told_what_would(client: TestClient) -> None:
    found = answered(client, hardware="l4", latency_sla=0.03)
    target = found["latency_sla"]
    assert target["met_by"] == []
    assert found["recommendation"]["stack"] is None
    bits, devices = target["would_meet"]
    assert "bits each" in bits
    assert "h100" in devices
    assert set(target["largest_batch"].values()) == {0}


def test_a_target_of_the_first_token_alone_has_no_bits(client: TestClient) -> None:
    found = answered(client, hardware="t4", latency_sla={"first_token_s": 0.12})
    assert found["latency_sla"]["met_by"] == []
    assert len(found["latency_sla"]["would_meet"]) == 1


def test_what_no_device_can_do_has_no_way(client: TestClient) -> None:
    workload = {"batch_size": 64, "prompt_tokens": 512, "output_tokens": 128}
    found = answered(
        client, hardware="b200", latency_sla={"first_token_s": 0.1}, workload=workload
    )
    assert found["latency_sla"]["met_by"] == []
    assert found["latency_sla"]["would_meet"]


def test_what_does_not_fit_is_told_how_much_and_what_would(
    client: TestClient, refused: Refused
) -> None:
    workload = {"batch_size": 64, "prompt_tokens": 512, "output_tokens": 128}
    answer = post(client, hardware="t4", workload=workload)
    problem = refused(answer, 422, "does_not_fit_memory", "/workload/batch_size")
    assert "fp16, needs 18.4 GB and a device has 16.0 GB" in problem["detail"]
    assert "at most 9 sequences of 640 tokens" in problem["detail"]
    assert "64 of at most 155 tokens would" in problem["detail"]


def test_one_sequence_that_does_not_fit_is_told_its_longest_context(
    client: TestClient, refused: Refused
) -> None:
    workload = {"batch_size": 1, "prompt_tokens": 100_000, "output_tokens": 100}
    answer = post(client, hardware="t4", workload=workload)
    detail = refused(answer, 422, "does_not_fit_memory")["detail"]
    assert "no sequence of 100100 tokens fits; 1 of at most" in detail


def test_weights_that_do_not_fit_ask_for_more_devices(
    client: TestClient, refused: Refused
) -> None:
    answer = post(client, model="llama-3.1-70b", hardware="t4")
    problem = refused(answer, 422, "does_not_fit_memory", "/workload/tensor_parallel")
    assert "weights alone take 141.1 GB" in problem["detail"]
    found = answered(client, model="llama-3.1-70b", workload={"tensor_parallel": 4})
    assert found["recommendation"]["stack"] == "bf16"
    assert found["formats"][0]["memory"]["devices"] == 4


def test_devices_without_a_link_are_not_joined(
    client: TestClient, refused: Refused
) -> None:
    answer = post(client, hardware="t4", workload={"tensor_parallel": 2})
    refused(answer, 422, "unsupported_hardware", "/workload/tensor_parallel")


@pytest.mark.parametrize(
    ("pointer", "change"),
    [
        ("/workload/batch_size", {"workload": {"batch_size": 0}}),
        ("/workload/batch_size", {"workload": {"batch_size": -1}}),
        ("/workload/prompt_tokens", {"workload": {"prompt_tokens": 0}}),
        ("/workload/output_tokens", {"workload": {"output_tokens": 2**31}}),
        ("/workload/tensor_parallel", {"workload": {"tensor_parallel": 65}}),
        ("/training/zero_stage", {"training": {"zero_stage": 4}}),
        ("/training/batch_size", {"training": {"batch_size": 0}}),
        ("/training/lora_rank", {"training": {"lora_rank": 0}}),
        ("/training/x", {"training": {"x": 1}}),
        ("/latency_sla", {"latency_sla": -1}),
        ("/max_memory_bytes", {"max_memory_bytes": 0}),
    ],
)
def test_absurd_sizes_are_refused_where_they_stand(
    client: TestClient, refused: Refused, pointer: str, change: Json
) -> None:
    refused(post(client, **change), 422, "validation_error", pointer)


@pytest.mark.parametrize(
    "field", ["scenario", "arithmetic", "optimizer", "checkpointing"]
)
def test_an_unknown_word_of_training_is_told_the_known_ones(
    client: TestClient, refused: Refused, field: str
) -> None:
    answer = post(client, training={field: "adm"})
    problem = refused(answer, 422, f"unknown_{field}", f"/training/{field}")
    assert "there are" in problem["detail"]


def test_training_is_counted_and_advised(client: TestClient) -> None:
    found = answered(client, training={"sequence_tokens": 2048})["training"]
    rows = {row["name"]: row["bytes"] for row in found["memory"]["rows"]}
    state = ("weights", "gradients", "master_weights", "optimizer_state")
    assert sum(rows[name] for name in state) == 16 * 7_615_616_512
    assert sum(rows.values()) == found["memory"]["total_bytes"]
    assert not found["fits"]
    assert found["mixed_precision"]["pays"]
    assert found["advice"]["precision"] == "bf16 with FP8 matrices"
    assert any(reason["folklore"] for reason in found["advice"]["reasons"])


@pytest.mark.parametrize(
    ("task", "scenario", "batch", "precision"),
    [
        ("pretrain", "pretraining", 8, "bf16 with FP8 matrices"),
        ("finetune", "finetuning", 8, "bf16"),
        ("lora", "lora", 8, "bf16"),
        ({"type": "finetune", "batch_size": 2}, "finetuning", 2, "bf16"),
    ],
)
def test_a_task_that_trains_is_counted_and_advised(
    client: TestClient, task: str | Json, scenario: str, batch: int, precision: str
) -> None:
    found = answered(client, task=task)["training"]
    assert found["assumed"]["scenario"] == found["advice"]["scenario"] == scenario
    assert found["assumed"]["batch_size"] == batch
    assert found["assumed"]["lora_rank"] == (8 if scenario == "lora" else None)
    assert found["advice"]["precision"] == precision
    rows = {row["name"]: row["bytes"] for row in found["memory"]["rows"]}
    frozen = rows.get("frozen_weights", 0)
    assert frozen == (2 * 7_615_616_512 if scenario == "lora" else 0)


def test_what_a_task_says_of_its_training_is_counted(client: TestClient) -> None:
    said = {"optimizer": "sgd_momentum", "batch_size": 4, "sequence_tokens": 256}
    task = {"type": "pretrain", **said, "planned": {"arithmetic": "fp32"}}
    more = {"zero_stage": 2, "data_parallel": 8, "batch_size": 1}
    found = answered(client, task=task, training=more)["training"]
    assumed = {**said, **more, "arithmetic": "fp32"}  # `training` goes before the task
    assert assumed.items() <= found["assumed"].items()
    rows = {row["name"]: row["bytes"] for row in found["memory"]["rows"]}
    assert rows["weights"] == 4 * 7_615_616_512
    assert rows["optimizer_state"] == 4 * 7_615_616_512 / 8


def test_where_mixed_precision_does_not_pay_the_advice_says_so(
    client: TestClient, tiny: Path
) -> None:
    (tiny / "config.json").write_text(json.dumps({**CONFIG, **SIZES}))
    short = {"type": "pretrain", "sequence_tokens": 64}
    found = answered(client, model={"path": str(tiny)}, task=short)["training"]
    assert not found["mixed_precision"]["pays"]
    assert found["advice"]["scenario"] == "small_model"
    assert found["advice"]["precision"] == "fp32"
    assert found["advice"]["reasons"][0]["folklore"]


@pytest.mark.parametrize(
    ("pointer", "change"),
    [
        ("/latency_sla", {"task": "finetune", "latency_sla": 0.02}),
        ("/task/learning_rate", {"task": {"type": "chat", "learning_rate": 0.1}}),
        ("/task/steps", {"task": {"type": "lora", "steps": 0}}),
        ("/task/optimizer", {"task": {"type": "lora", "optimizer": "adm"}}),
    ],
)
def test_a_task_is_refused_as_a_job_would_be(
    client: TestClient, pointer: str, change: Json
) -> None:
    answer = post(client, **change)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer


def test_training_is_told_even_where_serving_does_not_fit(client: TestClient) -> None:
    found = answered(
        client,
        model="llama-3.1-70b",
        training={"data_parallel": 512, "zero_stage": 3, "scenario": "lora"},
    )
    assert not found["formats"][0]["fits"]
    assert found["training"]["advice"]["scenario"] == "lora"
    assert found["training"]["memory"]["devices"] == 512


def test_adapters_alone_are_trained_where_lora_is_asked_for(client: TestClient) -> None:
    found = answered(client, training={"scenario": "lora"})["training"]
    assert found["assumed"]["lora_rank"] == 8
    assert found["fits"]  # 15.2 GB of frozen weights, and little more
    whole = answered(client, training={"scenario": "lora", "lora_rank": None})
    assert not whole["training"]["fits"]


def test_more_tokens_than_the_model_takes_are_warned_of(client: TestClient) -> None:
    workload = {"prompt_tokens": 10_000}
    found = answered(client, model="llama-3-8b", workload=workload)
    assert "8192" in found["warnings"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DEVICES))
def test_every_device_has_an_answer(client: TestClient, name: str) -> None:
    found = answered(client, hardware=name)
    for row in found["formats"]:
        assert row["per_token_s"] >= row["limits"]["per_token"]["seconds"]
        assert row["first_token_s"] >= row["limits"]["first_token"]["seconds"]
