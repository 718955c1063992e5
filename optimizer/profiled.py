"""Costs from a measured profile of the device, before anything else that is known of it.

A phase of a site that the profile has is measured. Where it has the format at other
shapes, or attention at other lengths, the roofline counts, brought to what was measured:
so the formats of a site are held against each other on one device's own kernels. The
rest is what it would be without the profile: kernel tables of other people's engines.
"""

from collections.abc import Callable
from dataclasses import replace

from optimizer.cost import SiteCost, site_cost
from optimizer.hardware import Device
from optimizer.kernels import Basis, Tables
from optimizer.padding import padded
from optimizer.roofline import gemm_format
from optimizer.spec import Workload
from optimizer.stack import LINEAR, Choice, ModelShape, SiteShape, choice_named
from optimizer.timing import ATTENTION

CostOf = Callable[[SiteShape, Choice], SiteCost]


def preferring(
    profile: Tables,
    others: CostOf,
    model: ModelShape,
    device: Device,
    workload: Workload,
) -> CostOf:
    """Return a cost function that reads the profile where it has the shape.

    `others` says what everything else costs.
    """

    def cost_of(shape: SiteShape, choice: Choice) -> SiteCost:
        asked = (padded(shape, choice), choice, device, workload, model)
        found, own = others(shape, choice), site_cost(*asked, tables=profile)
        corrected = _corrects(profile, shape, choice)
        if corrected[1] or own.basis is Basis.MEASURED:
            found = replace(
                found,
                per_token_s=own.per_token_s,
                basis=own.basis,
                error=own.error,
            )
        if corrected[0] or own.first_basis is Basis.MEASURED:
            found = replace(
                found,
                first_token_s=own.first_token_s,
                first_basis=own.first_basis,
                first_error=own.first_error,
            )
        return found

    return cost_of


def _corrects(profile: Tables, shape: SiteShape, choice: Choice) -> tuple[bool, bool]:
    """Whether the profile corrects the roofline of a site's prefill, and of a step."""
    known = profile.corrections
    if shape.site.component in LINEAR:
        fits = gemm_format(choice) in known
        return fits, fits
    if shape.site.component in ATTENTION:
        return "context" in known, "generation" in known
    return False, False


def covers(cost_of: CostOf, model: ModelShape) -> bool:
    """Whether the profile has every matrix of a model in bf16: it was made for it."""
    return all(
        cost_of(shape, choice_named(shape.site.component, "bf16")).basis
        is Basis.MEASURED
        for shape in model.sites
        if shape.site.component in LINEAR
    )
