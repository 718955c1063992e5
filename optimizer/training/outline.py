"""The training report as a list of blocks, for Markdown and PDF: what the page shows.

Curves and strips of exponents are pictures of the page alone; the JSON has their figures.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from optimizer import units
from optimizer.report_blocks import Block, Code, Facts, Heading, Items, Table, Text
from optimizer.report_cells import at, dicts, listed, text
from optimizer.units import count, significant, size

Json = dict[str, Any]
FIGURES = ("gradient_norm", "moved")
STORED = ("bf16", "fp16")  # what weights without masters are in


def outline(view: Json) -> list[Block]:
    """Return the blocks of a `training.report.view`."""
    return [block for section in _SECTIONS for block in section(view)]


def percent(value: object) -> str:
    """Return a share in percent, with a sign; what is not finite as it is."""
    found = units.number(value)
    return "not finite" if found is None else f"{100 * found:+.2g} %"


def deviation(found: object) -> str:
    """Return a deviation with its interval: +2 % (+1.5 % to +2.5 %)."""
    if units.number(at(found, "value")) is None:
        return percent(None)
    low, high = (percent(at(found, end)) for end in ("low", "high"))
    return f"{percent(at(found, 'value'))} ({low} to {high})"


def _asked(v: Json) -> Iterator[Block]:
    d, how = v["d"], v["d"].get("training")
    hardware = text(at(d, "hardware", "name"))
    yield Heading(f"Training report: {text(at(d, 'model', 'name'))} on {hardware}", 1)
    yield Heading("What was asked")
    batch = [count(at(how, name)) for name in ("batch_size", "accumulation")]
    trained = [count(at(d, "model", n)) for n in ("trained_parameters", "parameters")]
    yield Facts(
        [
            ("Task", text(at(d, "request", "task"))),
            ("Hardware", hardware),
            ("Data", text(at(d, "data", "distribution"))),
            ("Steps", count(at(how, "steps"))),
            ("Optimizer", text(at(how, "optimizer"))),
            ("Learning rate", text(at(how, "learning_rate"))),
            ("Sequences of a step", " × ".join(batch)),
            ("Tokens of a sequence", count(at(how, "sequence_tokens"))),
            ("Parameters trained", " of ".join(trained)),
        ]
    )


def _verdict(v: Json) -> Iterator[Block]:
    verdict = v["d"].get("verdict")
    yield Heading("Verdict")
    chosen = "" if at(verdict, "outcome") == "unstable" else text(v["named"])
    yield Text(" ".join((*v["outcome"][:2], chosen)).strip(), "note")
    yield Text(text(at(verdict, "sentence")), "lead")
    found = dicts(at(verdict, "findings"))
    if found:
        yield Items([_finding(f) for f in found])
    pays = at(verdict, "pays")
    if pays and not pays.get("pays"):
        yield Text(f"Mixed precision {text(pays.get('said'))}.")
    yield Text(
        "FP8 is emulated; bf16 and fp16 are torch's autocast on the worker's own device. "
        "No speed was measured.",
        "note",
    )


def _finding(found: Json) -> str:
    code = text(found.get("code")).replace("_", " ")
    known = "" if found.get("breaks") else "worth knowing: "
    return (
        f"{known}{code}: {text(found.get('said'))}. First: {text(found.get('first'))}."
    )


def _candidates(v: Json) -> Iterator[Block]:
    yield Heading("Candidates")
    rows = dicts(v["d"].get("candidates"))
    yield Table(
        ("Candidate", "Came to", "Runs", "Drift", "Held-out loss", "Why"),
        [_candidate(row) for row in rows],
        figures=(2, 3, 4),
        chosen=[n for n, row in enumerate(rows) if row.get("name") == v["named"]],
    )


def _candidate(row: Json) -> Sequence[str]:
    rounds = dicts(row.get("rounds"))
    if not rounds:
        said = text(row.get("unusable"))
        return (text(row.get("name")), "not tried", "", "", "", said)
    first, last = rounds[0], rounds[-1]
    drift = dicts(first.get("drift"))
    why = [_finding(found) for found in dicts(first.get("findings"))]
    return (
        text(row.get("name")),
        text(row.get("status")),
        count(len(rounds)),
        f"{sum(bool(r.get('drifts')) for r in drift)} of {len(drift)} layers",
        deviation(last.get("held_out_loss")),
        " ".join(why) or text(first.get("stopped")),
    )


def _stack(v: Json) -> Iterator[Block]:
    yield Heading("The training stack")
    yield Text(
        "y = x Wᵀ is fprop, the gradient of x dgrad, the gradient of W wgrad. FP8 is "
        "e4m3 for x and W and e5m2 for gradients.",
        "note",
    )
    yield Table(
        ("Matrix", "Layers", "fprop", "dgrad", "wgrad", "Why"),
        [
            (
                text(row["inside"]),
                _layers(row["layers"]),
                *(text(row.get(gemm)) for gemm in ("fprop", "dgrad", "wgrad")),
                text(row.get("reason")),
            )
            for row in v["rows"]
        ],
    )
    kept = dicts(v["d"].get("kept_fp32"))
    if kept:
        yield Heading("What stays in fp32 in any case", 3)
        yield Items([f"{text(k.get('claim'))} ({text(k.get('source'))})" for k in kept])


def _layers(layers: Sequence[object]) -> str:
    return text(layers[0]) if len(layers) == 1 else f"{len(layers)} layers"


def _promotions(v: Json) -> Iterator[Block]:
    rows = [(c["name"], p) for c in v["tried"] for p in dicts(c.get("promotions"))]
    if not rows:
        return
    yield Heading("Promotions, and the proof")
    yield Table(
        ("Candidate", "Matrix", "Products", "Now in", "Before", "After", "Cured"),
        [
            (
                name,
                text(row.get("matrix")),
                ", ".join(listed(row.get("gemms"))),
                text(row.get("arithmetic")),
                *(_both(row.get(when)) for when in ("before", "after")),
                "yes" if row.get("cured") else "no",
            )
            for name, row in rows
        ],
        figures=(4, 5),
    )
    yield Text("Before and after: the gradient norm and the weights' way.", "note")


def _both(drift: object) -> str:
    return ", ".join(percent(at(drift, name, "value")) for name in FIGURES)


def _heat(title: str, heat: Json) -> Iterator[Block]:
    yield Heading(title)
    yield Table(
        ("Layer", *heat["columns"]),
        [(text(layer), *(cell[1] for cell in cells)) for layer, cells in heat["rows"]],
        figures=tuple(range(1, len(heat["columns"]) + 1)),
        heat=[(None, *(int(c[0][1:]) for c in cells)) for _, cells in heat["rows"]],
    )


def _drift(v: Json) -> Iterator[Block]:
    yield from _heat("Drift by layer", v["drift"])
    if v["reasons"]:
        yield Heading("Why layers drift", 3)
        yield Table(
            ("Candidate", "Layer", "Gradient norm", "Weights moved", "Why"),
            [
                (
                    name,
                    text(row.get("layer")),
                    *(percent(at(row, figure, "value")) for figure in FIGURES),
                    f"{text(at(row, 'why', 'code')).replace('_', ' ')}: "
                    f"{text(at(row, 'why', 'said'))}",
                )
                for name, row in v["reasons"]
            ],
            figures=(2, 3),
        )
    yield from _heat("Zero rate of gradients", v["zeros"])


def _updates(v: Json) -> Iterator[Block]:
    yield Heading("Updates")
    yield Text(
        "In fp32. Of a parameter in 16 bits alone that moves by less than half a step of "
        "its format most updates round away; with fp32 master weights none do.",
        "note",
    )
    of_formats = [(n, f) for n in ("least_in_steps", "rounds_away") for f in STORED]
    yield Table(
        (
            "Layer",
            "lr·‖g‖/‖w‖",
            "‖Δw‖/‖w‖",
            "Least, in steps of bf16",
            "of fp16",
            "Would round away in bf16",
            "in fp16",
        ),
        [
            (
                text(layer),
                *(significant(row.get(name)) for name in ("ratio", "step_ratio")),
                *(significant(at(row, name, fmt)) for name, fmt in of_formats),
            )
            for layer, row in v["updates"]
        ],
        figures=tuple(range(1, 7)),
    )


def _scaling(v: Json) -> Iterator[Block]:
    found = v["d"].get("loss_scaling")
    yield Heading("Loss scale")
    needed = "needs it" if at(found, "needed") else "needs none; for fp16 it would be"
    yield Text(f"The chosen precision {needed}:")
    names = ("initial", "growth", "growth_interval", "backoff")
    yield Facts([(name.replace("_", " "), text(at(found, name))) for name in names])
    yield Items([text(rule) for rule in listed(at(found, "rules"))])


def _memory(v: Json) -> Iterator[Block]:
    found = v["d"].get("memory")
    if not found:
        return
    yield Heading("Memory")
    rows = dicts(at(found, "chosen", "rows"))
    whole = [size(at(found, which, "total_bytes")) for which in ("chosen", "fp32")]
    yield Table(
        (text(v["named"]), "Bytes", "Counted as"),
        [
            *(
                (
                    text(r.get("name")).replace("_", " "),
                    size(r.get("bytes")),
                    text(r.get("counted")),
                )
                for r in rows
            ),
            ("together", whole[0], f"fp32: {whole[1]}"),
        ],
        figures=(1,),
    )


def _end(v: Json) -> Iterator[Block]:
    d = v["d"]
    yield Heading("What this does not say")
    yield Items([text(s) for s in listed(d.get("limits")) + listed(d.get("warnings"))])
    yield Heading("Provenance")
    versions = at(d, "provenance", "versions") or {}
    yield Facts(
        [
            ("Made", text(d.get("made_at"))),
            ("Model", text(at(d, "model", "sha256"))),
            ("Data", text(at(d, "data", "sha256"))),
            ("Origin", text(at(d, "data", "origin"))),
            ("Seed", text(at(d, "provenance", "seed"))),
            ("Versions", ", ".join(f"{k} {w}" for k, w in versions.items())),
            ("Computed on", text(at(d, "executed_on", "device"))),
        ]
    )
    yield Code(text(at(d, "provenance", "reproduce")))


_SECTIONS = (
    _asked,
    _verdict,
    _candidates,
    _stack,
    _promotions,
    _drift,
    _updates,
    _scaling,
    _memory,
    _end,
)
