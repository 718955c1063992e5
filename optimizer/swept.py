"""Which choices are swept of a site, whatever the hardware runs of them."""

from collections.abc import Collection, Iterable

from optimizer.quantize import BLOCK
from optimizer.spec import SWEPT_FORMATS
from optimizer.stack import CHOICES, Choice, Granularity, Site, SiteShape

CORE = "core"  # the choices that every job sweeps


def choices(
    shapes: Iterable[SiteShape], families: Collection[str]
) -> dict[Site, list[Choice]]:
    """Return every choice of some families."""
    return {
        shape.site: [
            c
            for c in CHOICES[shape.site.component]
            if family(c) in families and not _partial(shape, c)
        ]
        for shape in shapes
    }


def family(choice: Choice) -> str:
    """Return which choices are swept together with this one, by what it asks for."""
    operands = [choice.input, *([choice.weight] if choice.weight else [])]
    formats = {p.format for p in operands} | {choice.output}
    others = sorted(formats - {*SWEPT_FORMATS})
    return others[0] if others else CORE


def _partial(shape: SiteShape, choice: Choice) -> bool:
    """Whether blocks would be cut: no kernel takes that, whatever the device."""
    blocks = choice.weight and choice.weight.granularity is Granularity.BLOCK
    return bool(blocks and shape.k % BLOCK)
