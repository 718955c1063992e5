"""What vLLM makes of prompts: run by vLLM's own Python, which knows nothing of us.

    python log_probabilities.py ASKED.json OUT.json

ASKED has `prompts`, a list of token ids each, `folders` of checkpoints by name, and
`dtypes`, what activations are held in. OUT has for each of these and each checkpoint,
and for every position but a prompt's first, the token that is most likely there and the
log-probability of the prompt's own; and the static scales that were loaded, by module,
and the format of the cache. A checkpoint that is refused has its `error` instead.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

SCALES = ("input_scale", "_k_scale", "_v_scale")
# Kernels for AMX take 16 bits alone: float32 goes the way of CPUs without it.
ONLY_16_BITS = "CPUFP8W8A8ScaledMMLinearKernel,CPUFp8PerTensorScaledMMLinearKernel"


def main() -> None:
    """Load each checkpoint in turn, and score the prompts."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    found = {
        dtype: {
            name: tried(folder, asked["prompts"], dtype)
            for name, folder in asked["folders"].items()
        }
        for dtype in asked["dtypes"]
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


def tried(folder: str, prompts: list[list[int]], dtype: str) -> dict[str, Any]:
    """Return what one checkpoint says, or why it says nothing."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    os.environ["VLLM_DISABLED_KERNELS"] = ONLY_16_BITS if dtype == "float32" else ""
    try:
        return answers(folder, prompts, dtype)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()  # of one that failed half-way


def answers(folder: str, prompts: list[list[int]], dtype: str) -> dict[str, Any]:
    """Return what one checkpoint says."""
    import vllm

    engine = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + 1,
        enable_prefix_caching=False,
        max_logprobs=1,
        worker_extension_cls="filled_in.Worker",
    )
    how = vllm.SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    likely, log_p = [], []
    done = engine.generate(given, how, use_tqdm=False)
    for ids, answer in zip(prompts, done, strict=True):
        rows = answer.prompt_logprobs[1:]
        likely.append([next(t for t, p in r.items() if p.rank == 1) for r in rows])
        log_p.append([r[t].logprob for r, t in zip(rows, ids[1:], strict=True)])
    (scales,) = engine.apply_model(static_scales)
    cache = engine.llm_engine.vllm_config.cache_config.cache_dtype
    return {"likely": likely, "log_p": log_p, "scales": scales, "cache": cache}


def static_scales(network: Any) -> dict[str, float]:
    """Return every scale of inputs and caches that the model holds."""
    return {
        f"{name}.{each}": float(getattr(module, each))
        for name, module in network.named_modules()
        for each in SCALES
        if getattr(module, each, None) is not None
    }


if __name__ == "__main__":  # the engine may be a child that imports this file
    main()
