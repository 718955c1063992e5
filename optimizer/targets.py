"""What a latency target would need: which stacks meet it, up to which batch, and else what."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from optimizer.estimate import Estimate, Priced
from optimizer.hardware import DEVICES
from optimizer.ledger import kinds
from optimizer.limits import Limit, Term, limits
from optimizer.uniform import uniforms


@dataclass(frozen=True, slots=True)
class Beyond:
    """A target under the physical limit of every stack that the device runs."""

    name: str  # "per_token_s" or "first_token_s"
    target_s: float
    limit: Limit
    said: str


@dataclass(frozen=True, slots=True)
class Needs:
    """How the stacks stand to the target."""

    met_by: tuple[str, ...]  # stacks that fit and meet it at this batch
    largest_batch: Mapping[str, int]  # of those compared, by stack; 0: none
    would_meet: tuple[str, ...]  # where nothing does


def beyond(found: Estimate) -> Beyond | None:
    """Return the target that no device like this one can meet. None: there is none."""
    each, first = found.fastest_limit
    for name, target, limit in (
        ("per_token_s", found.ask.sla.per_token_s, each),
        ("first_token_s", found.ask.sla.first_token_s, first),
    ):
        if target is not None and target < limit.seconds:
            said = (
                f"{target * 1e3:.4g} ms is under the physical limit of "
                f"{limit.seconds * 1e3:.4g} ms, which {limit.term} sets: "
                f"{limit.said(found.ask.device)}"
            )
            return Beyond(name, target, limit, said)
    return None


def needs(found: Estimate) -> Needs:
    """Return what the target would need."""
    met = tuple(p.name for p in found.priced if p.usable())
    return Needs(
        met_by=met,
        largest_batch={p.name: _largest_batch(p, found) for p in found.priced},
        would_meet=() if met else tuple(_ways(found)),
    )


def _largest_batch(priced: Priced, found: Estimate) -> int:
    """Return the largest compared batch that fits and meets the seconds per token."""
    target = found.ask.sla.per_token_s
    met = [
        at.batch_size
        for at in found.by_batch
        if priced.name in at.per_token_s
        and at.batch_size <= priced.largest_batch
        and (target is None or at.per_token_s[priced.name] <= target)
    ]
    return max(met, default=0)


def _ways(found: Estimate) -> Iterator[str]:
    """Say what would meet a target that nothing meets: fewer bits, or another device."""
    base = next((p for p in found.priced if p.name != "fp32"), found.priced[0])
    target = found.ask.sla.per_token_s
    if target is not None and base.per_token.term is Term.BANDWIDTH:
        device = found.ask.device
        moved = target * device.bandwidth_bytes_s - base.per_token.cache_bytes
        bits = 16 * moved / base.per_token.weight_bytes
        yield (
            f"weights of at most {bits:.1f} bits each, if all of the bandwidth of "
            f"{device.name} were reached"
        )
    able = [name for name in DEVICES if _allows(name, found)]
    if able:
        yield f"a device whose data sheet allows it: {', '.join(able)}"


def _allows(name: str, found: Estimate) -> bool:
    """Whether the physical limit of a 16-bit or FP8 stack is within the target there."""
    ask, device = found.ask, DEVICES[name]
    for uniform in uniforms(ask.model, device, ask.engine, ask.formats):
        if uniform.stack is None or uniform.name == "fp32":
            continue
        each, first = limits(kinds(ask.model, uniform.stack), device, ask.workload)
        pairs = ((ask.sla.per_token_s, each), (ask.sla.first_token_s, first))
        if all(target is None or limit.seconds <= target for target, limit in pairs):
            return True
    return False
