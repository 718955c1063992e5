"""The JSON of uploads that comes in."""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from api.model_files import MAX_SMALL_BYTES, MODEL_FILES, NEEDED, WEIGHTS
from api.schemas import Body, FolderPath, Name
from optimizer.units import size

MAX_FILES = 1_100
MAX_BYTES = 2**50
KeepSeconds = Annotated[int, Field(ge=60, le=3650 * 86_400)]
Bytes = Annotated[int, Field(ge=1, le=MAX_BYTES)]
FileName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class FileBody(Body):
    """A file to be uploaded: its name, and how long it is."""

    path: FileName
    bytes: Bytes

    @model_validator(mode="after")
    def _allowed(self) -> Self:
        if WEIGHTS.fullmatch(self.path):
            return self
        if self.path not in MODEL_FILES:
            raise PydanticCustomError(
                "file_not_allowed",
                "a model has *.safetensors and "
                + ", ".join(MODEL_FILES)
                + "; no folders, and nothing that is code or a pickle",
            )
        if self.bytes > MAX_SMALL_BYTES:
            raise PydanticCustomError(
                "file_too_large",
                f"only weights may have more than {size(MAX_SMALL_BYTES)}",
            )
        return self


class ModelBody(Body):
    """Body of POST /v1/models: a folder that the service sees, or files to upload."""

    name: Name
    path: FolderPath | None = None
    files: (
        Annotated[list[FileBody], Field(min_length=1, max_length=MAX_FILES)] | None
    ) = None
    expires_in: KeepSeconds | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.path is None) == (self.files is None):
            raise PydanticCustomError("one_of", "give exactly one of path and files")
        if self.path is not None and self.expires_in is not None:
            raise PydanticCustomError("no_expiry", "a folder of yours does not expire")
        return self

    @model_validator(mode="after")
    def _whole(self) -> Self:
        paths = [file.path for file in self.files or ()]
        if len(set(paths)) < len(paths):
            raise PydanticCustomError("file_twice", "a file is there twice")
        absent = [name for name in NEEDED if name not in paths]
        if paths and (absent or not any(map(WEIGHTS.fullmatch, paths))):
            raise PydanticCustomError(
                "file_missing",
                "a model needs config.json, tokenizer.json and *.safetensors",
            )
        return self


class DatasetBody(Body):
    """Body of POST /v1/datasets: JSON lines that will come in parts."""

    name: Name
    bytes: Bytes
    expires_in: KeepSeconds | None = None


class DigestBody(Body):
    """A file, and the sha256 that it must have, in hex."""

    path: FileName
    sha256: Sha256


class CompleteBody(Body):
    """Body of `complete`: nothing, or what the files must be."""

    files: Annotated[list[DigestBody], Field(max_length=MAX_FILES)] = Field(
        default_factory=list
    )
