"""The digest of a report: of what it says, and not of how its JSON is laid out.

    document["integrity"] = {"sha256": digest(document)}

The digest covers every member but `integrity` itself, as canonical JSON. So the same
job twice has the same digest, and one other digit gives another.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from optimizer.pieces import to_json

INTEGRITY = "integrity"


def digest(document: Mapping[str, Any]) -> str:
    """Return the sha256 of a document, 64 hexadecimal digits.

    Raises ValueError where a number is not finite.
    """
    content = {k: v for k, v in document.items() if k != INTEGRITY}
    return hashlib.sha256(to_json(content).encode()).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with its digest."""
    return {**document, INTEGRITY: {"sha256": digest(document)}}
