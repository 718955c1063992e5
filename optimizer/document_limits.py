"""What a report has to warn of, and what its figures do not cover."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optimizer.experts import rare
from optimizer.local_run import SERVED
from optimizer.on_device import executed_as
from optimizer.one_pass import generates
from optimizer.reasons import growing
from optimizer.units import seconds

if TYPE_CHECKING:
    from optimizer.document import Run

NAMED_EXPERTS = 8  # in a warning; the document has them all


def limits(run: "Run") -> list[str]:
    """Return what the figures do not cover, a sentence each."""
    spec = run.spec
    said = [
        executed_as(run.executed),
        f"Quality was measured at {spec.sequence_tokens} tokens of context.",
        "Predicted KL adds up what each site loses alone, corrected by the stacks that "
        "were measured; measured KL is of the whole stack.",
    ]
    if spec.stack is not None and spec.stack_use == "validate":
        said.append(
            "The stack came with the request: it was measured beside the uniform ones, "
            "and the rest of the front is predicted."
        )
    if not generates(run.model.shape):
        said.append(
            "The model generates nothing: its times, per token and to the first, are "
            "both of one pass over the batch, and KL is of its logits at every "
            "position. There is no perplexity: no token is predicted from those before "
            "it, and a pseudo-perplexity would take a pass for each masked token."
        )
    ways = spec.workload.tensor_parallel
    if ways > 1:
        said.append(
            f"{ways} devices share every layer: times are of one device's part and of "
            f"what they exchange, weights and memory of a stack those of all {ways}."
        )
    if run.basis == "modelled":
        said.append(
            "Latency is put together from kernels that others measured and, where there "
            "are none, a roofline fitted to them; the stack was not run on the device."
        )
    else:
        said.append(
            "Latency adds up what sites took on the worker; stacks that were run there "
            "end to end have their own figures."
        )
    if (served := run.runs.get(SERVED)) is not None:
        first = served.first_token_s
        also = "" if first is None else f" and {seconds(first)} to the first"
        said.append(
            f"{served.engine} {served.version} served the exported stack on the worker: "
            f"{seconds(served.per_token_s)} per token{also}. They decide whether "
            "the targets are met; the front's seconds are torch's, which ran every stack."
        )
    return said


def warnings(run: "Run") -> list[str]:
    """Return what a reader has to look at, a sentence each."""
    context = run.spec.workload.prompt_tokens
    if generates(run.model.shape):
        context += run.spec.workload.output_tokens
    said = list(run.tokens.warnings)
    few = rare(run.experts)
    if few:
        named = ", ".join(f"{e.name} ({e.tokens})" for e in few[:NAMED_EXPERTS])
        said.append(
            f"{len(few)} of {len(run.experts)} experts got hardly any calibration tokens:"
            f" {named}; their input scale is their layer's. Calibrate on more data, or "
            "on data that reaches them"
        )
    longest = run.model.shape.max_context
    if 0 < longest < context:
        said.append(
            f"the workload reaches {context} tokens of context; the model was made for "
            f"{longest}"
        )
    if context > run.spec.sequence_tokens:
        said.append(
            f"the workload reaches {context} tokens of context; scales and quality are "
            f"from sequences of {run.spec.sequence_tokens}"
        )
    places = run.evidence.statistics.places
    said += growing(places, context, run.spec.sequence_tokens)
    said += _loops(run.looked.generation)
    return said + _served(run)


def _served(run: "Run") -> list[str]:
    """Say where the engine did not serve the export."""
    checkpoint = (run.exported or {}).get("checkpoint") or {}
    found = checkpoint.get("served_seconds", {})
    if "error" in found:
        return [f"the exported stack was not served here: {found['error']}"]
    return []


def _loops(generation: Mapping[str, Any] | None) -> list[str]:
    if generation is None:
        return []
    loops, prompts = generation["loops"], len(generation["continuations"])
    if loops["stack"] <= loops["reference"]:
        return []
    return [
        f"the chosen stack's greedy text ends in a loop on {loops['stack']} of {prompts} "
        f"prompts, the reference's on {loops['reference']}: read the generation check"
    ]
