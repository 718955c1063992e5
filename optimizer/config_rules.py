"""What a model's JSON files may not ask for: code, other files, kernels from elsewhere."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from optimizer.errors import ModelError

MAX_DEPTH = 16  # the deepest config we know has 4
REMOTE_CODE = ("auto_map", "custom_pipelines", "custom_generate")
# "eager" or "sdpa"; a name with a slash would be a repository of kernels.
_IMPLEMENTATION = re.compile(r"_?(?:attn|experts)_implementation\w*")
_OWN_KERNELS = re.compile(r"\w*")


def refuse_requests(value: object, name: str, depth: int = 0) -> None:
    """Raise ModelError where the file `name` asks for what is never done.

    Looks into nested objects too: libraries build parts of a model from them.
    """
    if depth > MAX_DEPTH:
        raise ModelError(f"{name} is nested more than {MAX_DEPTH} levels deep")
    inner: Iterable[object] = value if isinstance(value, list) else ()
    if isinstance(value, Mapping):
        inner = value.values()
        for key, asked in value.items():
            _refuse_request(str(key), asked, name)
    for child in inner:
        refuse_requests(child, name, depth + 1)


def _refuse_request(key: str, value: Any, name: str) -> None:
    if key in REMOTE_CODE:
        article = "an" if key[0] == "a" else "a"
        raise ModelError(
            f"{name} has {article} {key}: code that comes with a model is never run. If "
            f"transformers itself has this architecture, remove {key}"
        )
    if key == "trust_remote_code" and value is not False:
        raise ModelError(
            f"{name} says trust_remote_code: code that comes with a model is never run. "
            "Remove it"
        )
    if _IMPLEMENTATION.fullmatch(key) and not _is_own_kernel(value):
        raise ModelError(
            f"{name} has {key} {str(value)[:80]!r}: kernels from elsewhere are never "
            "loaded. Remove it"
        )


def _is_own_kernel(value: object) -> bool:
    """Whether it is a word such as "sdpa"; old configs have booleans there."""
    if isinstance(value, str):
        return _OWN_KERNELS.fullmatch(value) is not None
    return value is None or isinstance(value, bool)
