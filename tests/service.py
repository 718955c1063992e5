"""The real service for tests: `precision serve` in a child, and a tiny real model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api.client import Client

MARK = "PRECISION_TEST_MARK"  # every process that a service starts inherits it
FAST = {  # a lost worker is noticed in seconds
    "PRECISION_LEASE_S": "3",
    "PRECISION_BEAT_S": "0.5",
    "PRECISION_SWEEP_S": "0.5",
    "PRECISION_CREATES_PER_MINUTE": "0",  # tests flood it
}
BODY: dict[str, Any] = {
    "model": "tiny",
    "hardware": "h100",
    "latency_sla": 0.02,
    "task": "chat",
    "data_distribution": {
        "name": "web_text",
        "calibration_tokens": 512,
        "validation_tokens": 512,
        "sequence_tokens": 128,
    },
}
START_S = 180.0  # usually 3; everything is imported, on a machine that may be busy
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 128, 2, 4, 2, 272


@dataclass
class Service:
    """A running `precision serve`."""

    process: "subprocess.Popen[bytes]"
    data_dir: Path
    mark: str
    output: Path
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(str(self.address["url"]), self.key)

    @property
    def address(self) -> dict[str, Any]:
        return dict(json.loads((self.data_dir / "address").read_text()))

    @property
    def key(self) -> str:
        return (self.data_dir / "api_key").read_text().strip()

    def compute_child(self) -> int | None:
        """Return the process that computes a job; None where none does."""
        for pid in processes(self.mark):
            if b"workers.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    def pool_child(self) -> int | None:
        """Return the process that answers a computing one; None between two jobs."""
        worker = self.address["children"]["worker"]
        for pid in processes(self.mark):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if parent(pid) == worker and b"spawn_main" in command:
                return pid
        return None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@contextmanager
def service(
    data_dir: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[Service]:
    """Run the service on a free port until the block ends, whatever happens in it."""
    mark, output = uuid4().hex, data_dir / "serve.out"
    data_dir.mkdir(exist_ok=True)
    (data_dir / "address").unlink(missing_ok=True)
    process = serve(data_dir, output, *options, environment=environment, mark=mark)
    try:
        began = time.monotonic()
        while not (data_dir / "address").exists():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() - began < START_S, output.read_text()
            time.sleep(0.05)
        started = Service(process, data_dir, mark, output)
        with started.client:
            yield started
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def serve(
    data_dir: Path,
    output: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    mark: str = "",
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "api.cli", "serve", "--data-dir", str(data_dir)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_")}
    with output.open("wb") as file:
        return subprocess.Popen(
            [*command, "--port", "0", *options],
            env={**clean, **FAST, **(environment or {}), MARK: mark},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def processes(mark: str) -> list[int]:
    """Return every live process that a service with this mark started."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended, or is not ours
        if wanted in environment:
            found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rsplit(")", 1)[1].split()[1])


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Return the first true value of `condition`, or what it is after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def tiny_model(folder: Path) -> Path:
    """Write a llama of two layers with random weights, and a tokenizer of bytes."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer(folder)
    return folder


def _weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    found = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        for name, shape in shapes.items():
            found[f"model.layers.{i}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return {**found, "model.norm.weight": np.ones(HIDDEN, np.float32)}


def byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer that has a token for every byte, and one for the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|end|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": 2048,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
