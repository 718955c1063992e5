"""What vLLM makes of prompts: run by vLLM's own Python, which knows nothing of us.

    python log_probabilities.py FOLDER PROMPTS.json OUT.json

PROMPTS has a list of token ids for each prompt. OUT gets, for every position but the
first, the token that is most likely there and the log-probability of the prompt's own.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Load the checkpoint and score the prompts."""
    import vllm

    folder, asked, out = sys.argv[1:]
    prompts = json.loads(Path(asked).read_text())
    engine = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + 1,
        enable_prefix_caching=False,
        max_logprobs=1,
        worker_extension_cls="filled_in.Worker",
    )
    how = vllm.SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    found = []
    for ids, answer in zip(prompts, engine.generate(given, how), strict=True):
        rows = answer.prompt_logprobs[1:]
        found.append(
            {
                "likely": [next(t for t, p in r.items() if p.rank == 1) for r in rows],
                "log_p": [r[t].logprob for r, t in zip(rows, ids[1:], strict=True)],
            }
        )
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":  # the engine is a child that imports this file
    main()
