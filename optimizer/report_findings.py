"""The outline's sections on what goes wrong: sites that stayed high, stability, text."""

from collections.abc import Iterator

from optimizer import units
from optimizer.report_blocks import Block, Code, Facts, Heading, Table, Text
from optimizer.report_cells import at, dicts, text
from optimizer.report_sites import Json
from optimizer.units import count, nats, share, significant


def reasons(v: Json) -> Iterator[Block]:
    """Why sites stayed high, grouped."""
    yield Heading("Why sites stayed high")
    if not v["reasons"]:
        yield Text("No site stayed high.")
        return
    yield Table(
        ("Sites", "Reason", "Where"),
        [
            (
                count(len(g["sites"])),
                g["reason"],
                ", ".join(f"{name} {n}" for name, n in g["counts"]),
            )
            for g in v["reasons"]
        ],
        figures=(0,),
    )


def stability(v: Json) -> Iterator[Block]:
    """What saturates, is flushed, collapses and falls back, and the worst tokens."""
    steady = v["d"].get("stability")
    yield Heading("Stability")
    yield Facts(
        [
            ("Tokens that fall back (measured)", share(at(steady, "fallback"))),
            ("Largest share saturated (predicted)", share(at(steady, "saturated"))),
            ("99th percentile token", nats(at(steady, "p99_token_kl_nats"))),
            ("Worst token", nats(at(steady, "worst_token_kl_nats"))),
            ("Pays up to this fallback", share(at(steady, "pays_up_to", "per_token"))),
        ]
    )
    rows = dicts(at(steady, "components"))
    if rows:
        shares = ("saturated", "flushed", "collapsed")
        yield Table(
            ("Component", "Sites", "Saturated", "Flushed to zero", "Collapsed"),
            [
                (
                    text(c.get("component")),
                    count(c.get("sites")),
                    *(_spread(c.get(s)) for s in shares),
                )
                for c in rows
            ],
            figures=tuple(range(1, 5)),
        )
    if v["worst"]:
        yield Heading("The worst tokens, in context", 3)
        yield Table(
            ("KL, nats", "Text … and what followed", "Reference says", "Stack says"),
            [
                (
                    significant(w.get("kl_nats")),
                    f"{w['before']} ▸ {w['next']}",
                    w["reference"],
                    w["stack"],
                )
                for w in v["worst"]
            ],
            figures=(0,),
        )


def _spread(found: object) -> str:
    middle, most = (at(found, k) for k in ("median", "largest"))
    if not units.number(most):
        return share(middle)
    return f"{share(middle)}, up to {share(most)} at {text(at(found, 'site'))}"


def generation(v: Json) -> Iterator[Block]:
    """Both texts of each prompt, and whether the stack loops more."""
    found = v["generation"]
    yield Heading("Generation check")
    if found is None:
        yield Text("Nothing was generated.")
        return
    yield Text(f"{found['sign']} {found['sentence']}", "lead")
    for number, c in enumerate(found["continuations"], 1):
        yield Text(f"Prompt {number}: {c['prompt']}")
        for name, who in (("Reference, fp32", "reference"), ("Stack", "stack")):
            side = c[who]
            loops = " It loops." if side.get("loop") else ""
            said = f"{name}: {share(side.get('repeated'))} repeated.{loops}"
            yield Text(said, "note")
            yield Code(f"{side['same']}{side['other']}")


def attention(v: Json) -> Iterator[Block]:
    """The top weight, before and after."""
    rows = (v["stats"] or {}).get("attention")
    if not rows:
        return
    yield Heading("Attention: the top weight, before and after")
    yield Table(
        ("Choice", "Site", "Before", "After", "Change", "Layer that moved most"),
        [
            (
                a["name"],
                a["component"] or "all",
                significant(a["before"], 4),
                significant(a["after"], 4),
                units.change(a["after"], a["before"]),
                text(a["worst"]["layer"]),
            )
            for a in rows
        ],
        figures=tuple(range(2, 6)),
        chosen=[n for n, a in enumerate(rows) if not a["component"]],
    )
