"""A second job on the same model and data, with another target, against the first.

    python -m tests.bench.second
    python -m tests.bench.second --hardware h100 --targets 0.02,0.0008

Every job runs in a process of its own, as a worker's jobs do, and takes over what the
ones before it left: the results that a service keeps in its database. A job's time is
from its call to its document; loading the libraries, which a worker does before a job
arrives or while it begins, is printed beside it. The last line is JSON; its ratio is of
the slowest of the later jobs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers import demo

MOST = 0.1  # of the first job's time, that another target may take
Row = dict[str, Any]


def main() -> None:
    arguments = parse()
    if arguments.job is not None:
        print(json.dumps(run(arguments)))
        return
    rows = []
    print(
        f"{'target':>10}{'job s':>8}{'libraries s':>13}{'of the first':>14}  computed"
    )
    with tempfile.TemporaryDirectory(prefix="precision-bench-") as folder:
        for target in arguments.targets.split(","):
            row = child(arguments, target, Path(folder) / "kept.json")
            rows.append(row)
            share = row["job_s"] / rows[0]["job_s"]
            print(
                f"{target:>10}{row['job_s']:8.1f}{row['libraries_s']:13.1f}{share:14.3f}"
                f"  {row['outcome']}: {row['computed'] or 'nothing'}",
                flush=True,
            )
    first, *later = rows
    slowest = max(row["job_s"] for row in later)
    figures = {
        "first_s": first["job_s"],
        "second_s": slowest,
        "ratio": slowest / first["job_s"],
        "ratio_with_libraries": max(row["job_s"] + row["libraries_s"] for row in later)
        / (first["job_s"] + first["libraries_s"]),
        "at_most": MOST,
        "stacks_measured": [row["computed"].get("validate", 0) for row in rows],
        "calibration_tokens": arguments.calibration,
        "validation_tokens": arguments.validation,
    }
    print(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hardware", default="l4")
    parser.add_argument(
        "--targets",
        default="0.0016,0.0018,0.0014",
        help="seconds per token, the first job's first; all bf16 takes 0.0019 on an l4",
    )
    parser.add_argument("--calibration", type=int, default=2048)
    parser.add_argument("--validation", type=int, default=2048)
    parser.add_argument("--model", type=Path, help="another model's folder")
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    parser.add_argument("--job", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def child(arguments: argparse.Namespace, target: str, kept: Path) -> Row:
    """Run one job in a process of its own; return what it says of itself."""
    folder = arguments.model or demo.demo_model(arguments.data_dir)
    options = ["--hardware", arguments.hardware, "--model", str(folder)]
    sizes = [arguments.calibration, arguments.validation]
    for name, size in zip(("--calibration", "--validation"), sizes, strict=True):
        options += [name, str(size)]
    command = [sys.executable, "-m", "tests.bench.second", *options]
    done = subprocess.run(
        [*command, "--job", target, "--kept", str(kept)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run(arguments: argparse.Namespace) -> Row:
    """Run one job here, with what others kept."""
    start = time.perf_counter()
    from optimizer.pieces import Compute, Memory, Piece, Result, Told
    from optimizer.run import optimize
    from optimizer.spec import LatencySla, OptimizeSpec

    @dataclass
    class Kept:
        """Keeps results as `Memory` does, and counts those that were computed."""

        memory: Memory
        computed: Counter[str] = field(default_factory=Counter)

        def run(
            self, pieces: Sequence[Piece], compute: Compute, progress: Told
        ) -> list[Result]:
            def counted(piece: Piece) -> Result:
                self.computed[piece.kind] += 1
                return compute(piece)

            return self.memory.run(pieces, counted, progress)

    spec = OptimizeSpec(
        model=arguments.model.name,
        model_path=str(arguments.model),
        model_sha256="0" * 64,  # one model here: nothing is told apart by it
        hardware=arguments.hardware,
        latency_sla=LatencySla(arguments.job),
        calibration_tokens=arguments.calibration,
        validation_tokens=arguments.validation,
    )
    before = json.loads(arguments.kept.read_text()) if arguments.kept.exists() else {}
    kept = Kept(Memory(before))
    begun = time.perf_counter()
    document = optimize(spec, lambda phase, fraction, detail: None, kept)
    end = time.perf_counter()
    arguments.kept.write_text(json.dumps(kept.memory.kept))
    return {
        "libraries_s": begun - start,
        "job_s": end - begun,
        "outcome": document["verdict"]["outcome"],
        "computed": dict(kept.computed),
    }


if __name__ == "__main__":
    main()
