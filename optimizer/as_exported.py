"""What of a model an engine can be handed: asked before the search, not after it.

`rules` says what an engine runs of a site; here is what it takes of a whole model, as
`export_scheme` writes it. A job for vLLM that leaves a checkpoint searches only what
such a checkpoint holds, so that every stack of its front can be exported.
"""

from collections.abc import Collection, Iterator, Mapping

from optimizer.errors import HardwareError
from optimizer.export_scheme import SERVED, refusal
from optimizer.spec import OptimizeSpec
from optimizer.stack import Choice, Component, ModelShape, Site, SiteShape

CHECKPOINT = "compressed_tensors"
Verdicts = Mapping[Site, Mapping[Choice, str | None]]  # why not; None: a candidate
_ONE_CACHE = ("vllm", "tensorrt_llm")  # --kv-cache-dtype is of the whole model


def require_class(architecture: str, engine: str, exports: Collection[str]) -> None:
    """Raise HardwareError where a checkpoint is asked for that vLLM has no class for."""
    asked = engine == "vllm" and CHECKPOINT in exports
    if asked and architecture not in SERVED:
        raise HardwareError(
            f"vLLM has no {architecture} of its own, so no checkpoint for it is written: "
            f"ask for the engine any, or for exports without {CHECKPOINT}"
        )


def writable(
    model: ModelShape, spec: OptimizeSpec, verdicts: Verdicts
) -> dict[Site, dict[Choice, str | None]]:
    """Return the verdicts with what the job's checkpoint cannot hold refused.

    Raises HardwareError where a site has no choice left.
    """
    found = {site: dict(some) for site, some in verdicts.items()}
    if spec.engine == "vllm" and CHECKPOINT in spec.exports:
        for shape in model.sites:
            _refuse(found[shape.site], shape, model)
        for pair in _experts(model):
            _refuse_alike(found, pair)
    for site, some in found.items():
        if all(some.values()):
            reasons = "; ".join(sorted({f"{c.name}: {no}" for c, no in some.items()}))
            raise HardwareError(
                f"{site} has no format left on {spec.hardware} with the engine "
                f"{spec.engine}: {reasons}"
            )
    return found


def joined(model: ModelShape, engine: str) -> tuple[tuple[Site, ...], ...]:
    """Return the sites that an engine gives one choice: caches, and a layer's experts."""
    cache = (s.site for s in model.sites if s.site.component is Component.KV_CACHE)
    switched = (tuple(sorted(cache)),) if engine in _ONE_CACHE else ()
    return (*filter(None, switched), *(_experts(model) if engine == "vllm" else ()))


def _refuse(
    found: dict[Choice, str | None], shape: SiteShape, model: ModelShape
) -> None:
    for choice, no in found.items():
        found[choice] = no or refusal(shape, choice, model)


def _experts(model: ModelShape) -> Iterator[tuple[Site, ...]]:
    """Yield the matrices of each layer's experts: vLLM runs them under one scheme."""
    for shape in model.sites:
        if shape.site.component is Component.FFN_IN and shape.active_share < 1:
            yield shape.site, Site(shape.site.layer, Component.FFN_OUT)


def _refuse_alike(
    found: Mapping[Site, dict[Choice, str | None]], pair: tuple[Site, ...]
) -> None:
    for one, other in (pair, pair[::-1]):
        for choice, no in found[other].items():
            if no and found[one].get(choice, no) is None:
                found[one][choice] = f"{other}, under the same scheme: {no}"
