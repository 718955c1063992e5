"""A model of one layer, and its search problem with losses made up by the test."""

from collections.abc import Callable

from optimizer.choose import (
    Chooser,
    CostOf,
    allowed,
    candidates,
    modelled,
    tabulate,
)
from optimizer.hardware import device
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.stack import (
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
)
from optimizer.sums import Sensitivity

OUT, FFN, DOWN = (
    Site(0, c) for c in (Component.ATTN_OUT, Component.FFN_IN, Component.FFN_OUT)
)
NORMS = Site(0, Component.NORMS)
EMBEDDINGS, HEAD = (
    Site(WHOLE_MODEL, c) for c in (Component.EMBEDDINGS, Component.LM_HEAD)
)
MATRICES = (OUT, FFN, DOWN)
BATCH = Workload(batch_size=16, prompt_tokens=512, output_tokens=128)
SPEC = OptimizeSpec("toy", "toy", "0" * 64, "l4", workload=BATCH)
NO_TARGET = LatencySla()
IMPOSSIBLE = LatencySla(per_token_s=1e-9)
ROOM = 10**12  # bytes: more than anything here needs

Loss = Callable[[Site, Choice], float]


def toy(*, tied: bool = True) -> ModelShape:
    """One layer of width 4096, without attention, wide enough for FP8 to pay."""
    table = 1600 * 4096
    sites = (
        SiteShape(EMBEDDINGS, 1600, 4096, table),
        SiteShape(OUT, 4096, 4096, 4096 * 4096, parts=(4096,)),
        SiteShape(FFN, 16384, 4096, 16384 * 4096, parts=(8192, 8192)),
        SiteShape(DOWN, 4096, 8192, 4096 * 8192, parts=(4096,)),
        SiteShape(NORMS, elements=2 * 4096),
        SiteShape(HEAD, 1600, 4096, table, parts=(1600,)),
    )
    return ModelShape(
        architecture="Toy",
        layers=1,
        hidden=4096,
        vocab=1600,
        max_context=2048,
        parameters=sum(s.weight_elements for s in sites) - (table if tied else 0),
        stored_bytes=0,
        tied_embeddings=tied,
        sites=sites,
    )


NATS = {"fp32": 0.0, "fp16": 1e-6, "bf16": 1e-5}


def usual(site: Site, choice: Choice) -> float:
    """FP8 loses 100 times as much as bf16, and e5m2 four times as much as e4m3."""
    narrow = {"fp8_e4m3_token": 5e-4, "fp8_e4m3_weight_only": 3e-4, "fp8_e5m2": 4e-3}
    return NATS.get(choice.name) or narrow.get(choice.name, 1e-3) * choice.is_fp8


def chooser(
    loss: Loss = usual,
    *,
    spec: OptimizeSpec = SPEC,
    shape: ModelShape | None = None,
    cost_of: CostOf | None = None,
    max_bytes: int = ROOM,
    overflowing: dict[Site, float] | None = None,
) -> Chooser:
    shape = shape or toy()
    target = device(spec.hardware)
    verdicts = allowed(shape, target, spec, overflowing or {})
    losses = {
        (site, c): Sensitivity(loss(site, c), 30.0, 0.0, 0.0)
        for site, some in candidates(verdicts).items()
        for c in some
    }
    cost_of = cost_of or modelled(shape, target, spec.workload)
    return Chooser(shape, tabulate(shape, verdicts, losses, cost_of), max_bytes)


def named(**choices: str) -> Stack:
    """A stack from {component: choice name}."""
    sites = {s.component.value: s for s in (EMBEDDINGS, OUT, FFN, DOWN, NORMS, HEAD)}
    return Stack.from_json({str(sites[k]): v for k, v in choices.items()})


def picked(stack: Stack) -> dict[str, str]:
    return {str(s): c.name for s, c in stack.choices.items()}
