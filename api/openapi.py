"""The description of the API, OpenAPI 3.1: `python -m api.openapi` writes it down.

The file beside this one is what portals and generated clients read; a test holds it
to what the service serves.
"""

import json
import warnings
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api import problems

FILE = Path(__file__).with_name("openapi.json")


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
    return schema


def _main() -> None:
    from api.app import create_app

    FILE.write_text(text(create_app()), "utf-8")


if __name__ == "__main__":
    _main()
