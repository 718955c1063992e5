"""A report that somebody changed does not verify, and it is said what is wrong."""

import copy
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi.testclient import TestClient

from api import signatures
from api.signatures import Unverified
from tests.optimizer.example_document import example_document

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def signed(data_dir: Path) -> dict[str, Any]:
    return signatures.sign(example_document(layers=1), NOW)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            yield from leaves(child, (*path, key))
    else:
        yield path


def changed(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return type(value)(value + 1)
    return f"{value} "


def test_what_was_signed_verifies_however_its_json_is_laid_out(
    signed: dict[str, Any],
) -> None:
    key = signatures.read_key(signatures.pem(signatures.public_key()))
    laid_out = json.dumps(signed, indent=3, sort_keys=True, ensure_ascii=False)
    again = signatures.parse(laid_out.encode())
    said = signatures.verify(again, key)
    assert said["signed_at"] == "2026-03-01T12:00:00Z"
    assert said["key_id"] == signatures.key_id(key)


def test_whatever_is_changed_fails(signed: dict[str, Any]) -> None:
    key = signatures.public_key()
    every = list(leaves(signed))
    assert len(every) > 500
    for path in every[:: len(every) // 200] + [p for p in every if p[0] == "integrity"]:
        copied = copy.deepcopy(signed)
        inside = copied
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = changed(inside[path[-1]])
        with pytest.raises(Unverified):
            signatures.verify(copied, key)


def test_the_last_digit_counts(signed: dict[str, Any]) -> None:
    text = json.dumps(signed)
    seconds = repr(signed["components"][1]["per_token_s"])
    other = seconds[:-1] + ("1" if seconds[-1] != "1" else "2")
    document = signatures.parse(text.replace(seconds, other, 1).encode())
    with pytest.raises(Unverified, match="it was changed"):
        signatures.verify(document, signatures.public_key())


def test_every_letter_of_the_signature_counts(signed: dict[str, Any]) -> None:
    written = signed["integrity"]["signature"]
    assert written.endswith("==")
    for last in set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef0123456789+/") - {written[-3]}:
        said = {**signed["integrity"], "signature": f"{written[:-3]}{last}=="}
        with pytest.raises(Unverified, match="signature is false"):
            signatures.verify({**signed, "integrity": said}, signatures.public_key())


def test_what_is_added_or_left_out_fails(signed: dict[str, Any]) -> None:
    key = signatures.public_key()
    with pytest.raises(Unverified, match="it was changed"):
        signatures.verify({**signed, "note": "approved"}, key)
    with pytest.raises(Unverified, match="it was changed"):
        signatures.verify({k: v for k, v in signed.items() if k != "warnings"}, key)


def test_a_digest_that_was_made_anew_is_no_signature(signed: dict[str, Any]) -> None:
    forged = {**signed, "warnings": []}
    forged["integrity"] = {
        **signed["integrity"],
        "sha256": signatures.seal.digest(forged),
    }
    with pytest.raises(Unverified, match="signature is false"):
        signatures.verify(forged, signatures.public_key())


def test_another_key_is_named(signed: dict[str, Any]) -> None:
    other = Ed25519PrivateKey.generate()
    with pytest.raises(Unverified, match="another key"):
        signatures.verify(signed, other.public_key())
    claimed = copy.deepcopy(signed)
    claimed["integrity"]["key_id"] = signatures.key_id(other.public_key())
    with pytest.raises(Unverified, match="signature is false"):
        signatures.verify(claimed, other.public_key())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a report"),
        (b"\xff\xfe", "not a report"),
        (b"[]", "not a report: not a JSON object"),
        (b'{"schema": "precision.stack/1"}', "its schema is 'precision.stack/1'"),
        (b'{"schema": "precision.report/1", "a": 1, "a": 2}', "comes twice"),
        (b'{"schema": "precision.report/1"}', "it carries no signature"),
        (
            b'{"schema": "precision.report/1", "integrity": {"sha256": 1}}',
            "no signature",
        ),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_signed_report_is_refused_by_name(
    data_dir: Path, content: bytes, said: str
) -> None:
    with pytest.raises(Unverified, match=said):
        signatures.verify(signatures.parse(content), signatures.public_key())


def test_infinite_numbers_have_no_digest(signed: dict[str, Any]) -> None:
    content = json.dumps({**signed, "seed": float("inf")}).encode()
    with pytest.raises(Unverified, match="not a report"):
        signatures.verify(signatures.parse(content), signatures.public_key())


def test_only_ed25519_keys_are_taken() -> None:
    rsa = generate_private_key(65537, 2048).public_key()
    pem = rsa.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    with pytest.raises(ValueError, match="Ed25519"):
        signatures.read_key(pem)
    with pytest.raises(ValueError, match="BEGIN PUBLIC KEY"):
        signatures.read_key("ssh-ed25519 AAAA")


def test_the_key_is_the_services_own(client: TestClient) -> None:
    found = client.get("/v1/report_key").json()
    key = signatures.read_key(found["public_key"])
    assert found["key_id"] == signatures.key_id(key)
    assert key.public_bytes_raw() == signatures.public_key().public_bytes_raw()
