"""Two workers against one, and a second job on the same model and data.

    python -m tests.bench.workers
    python -m tests.bench.workers --calibration 2048 --validation 2048

Starts the real service twice, each in a folder of its own. Times are the jobs' own,
from their start to their end, so that loading torch counts and waiting does not. The
workers share the machine's cores; the last line is JSON.
"""

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.service import Service, service
from workers import demo

SLA_S = (0.0016, 0.0018)  # per token on an L4; all bf16 takes 0.0019

Body = dict[str, Any]


def main() -> None:
    arguments = parse()
    folder = arguments.model or demo.demo_model(arguments.data_dir)
    figures = {
        **against(folder, arguments),
        "cores": os.cpu_count(),
        "calibration_tokens": arguments.calibration,
        "validation_tokens": arguments.validation,
    }
    print(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calibration", type=int, default=2048)
    parser.add_argument("--validation", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", type=Path, help="another model's folder")
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    return parser.parse_args()


def against(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the same job with one worker and with several; then another with one."""
    with running(folder, 1) as one:
        alone_s, alone = measure(one, body(folder, arguments, SLA_S[0]))
        print(f"1 worker    {alone_s:8.1f} s  sha256 {digest(alone)}")
        again_s, again = measure(one, body(folder, arguments, SLA_S[1]))
        print(f"another SLA {again_s:8.1f} s  {again_s / alone_s:.3f} of the first")
    with running(folder, arguments.workers) as many:
        together_s, together = measure(many, body(folder, arguments, SLA_S[0]))
        print(
            f"{arguments.workers} workers   {together_s:8.1f} s  sha256 {digest(together)}"
        )
    return {
        "one_worker_s": alone_s,
        "workers": arguments.workers,
        "workers_s": together_s,
        "time_ratio": together_s / alone_s,
        "same_bytes": alone == together,
        "other_sla_s": again_s,
        "other_sla_ratio": again_s / alone_s,
        "outcomes": [json.loads(r)["verdict"]["outcome"] for r in (alone, again)],
    }


@contextmanager
def running(model: Path, workers: int) -> Iterator[Service]:
    """Give a service with data of its own, and nothing kept from before."""
    with tempfile.TemporaryDirectory(prefix="precision-bench-") as data_dir:
        models = Path(data_dir) / "models"
        models.mkdir()
        (models / model.name).symlink_to(model.resolve())
        patient = {"PRECISION_LEASE_S": "120"}  # the machine may be busy
        roots = ("--model-root", str(model.parent.resolve()))
        options = ("--workers", str(workers), *roots)
        with service(Path(data_dir), *options, environment=patient) as started:
            yield started


def body(folder: Path, arguments: argparse.Namespace, sla_s: float) -> Body:
    return {
        "model": folder.name,
        "hardware": "l4",
        "latency_sla": sla_s,
        "task": "chat",
        "data_distribution": {
            "name": "web_text",
            "calibration_tokens": arguments.calibration,
            "validation_tokens": arguments.validation,
            "sequence_tokens": arguments.sequence,
        },
    }


def measure(service: Service, request: Body) -> tuple[float, str]:
    """Return the seconds that a job ran, and its report but for the threads it names."""
    job_id = service.client.optimize(request)["id"]
    job = service.client.wait(job_id, poll_s=0.5)
    assert job["status"] == "succeeded", job["error"]
    seconds = float(job["durations"]["running_seconds"])
    document = service.client.report(job_id)
    del document["executed_on"]["threads"]
    return seconds, json.dumps(document)


def digest(report: str) -> str:
    return hashlib.sha256(report.encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
