"""What workers leave for watchers: counted in rows, on both databases."""

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from api import auth, watched
from api.db import reading, transaction
from api.metrics import Metrics
from api.models import Gpu
from api.pieces import PieceClaim
from api.transitions import now
from optimizer import swept
from optimizer.pieces import Piece

STACK = {"layers.0.ffn_in": "fp8_e4m3_token", "layers.0.ffn_out": "bf16"}


def of(payload: dict[str, Any], tenant_id: str = "") -> PieceClaim:
    return PieceClaim("job", tenant_id, 1, Piece("sweep", "0" * 64, payload))


def tenant(name: str) -> str:
    with transaction() as session:
        return auth.tenant_named(session, name).id


@pytest.mark.parametrize(
    ("payload", "precision"),
    [
        ({"family": "core", "sequences": [0]}, "fp8"),
        ({"family": "int8"}, "int8"),
        ({"family": "core+int8"}, "fp8"),
        ({"family": "statistics"}, "reference"),
        ({"pairs": [["lm_head", "fp6_e3m2_mx"], ["lm_head", "bf16"]]}, "fp6"),
        ({"stack": STACK}, "fp8"),
        ({"stack": {**STACK, "lm_head": "int4_weight_only"}}, "mixed"),
        ({"stack": {"lm_head": "fp32"}}, "reference"),
        ({"stack": None}, "reference"),
        ({"candidate": {"arithmetic": "fp16"}}, "fp16"),
        ({}, "reference"),
        # a process that was taken over says what it likes
        ({"family": "x" * 1000}, "reference"),
        ({"stack": {"a": 7, "b": ["fp8"]}}, "reference"),
        ({"pairs": ["int8", [1], [1, 2], ["a", "int8", 3]]}, "reference"),
    ],
)
def test_a_measurement_is_about_one_of_few_precisions(
    payload: dict[str, Any], precision: str
) -> None:
    assert watched.precision_of(of(payload).piece) == precision


def test_the_core_is_that_of_the_sweep() -> None:
    assert swept.CORE == watched.CORE


@pytest.mark.usefixtures("database")
def test_measurements_of_all_tenants_add_up() -> None:
    acme, umbrella = tenant("acme"), tenant("umbrella")
    ended = [
        (of({"family": "core"}, acme), "measured", 0.05),
        (of({"family": "core"}, acme), "measured", 0.05),
        (of({"family": "core"}, umbrella), "measured", 2.0),
        (of({"family": "int8"}, acme), "measured", 7200.0),
        (of({"family": "int8"}, acme), "failed", 30.0),
    ]
    for claim, result, seconds in ended:
        with transaction() as session:
            watched.note(session, claim, result, seconds)
    with reading() as session:
        assert watched.counted(session) == {
            ("failed", "int8"): 1,
            ("measured", "fp8"): 3,
            ("measured", "int8"): 1,
        }
        times = watched.times(session, (0.1, 5.0, 3600.0))
    assert (times.at_most, times.total) == ((2, 3, 3), 4)
    assert times.sum_s == pytest.approx(7202.1)
    said = told()
    tried = {
        (s.labels["result"], s.labels["precision"]): s.value
        for s in said["precision_trials"].samples
        if s.name.endswith("_total")
    }
    assert tried[("measured", "fp8")] == 3
    buckets = {
        s.labels["le"]: s.value
        for s in said["precision_trial_seconds"].samples
        if s.name.endswith("_bucket")
    }
    assert (buckets["0.1"], buckets["5.0"], buckets["+Inf"]) == (2, 3, 4)


@pytest.mark.usefixtures("database")
def test_nothing_was_measured_at_first() -> None:
    with reading() as session:
        assert watched.counted(session) == {}
        assert watched.times(session, (1.0,)) == ((0,), 0, 0.0)
    assert told()["precision_gpu_memory_used_bytes"].samples == []


@pytest.mark.usefixtures("database")
def test_a_gpu_is_shown_as_long_as_its_worker_lives() -> None:
    with transaction() as session:
        watched.show_gpus(session, {"NVIDIA H200 00aa11bb": 1, "NVIDIA L4 22cc33dd": 5})
    with transaction() as session:
        watched.show_gpus(session, {"NVIDIA H200 00aa11bb": 2**37})
    samples = told()["precision_gpu_memory_used_bytes"].samples
    found = {s.labels["device"]: s.value for s in samples}
    assert found == {"NVIDIA H200 00aa11bb": 2**37, "NVIDIA L4 22cc33dd": 5}
    with transaction() as session:
        silent = timedelta(minutes=2)
        session.execute(update(Gpu).values(at=now(session) - silent))
        assert watched.gpus(session) == {}
        watched.show_gpus(session, {"NVIDIA L4 22cc33dd": 7})
        assert watched.gpus(session) == {"NVIDIA L4 22cc33dd": 7}
        assert session.query(Gpu).count() == 1


def told() -> dict[str, Any]:
    text = Metrics(lambda: 0).render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}
