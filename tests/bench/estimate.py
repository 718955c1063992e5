"""How long an estimate takes, over HTTP: `python -m tests.bench.estimate`.

`POST /v1/estimate` for Qwen2-7B on every device of the catalogue, through the whole
application in this process: routing, key, database, JSON. Every request has lengths of
its own, so that no price is remembered from the one before. `ms` are by the clock, what
a caller waits beside whatever else the machine does; `cpu ms` are the processor's, the
service's own. Stacks with a figure under a physical limit are counted: there are none.
The last line is JSON.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from fastapi.testclient import TestClient

from optimizer.hardware import DEVICES

LIMIT_MS = 100.0
BATCHES = (1, 2, 4)  # what every device holds of the model


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of each request to one device, and figures that beat physics."""

    wall_ms: list[float]
    cpu_ms: list[float]
    beyond: int

    def percentiles(self) -> dict[str, float]:
        return {
            f"{kind}p{q}_ms": round(float(np.percentile(values, q)), 1)
            for kind, values in (("", self.wall_ms), ("cpu_", self.cpu_ms))
            for q in (50, 95)
        }


def service(folder: str) -> TestClient:
    """Start the application on a database of its own; the client has a key."""
    os.environ |= {"PRECISION_DATA_DIR": folder, "PRECISION_LOG_LEVEL": "error"}
    from api import auth, db  # after the environment is set
    from api.app import create_app

    Path(folder).mkdir(exist_ok=True)
    db.migrate()
    with db.transaction() as session:
        token = auth.create_key(session, "bench", "bench")
    client = TestClient(create_app())
    client.headers["Authorization"] = f"Bearer {token}"
    return client


def measured(client: TestClient, device: str, requests: int) -> Figures:
    wall, cpu, beyond = [], [], 0
    for i, batch in zip(range(requests), cycle(BATCHES), strict=False):
        load = {"batch_size": batch, "prompt_tokens": 300 + 17 * i, "output_tokens": 90}
        body = {"model": "qwen2-7b", "hardware": device, "workload": load}
        start, used = time.perf_counter(), time.process_time()
        answer = client.post("/v1/estimate", json=body)
        wall.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - used))
        assert answer.status_code == 200, answer.text
        beyond += sum(
            row[f"{what}_s"] < row["limits"][what]["seconds"]
            for row in answer.json()["formats"]
            for what in ("per_token", "first_token")
        )
    return Figures(wall, cpu, beyond)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=20, help="of each device")
    requests = parser.parse_args().requests
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder, service(folder) as client:
        for device in DEVICES:
            measured(client, device, 1)  # its tables are read once
            found[device] = measured(client, device, requests)
    print(f"{'':18}{'p50 ms':>8}{'p95 ms':>8}{'cpu p50':>9}{'cpu p95':>9}")
    rows = {name: figures.percentiles() for name, figures in found.items()}
    for name, row in rows.items():
        print(
            f"{name:18}{row['p50_ms']:8}{row['p95_ms']:8}"
            f"{row['cpu_p50_ms']:9}{row['cpu_p95_ms']:9}"
        )
    worst = max(row["cpu_p95_ms"] for row in rows.values())
    summary = {
        "devices": rows,
        "worst_p95_ms": max(row["p95_ms"] for row in rows.values()),
        "worst_cpu_p95_ms": worst,
        "limit_ms": LIMIT_MS,
        "under_limit": worst < LIMIT_MS,
        "figures_beyond_physics": sum(f.beyond for f in found.values()),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
