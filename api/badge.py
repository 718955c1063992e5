"""`GET /v1/jobs/{id}/badge.svg`: a job's state as a picture for any page.

A fixed drawing with two words in it, escaped; nothing in it runs, and it asks nobody
for anything. It reads alike with any font: the widths are said in it.
"""

import hashlib
from xml.sax.saxutils import escape

from fastapi import APIRouter, Request, Response

from api import jobs, page_words
from api.access import DB, Viewer
from api.models import Job, Status
from api.strict import StrictRoute

COLORS = {  # white on each of them has a contrast of 4.5 and more
    "good": "#146c37",
    "bad": "#a8231b",
    "even": "#6a5300",
    "live": "#1d5fc4",
}
LABEL = "precision"
LETTER = 6.6  # mean width of a letter at 11 px
PAD = 10.0
HEADERS = {
    "Cache-Control": "max-age=60",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cross-Origin-Resource-Policy": "cross-origin",
}
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {text}">
<title>{label}: {text}</title>
<clipPath id="r"><rect width="{width}" height="20" rx="4"/></clipPath>
<g clip-path="url(#r)"><rect width="{left}" height="20" fill="#3d444b"/><rect x="{left}" width="{right}" height="20" fill="{color}"/></g>
<g fill="#fff" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{at_label}" y="14" textLength="{label_length}">{label}</text>
<text x="{at_text}" y="14" textLength="{text_length}">{text}</text>
</g>
</svg>
"""

router = APIRouter(prefix="/v1/jobs/{job_id}", route_class=StrictRoute, tags=["jobs"])


@router.get(
    "/badge.svg",
    response_class=Response,
    responses={
        200: {"content": {"image/svg+xml": {"schema": {"type": "string"}}}},
        304: {"description": "It is still as `If-None-Match` says"},
    },
)
def get_badge(job_id: str, caller: Viewer, session: DB, request: Request) -> Response:
    """Return a job's state as a picture. `token`, a view token, stands in for a key."""
    text, tone = message(jobs.get(session, caller.tenant_id, job_id))
    svg = draw(text, COLORS[tone])
    etag = f'"{hashlib.sha256(svg.encode()).hexdigest()[:24]}"'
    headers = {**HEADERS, "ETag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(svg, headers=headers, media_type="image/svg+xml")


def message(job: Job) -> tuple[str, str]:
    """Return the words for a job's state, and their tone."""
    if job.deleted_at is not None:
        return "deleted", "even"
    _, word, tone = page_words.state(job.status, job.outcome)
    if job.status is Status.RUNNING:
        return f"running {job.percent:.0f} %", tone
    return (word if job.outcome else word.lower()), tone


def draw(text: str, color: str) -> str:
    """Return the picture."""
    label_length, text_length = (round(LETTER * len(t), 1) for t in (LABEL, text))
    left, right = label_length + 2 * PAD, text_length + 2 * PAD
    return SVG.format(
        width=round(left + right, 1),
        left=left,
        right=right,
        color=color,
        label=LABEL,
        text=escape(text, {'"': "&quot;"}),
        at_label=left / 2,
        at_text=round(left + right / 2, 1),
        label_length=label_length,
        text_length=text_length,
    )
