"""Every error as a problem document, RFC 9457, without what the caller sent."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from api.errors import APIError, Invalid, MalformedJson, Unavailable

MEDIA_TYPE = "application/problem+json"
PROBLEMS = "https://precision.example/problems"
MAX_ERRORS = 20
MAX_POINTER = 200
SHORT_FORMS = {  # fields that are an object or the value that is short for it
    "model": "a name",
    "hardware": "a name",
    "task": "a name",
    "data_distribution": "a name",
    "latency_sla": "a number of seconds",
}
CODES = {405: "method_not_allowed", 404: "not_found", 400: "bad_request"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

log = structlog.get_logger()


class FieldProblem(BaseModel):
    """What is wrong with one field: a JSON Pointer into the body, or a parameter."""

    pointer: str | None = None
    parameter: str | None = None
    code: str
    detail: str
    known: list[str] | None = None


class Problem(BaseModel):
    """RFC 9457, with a stable `code`, the request's id and the fields at fault."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    errors: list[FieldProblem] = []


def install(app: FastAPI) -> None:
    """Answer every error that the application raises with a problem."""
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(OperationalError, _on_database)


def response(instance: str, request_id: str, error: APIError) -> JSONResponse:
    """Return the problem document of an error."""
    body = {
        "type": error.type or f"{PROBLEMS}/{error.code.replace('_', '-')}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "instance": instance,
        "code": error.code,
        "request_id": request_id,
        "errors": error.errors,
        **error.extensions,
    }
    return JSONResponse(
        body, error.status, headers=error.headers, media_type=MEDIA_TYPE
    )


async def refuse(scope: Scope, receive: Receive, send: Send, error: APIError) -> None:
    """Answer with a problem, from outside of the routes."""
    answer = response(scope["path"], scope["state"]["request_id"], error)
    await answer(scope, receive, send)


def _answer(request: Request, error: APIError) -> JSONResponse:
    return response(request.url.path, request.state.request_id, error)


def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, APIError)
    return _answer(request, error)


def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = [_field(entry, error.body) for entry in error.errors()[:MAX_ERRORS]]
    if any(field["code"] == "json_invalid" for field in found):
        return _answer(request, MalformedJson("the body is not JSON"))
    first = found[0]
    where = first.get("parameter") or first["pointer"] or "the body"
    problem = Invalid("", f"{where}: {first['detail']}")
    problem.errors = found
    return _answer(request, problem)


def _field(entry: dict[str, Any], body: Any) -> dict[str, Any]:
    """Return where and why, but not what: the value may be a secret."""
    place, *rest = entry["loc"]
    code, detail = entry["type"], _wording(entry)
    if place != "body":
        return {"parameter": str(rest[0])[:MAX_POINTER], "code": code, "detail": detail}
    return {"pointer": _pointer(rest, body), "code": code, "detail": detail}


def _wording(entry: dict[str, Any]) -> str:
    if entry["type"] in ("model_type", "model_attributes_type", "dict_type"):
        short = SHORT_FORMS.get(str(entry["loc"][-1]))
        return f"must be {short} or an object" if short else "must be an object"
    if entry["type"] == "extra_forbidden":
        return "there is no such field"
    return str(entry["msg"])


def _pointer(path: Sequence[int | str], body: Any) -> str:
    """Return a JSON Pointer into what the caller wrote, not into what it is short for."""
    pointer = ""
    for step in path:
        if not isinstance(body, dict | list):
            break
        pointer += "/" + str(step).replace("~", "~0").replace("/", "~1")
        children = body if isinstance(body, dict) else dict(enumerate(body))
        body = children.get(step)
    return pointer[:MAX_POINTER]


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed(request))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    detail = status.description or status.phrase
    problem = APIError(detail, headers=headers)
    problem.status, problem.title = status.value, status.phrase
    problem.code = CODES.get(status.value, "http_error")
    return _answer(request, problem)


def _allowed(request: Request) -> list[str]:
    """Return the methods that the path has, over all of its routes."""
    routes = request.app.routes
    return [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in routes
        )
    ]


def _on_database(request: Request, error: Exception) -> JSONResponse:
    log.error("database_unavailable", error=str(getattr(error, "orig", error))[:500])
    detail = "the database does not answer; try again in a moment"
    return _answer(request, Unavailable(detail, headers={"Retry-After": "2"}))
