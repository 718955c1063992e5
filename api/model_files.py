"""Which files a model consists of: what is sent, and what is taken."""

import re

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
"""What a model may consist of beside its weights, `*.safetensors`."""

NEEDED = ("config.json", "tokenizer.json")
MAX_SMALL_BYTES = 64 << 20
WEIGHTS = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,99}\.safetensors", re.ASCII)
