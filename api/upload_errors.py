"""What uploads are answered when they are not answered 2xx; see `api.errors`.

* APIError
  * LengthMismatch        400  length_mismatch
  * RequestTimeout        408  request_timeout
  * PartsMissing          409  parts_missing
  * InUse                 409  in_use
  * TooLarge              413  model_too_large, dataset_too_large
  * StorageQuota          413  storage_quota_exceeded
  * StorageFull           507  storage_full
"""

from api.errors import APIError


class LengthMismatch(APIError):
    """Fewer bytes came than the part has."""

    status = 400
    code = "length_mismatch"
    title = "The part is too short"


class RequestTimeout(APIError):
    """Nothing of the body came for too long."""

    status = 408
    code = "request_timeout"
    title = "The body stopped coming"


class PartsMissing(APIError):
    """An upload is not complete."""

    status = 409
    code = "parts_missing"
    title = "Parts are missing"


class InUse(APIError):
    """It cannot be deleted, now or by this caller."""

    status = 409
    code = "in_use"
    title = "It cannot be deleted"


class TooLarge(APIError):
    """What is to be uploaded has more bytes than a setting allows."""

    status = 413
    title = "The upload is too large"

    def __init__(self, what: str, size: int, limit_bytes: int) -> None:
        super().__init__(
            f"the {what} has {size} bytes, the limit is {limit_bytes}",
            limit_bytes=limit_bytes,
        )
        self.code = f"{what}_too_large"


class StorageQuota(APIError):
    """A tenant's uploads would take more disk than they may."""

    status = 413
    code = "storage_quota_exceeded"
    title = "The disk quota is used up"

    def __init__(self, size: int, used_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{size} bytes do not fit: your uploads and the files of your jobs take "
            f"{used_bytes} of {limit_bytes}; delete models, datasets or jobs, or ask "
            "the operator for more",
            used_bytes=used_bytes,
            limit_bytes=limit_bytes,
        )


class StorageFull(APIError):
    """The service's own disk has no room; nothing the caller has is to blame."""

    status = 507
    code = "storage_full"
    title = "The disk of the service is full"
