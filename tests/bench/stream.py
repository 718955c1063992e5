"""A model larger than its share of memory, swept as it streams from its files.

    python -m tests.bench.stream                # 6 GB of random weights, once written
    python -m tests.bench.stream --layers 4     # a smaller one, to try it

The sweep runs in a process of its own, whose peak memory is the figure. The demo
model is swept both ways as well: the bytes of the two results must be the same.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import WeightCodes
from optimizer.model import LoadedModel, load
from optimizer.pieces import to_json
from optimizer.sensitivity import sweep
from optimizer.stack import CHOICES, Choice, Site
from optimizer.stream import stream
from optimizer.swept import CORE, family
from optimizer.walk import Activations
from workers import demo

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2048, 8192, 16, 8, 32000
SEQUENCES, TOKENS = 2, 64


def main() -> None:
    arguments = parse()
    if arguments.child:
        child(arguments.child)
        return
    folder = arguments.data_dir / "bench" / f"random-{arguments.layers}"
    if not (folder / "config.json").exists():
        write(folder, arguments.layers)
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    words = [sys.executable, "-m", "tests.bench.stream", "--child", str(folder)]
    found = json.loads(subprocess.run(words, stdout=-1, check=True).stdout)
    peak = found["peak_bytes"]
    print(f"{size / 1e9:.2f} GB of weights, {peak / 1e9:.2f} GB at the peak")
    print(
        json.dumps(
            {
                "model_bytes": size,
                "peak_over_model_ratio": peak / size,
                **found,
                "same_bytes_streamed": same_bytes(arguments.data_dir),
            }
        )
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=46)
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def child(folder: Path) -> None:
    """Calibrate and sweep a streamed model; print what it took."""
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    shape = (1, TOKENS)
    ids = [
        torch.randint(0, VOCAB, shape, generator=generator) for _ in range(SEQUENCES)
    ]
    model = stream(folder)
    with Progress(console=Console(stderr=True)) as bar:
        swept = run(model, ids, bar)
    print(
        json.dumps(
            {
                "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "seconds": time.perf_counter() - start,
                "parameters": model.shape.parameters,
                "tokens": SEQUENCES * TOKENS,
                "roundings": len(json.loads(swept)["roundings"]),
            }
        )
    )


def run(model: LoadedModel, ids: list[torch.Tensor], bar: Progress | None) -> str:
    """Return the JSON of a sweep of every core choice."""

    def told(name: str) -> object:
        if bar is None:
            return lambda done, planned: None
        task = bar.add_task(name)
        return lambda done, planned: bar.update(task, completed=done, total=planned)

    kept = Activations(budget_bytes=256 << 20)
    largest = amaxes(calibrate(model, ids, told("calibrate"), kept=kept))  # type: ignore[arg-type]
    sums = sweep(
        model,
        dict(enumerate(ids)),
        candidates(model),
        largest,
        WeightCodes(model),
        kept=kept,
        progress=told("sweep"),  # type: ignore[arg-type]
    )
    return to_json(sums.to_json())


def candidates(model: LoadedModel) -> dict[Site, list[Choice]]:
    return {
        s: [c for c in CHOICES[s.component] if family(c) == CORE] for s in model.sites
    }


def same_bytes(data_dir: Path) -> bool:
    """Whether the demo model's sweep is the same streamed and not streamed."""
    folder = demo.demo_model(data_dir)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 4096, (1, 32), generator=generator)]
    return run(stream(folder), ids, None) == run(load(folder), ids, None)


# A random model


def write(folder: Path, layers: int) -> None:
    """Write a Llama of random weights in bf16, a file for every layer."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32)
        return x.mul_(shape[-1] ** -0.5).bfloat16()

    ends = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    index = {}
    for number in range(-1, layers):
        tensors = ends if number < 0 else layer(number, normal)
        name = f"model-{number + 2:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
    total = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    written = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(written))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config(layers)))


def layer(number: int, normal: object) -> dict[str, torch.Tensor]:
    made = normal
    at = f"model.layers.{number}"
    width = HIDDEN // HEADS * KV_HEADS
    ones = torch.ones(HIDDEN).bfloat16()
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (width, HIDDEN),
        "self_attn.v_proj": (width, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"{at}.{n}.weight": made(*s) for n, s in shapes.items()}  # type: ignore[operator]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{at}.{norm}.weight"] = ones.clone()
    return tensors


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
