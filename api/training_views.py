"""A probe's report, as endpoints show what they show of every job."""

from typing import Any

SCHEMA = "precision.training_report/1"
GEMMS = ("fprop", "dgrad", "wgrad")
Json = dict[str, Any]


def as_served(report: Json) -> Json:
    """Return a report with what one of serving has: matrices are sites, no front."""
    if report.get("schema") != SCHEMA:
        return report
    return {
        **report,
        "components": [
            {"component": name, "choice": choice}
            for name, choice in report["precision_stack"].items()
        ],
        "layers": [],
        "sites": [_site(row) for row in report["stack"]],
        "front": [],
    }


def _site(row: Json) -> Json:
    """Return a matrix as a site; one of several arithmetics is named by all three."""
    runs = [str(row[gemm]) for gemm in GEMMS]
    return {
        "site": row["matrix"],
        "component": row["component"],
        "layer": None,
        "choice": runs[0] if len(set(runs)) == 1 else "/".join(runs),
        "kl_nats": None,
        "reason": row["reason"],
        "alternatives": [],
    }


def tried(report: Json) -> list[Json]:
    """Return what a probe tried: a row for each candidate."""
    chosen = report["verdict"]["chosen"]
    return [
        {
            "kind": "stack",
            "id": candidate["name"],
            "chosen": candidate["name"] == chosen,
            "refused": candidate["unusable"],
        }
        for candidate in report["candidates"]
    ]
