"""The service's own secret, and the keys that are derived from it, one per purpose.

It signs cursors and links: whoever has it could forge those, and nothing else. All
replicas of one installation need the same one, so it is a setting; on one machine it
lies in the data folder, readable by its owner alone.
"""

import hashlib
import hmac
import os
import secrets
from functools import cache
from pathlib import Path

from api.settings import settings

BYTES = 32


@cache
def key(purpose: str) -> bytes:
    """Return the 32 bytes for one purpose. Another purpose has others."""
    return hmac.digest(_secret(), purpose.encode(), hashlib.sha256)


def sign(purpose: str, message: bytes) -> bytes:
    """Return the HMAC-SHA-256 of a message under the purpose's key."""
    return hmac.digest(key(purpose), message, hashlib.sha256)


def _secret() -> bytes:
    given = settings().secret_key.get_secret_value()
    return given.encode() if given else _kept(settings().data_dir / "secret")


def _kept(path: Path) -> bytes:
    """Return the secret in a file; who comes first makes it, whole or not at all."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".secret.{secrets.token_hex(8)}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)  # fails where another process was faster
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    return path.read_bytes()
