"""What models, datasets and uploads look like, for the description and its clients."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from api.models import UploadState


class ModelFile(BaseModel):
    """A file of a model, and what it holds."""

    path: str
    bytes: int
    sha256: str


class ModelView(BaseModel):
    """A model as lists show it. `dtypes` are the bytes stored in each.

    A `shared` one is the operator's, and everybody's to use.
    """

    id: str
    object: Literal["model"] = "model"
    name: str
    shared: bool
    uploaded: bool
    sha256: str
    architecture: str
    parameters: int
    stored_bytes: int
    dtypes: dict[str, int]
    created_at: datetime
    expires_at: datetime | None


class WholeModel(ModelView):
    """A model, with what its headers say and the digest of each file.

    `tensors` is null for models that were registered before it was kept.
    """

    tensors: int | None
    declared_dtype: str | None
    files: list[ModelFile]
    warnings: list[str]


class DatasetView(BaseModel):
    """A dataset that was uploaded."""

    id: str
    object: Literal["dataset"] = "dataset"
    name: str
    built_in: Literal[False] = False
    sha256: str
    samples: int
    bytes: int
    created_at: datetime
    expires_at: datetime | None


class DistributionView(BaseModel):
    """A data distribution that comes with the service."""

    id: str
    object: Literal["dataset"] = "dataset"
    name: str
    built_in: Literal[True] = True
    title: str
    origin: str
    licence: str


class PlannedFileView(BaseModel):
    """A file on its way in, and which parts are its."""

    path: str
    bytes: int
    first_part: int
    parts: int


class UploadError(BaseModel):
    """Why what came in was refused."""

    code: str
    detail: str


class UploadView(BaseModel):
    """An upload on its way in. Part `n` of a file holds its bytes from
    `(n - first_part) × part_bytes` on; `missing_parts` are the first thousand.
    """

    id: str
    object: Literal["upload"] = "upload"
    kind: Literal["model", "folder", "dataset"]
    name: str
    state: UploadState
    bytes: int
    part_bytes: int
    files: list[PlannedFileView]
    parts: int
    missing_parts: list[int]
    missing_count: int
    error: UploadError | None
    poll_after_seconds: int | None
    created_at: datetime
    expires_at: datetime
    links: dict[str, str]


class PartView(BaseModel):
    """A part that came in whole."""

    object: Literal["part"] = "part"
    number: int
    bytes: int
    sha256: str


class ModelPage(BaseModel):
    """Some models, the newest first; `next_cursor` is the next page's `after`."""

    object: Literal["list"] = "list"
    data: list[ModelView]
    has_more: bool
    next_cursor: str | None


class DatasetPage(BaseModel):
    """The built-in distributions, then datasets; `next_cursor` is the next page's
    `after`.
    """

    object: Literal["list"] = "list"
    data: list[DistributionView | DatasetView]
    has_more: bool
    next_cursor: str | None


SomeModel = WholeModel | UploadView
SomeDataset = DistributionView | DatasetView | UploadView


def also(status: int, model: Any, said: str) -> dict[int | str, dict[str, Any]]:
    """Return another answer of a route, for its description."""
    return {status: {"model": model, "description": said}}
