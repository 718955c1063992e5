"""Seconds of a checkpoint under vLLM: run by vLLM's own Python, which knows nothing of us.

    python vllm_seconds.py FOLDER '{"batch_size": 1, "prompt_tokens": 512, "output_tokens": 128}'

One line is JSON, between the engine's own. A token's time is that of all but the first,
over their number.
"""

import json
import multiprocessing
import statistics
import sys
import threading
import time

REPEATS = 3
MOST_TOKENS = 64  # of output: enough to divide by


def lock_without_shared_memory() -> None:
    """Have vLLM, which starts no process here, take a lock of threads.

    A worker's sandbox lets nothing be made in /dev/shm, where those of processes lie.
    """
    try:
        multiprocessing.Lock()
    except OSError:
        multiprocessing.Lock = threading.Lock  # type: ignore[assignment]


def main() -> None:
    """Load, warm up, generate one token and many, and print what they took."""
    lock_without_shared_memory()
    import vllm

    folder, workload = sys.argv[1], json.loads(sys.argv[2])
    batch, prompt = workload["batch_size"], workload["prompt_tokens"]
    wanted = min(workload["output_tokens"], MOST_TOKENS)
    engine = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=prompt + wanted,
        max_num_seqs=batch,
        enable_prefix_caching=False,
    )

    def seconds(tokens: int, seed: int) -> float:
        prompts = [
            {"prompt_token_ids": [3 + (seed + i + j) % 89 for j in range(prompt)]}
            for i in range(batch)
        ]
        how = vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        engine.generate(prompts, how, use_tqdm=False)
        return time.perf_counter() - start

    seconds(2, 0)
    firsts = [seconds(1, i) for i in range(REPEATS)]
    first = statistics.median(firsts)
    steps = max(wanted - 1, 1)
    each = sorted((seconds(1 + steps, i) - first) / steps for i in range(REPEATS))
    found = {
        "per_token_s": each[REPEATS // 2],
        "first_token_s": first,
        "spread": (each[-1] - each[0]) / each[REPEATS // 2],
        "steps": steps * REPEATS,
        "engine": "vllm",
        "version": vllm.__version__,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":  # the engine is a child that imports this file
    main()
