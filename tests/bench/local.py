"""What this processor takes, predicted and measured: `python -m tests.bench.local`.

The demo model is run end to end in five stacks. The prediction adds up what sites took
in runs of three uniform stacks (fp32, bf16, FP8 weights), as `hardware: "local"` does;
the measurement is of other runs. All of them take turns, and the fastest quarter of
each stack's steps counts, predicted and measured alike, so that other work on the
machine counts for little. The roofline, with this processor's own peaks, stands beside
them, and under PRECISION_VLLM_PYTHON what vLLM takes for the same checkpoint in bf16.
The last line is JSON.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from api.settings import settings
from optimizer import local
from optimizer.cost import stack_cost
from optimizer.engines import served_seconds
from optimizer.local_prices import Profile, priced
from optimizer.local_run import Times, opened, profiled, run, uniform
from optimizer.native import Native
from optimizer.spec import Workload
from optimizer.stack import Component, ModelShape, Stack

FFN = frozenset({Component.FFN_IN, Component.FFN_ACT, Component.FFN_OUT})
ATTENTION = frozenset(
    {
        Component.ATTN_QKV,
        Component.KV_CACHE,
        Component.ATTN_SCORES,
        Component.ATTN_SOFTMAX,
        Component.ATTN_VALUES,
        Component.ATTN_OUT,
    }
)
DEMO = Path("var/models/smollm2-135m-instruct")
FASTEST = 0.25
WORKLOAD = Workload(batch_size=1, prompt_tokens=512, output_tokens=128)
WEIGHT_ONLY = ("fp8_e4m3_weight_only", "bf16")


def mixed(model: ModelShape, some: frozenset[Component], *names: str) -> Stack:
    """Return the bf16 stack in which some components have the first name they know."""
    inside, outside = uniform(model, names), uniform(model, ("bf16",))
    return Stack(
        {
            s: (inside if s.component in some else outside).choices[s]
            for s in outside.choices
        }
    )


def stacks(model: ModelShape) -> dict[str, Stack]:
    return {
        "all_fp32": uniform(model, ("fp32",)),
        "all_bf16": uniform(model, ("bf16",)),
        "all_weight_only": uniform(model, WEIGHT_ONLY),
        "ffn_fp32": mixed(model, FFN, "fp32"),
        "attention_weight_only": mixed(model, ATTENTION, *WEIGHT_ONLY),
    }


def measured(
    native: Native,
    known: Mapping[object, Stack],
    asked: Mapping[object, Stack],
    rounds: int,
) -> dict[object, Times]:
    every: dict[object, Times] = defaultdict(Times)
    for _ in range(rounds):
        for name, times in run(native, {**known, **asked}, WORKLOAD).items():
            every[name].add(times)
    return {name: fastest(times) for name, times in every.items()}


def fastest(times: Times) -> Times:
    """Return the fastest steps: in the others, other work had the cores."""
    decode, prefill = (
        sorted(zip(steps, parts, strict=True), key=lambda pair: pair[0])[
            : math.ceil(FASTEST * len(steps))
        ]
        for steps, parts in (
            (times.decode, times.decode_sites),
            (times.prefill, times.prefill_sites),
        )
    )
    return Times(
        [step for step, _ in decode],
        [step for step, _ in prefill],
        [sites for _, sites in decode],
        [sites for _, sites in prefill],
    )


def figures_of(
    native: Native,
    asked: Mapping[str, Stack],
    every: Mapping[object, Times],
    own: Profile,
) -> dict[str, float]:
    """Print a row for each stack, and return what it says."""
    sites, device = native.shape.sites, local.device()
    casts = local.casts(native.shape, WORKLOAD)
    figures: dict[str, float] = {}
    print(f"{'':22}{'ms per token':>42}{'seconds to the first':>24}")
    print(
        f"{'':22}{'roofline':>10}{'predicted':>11}{'measured':>10}{'error':>11}", end=""
    )
    print(f"{'predicted':>14}{'measured':>10}")
    for name, stack in asked.items():
        found = every[name].measured()
        added = casts.total(stack.choices)
        step, first = (
            math.fsum(prices.of(s, stack.choices[s.site]) or 0.0 for s in sites) + more
            for prices, more in (
                (own.decode, added.per_token_s),
                (own.prefill, added.first_token_s),
            )
        )
        roof = stack_cost(native.shape, stack, device, WORKLOAD).per_token_s
        error = step / found.per_token_s - 1
        print(
            f"{name:22}{1e3 * roof:10.1f}{1e3 * step:11.1f}{1e3 * found.per_token_s:10.1f}"
            f"{error:11.1%}{first:14.2f}{found.first_token_s or math.nan:10.2f}"
        )
        figures[f"{name}_per_token_s"] = round(found.per_token_s, 5)
        if found.first_token_s:  # a busy machine has time for some only
            figures[f"{name}_first_token_s"] = round(found.first_token_s, 4)
        figures[f"{name}_error_ratio"] = round(error, 4)
        figures[f"{name}_spread_ratio"] = round(found.spread, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    native = opened(arguments.model)
    known = dict(enumerate(profiled(native.shape)))
    asked = stacks(native.shape)
    every = measured(native, known, asked, arguments.rounds)
    figures = figures_of(native, asked, every, priced(native, known, every))
    errors = [abs(v) for k, v in figures.items() if k.endswith("_error_ratio")]
    figures["largest_error_ratio"] = max(errors)
    wide, narrow = (figures.get(f"all_{f}_first_token_s") for f in ("fp32", "bf16"))
    if wide and narrow:
        figures["bf16_over_fp32_prefill_ratio"] = round(narrow / wide, 3)
    python = settings().vllm_python
    if python is not None:
        served = served_seconds(python, arguments.model.resolve(), WORKLOAD)
        print(
            f"served by {served.engine} {served.version} in bf16: "
            f"{1e3 * served.per_token_s:.1f} ms per token, "
            f"{served.first_token_s:.3f} s to the first"
        )
        figures["vllm_bf16_per_token_s"] = round(served.per_token_s, 5)
    print(json.dumps({**figures, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
