"""The outline's last sections: latency and memory, limits, and where it is from."""

from collections.abc import Iterator, Sequence

from optimizer.report_blocks import (
    Block,
    Code,
    Facts,
    Heading,
    Items,
    Table,
    Text,
)
from optimizer.report_cells import at, dicts, listed, measured, text
from optimizer.report_sites import Json
from optimizer.units import count, ratio, seconds, significant, size


def exports(v: Json) -> Iterator[Block]:
    """What an engine loads: measured again from disk, refused, or run otherwise."""
    found = v["exported"]
    if found is None:
        return
    yield Heading("As exported: what an engine loads", 3)
    kept = found["checkpoint"]
    if kept:
        same = {True: "within the interval of", False: "outside of the interval of"}
        yield Text(
            f"The checkpoint, loaded again from {size(kept.get('bytes'))} on disk: KL "
            f"{measured(kept.get('kl_nats'))} nats, "
            f"{same.get(kept.get('as_emulated'), 'not held against')} what was emulated, "
            f"{measured(kept.get('emulated_kl_nats'))}."
        )
    refused = [
        f"{text(r.get('export'))}: {text(r.get('reason'))}" for r in found["refused"]
    ]
    if refused:
        yield Text("Not written:")
        yield Items(refused)
    if found["groups"]:
        yield Table(
            ("Export", "Sites", "Measured", "Served", "Which is", "Why"),
            [
                (
                    g["export"],
                    f"{g['sites']}: {g['first']}",
                    g["measured"],
                    g["served"],
                    g["toward"],
                    g["reason"],
                )
                for g in found["groups"]
            ],
        )


def latency(v: Json) -> Iterator[Block]:
    """Seconds and bytes, each with its basis."""
    d, basis = v["d"], v["basis"]
    hardware = d.get("hardware")
    yield Heading("Latency and memory")
    method = at(hardware, "method")
    yield Text(f"Latency: {basis}{f' by {method}' if method else ''}.", "note")
    stacks = dicts(at(d, "validation", "stacks"))
    yield Table(
        (
            "Stack",
            f"Per token, {basis}",
            "Tokens/s and sequence",
            f"First token, {basis}",
            "Weights, modelled",
            "With KV cache, modelled",
        ),
        [
            (
                text(s.get("label") or s.get("id")),
                seconds(s.get("per_token_s")),
                ratio(1, s.get("per_token_s")).replace("×", ""),
                seconds(s.get("first_token_s")),
                size(s.get("bytes")),
                size(s.get("memory_bytes") or v["memory_of"].get(s.get("front_id"))),
            )
            for s in stacks
        ],
        figures=tuple(range(1, 6)),
        chosen=[n for n, s in enumerate(stacks) if s.get("id") == "chosen"],
    )
    yield from _runs(dicts(d.get("runs")))
    rows = at(hardware, "per_device")
    if isinstance(rows, dict) and rows:
        yield Heading("Memory of each device, modelled", 3)
        names = [(k.removesuffix("_bytes").replace("_", " "), k) for k in rows]
        yield Facts([(name, size(rows[key])) for name, key in names])


def _runs(rows: Sequence[Json]) -> Iterator[Block]:
    if rows:
        yield Heading("Run end to end on this machine", 3)
        yield Table(
            ("Stack", "Per token, measured", "First token, measured", "With"),
            [
                (
                    text(r.get("label")),
                    seconds(r.get("per_token_s")),
                    seconds(r.get("first_token_s")),
                    f"{text(r.get('engine'))} {text(r.get('version'))}",
                )
                for r in rows
            ],
            figures=(1, 2),
        )


def limits(v: Json) -> Iterator[Block]:
    """Warnings first."""
    d = v["d"]
    yield Heading("Limits and warnings")
    warnings = listed(d.get("warnings")) + listed(at(d, "model", "warnings"))
    for name, rows in (("Warnings", warnings), ("Limits", listed(d.get("limits")))):
        if rows:
            yield Heading(name, 3)
            yield Items([text(row) for row in rows])


def provenance(v: Json) -> Iterator[Block]:
    """Digests, seeds, versions, and the two commands."""
    d = v["d"]
    model, data, made = d.get("model"), d.get("data"), d.get("provenance")
    ran = d.get("executed_on")
    processor = at(ran, "processor")
    halves = [
        f"{count(at(data, half, 'tokens'))} tokens of "
        f"{count(at(data, half, 'samples'))} samples"
        for half in ("calibration", "validation")
    ]
    yield Heading("Provenance, and how to repeat it")
    yield Facts(
        [
            ("Model, sha256", text(at(model, "sha256"))),
            ("Data, sha256", text(at(data, "sha256"))),
            ("Code, sha256", text(at(made, "code_sha256"))),
            ("This report, sha256", text(at(d, "integrity", "sha256"))),
            ("Architecture", text(at(model, "architecture"))),
            ("Parameters", count(at(model, "parameters"))),
            ("Recognized", f"{significant(at(model, 'coverage_percent'), 4)} %"),
            ("Data, origin", text(at(data, "origin"))),
            ("Data, licence", text(at(data, "licence"))),
            ("Calibration", halves[0]),
            ("Validation", halves[1]),
            (
                "Executed on",
                f"{text(at(ran, 'device'))}{f' ({processor})' if processor else ''}, "
                f"{count(at(ran, 'threads'))} threads",
            ),
            ("Versions", text(v["versions"])),
            ("Seed", count(at(made, "seed"))),
            ("Schema", text(d.get("schema"))),
        ]
    )
    yield Text("To repeat it, and to check that nobody changed it:")
    yield Code(f"{text(at(made, 'reproduce'))}\nprecision verify report.json")
