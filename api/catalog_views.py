"""The JSON of models, datasets and uploads that goes out."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from api import part_plan
from api.models import Dataset, RegisteredModel, Upload, UploadState
from optimizer.datasets import Distribution

Json = dict[str, Any]

MAX_MISSING = 1000  # numbers shown at a time
POLL_AFTER_S = 2


def model(row: RegisteredModel) -> Json:
    """Return a model as lists show it."""
    return {
        "id": row.id,
        "object": "model",
        "name": row.name,
        "shared": row.tenant_id is None,
        "uploaded": row.uploaded,
        "sha256": row.sha256,
        "architecture": row.architecture,
        "parameters": row.parameters,
        "stored_bytes": row.stored_bytes,
        "dtypes": row.dtypes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
    }


def whole_model(row: RegisteredModel) -> Json:
    """Return a model with what its headers say, and its files with their digests."""
    details = row.details or {}
    return {
        **model(row),
        "tensors": details.get("tensors"),
        "declared_dtype": details.get("declared_dtype"),
        "files": details.get("files", []),
        "warnings": details.get("warnings", []),
    }


def dataset(row: Dataset) -> Json:
    """Return an uploaded dataset."""
    return {
        "id": row.id,
        "object": "dataset",
        "name": row.name,
        "built_in": False,
        "sha256": row.sha256,
        "samples": row.samples,
        "bytes": row.bytes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
    }


def distribution(found: Distribution) -> Json:
    """Return a built-in data distribution."""
    return {
        "id": found.name,
        "object": "dataset",
        "name": found.name,
        "built_in": True,
        "title": found.title,
        "origin": found.origin,
        "licence": found.licence,
    }


def upload(row: Upload, missing: Sequence[int]) -> Json:
    """Return an upload, with the parts that have yet to come.

    Part `n` of a file holds its bytes from `(n - first_part) × part_bytes` on.
    """
    noun = "datasets" if row.kind == "dataset" else "models"
    base = f"/v1/{noun}/{row.id}"
    opened = row.state is UploadState.OPEN
    folder = row.kind == "folder"
    planned = [] if folder else part_plan.files(row.files, row.part_bytes)
    return {
        "id": row.id,
        "object": "upload",
        "kind": row.kind,
        "name": row.name,
        "state": row.state,
        "bytes": row.bytes,
        "part_bytes": row.part_bytes,
        "files": [asdict(file) for file in planned],
        "parts": sum(file.parts for file in planned),
        "missing_parts": list(missing[:MAX_MISSING]),
        "missing_count": len(missing),
        "error": row.error,
        "poll_after_seconds": POLL_AFTER_S
        if row.state is UploadState.CHECKING
        else None,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "links": {
            "self": base,
            **({"part": f"{base}/parts/{{number}}"} if opened else {}),
            **({"complete": f"{base}/complete"} if not folder else {}),
        },
    }
