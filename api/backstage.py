"""`GET /catalog-info.yaml`: the service as Backstage's catalog takes it.

One component, its API with the whole description in it (Backstage wants a text, and a
second fetch would need a second permission), and a resource for each device that has
workers of its own. Everything in it is made from settings and from what is served.
"""

import json

from fastapi import APIRouter, Request, Response

from api import openapi
from api.page_render import render
from api.settings import settings
from api.strict import PlainRoute
from optimizer.hardware import DEVICES

router = APIRouter(route_class=PlainRoute, include_in_schema=False)


@router.get("/catalog-info.yaml")
def catalog_info(request: Request) -> Response:
    """Return the entities, as one YAML stream. It says nothing that a key guards."""
    text = catalog(openapi.text(request.app), _base(request))
    headers = {"Cache-Control": "max-age=300"}
    return Response(text, headers=headers, media_type="application/yaml")


def catalog(description: str, base: str) -> str:
    """Return the YAML of the catalog. `description` is the OpenAPI document."""
    pools = [
        (name, DEVICES[name].name if name in DEVICES else name)
        for name in settings().hardware_queues
    ]
    text = render(
        "catalog-info.yaml.j2",
        base=base,
        owner=settings().catalog_owner,
        system=settings().catalog_system,
        pools=pools,
        definition=description.rstrip().splitlines(),
        quoted=_quoted,
    )
    return text.strip() + "\n"


def _quoted(value: str) -> str:
    """Return a YAML string: JSON's are."""
    return json.dumps(value, ensure_ascii=False)


def _base(request: Request) -> str:
    said = settings().public_url.rstrip("/")
    return said or f"{request.url.scheme}://{request.url.netloc}"
