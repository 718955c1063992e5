"""Signatures of reports: Ed25519, by a key that follows from the operator's secret.

A signature is over the digest of a report and the time of signing. Whoever has the
public key can check it, offline and without the service:

    {"sha256": "…", "algorithm": "ed25519", "key_id": "…", "signed_at": "…Z",
     "signature": "…"}

Another secret has another key: reports that were signed before need the public key of
that time, so keep it (`precision report-key`).
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from api import secret
from optimizer import seal, strict_json
from optimizer.seal import INTEGRITY

ALGORITHM = "ed25519"
PURPOSE = "report signatures"
SCHEMAS = ("precision.report/", "precision.training_report/")
MAX_BYTES = 256 << 20  # of a report: one of a model of 126 layers has 7 MB


class Unverified(Exception):
    """A report is not what was signed, or nobody can tell; the message says why."""


def public_key() -> Ed25519PublicKey:
    """Return the key that this installation's signatures are checked with."""
    return _private_key().public_key()


def _private_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(secret.key(PURPOSE))


def key_id(key: Ed25519PublicKey) -> str:
    """Return a short name of a public key: the start of its sha256."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def pem(key: Ed25519PublicKey) -> str:
    """Return a public key as PEM, as other tools read it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form).decode()


def read_key(text: str) -> Ed25519PublicKey:
    """Return the key of a PEM. Raises ValueError where it is none of Ed25519."""
    try:
        key = serialization.load_pem_public_key(text.encode())
    except ValueError:
        raise ValueError("no public key in PEM: -----BEGIN PUBLIC KEY-----") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("a public key of another kind: it has to be Ed25519")
    return key


def sign(document: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the document with its digest and a signature; `now` is aware."""
    sha256, signed_at = seal.digest(document), f"{now:%Y-%m-%dT%H:%M:%SZ}"
    private = _private_key()
    signature = private.sign(_message(sha256, signed_at))
    return {
        **document,
        INTEGRITY: {
            "sha256": sha256,
            "algorithm": ALGORITHM,
            "key_id": key_id(private.public_key()),
            "signed_at": signed_at,
            "signature": base64.b64encode(signature).decode(),
        },
    }


def _message(sha256: str, signed_at: str) -> bytes:
    return f"precision report\n{sha256}\n{signed_at}\n".encode()


def parse(content: bytes) -> dict[str, Any]:
    """Return a report's document. Raises Unverified where it is none."""
    if len(content) > MAX_BYTES:
        raise Unverified(f"larger than any report: {len(content)} bytes")
    try:
        document = strict_json.parse(content)
    except ValueError as error:
        raise Unverified(f"not a report: {error}") from None
    schema = document.get("schema")
    if not isinstance(schema, str) or not schema.startswith(SCHEMAS):
        raise Unverified(f"not a report: its schema is {str(schema)[:80]!r}")
    return document


def verify(document: Mapping[str, Any], key: Ed25519PublicKey) -> dict[str, Any]:
    """Return what the signature says. Raises Unverified, and says what is wrong."""
    said = _integrity(document)
    found = _digest(document)
    if found != said["sha256"]:
        raise Unverified(
            f"it was changed: its content has the sha256 {found}, and it was signed "
            f"with {said['sha256'][:64]}"
        )
    if said["key_id"] != key_id(key):
        raise Unverified(
            f"it was signed with another key, {said['key_id'][:40]!r}, and not with "
            f"{key_id(key)!r}: ask its operator for that public key"
        )
    try:
        signature = base64.b64decode(said["signature"], validate=True)
        if base64.b64encode(signature).decode() != said["signature"]:
            raise InvalidSignature  # its last letter has bits that stand for nothing
        key.verify(signature, _message(said["sha256"], said["signed_at"]))
    except (InvalidSignature, binascii.Error):
        raise Unverified("its signature is false: it was changed after it") from None
    return said


def _digest(document: Mapping[str, Any]) -> str:
    try:
        return seal.digest(document)
    except ValueError as error:
        raise Unverified(f"not a report: {error}") from None


def _integrity(document: Mapping[str, Any]) -> dict[str, str]:
    said = document.get(INTEGRITY)
    names = ("sha256", "algorithm", "key_id", "signed_at", "signature")
    if not isinstance(said, dict) or not all(
        isinstance(said.get(n), str) for n in names
    ):
        raise Unverified("it carries no signature: it is from before reports had any")
    if said["algorithm"] != ALGORITHM:
        raise Unverified(
            f"its signature is of another kind: {said['algorithm'][:40]!r}, not {ALGORITHM}"
        )
    return {name: said[name] for name in names}
