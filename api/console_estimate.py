"""How an estimate looks on a terminal 80 columns wide."""

from collections.abc import Iterator
from typing import Any

from api.console import out, rows

Json = dict[str, Any]


def estimate(found: Json) -> None:
    """Print latency by format, the ledger, FP8 by batch, and the recommendation."""
    model, device, load = found["model"], found["hardware"], found["workload"]
    _say(
        f"{model['id']} ({model['parameters'] / 1e9:.3f} B parameters) on "
        f"{device['name']}: batch {load['batch_size']}, {load['prompt_tokens']} + "
        f"{load['output_tokens']} tokens"
    )
    out.print()
    title = ("format", "ms/tok", "limit", "basis", "±%", "first ms", "GB", "fits")
    rows(title, [_latency(row) for row in found["formats"]])
    for name, why in found["refused"].items():
        _say(f"{name}: {why}")
    _say(f"limit: {_first(found)['limits']['per_token']['said']}")
    _say(_basis(found["basis"]))
    _ledger(f"memory of {_first(found)['name']}", _first(found)["memory"])
    _batches(found["fp8"])
    _target(found["latency_sla"])
    stack = found["recommendation"]["stack"] or "none"
    _say(f"\nrecommended: {stack}")
    for reason in found["recommendation"]["reasons"]:
        _say(f"- {reason}")
    for warning in found["warnings"]:
        _say(f"warning: {warning}")
    if found["training"]:
        _training(found["training"])


def _say(text: str) -> None:
    out.print(text)


def _first(found: Json) -> Json:
    """Return the row that the answer is about: the recommended, else 16 bits."""
    named = found["recommendation"]["stack"] or "bf16"
    formats: list[Json] = found["formats"]
    return next((row for row in formats if row["name"] == named), formats[0])


def _latency(row: Json) -> tuple[object, ...]:
    error = row["error"]
    return (
        row["name"],
        f"{row['per_token_s'] * 1e3:.3f}",
        f"{row['limits']['per_token']['seconds'] * 1e3:.3f}",
        row["basis"],
        None if error is None else f"{100 * error:.0f}",
        f"{row['first_token_s'] * 1e3:.1f}",
        f"{row['memory']['total_bytes'] / 1e9:.1f}",
        f"batch {row['largest_batch']}" if row["fits"] else "no",
    )


def _basis(basis: Json) -> str:
    if basis["engine"] is None:
        return "no kernels were timed on this device: all figures are modelled"
    for_ = f", in place of {basis['stands_in_for']}'s" if basis["stands_in_for"] else ""
    version = f"{basis['engine']} {basis['engine_version']}"
    return f"kernels: {version}, {basis['origin']}{for_}"


def _ledger(title: str, ledger: Json) -> None:
    many = f", on each of {ledger['devices']} devices" if ledger["devices"] > 1 else ""
    _say(f"\n{title}{many}")
    lines = [(row["name"], f"{row['bytes']:,}") for row in ledger["rows"]]
    rows(("row", "bytes"), [*lines, ("total", f"{ledger['total_bytes']:,}")])


def _batches(fp8: Json) -> None:
    names = list(fp8["by_batch"][0]["per_token_s"])
    _say("\nms per token by batch")
    rows(("batch", *names), [_at(at, names) for at in fp8["by_batch"]])
    _say(f"FP8: {fp8['said']}")
    if fp8["from_batch"]:
        _say(f"it pays from batch {fp8['from_batch']} to {fp8['to_batch']} of these")


def _at(at: Json, names: list[str]) -> tuple[object, ...]:
    return (
        at["batch_size"],
        *(f"{at['per_token_s'][name] * 1e3:.2f}" for name in names),
    )


def _target(target: Json | None) -> None:
    if target is None:
        return
    met = ", ".join(target["met_by"]) or "nothing"
    _say(f"\ntarget met by: {met}")
    for way in target["would_meet"]:
        _say(f"- would need: {way}")


def _training(training: Json) -> None:
    _ledger("training", training["memory"])
    _say(f"fits: {'yes' if training['fits'] else 'no'}")
    _say(f"mixed precision {training['mixed_precision']['said']}")
    advice = training["advice"]
    _say(f"\ntrain in: {advice['precision']}")
    for line in _claims(advice["reasons"]):
        _say(line)


def _claims(reasons: list[Json]) -> Iterator[str]:
    for reason in reasons:
        kind = "folklore" if reason["folklore"] else reason["source"]
        yield f"- {reason['claim']} [{kind}]"
