"""The worker signs what the computing process left: that one has no key.

What it signs is the digest of what lies there. So the report is read as any file of a
stranger is: as plain JSON, of a size that has a limit.
"""

import json
import os
from pathlib import Path

from api import signatures
from api.base import now
from optimizer.seal import INTEGRITY
from workers.channel import Garbled


def sign(path: Path) -> None:
    """Sign a report in its place. Raises Garbled where it is no report."""
    if path.stat().st_size > signatures.MAX_BYTES:
        raise Garbled(f"a report of {path.stat().st_size} bytes")
    try:
        document = signatures.parse(path.read_bytes())
        signed = signatures.sign(document, now())
    except (signatures.Unverified, ValueError) as error:
        raise Garbled(f"no report: {error}") from None
    said = document.get(INTEGRITY)
    if not isinstance(said, dict) or said.get("sha256") != signed[INTEGRITY]["sha256"]:
        raise Garbled("a report whose digest is not its own")
    made = path.with_name(f".{path.name}.signed")
    made.write_text(json.dumps(signed, allow_nan=False), "utf-8")
    os.replace(made, path)
