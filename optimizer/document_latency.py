"""Where a stack's seconds are from: the basis, the engine, its version, the device."""

import math
from collections.abc import Sequence
from typing import Any

from optimizer import fits, kernels
from optimizer.cost import SiteCost
from optimizer.hardware import Device
from optimizer.kernels import Basis, Tables

MEASURED = "what its sites took"


def latency(
    device: Device,
    basis: str,
    costs: Sequence[SiteCost],
    engine: str = "any",
    profile: Tables | None = None,
) -> dict[str, Any]:
    """Return the origin of the seconds per token that `costs` add up to.

    `basis` is "measured" where the matrices were timed on the device itself, `engine`
    what the request names, `profile` what was measured there before the job.
    """
    shares = basis_shares(costs)
    known = kernels.of_engine(device.id, engine) if Basis.KERNELS in shares else None
    return {
        "method": MEASURED
        if basis == "measured" and profile is None
        else _method(device, shares, engine, profile),
        "basis_shares": {str(b): share for b, share in shares.items()},
        "engine": known.engine if known else None,
        "engine_version": known.version if known else None,
        "origin": known.origin if known else None,
        "expected_error": expected_error(costs),
        "profile": _profile(profile),
    }


def _profile(profile: Tables | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    said = {key: profile.facts.get(key) for key in ("name", "driver", "measured_at")}
    return {"engine": profile.engine, "engine_version": profile.version, **said}


def basis_shares(costs: Sequence[SiteCost]) -> dict[Basis, float]:
    """Return the part of the seconds per token that each basis has, largest first."""
    total = math.fsum(c.per_token_s for c in costs)
    sums = {
        b: math.fsum(c.per_token_s for c in costs if c.basis is b) / total
        for b in Basis
    }
    return {b: sums[b] for b in sorted(sums, key=lambda b: -sums[b]) if sums[b]}


def expected_error(costs: Sequence[SiteCost]) -> float | None:
    """Return the relative error of the sum, were all sites off the same way.

    Of kernels that is what interpolation adds, of the roofline the residual of its fit:
    neither knows what a server does beside. None: a site does not say.
    """
    total = math.fsum(c.per_token_s for c in costs)
    error = math.fsum(c.per_token_s * c.error for c in costs) / total
    return None if math.isnan(error) else error


def _method(
    device: Device, shares: dict[Basis, float], engine: str, profile: Tables | None
) -> str:
    named = {basis: _named(basis, device, engine, profile) for basis in shares}
    if len(named) == 1:
        return "".join(named.values())
    return ", ".join(
        f"{named[b]} ({part:.0%} of the time)" for b, part in shares.items()
    )


def _named(basis: Basis, device: Device, engine: str, profile: Tables | None) -> str:
    match basis:
        case Basis.MEASURED:
            by = "" if profile is None else f" ({profile.engine} {profile.version})"
            return f"kernels timed on the device itself{by}"
        case Basis.KERNELS:
            known = kernels.of_engine(device.id, engine)
            assert known is not None, "a kernel's time is of its device's tables"
            said = f"measured kernels of {known.engine} {known.version}, {known.origin}"
            other = kernels.stand_in(known, engine)
            return f"{said}, in place of {engine}'s" if other else said
        case _:
            own = ", and to those kernels" if profile and profile.corrections else ""
            return f"roofline fitted to {fits.fit(device).origin}{own}"
