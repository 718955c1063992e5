"""A job's card for frames of other sites' pages, and the tokens that open it.

The page `/embed/jobs/{id}` shows nothing by itself. A view token opens it: in the
fragment (`#vt=…`, which no log and no `Referer` ever has), or in the query for who
runs no scripts. It ignores what portals append to addresses. Which sites may frame it
says the setting `frame_origins`; there is no `X-Frame-Options`, which cannot list any.
"""

import json
import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Response
from markupsafe import Markup
from pydantic import Field
from sqlalchemy.orm import Session

from api import auth, jobs, page_plot, page_words, view_tokens, views
from api.access import DB, Caller
from api.errors import APIError, Invalid, Unauthenticated
from api.models import FINAL
from api.page_render import POLICY, render
from api.pages import PageRoute
from api.places import places
from api.schemas import Body
from api.settings import settings
from api.strict import StrictRoute
from api.view_tokens import LONGEST_S, Use, View

router = APIRouter(prefix="/v1/jobs/{job_id}", route_class=StrictRoute, tags=["jobs"])
frames = APIRouter(prefix="/embed", route_class=PageRoute, include_in_schema=False)


class ViewTokenBody(Body):
    """What a view token is for, and how long it is good.

    At most 900 seconds for `view`, 90 days for `badge`; that is also the default.
    """

    use: Annotated[Use, Field(strict=False)] = Use.VIEW
    expires_in: Annotated[int, Field(ge=1)] | None = None


class ViewTokenView(Body):
    """A token that shows one job. Nobody can show it again."""

    object: str = "view_token"
    token: str
    use: Use
    job_id: str
    expires_at: datetime
    links: dict[str, str]


@router.post("/view_tokens", status_code=201)
def create_view_token(
    job_id: str, caller: Caller, session: DB, body: ViewTokenBody | None = None
) -> ViewTokenView:
    """Make a token that shows this job, and nothing else, to who has no key."""
    jobs.get(session, caller.tenant_id, job_id)
    body = body or ViewTokenBody()
    longest = LONGEST_S[body.use]
    if body.expires_in is not None and body.expires_in > longest:
        detail = f"a token for {body.use} is good for at most {longest} seconds"
        raise Invalid("/expires_in", detail)
    ends_at = int(time.time()) + (body.expires_in or longest)
    token = view_tokens.make(View(caller.tenant_id, job_id, body.use, ends_at))
    return ViewTokenView(
        token=token,
        use=body.use,
        job_id=job_id,
        expires_at=datetime.fromtimestamp(ends_at, UTC),
        links=_links(job_id, token, body.use),
    )


@frames.get("/jobs/{job_id}")
def frame(job_id: str, session: DB, vt: str | None = None) -> Response:
    """Return the page for a frame; with the card in it where the query has a token."""
    if vt is None:
        return _page(job_id, card="", state="")
    try:
        view = view_tokens.read(vt, job_id, Use.VIEW)
    except Unauthenticated:
        return _page(job_id, card="", state="over", status=401)
    try:
        return _page(job_id, *_card(session, view))
    except APIError as error:
        return _page(job_id, card="", state="gone", status=error.status)


@frames.get("/jobs/{job_id}/card")
def card(
    job_id: str, session: DB, authorization: Annotated[str | None, Header()] = None
) -> Response:
    """Return the card alone, as the page's script asks for it again and again."""
    try:
        token = auth.token_in(authorization)
        html, state = _card(session, view_tokens.read(token, job_id, Use.VIEW))
    except APIError as error:
        return Response(status_code=error.status)
    headers = {"X-Job-State": state, "Content-Security-Policy": "default-src 'none'"}
    return Response(html, headers=headers, media_type="text/html; charset=utf-8")


def _card(session: Session, view: View) -> tuple[str, str]:
    """Return the card of a job, and whether it goes on changing: live or final."""
    row = jobs.get(session, view.tenant_id, view.job_id)
    shown = views.job(row, places().of(session, row))
    drawn = None
    if shown.result:
        result = shown.result
        points = page_plot.drawn(shown.id, result["front"], result["chosen"])
        sla = shown.request.get("latency_sla") or {}
        drawn = page_plot.of_jobs([points], sla.get("per_token_s"))
    html = render("card.html.j2", job=shown, front=drawn)
    return html, "final" if row.status in FINAL else "live"


def _page(job_id: str, card: str, state: str, status: int = 200) -> Response:
    origins = settings().frame_origins
    html = render(
        "embed.html.j2",
        job_id=job_id if page_words.is_id(job_id) else "",
        card=Markup(card),  # of our own template, which escaped what is in it
        state=state,
        origins=json.dumps(origins),
    )
    headers = {
        "Content-Security-Policy": POLICY.format(" ".join(origins) or "'none'"),
        "Referrer-Policy": "no-referrer",
    }
    return Response(html, status, headers, "text/html; charset=utf-8")


def _links(job_id: str, token: str, use: Use) -> dict[str, str]:
    base = settings().public_url.rstrip("/")
    links = {"badge": f"{base}/v1/jobs/{job_id}/badge.svg?token={token}"}
    if use is Use.VIEW:
        links["embed"] = f"{base}/embed/jobs/{job_id}#vt={token}"
    return links
