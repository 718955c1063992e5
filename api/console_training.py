"""A probe's report on a terminal."""

from typing import Any

from api.console import out, rows

Json = dict[str, Any]


def report(document: Json) -> None:
    """Print the candidates, the stack by component, and the verdict."""
    out.print()
    rows(
        ("candidate", "came to", "runs", "drift", "held-out loss", "why"),
        [_candidate(row) for row in document["candidates"]],
    )
    out.print()
    rows(("component", "trains in"), list(document["precision_stack"].items()))
    out.print()
    out.print(document["verdict"]["sentence"])
    for finding in document["verdict"]["findings"]:
        out.print(f"first: {finding['first']}")


def _candidate(row: Json) -> tuple[str, ...]:
    if not row.get("rounds"):
        return row["name"], "not tried", "", "", "", str(row["unusable"])
    first, last = row["rounds"][0], row["rounds"][-1]
    drifting = sum(layer["drifts"] for layer in first["drift"])
    loss = last["held_out_loss"]["value"]
    return (
        row["name"],
        row["status"],
        str(len(row["rounds"])),
        f"{drifting} of {len(first['drift'])}",
        "not finite" if loss is None else f"{100 * loss:+.2g} %",
        ", ".join(f["code"].replace("_", " ") for f in first["findings"]),
    )
