"""The description of the API, OpenAPI 3.1: `python -m api.openapi` writes it down.

The file beside this one is what portals and generated clients read; a test holds it
to what the service serves.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool

from api import problems
from api.strict import PlainRoute

TAGS = (
    ("jobs", "Optimizations: from the request to the stack and its evidence."),
    ("estimate", "What to expect, without a job."),
    ("catalog", "Devices, formats, tasks, models and datasets."),
    ("keys", "Who may call, and what they may do."),
    ("webhooks", "Who is told what happens, and what was delivered."),
    ("account", "What a tenant uses, may use, and did."),
    ("health", "For machines that watch the service."),
)
HEADERS = {  # of every answer
    "X-Request-Id": {
        "description": "Finds the request in the service's log.",
        "schema": {"type": "string"},
    },
    "API-Version": {
        "description": "The version that answered; a request may pin it.",
        "schema": {"type": "string"},
    },
}
NEEDED = ("if-match", "content-digest")  # without them: a problem of their own
EXAMPLES = Path(__file__).with_name("examples.json")
FILE = Path(__file__).with_name("openapi.json")

router = APIRouter(route_class=PlainRoute, include_in_schema=False)


@router.get("/openapi.yaml")
async def as_yaml(request: Request) -> Response:
    """Return what `/openapi.json` says, for portals and tools that want YAML."""
    app = request.app
    text = getattr(app.state, "openapi_yaml", None)
    if text is None:  # half a second of work, once
        text = app.state.openapi_yaml = await run_in_threadpool(yaml_text, app)
    headers = {"Cache-Control": "max-age=300"}
    return Response(text, headers=headers, media_type="application/yaml")


def yaml_text(app: FastAPI) -> str:
    """Return the description as YAML, in the same order."""
    import yaml  # slow to import, and rarely needed

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    plain = json.loads(text(app))  # no types of ours, and no anchors
    return str(yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=True))


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the description, made once."""
    if not app.openapi_schema:
        app.openapi_schema = _described(app)
    return app.openapi_schema


def text(app: FastAPI) -> str:
    """Return the description as it is kept in the file."""
    return json.dumps(describe(app), indent=1, ensure_ascii=False) + "\n"


def _described(app: FastAPI) -> dict[str, Any]:
    with warnings.catch_warnings():
        # HEAD is served by the routes of GET, so its id is there twice for a moment.
        warnings.filterwarnings("ignore", message="Duplicate Operation ID")
        schema = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            webhooks=app.webhooks.routes,
        )
    for path in schema["paths"].values():
        path.pop("head", None)
    problem = problems.Problem.model_json_schema(
        ref_template="#/components/schemas/{model}"
    )
    parts = schema["components"]["schemas"]
    parts |= problem.pop("$defs", {})
    parts["Problem"] = problem
    schema["components"]["headers"] = HEADERS
    schema["tags"] = [{"name": name, "description": said} for name, said in TAGS]
    examples = json.loads(EXAMPLES.read_text("utf-8")) if EXAMPLES.exists() else {}
    for operation in _operations(schema):
        _show(operation, examples.get(operation["operationId"], {}))
        for parameter in operation.get("parameters", ()):
            _say_what_can_be_sent(parameter)
        for answer in operation["responses"].values():
            told = answer.setdefault("headers", {})
            told |= {n: {"$ref": f"#/components/headers/{n}"} for n in HEADERS}
    return schema


def _show(operation: dict[str, Any], example: dict[str, Any]) -> None:
    """Put what was sent and answered once beside the schemas."""
    if "request" in example:
        body = operation["requestBody"]["content"]["application/json"]
        body["example"] = example["request"]
    if "response" in example:
        answer = operation["responses"][example["status"]]
        answer["content"]["application/json"]["example"] = example["response"]


def _say_what_can_be_sent(parameter: dict[str, Any]) -> None:
    """Nobody sends null in a header or a query, and some headers have to be there."""
    shape = parameter["schema"]
    kinds = [kind for kind in shape.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        del shape["anyOf"]
        shape |= kinds[0]
    elif kinds:
        shape["anyOf"] = kinds
    if parameter["name"].lower() in NEEDED:
        parameter["required"] = True


def _operations(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in schema["paths"].values():
        yield from path.values()


def _main() -> None:
    from api.app import create_app

    FILE.write_text(text(create_app()), "utf-8")


if __name__ == "__main__":
    _main()
