"""What every peer's script reads and writes: two JSON files.

The request names a model folder, sequences of token ids, effective bits per weight of
the linear layers (lm_head aside) and a method. The answer holds the modules that got
8 bits, for each of these bits, and the seconds from the loaded model to the first
stack: of the clock, and of the processor.

    python modelopt_auto.py request.json answer.json

Runs in the peers' own virtual environment: nothing of the product is imported.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

NARROW_BITS = 8
WIDE_BITS = 16


def load(request: dict[str, Any]) -> Any:
    """Return the model in float32, as everybody gets it."""
    return AutoModelForCausalLM.from_pretrained(
        request["folder"], dtype=torch.float32, local_files_only=True
    ).eval()


def batches(request: dict[str, Any]) -> list[torch.Tensor]:
    """Return the calibration sequences, (1, tokens) each."""
    return [torch.tensor([ids]) for ids in request["sequences"]]


def linears(model: Any) -> dict[str, int]:
    """Return the elements of every matrix that bits are counted over."""
    return {
        name: module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def answer(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the request, run the peer, write its answer."""
    request = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(request)))


class Clock:
    """Seconds since it was made: of the clock, and of the processor.

    The second kind is what can be compared where others use the same cores.
    """

    def __init__(self) -> None:
        self.start = self._now()

    def __call__(self) -> dict[str, float]:
        seconds, cpu = self._now()
        return {"seconds": seconds - self.start[0], "cpu_seconds": cpu - self.start[1]}

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()
