"""A stack as a module plan for Transformer Engine: a Python file, a recipe a module.

    import transformer_engine_plan as plan
    with plan.autocast("model.layers.0.mlp.up_proj"):
        y = module(x)  # a transformer_engine.pytorch.Linear

The file knows modules by the names that transformers gives them. What no recipe
computes as it was measured runs in 16 bits, and is listed with the reason.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from optimizer import te
from optimizer.errors import ExportError
from optimizer.execute import Amaxes, WeightCodes
from optimizer.export_files import Target
from optimizer.export_layout import stage_of
from optimizer.export_scheme import Deviation, Toward
from optimizer.formats import FORMATS
from optimizer.model import LoadedModel
from optimizer.quantize import scale_from_amax
from optimizer.sites import LinearPart, attention_module, name_of
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    Granularity,
    Role,
    Site,
    Stack,
    choice_named,
)

PLAN = "transformer_engine_plan.py"
ATTENTION = "attention"
# As `te.recipe_of` makes them; a test holds the two against each other.
RECIPES = {
    "static": """recipe.DelayedScaling(
        fp8_format=recipe.Format.E4M3,
        amax_history_len=1,
        amax_compute_algo="most_recent",
    )""",
    ATTENTION: """recipe.DelayedScaling(
        fp8_format=recipe.Format.E4M3,
        amax_history_len=1,
        amax_compute_algo="most_recent",
        fp8_dpa=True,
    )""",
    "block": """recipe.Float8BlockScaling(
        fp8_format=recipe.Format.E4M3,
        fp8_quant_fwd_inp=recipe.QParams(power_2_scale=False),
        fp8_quant_fwd_weight=recipe.QParams(power_2_scale=False),
    )""",
    "nv": """recipe.NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
    )""",
}
KINDS = {
    Granularity.TENSOR: "static",
    Granularity.GROUP: "block",
    Granularity.NV: "nv",
}
TEMPLATE = '''"""Which recipe of Transformer Engine each module of a model runs under.

A module that is not in RECIPE_OF runs without FP8. SCALES are Transformer Engine's, of
input and weight: what a value is multiplied by. They belong into a module's
fp8_meta["scaling_fwd"].scale, and stay there under a history of one step.
"""

from contextlib import nullcontext

from transformer_engine.common import recipe

MODEL = {model}
RECIPES = {{
{recipes}
}}
RECIPE_OF = {modules}
SCALES = {scales}


def recipe_of(module):
    """Return the recipe of a module by its name; None: it runs in 16 bits."""
    name = RECIPE_OF.get(module)
    return None if name is None else RECIPES[name]


def autocast(module):
    """Return the context that a module's forward pass belongs into."""
    wanted = recipe_of(module)
    if wanted is None:
        return nullcontext()
    import transformer_engine.pytorch as te

    return te.autocast(enabled=True, recipe=wanted)
'''


@dataclass(frozen=True, slots=True)
class TePlan:
    """Which kind of recipe each module gets, and what is not as it was measured."""

    modules: dict[str, str]  # by module: a key of RECIPES
    parts: tuple[LinearPart, ...]  # those with static scales
    deviations: tuple[Deviation, ...]


def plan(stack: Stack, model: LoadedModel) -> TePlan:
    """Decide on a recipe for every module. Raises ExportError where none gets one."""
    modules: dict[str, str] = {}
    static: list[LinearPart] = []
    found: list[Deviation] = []
    for site, choice in sorted(stack.choices.items()):
        why = _refusal(site, choice, stack)
        if why is not None:
            found.append(_wider(site, choice, why))
        elif choice.is_narrow and site.component in LINEAR:
            kind = KINDS[choice.input.granularity]
            modules |= {part.name: kind for part in model.parts[site]}
            static += model.parts[site] if kind == "static" else []
        elif choice.is_narrow:
            attention = attention_module(model.layers[site.layer])
            modules[name_of(model.network, attention)] = ATTENTION
    if not modules:
        reasons = "; ".join(sorted({d.reason for d in found}))
        raise ExportError(
            "no site of the stack runs under a recipe of Transformer Engine"
            + (f": {reasons}" if reasons else ": none of them is in FP8")
        )
    return TePlan(modules, tuple(static), tuple(found))


def write_plan(
    made: TePlan,
    name: str,
    model: LoadedModel,
    stack: Stack,
    weights: WeightCodes,
    amaxes: Amaxes,
    to: Target,
) -> None:
    """Write the plan of a model that callers know as `name`."""
    used = sorted(set(made.modules.values()))
    scales = {}
    for part in made.parts:
        with model.residency.holding(stage_of(part.site, model)):
            scales[part.name] = [*_scales(part, stack, weights, amaxes)]
    text = TEMPLATE.format(
        model=json.dumps(name),
        recipes="\n".join(f'    "{kind}": {RECIPES[kind]},' for kind in used),
        modules=json.dumps(made.modules, indent=4),
        scales=json.dumps(scales, indent=4, allow_nan=False),
    )
    compile(text, PLAN, "exec", dont_inherit=True)  # what does not compile is no plan
    to.text(PLAN, text)


def _refusal(site: Site, choice: Choice, stack: Stack) -> str | None:
    why = te.refusal(site.component, choice)
    if why is not None or not choice.is_narrow or site.component in LINEAR:
        return why
    pair = {Component.ATTN_SCORES, Component.ATTN_VALUES} - {site.component}
    (other,) = (stack.choices.get(Site(site.layer, c)) for c in pair)
    alike = other is not None and other.is_narrow
    return None if alike else "attention is in FP8 as a whole, or not at all"


def _wider(site: Site, choice: Choice, reason: str) -> Deviation:
    served = choice_named(site.component, "bf16")
    return Deviation(str(site), choice.name, served.name, Toward.WIDER, reason)


def _scales(
    part: LinearPart, stack: Stack, weights: WeightCodes, amaxes: Amaxes
) -> Iterator[float]:
    choice = stack.choices[part.site]
    assert choice.weight is not None
    largest = amaxes[part.site, Role.INPUT].amax()
    _, scale = weights.get(part, choice.weight)
    assert scale is not None, part.name
    for ours in (scale_from_amax(largest, FORMATS[choice.input.format]), scale):
        yield float(te.te_scale(ours.reshape(())))
