"""How fast tensors are quantized here: `python -m tests.bench.quantize`.

Every candidate runs once per round, so that a busy moment hits all of them; a ratio
is the median over rounds of ratios within a round. The last line is JSON.
"""

import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from optimizer.formats import BF16, E4M3
from optimizer.quantize import amax, fake_quantize, round_to_format, scale_from_amax
from optimizer.stack import Granularity

SIDE = 4096  # 64 MiB of float32, more than any cache
ROUNDS = 15


def candidates(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    per_tensor = scale_from_amax(amax(x, Granularity.TENSOR), E4M3)
    per_token = scale_from_amax(amax(x, Granularity.TOKEN), E4M3)
    return {
        "clone": x.clone,
        "torch_cast": lambda: x.to(torch.float8_e4m3fn).float(),
        "torch_bf16_cast": lambda: x.bfloat16().float(),
        "fake_quantize": lambda: fake_quantize(x, per_tensor, E4M3),
        "fake_quantize_token": lambda: fake_quantize(x, per_token, E4M3),
        "round_bf16": lambda: round_to_format(x, BF16),
        "amax_tensor": lambda: amax(x, Granularity.TENSOR),
        "amax_token": lambda: amax(x, Granularity.TOKEN),
    }


def seconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result  # freed outside the clock
    return elapsed


def main() -> None:
    x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    calls = candidates(x)
    rounds = [{name: seconds(c) for name, c in calls.items()} for _ in range(ROUNDS)]
    figures: dict[str, float] = {"threads": torch.get_num_threads()}
    print(f"{'':22}{'ms':>8}{'GB/s':>8}{'/ clone':>9}")
    for name in calls:
        time_s = median(r[name] for r in rounds)
        ratio = median(r[name] / r["clone"] for r in rounds)
        gb_per_s = 4 * x.numel() / time_s / 1e9  # of x, not of the traffic
        print(f"{name:22}{time_s * 1e3:8.1f}{gb_per_s:8.2f}{ratio:9.2f}")
        figures[f"{name}_gb_per_s"] = round(gb_per_s, 3)
        figures[f"{name}_over_clone_ratio"] = round(ratio, 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
