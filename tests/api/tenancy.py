"""What belongs to one tenant, a row of each kind, and every call that names one.

The calls come from the description of the API. A path with a parameter that nobody
here knows fails the tests: whoever adds a route says what its id stands for.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fastapi import FastAPI
from sqlalchemy import select
from sqlalchemy.orm import Session

from api import auth, ids, jobs, storage, upload_files
from api.base import Base
from api.models import (
    ApiKey,
    AuditEvent,
    Dataset,
    KeptResult,
    RegisteredModel,
    Upload,
    UploadPart,
    WebhookDelivery,
    WebhookEndpoint,
    now,
)
from optimizer.spec import OptimizeSpec
from tests.api.conftest import SUMMARY, Json
from tests.optimizer.example_document import example_document

PART = b"no tensors"
MARK = "belongs-to-acme"  # in every text that a row of the tenant holds

# Operations whose parameter names nothing that a tenant owns, or only its own.
EVERYBODYS = frozenset(
    {
        "get_hardware",
        "get_format",
        "inspect_format",
        "put_dataset",  # a name among the caller's own
    }
)

BODIES: dict[str, Json] = {  # of the operations that want one
    "update_api_key": {"name": "taken"},
    "create_view_token": {"use": "view"},
    "update_webhook_endpoint": {"description": "taken"},
    "complete_model": {},
    "complete_dataset": {},
}
HEADERS = {"If-Match": "*"}

Make = Callable[[Session, str], str]


@dataclass(frozen=True)
class Call:
    """An operation, with the ids of somebody's rows in its path."""

    method: str
    path: str
    operation: str
    request: dict[str, Any] = field(default_factory=dict)


def calls(app: FastAPI, values: dict[str, str]) -> Iterator[Call]:
    """Return every call of the description that names something of a tenant."""
    for path, operations in app.openapi()["paths"].items():
        names = re.findall(r"\{(\w+)\}", path)
        ids = {operation["operationId"] for operation in operations.values()}
        if not names or ids <= EVERYBODYS:
            continue
        strange = [name for name in names if name not in values]
        assert not strange, f"say in {__name__} what {strange} of {path} stand for"
        url = re.sub(r"\{(\w+)\}", lambda found: values[found[1]], path)
        for method, operation in operations.items():
            name = operation["operationId"]
            if name in EVERYBODYS:
                continue
            yield Call(method.upper(), url, name, request_of(operation))


def request_of(operation: Json) -> dict[str, Any]:
    """Return what an operation is sent: a body that it takes, and If-Match."""
    body = operation.get("requestBody")
    if not body or not body.get("required"):
        return {"headers": HEADERS}
    (kind, *_) = body["content"]
    if kind != "application/json":
        return {"headers": {**HEADERS, "Content-Type": kind}, "content": b"{}"}
    name = operation["operationId"]
    assert name in BODIES, f"say in {__name__} what {name} is to be sent"
    return {"headers": HEADERS, "json": BODIES[name]}


def rows_of(session: Session, tenant_id: str) -> dict[str, list[dict[str, Any]]]:
    """Return all that a tenant has, by table."""
    found = {}
    for table in Base.metadata.sorted_tables:
        if "tenant_id" in table.columns:
            query = select(table).where(table.c.tenant_id == tenant_id)
            rows = [dict(row) for row in session.execute(query).mappings()]
            found[table.name] = sorted(rows, key=repr)
    return found


# -- one row of each kind ------------------------------------------------------------


def furnish(session: Session, tenant_id: str) -> dict[str, str]:
    """Give the tenant a row of every kind; return the value of each path parameter."""
    model, dataset = _model(session, tenant_id), _dataset(session, tenant_id)
    endpoint = _endpoint(session, tenant_id)
    job = _job(session, tenant_id)
    upload = _upload(session, tenant_id)
    _others(session, tenant_id)
    return {
        "job_id": job,
        "name": "report.json",
        "model_id": model,
        "dataset_id": dataset,
        "upload_id": upload,
        "number": "1",
        "endpoint_id": endpoint,
        "delivery_id": _delivery(session, tenant_id, endpoint, job),
        "key_id": _key(session, tenant_id),
    }


def _add(session: Session, row: Any) -> str:
    session.add(row)
    session.flush()
    return str(row.id)


def _job(session: Session, tenant_id: str) -> str:
    spec = OptimizeSpec(MARK, f"/models/{MARK}", "0" * 64, "h100")
    body = {"model": MARK, "hardware": "h100", "metadata": {"team": MARK}}
    job = jobs.submit(session, tenant_id, spec, body)
    claim = jobs.claim(session, job.id, "worker-1")
    assert claim is not None
    files = {
        "report.json": json.dumps(example_document(layers=2)).encode(),
        "report.html": MARK.encode(),
    }
    stored = [storage.put(job.id, 1, name, data) for name, data in files.items()]
    jobs.succeed(session, claim, "sla_met", SUMMARY, stored)
    return job.id


def _model(session: Session, tenant_id: str) -> str:
    row = RegisteredModel(
        tenant_id=tenant_id,
        name=MARK,
        path=f"/models/{MARK}",
        stamp="1",
        sha256="0" * 64,
        architecture="LlamaForCausalLM",
        parameters=1,
        stored_bytes=1,
        dtypes={"bf16": 1},
        uploaded=True,
    )
    return _add(session, row)


def _dataset(session: Session, tenant_id: str) -> str:
    row = Dataset(
        tenant_id=tenant_id,
        name=MARK,
        path=f"/datasets/{MARK}",
        sha256="0" * 64,
        samples=1,
        bytes=1,
    )
    return _add(session, row)


def _upload(session: Session, tenant_id: str) -> str:
    at = now()
    row = Upload(
        id=ids.new("mdl"),
        tenant_id=tenant_id,
        kind="model",
        name=f"{MARK}.on-its-way",
        files=[{"path": "model.safetensors", "bytes": len(PART)}],
        bytes=len(PART),
        part_bytes=len(PART),
        created_at=at,
        expires_at=at + timedelta(days=1),
    )
    upload = _add(session, row)
    sha256 = hashlib.sha256(PART).hexdigest()
    part = UploadPart(
        upload_id=upload, number=1, sha256=sha256, bytes=len(PART), created_at=at
    )
    session.add(part)
    file = upload_files.part_file(upload, 1, sha256)
    file.parent.mkdir(parents=True)
    file.write_bytes(PART)
    return upload


def _endpoint(session: Session, tenant_id: str) -> str:
    at = now()
    row = WebhookEndpoint(
        tenant_id=tenant_id,
        url=f"https://{MARK}.example/hook",
        events=["job.succeeded"],
        secret="whsec_" + "A" * 32,
        created_at=at,
        updated_at=at,
    )
    return _add(session, row)


def _delivery(session: Session, tenant_id: str, endpoint: str, job: str) -> str:
    at = now()
    row = WebhookDelivery(
        tenant_id=tenant_id,
        endpoint_id=endpoint,
        job_id=job,
        message_id=ids.new("msg"),
        event_type="job.succeeded",
        payload=f'{{"job_id": "{MARK}"}}',
        log=[],
        next_attempt_at=at,
        created_at=at,
    )
    return _add(session, row)


def _key(session: Session, tenant_id: str) -> str:
    row = ApiKey(tenant_id=tenant_id, name=MARK, scopes=["jobs:read"], kind="personal")
    return auth.key_id(auth.add(session, row))


def _others(session: Session, tenant_id: str) -> None:
    """Add rows that no path names."""
    at = now()
    kept = KeptResult(
        tenant_id=tenant_id,
        key="k" * 64,
        kind="profile",
        text=f'"{MARK}"',
        bytes=1,
        created_at=at,
        last_used_at=at,
    )
    said = AuditEvent(
        tenant_id=tenant_id, at=at, actor=MARK, action="job.created", details={}
    )
    session.add_all([kept, said])
