"""The report as a list of blocks, in the order in which a reviewer asks.

Markdown and PDF are written from it. What the page keeps behind a click (every site
with every choice) is left out here: the CSV and the JSON have it.
"""

from collections.abc import Callable, Iterator

from optimizer import units
from optimizer.report_blocks import Block, Facts, Heading, Items, Plot, Table, Text
from optimizer.report_cells import at, dicts, listed, measured, text
from optimizer.report_findings import attention, generation, reasons, stability
from optimizer.report_origin import exports, latency, limits, provenance
from optimizer.report_sites import HEAT_STEPS, Json, letter
from optimizer.units import count, seconds, share, significant, size

OUTCOMES = {
    "sla_met": "✓ SLA met",
    "sla_not_met": "✗ SLA not met",
    "no_improvement": "= No improvement",
}


def outline(view: Json) -> list[Block]:
    """Return the blocks of a `report.view`."""
    return [block for section in _SECTIONS for block in section(view)]


def _asked(v: Json) -> Iterator[Block]:
    d = v["d"]
    model = at(d, "model", "name")
    hardware = at(d, "hardware", "name") or at(d, "hardware", "id")
    yield Heading(f"Precision report: {text(model)} on {text(hardware)}", 1)
    if d.get("made_at"):
        yield Text(f"Made {text(d['made_at'])}.", "note")
    yield Heading("What was asked")
    sla, work = at(d, "request", "latency_sla"), d.get("workload")
    tokens = [count(at(work, f"{w}_tokens")) for w in ("prompt", "output")]
    yield Facts(
        [
            ("Model", text(at(d, "request", "model") or model)),
            ("Hardware", text(hardware)),
            ("SLA per output token", seconds(at(sla, "per_token_s"))),
            ("SLA to first token", seconds(at(sla, "first_token_s"))),
            ("Task", text(at(d, "request", "task"))),
            ("Data", text(at(d, "request", "data_distribution"))),
            ("Batch", count(at(work, "batch_size"))),
            ("Prompt + output tokens", " + ".join(tokens)),
            ("Engine", text(at(d, "request", "engine"))),
        ]
    )


def _verdict(v: Json) -> Iterator[Block]:
    verdict = v["d"].get("verdict")
    outcome = at(verdict, "outcome")
    yield Heading("Verdict")
    yield Text(OUTCOMES.get(str(outcome), text(outcome)), "note")
    yield Text(text(at(verdict, "sentence")), "lead")
    meet = listed(at(verdict, "would_meet"))
    if meet:
        yield Text("What would meet it:")
        yield Items([text(m) for m in meet])
    emulated = at(v["d"], "executed_on", "emulated")
    device = text(at(v["d"], "executed_on", "device"))
    how = {True: f"emulated on {device}", False: f"run on {device}"}
    said = how.get(emulated, "run on what was not recorded")
    yield Text(
        f"The numerics were {said}; latency is {v['basis']}. The reference is the same "
        "model in fp32.",
        "note",
    )


def _stack(v: Json) -> Iterator[Block]:
    yield Heading("The stack by component")
    yield Table(
        (
            "Component",
            "Choice",
            "What the sites got",
            "KL predicted, nats",
            "Share of KL",
            f"Per token, {v['basis']}",
            "Weights",
        ),
        [
            (
                text(c.get("component")),
                text(c.get("choice")),
                text(c["got"] or c.get("sites")),
                significant(c.get("kl_nats")),
                share(c["kl_share"]),
                seconds(c.get("per_token_s")),
                size(c.get("bytes")),
            )
            for c in v["components"]
        ],
        figures=(3, 4, 5, 6),
    )


def _front(v: Json) -> Iterator[Block]:
    yield Heading("The Pareto front")
    yield Text(
        "Each point is a whole stack that no other beats in latency, KL and memory "
        f"together. Latency is {v['basis']}.",
        "note",
    )
    if v["plot"]:
        yield Plot("Latency per token against KL; the table has the same figures.")
        yield Text(
            "In the plot, circles are stacks of the front with their predicted KL, "
            "diamonds measured ones with their interval, squares one format everywhere; "
            "the ring is the chosen stack, and a point's size its memory.",
            "note",
        )
    rows = v["front"]
    yield Table(
        (
            "Stack",
            "Per token",
            "First token",
            "KL predicted, nats",
            "KL measured, nats",
            "Memory",
            "In FP8",
            "Fallback",
            "Meets the SLA",
        ),
        [
            (
                text(p.get("id")) + (" chosen" if p["chosen"] else ""),
                seconds(p.get("per_token_s")),
                seconds(p.get("first_token_s")),
                significant(p.get("kl_nats")),
                measured(at(p, "measured", "kl_nats")),
                size(p.get("memory_bytes")),
                share(p.get("fp8_share")),
                share(at(p, "stability", "fallback")),
                p["meets_sla"],
            )
            for p in rows
        ],
        figures=tuple(range(1, 8)),
        chosen=[n for n, p in enumerate(rows) if p["chosen"]],
    )


def _quality(v: Json) -> Iterator[Block]:
    check = v["d"].get("validation")
    stacks = dicts(at(check, "stacks"))
    base = at(check, "reference", "perplexity")
    yield Heading("Quality on held-out data")
    yield Text(
        f"Whole stacks on {count(at(check, 'tokens'))} tokens that calibration never "
        f"saw, with {v['confidence']} intervals. Perplexity of the fp32 reference: "
        f"{significant(base, 4)}.",
        "note",
    )
    yield Table(
        (
            "Stack",
            "KL predicted",
            "KL measured, nats",
            "Perplexity",
            "Against reference",
            "Same top token, %",
            "Worst token, nats",
            "Fallback",
        ),
        [
            (
                text(s.get("label") or s.get("id")),
                significant(s.get("predicted_kl_nats")),
                measured(s.get("kl_nats")),
                measured(s.get("perplexity"), 4),
                units.change(at(s, "perplexity", "value"), base),
                measured(s.get("top1_agreement"), 3, 100),
                significant(s.get("worst_token_kl_nats")),
                share(s.get("fallback")),
            )
            for s in stacks
        ],
        figures=tuple(range(1, 8)),
        chosen=[n for n, s in enumerate(stacks) if s.get("id") == "chosen"],
    )
    yield from _elsewhere(v)
    yield from exports(v)


def _elsewhere(v: Json) -> Iterator[Block]:
    heads = ("Tokens", "KL, nats", "Same top token, %", "Worst token, nats")
    if v["positions"]:
        yield Heading("By length", 3)
        yield Table(
            ("Tokens before", "Measured on", *heads),
            [
                (
                    f"{count(r.get('from'))} to {count(r.get('to'))}",
                    text(r.get("source")),
                    *_figures(r),
                )
                for r in v["positions"]
            ],
            figures=tuple(range(2, 6)),
        )
    if v["distributions"]:
        yield Heading("By distribution", 3)
        yield Table(
            ("Distribution", *heads),
            [(text(r.get("distribution")), *_figures(r)) for r in v["distributions"]],
            figures=tuple(range(1, 5)),
        )


def _figures(row: Json) -> tuple[str, ...]:
    return (
        count(row.get("tokens")),
        measured(row.get("kl_nats")),
        measured(row.get("top1_agreement"), 3, 100),
        significant(row.get("worst_token_kl_nats")),
    )


def _heat(v: Json) -> Iterator[Block]:
    heat = v["heat"]
    yield Heading("Layers × components")
    legend = ", ".join(f"{sign} {choice}" for sign, choice in heat["legend"])
    yield Text(
        "The letter is the format that the site got, the figure what FP8 costs there in "
        f"thousandths of a nat. {legend}.",
        "note",
    )
    names = heat["components"]
    if heat["layers"]:
        yield Table(
            ("layer", *names),
            [
                (text(layer), *(_heat_cell(cells.get(c)) for c in names))
                for layer, cells in heat["layers"]
            ],
            heat=[
                (None, *((cells.get(c) or {}).get("heat") for c in names))
                for _, cells in heat["layers"]
            ],
        )
    if heat["whole"]:
        cells = [cell for _, cell in heat["whole"]]
        yield Table(
            [name for name, _ in heat["whole"]],
            [[_heat_cell(c) for c in cells]],
            heat=[[c["heat"] for c in cells]],
        )
    steps = ", ".join(significant(s * 1e3, 1) for s in HEAT_STEPS)
    yield Text(f"Shades begin at {steps} thousandths of a nat.", "note")


def _heat_cell(cell: Json | None) -> str:
    return "" if cell is None else f"{letter(cell['choice'])} {cell['text']}".strip()


_SECTIONS: tuple[Callable[[Json], Iterator[Block]], ...] = (
    _asked,
    _verdict,
    _stack,
    _front,
    _quality,
    _heat,
    reasons,
    stability,
    generation,
    attention,
    latency,
    limits,
    provenance,
)
