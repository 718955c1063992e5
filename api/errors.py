"""What the API answers when it does not answer 2xx. No web framework in here.

* APIError                500  internal_error
  * MalformedJson         400  malformed_json
  * BadCursor             400  bad_cursor
  * UnknownVersion        400  unknown_version
  * IdempotencyKeyMissing 400  idempotency_key_missing
  * Unauthenticated       401  unauthenticated
  * InsufficientScope     403  insufficient_scope
  * UnknownTenant         403  unknown_tenant
  * CrossSite             403  cross_site_request
  * NotFound              404  not_found
  * NotAcceptable         406  not_acceptable
  * NotFinal              409  not_final
  * InvalidState          409  invalid_state
  * NameTaken             409  name_taken
  * IdempotencyInProgress 409  idempotency_in_progress
  * SourceChanged         409  source_changed
  * Gone                  410  artifact_expired
  * PreconditionFailed    412  precondition_failed
  * BodyTooLarge          413  body_too_large
  * UnsupportedMediaType  415  unsupported_media_type
  * RangeNotSatisfiable   416  range_not_satisfiable
  * Invalid               422  validation_error, or what the field is about
  * IdempotencyKeyReused  422  idempotency_key_reused
  * ConcurrencyLimit      429  concurrency_limit
  * QuotaExceeded         429  quota_exceeded
  * PreconditionRequired  428  precondition_required
  * RateLimited           429  rate_limited
  * Unavailable           503  overloaded

Those of uploads are in `api.upload_errors`, of keys in `api.key_errors`, of what is
refused at the door in `api.guards` and `api.maintenance`.
"""

from collections.abc import Sequence
from typing import Any


class APIError(Exception):
    """Base class: carries its own status, a stable code and extra headers."""

    status = 500
    code = "internal_error"
    title = "Internal error"
    type: str | None = None  # a URI of a registry; None: one of ours

    def __init__(
        self,
        detail: str,
        *,
        errors: Sequence[dict[str, Any]] = (),
        headers: dict[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = list(errors)
        self.headers = headers or {}
        self.extensions = extensions


class MalformedJson(APIError):
    """The body is not JSON, or not JSON that two readers would read alike."""

    status = 400
    code = "malformed_json"
    title = "The body is not JSON"


class BadCursor(APIError):
    """The cursor is not one of ours."""

    status = 400
    code = "bad_cursor"
    title = "The cursor is not valid"


class UnknownVersion(APIError):
    """The request is pinned to a version of the API that is not served."""

    status = 400
    code = "unknown_version"
    title = "No such version of the API"

    def __init__(self, asked: str, current: str) -> None:
        super().__init__(
            f"API-Version {asked[:40]!r} is not served; leave the header out, or send "
            f"{current}",
            known=[current],
        )


class IdempotencyKeyMissing(APIError):
    """A key of kind `service` creates nothing without an Idempotency-Key."""

    status = 400
    code = "idempotency_key_missing"
    title = "An Idempotency-Key is needed"

    def __init__(self) -> None:
        super().__init__(
            "send an 'Idempotency-Key' header, a new one for each thing to create: "
            "this API key is a service's, and services send requests again"
        )


class Unauthenticated(APIError):
    """No key, or no valid one; which of the two is not said."""

    status = 401
    code = "unauthenticated"
    title = "A valid API key is needed"

    def __init__(self) -> None:
        super().__init__(
            "send a valid API key as 'Authorization: Bearer po_live_…'; "
            "'precision keys create' makes one",
            headers={"WWW-Authenticate": "Bearer"},
        )


class InsufficientScope(APIError):
    """The key is good, but not for this."""

    status = 403
    code = "insufficient_scope"
    title = "The key may not do this"

    def __init__(self, required: str) -> None:
        super().__init__(
            f"this needs a key with the scope {required}", required_scope=required
        )


class UnknownTenant(APIError):
    """The portal's token is good, but of nobody who is known here."""

    status = 403
    code = "unknown_tenant"
    title = "No such tenant"


class CrossSite(APIError):
    """A browser's session would change something, and no page of ours sent it."""

    status = 403
    code = "cross_site_request"
    title = "The request did not come from one of our pages"


class NotFound(APIError):
    """No such thing, or not yours."""

    status = 404
    code = "not_found"
    title = "There is no such thing"


class NotAcceptable(APIError):
    """None of the media types that the caller accepts exists."""

    status = 406
    code = "not_acceptable"
    title = "No acceptable representation"


class NotFinal(APIError):
    """The answer does not exist yet."""

    status = 409
    code = "not_final"
    title = "The job has no result yet"


class InvalidState(APIError):
    """The job is in a state that has no such answer, and never will."""

    status = 409
    code = "invalid_state"
    title = "The job has no result"


class NameTaken(APIError):
    """The name belongs to something built in."""

    status = 409
    code = "name_taken"
    title = "The name is taken"


class IdempotencyInProgress(APIError):
    """Another request with the same key is being served."""

    status = 409
    code = "idempotency_in_progress"
    title = "The first request is being served"

    def __init__(self) -> None:
        super().__init__(
            "a request with this Idempotency-Key is being served; send it again in a "
            "moment for its answer",
            headers={"Retry-After": "1"},
        )


class SourceChanged(APIError):
    """What a job was made from is not what it was: a retry would be another job."""

    status = 409
    code = "source_changed"
    title = "The job's inputs have changed"


class Gone(APIError):
    """The file was published, and its bytes have been deleted since."""

    status = 410
    code = "artifact_expired"
    title = "The file is gone"


class PreconditionFailed(APIError):
    """The thing has changed since the caller read it."""

    status = 412
    code = "precondition_failed"
    title = "It has changed meanwhile"

    def __init__(self) -> None:
        super().__init__("it has changed: read it again, and send its ETag now")


class BodyTooLarge(APIError):
    """The body has more bytes than a setting allows."""

    status = 413
    code = "body_too_large"
    title = "The body is too large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the body is larger than {limit_bytes} bytes",
            limit_bytes=limit_bytes,
            headers={"Connection": "close"},  # the rest of the body is not read
        )


class UnsupportedMediaType(APIError):
    """The body is of a type that this endpoint does not read."""

    status = 415
    code = "unsupported_media_type"
    title = "Unsupported media type"


class RangeNotSatisfiable(APIError):
    """The file ends before the range begins."""

    status = 416
    code = "range_not_satisfiable"
    title = "Range not satisfiable"

    def __init__(self, total_bytes: int) -> None:
        super().__init__(
            f"the file has {total_bytes} bytes",
            headers={"Content-Range": f"bytes */{total_bytes}"},
            total_bytes=total_bytes,
        )


class Invalid(APIError):
    """One field is wrong; `pointer` says which."""

    status = 422
    title = "The request is not valid"

    def __init__(
        self,
        pointer: str,
        detail: str,
        code: str = "validation_error",
        known: Sequence[str] | None = None,
    ) -> None:
        field: dict[str, Any] = {"pointer": pointer, "code": code, "detail": detail}
        if known is not None:
            field["known"] = list(known)
        super().__init__(detail, errors=[field])
        self.code = code


class IdempotencyKeyReused(APIError):
    """The key came before, with another body."""

    status = 422
    code = "idempotency_key_reused"
    title = "The Idempotency-Key belongs to another request"

    def __init__(self) -> None:
        super().__init__(
            "this Idempotency-Key was sent with another body; send a new key for a new "
            "request"
        )


class InvalidParameter(Invalid):
    """A query parameter or a header is wrong; `parameter` says which."""

    def __init__(
        self,
        parameter: str,
        detail: str,
        code: str = "validation_error",
        known: Sequence[str] | None = None,
    ) -> None:
        super().__init__("", detail, code, known)
        self.errors[0].pop("pointer")
        self.errors[0] = {"parameter": parameter[:200], **self.errors[0]}


class QuotaExceeded(APIError):
    """The caller has as much of something as it may have at a time."""

    status = 429
    code = "quota_exceeded"
    title = "A quota is used up"
    type = "https://iana.org/assignments/http-problem-types#quota-exceeded"

    def __init__(self, policy: str, used: int, limit: int, retry_after_s: int) -> None:
        super().__init__(
            f"{used} {policy.replace('_', ' ')} of {limit}: wait until there are "
            "fewer, or ask the operator for a higher quota",
            headers={"Retry-After": str(retry_after_s)},
            limit=limit,
        )
        self.extensions["violated-policies"] = [policy]


class ConcurrencyLimit(APIError):
    """The caller holds as many connections open as it may."""

    status = 429
    code = "concurrency_limit"
    title = "Too many open streams"

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(
            f"at most {limit} {what} per key at a time: close one, or poll instead",
            limit=limit,
            headers={"Retry-After": "5"},
        )


class PreconditionRequired(APIError):
    """An edit must say which version it edits: two at once would lose one."""

    status = 428
    code = "precondition_required"
    title = "If-Match is needed"

    def __init__(self) -> None:
        super().__init__("send 'If-Match:' with the ETag that reading it gave")


class RateLimited(APIError):
    """The caller asks too often; `policy` names the limit."""

    status = 429
    code = "rate_limited"
    title = "Too many requests"
    type = "https://iana.org/assignments/http-problem-types#quota-exceeded"

    def __init__(self, policy: str, quota: int, retry_after_s: int) -> None:
        super().__init__(
            f"more than {quota} requests in a minute (policy {policy!r}); go on in "
            f"{retry_after_s} s",
            headers={"Retry-After": str(retry_after_s)},
            limit=quota,
        )
        self.extensions["violated-policies"] = [policy]


class Unavailable(APIError):
    """The database does not answer; the same request may work in a moment."""

    status = 503
    code = "overloaded"
    title = "Temporarily unavailable"
