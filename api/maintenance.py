"""While the operator works on the service nothing new is taken; what is there is read.

* APIError
  * Maintenance 503  maintenance
"""

from starlette.types import Scope

from api.errors import APIError
from api.settings import settings

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
RETRY_S = 300  # nobody knows how long the work takes


class Maintenance(APIError):
    """The operator's text says why, and perhaps until when."""

    status = 503
    code = "maintenance"
    title = "Under maintenance: nothing is changed, what is there can be read"


def refusal(scope: Scope) -> Maintenance | None:
    """Return the answer to a request that would change something. None: it may pass."""
    said = settings().maintenance
    writes = scope["method"] in WRITES and scope["path"].startswith("/v1/")
    if not said or not writes:
        return None
    return Maintenance(said, headers={"Retry-After": str(RETRY_S)})
