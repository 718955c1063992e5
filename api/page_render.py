"""Pages as HTML: the templates, the assets, and the headers that guard them.

Templates escape everything; no page has a script or a style of its own in it, so the
policy allows none. Assets are served under a name that changes with their bytes.
"""

import hashlib
import json
import mimetypes
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any

from fastapi import Request, Response
from jinja2 import ChainableUndefined, Environment, FunctionLoader

from api import page_session, page_words, phases
from api.callers import Caller
from api.metrics import service_version
from api.settings import settings
from optimizer import units

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors {}"
)
HEADERS = {
    "Content-Security-Policy": POLICY.format("'none'"),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
FOREVER = "public, max-age=31536000, immutable"
NAV = (
    ("jobs", "/ui/jobs", "Jobs"),
    ("new", "/ui/new", "New job"),
    ("models", "/ui/models", "Models"),
    ("datasets", "/ui/datasets", "Datasets"),
    ("hardware", "/ui/hardware", "Hardware"),
)


def page(
    request: Request,
    template: str,
    caller: Caller | None,
    *,
    status: int = 200,
    here: str = "",
    **values: Any,
) -> Response:
    """Return a whole page; `here` is the entry of the navigation that it belongs to."""
    html = render(
        template,
        caller=caller,
        csrf=page_session.csrf_of(request) if caller else "",
        here=here,
        nav=NAV if caller else (),
        maintenance=settings().maintenance if caller else "",
        **values,
    )
    return Response(html, status, dict(HEADERS), "text/html; charset=utf-8")


def render(template: str, **values: Any) -> str:
    """Return a template, filled."""
    return _environment().get_template(template).render(**values)


def asset(name: str) -> Response | None:
    """Return a script, a style or a picture. None: there is none of that name."""
    found = _assets().get(name)
    if found is None:
        return None
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(found, headers={"Cache-Control": FOREVER}, media_type=media_type)


@cache
def assets_version() -> str:
    """Return what the assets' address has in it: other bytes, another address."""
    digest = hashlib.sha256()
    for name, data in sorted(_assets().items()):
        digest.update(name.encode() + data)
    return digest.hexdigest()[:12]


@cache
def _assets() -> dict[str, bytes]:
    folder = resources.files("api").joinpath("data", "assets")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FunctionLoader(_template),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("nats", "seconds", "size", "share", "count", "significant", "change"):
        found.filters[name] = getattr(units, name)
    found.filters["as_json"] = as_json
    found.filters |= {"ago": ago, "moment": moment, "duration": page_words.duration}
    found.globals |= {
        "assets": f"/ui/assets/{assets_version()}",
        "version": service_version(),
        "words": page_words,
        "phases": phases,
    }
    return found


def _template(name: str) -> str:
    folder = resources.files("api").joinpath("data", "pages")
    return folder.joinpath(name).read_text("utf-8")


def moment(value: datetime | str | None) -> str:
    """Return a time as people write it, in UTC: 2026-12-01 03:54 UTC."""
    at = _at(value)
    return f"{at:%Y-%m-%d %H:%M} UTC" if at else units.MISSING


def ago(value: datetime | str | None) -> str:
    """Return how long ago something was: 3 min ago."""
    at = _at(value)
    if at is None:
        return units.MISSING
    passed = datetime.now(UTC) - at
    if passed < timedelta(seconds=5):
        return "just now"
    return f"{page_words.duration(passed.total_seconds())} ago"


def _at(value: datetime | str | None) -> datetime | None:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.astimezone(UTC) if value else None


def as_json(value: Any) -> str:
    """Return JSON for an attribute that a script reads."""
    return json.dumps(value, separators=(",", ":"), default=str)
