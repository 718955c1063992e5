"""What aiconfigurator 0.12 estimates: run in .venv-latency, questions and answers as JSON.

    .venv-latency/bin/python aiconfigurator_static.py < questions.json

A question is {"config": a folder with config.json, "system", "batch", "prompt",
"output", "gemm": "bfloat16" or "fp8", "gpus"}; its answer {"per_token_s",
"first_token_s", "version"}, or {"error"}. The mode is "static": kernels alone, one batch
that starts together. (The mode "agg" adds what a server adds to the first token: for
vLLM 0.8 ms for each layer.)
"""

import json
import logging
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

from aiconfigurator.cli.api import cli_estimate  # noqa: E402 - after the silence


def answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        found = cli_estimate(
            question["config"],
            question["system"],
            mode="static",
            backend_name="vllm",
            isl=question["prompt"],
            osl=question["output"],
            batch_size=question["batch"],
            tp_size=question["gpus"],
            gemm_quant_mode=question["gemm"],
            kvcache_quant_mode="bfloat16",
            fmha_quant_mode="bfloat16",
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return {
        "per_token_s": found.tpot / 1e3,
        "first_token_s": found.ttft / 1e3,
        "version": found.backend_version,
    }


json.dump([answer(q) for q in json.load(sys.stdin)], sys.stdout)
