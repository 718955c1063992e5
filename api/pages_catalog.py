"""The pages of models, datasets and devices: what there is, and uploads."""

from typing import Any

from fastapi import APIRouter, Request, Response

from api import catalog, catalog_views, datasets, estimate_views, hardware
from api.access import DB
from api.errors import NotFound
from api.model_files import MODEL_FILES, NEEDED
from api.page_render import page
from api.pages import PageRoute, Visitor
from api.settings import settings
from optimizer.abilities import Status
from optimizer.datasets import Distribution
from optimizer.hardware import DEVICES

PER_PAGE = 50

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/ui/models")
def models_page(
    request: Request, visitor: Visitor, session: DB, after: str | None = None
) -> Response:
    """List models, and take files of a new one."""
    rows, cursor = catalog.page(session, visitor.tenant_id, PER_PAGE, after)
    return page(
        request,
        "models.html.j2",
        visitor,
        here="models",
        models=[catalog_views.model(row) for row in rows],
        next=f"/ui/models?after={cursor}" if cursor else None,
        first="/ui/models" if after else None,
        can_write="models:write" in visitor.scopes,
        limit=settings().max_model_bytes,
        allowed=", ".join(name for name in MODEL_FILES if name not in NEEDED),
    )


@router.get("/ui/models/{name}")
def model_page(name: str, request: Request, visitor: Visitor, session: DB) -> Response:
    """Show a model: its files, its tensors, what it warns of."""
    row = catalog.find(session, visitor.tenant_id, name)
    if row is None:
        raise NotFound(f"no model {name[:64]!r}")
    return page(
        request,
        "model.html.j2",
        visitor,
        here="models",
        model=catalog_views.whole_model(row),
        mine=row.tenant_id == visitor.tenant_id,
        can_write="models:write" in visitor.scopes,
    )


@router.get("/ui/datasets")
def datasets_page(
    request: Request, visitor: Visitor, session: DB, after: str | None = None
) -> Response:
    """List built-in and own data, and take a file of more."""
    rows, cursor = datasets.page(session, visitor.tenant_id, PER_PAGE, after)
    return page(
        request,
        "datasets.html.j2",
        visitor,
        here="datasets",
        built_in=[r for r in rows if isinstance(r, Distribution)],
        own=[r for r in rows if not isinstance(r, Distribution)],
        next=f"/ui/datasets?after={cursor}" if cursor else None,
        first="/ui/datasets" if after else None,
        can_write="datasets:write" in visitor.scopes,
        limit=settings().max_dataset_upload_bytes,
    )


@router.get("/ui/hardware")
def hardware_page(request: Request, visitor: Visitor, session: DB) -> Response:
    """List the devices that a job may be for."""
    return page(
        request,
        "hardware.html.j2",
        visitor,
        here="hardware",
        devices=hardware.list_hardware(visitor, session).data,
    )


@router.get("/ui/hardware/{name}")
def device_page(name: str, request: Request, visitor: Visitor, session: DB) -> Response:
    """Show a device: its figures, what each component may be, and why not."""
    found = hardware.get_hardware(name, visitor, session)
    return page(
        request,
        "device.html.j2",
        visitor,
        here="hardware",
        device=found,
        answers=_answers(found),
        advice=_advice(found.id),
    )


def _advice(name: str) -> dict[str, Any]:
    """Return what to train in, by purpose; of the worker's own device nothing is known."""
    known = DEVICES.get(name)
    return estimate_views.every_advice(known) if known else {}


def _answers(found: hardware.DeviceView) -> dict[str, dict[str, list[Any]]]:
    """Return the choices by component and by the answer."""
    return {
        str(name): {
            str(status): [one for one in choices if one.status is status]
            for status in Status
        }
        for name, choices in found.components.items()
    }
