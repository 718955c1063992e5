"""The page's one script, and the policy under which it alone may run."""

import base64
import hashlib
from functools import cache
from importlib import resources

_PAGE = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


@cache
def script() -> str:
    """Return the script, byte by byte what stands between the tags."""
    return resources.files("optimizer").joinpath("data", "report.js").read_text("utf-8")


@cache
def policy() -> str:
    """Return the Content-Security-Policy: nothing is loaded, and only `script` runs."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return f"{_PAGE}; script-src 'sha256-{digest}'"
