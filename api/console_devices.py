"""How devices look on a terminal: figures, what they multiply, and why not the rest."""

from collections.abc import Iterator
from typing import Any

from api.console import out, rows

Json = dict[str, Any]

_MARKS = {
    "supported": "yes",
    "weight_only": "weights",
    "other_kernel": "other",
    "refused": "no",
}
_LINEAR = ["attn_qkv", "attn_out", "ffn_in", "ffn_out", "lm_head"]
_ENGINES = {
    "vllm": "vLLM",
    "tensorrt_llm": "TRT",
    "transformer_engine": "TE",
    "torchao": "torchao",
}


def devices(found: list[Json]) -> None:
    """Print a list of devices: dense peaks, bandwidth and memory."""
    title = ("id", "name", "cc", "bf16 TF", "fp8 TF", "GB/s", "GB")
    rows(title, [_line(device) for device in found])


def _line(device: Json) -> tuple[object, ...]:
    peak = device["peak_flops"]
    base = peak.get("bf16") or peak.get("fp16")
    return (
        device["id"],
        device["name"],
        device["compute_capability"],
        _in(base, 1e12),
        _in(peak.get("fp8"), 1e12),
        _in(device["bandwidth_bytes_s"], 1e9),
        _in(device["memory_bytes"], 1e9),
    )


def _in(value: float | None, unit: float) -> str | None:
    return None if value is None else f"{value / unit:.4g}"


def device(found: Json) -> None:
    """Print one device: its figures, its matmuls, its choices, and each "no"."""
    devices([found])
    for name, fact in _facts(found):
        out.print(f"{name:<8} {fact}")
    if found["matmuls"]:
        out.print("\nnarrow matmuls")
        rows(("input × weight", "scales of", ""), [_pair(m) for m in found["matmuls"]])
        out.print("\nchoices, by site and engine")
        rows(("sites", "choice", "any", *_ENGINES.values()), list(_choices(found)))
        out.print("\nwhy not")
        for reason, names in _reasons(found).items():
            out.print(f"- {reason}: {', '.join(names)}")
    for note in found["notes"]:
        out.print(f"note: {note}")


def _facts(found: Json) -> Iterator[tuple[str, str]]:
    if units := found["units"]:
        clock = units["clock_hz"] / 1e9
        yield "units", f"{units['count']} at {clock:g} GHz: the peaks' limit"
    if found["memory_type"]:
        yield "memory", found["memory_type"]
    if found["link"]:
        speed = _in(found["link_bytes_s"] or None, 1e9)
        one_way = f", {speed} GB/s in one direction" if speed else ""
        yield "link", found["link"] + one_way
    if found["tdp_w"]:
        yield "power", f"{found['tdp_w']:g} W"
    for fmt, peak in found["peak_flops"].items():
        ridge = found["ridge_flop_per_byte"][fmt]
        yield fmt, f"{peak / 1e12:.4g} TFLOP/s, {ridge:.1f} FLOP per byte"


def _pair(matmul: Json) -> tuple[str, str, str]:
    operands = f"{matmul['input']} × {matmul['weight']}"
    return (operands, matmul["scaling"], _MARKS[matmul["status"]])


def _choices(found: Json) -> Iterator[tuple[str, ...]]:
    """One row for a choice and all sites that answer alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for component, answers in found["components"].items():
        for answer in answers:
            marks = [_MARKS[_of(answer, e)["status"]] for e in ("any", *_ENGINES)]
            alike.setdefault((answer["choice"], *marks), []).append(component)
    for (choice, *marks), components in sorted(
        alike.items(), key=lambda item: (item[1], item[0])
    ):
        if set(marks) != {"no"}:
            yield (_sites(components, found), choice, *marks)


def _sites(components: list[str], found: Json) -> str:
    if components == list(found["components"]):
        return "every site"
    return "linear sites" if components == _LINEAR else " ".join(components)


def _of(answer: Json, engine: str) -> Json:
    return dict(answer["engines"].get(engine, answer))


def _reasons(found: Json) -> dict[str, list[str]]:
    """Each reason once, with the choices that it refuses."""
    reasons: dict[str, list[str]] = {}
    for answers in found["components"].values():
        for answer in answers:
            for engine in ("any", *_ENGINES):
                said = _of(answer, engine)
                if said["status"] in ("refused", "other_kernel"):
                    names = reasons.setdefault(said["reason"], [])
                    if answer["choice"] not in names:
                        names.append(answer["choice"])
    for matmul in found["matmuls"]:
        if matmul["status"] in ("refused", "weight_only"):
            pair = f"{matmul['input']}×{matmul['weight']} ({matmul['scaling']})"
            reasons.setdefault(matmul["reason"], []).append(pair)
    return reasons
