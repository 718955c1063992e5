"""Models that a request names by their place at a hub: `hf://org/repo@<commit>`.

Off unless the operator names repositories. A commit never changes, so what was fetched
once is the tenant's model from then on, under an id that is made of the address: the
next job finds it, and nobody fetches it again. A worker does the fetching.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sqlalchemy.orm import Session

from api import catalog, ids
from api.catalog import Weights
from api.errors import Invalid
from api.settings import settings

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
PATTERN = rf"^hf://{NAME}/{NAME}@[0-9a-f]{{40}}$"
NOT_ALLOWED = "model_uri_not_allowed"


@dataclass(frozen=True, slots=True)
class Address:
    """One commit of one repository."""

    text: str
    repository: str  # org/repo
    commit: str

    @property
    def name(self) -> str:
        """What the tenant's model is called."""
        repo = self.repository.partition("/")[2]
        return f"{repo[:50]}-{self.commit[:12]}"

    def id(self, tenant_id: str) -> str:
        """Return the id of the tenant's model."""
        return ids.of("mdl", f"{tenant_id} {self.text}")


def is_address(text: str) -> bool:
    """Return whether it is one of these addresses, whoever may use it."""
    return re.fullmatch(PATTERN, text) is not None


def address(text: str) -> Address:
    """Take an address apart. Raises ValueError."""
    if not is_address(text):
        raise ValueError(f"not hf://org/repo@<40 hexadecimal digits>: {text[:200]!r}")
    repository, _, commit = text.removeprefix("hf://").partition("@")
    return Address(text, repository, commit)


def allows(where: Address) -> bool:
    """Return whether the operator allows a repository."""
    patterns = settings().hub_models
    return any(fnmatchcase(where.repository, pattern) for pattern in patterns)


def found(session: Session, tenant_id: str, where: Address) -> Weights | None:
    """Return the model as it was fetched. None: it was not, or was deleted since."""
    return catalog.weights_named(session, tenant_id, where.id(tenant_id))


def weights(session: Session, tenant_id: str, text: str) -> Weights | None:
    """Return a model by its address. None: a worker will fetch it. Raises Invalid."""
    where = address(text)
    if not allows(where):
        listed = ", ".join(settings().hub_models)
        detail = f"{where.repository} is not one of the operator's: {listed}"
        raise Invalid("/model", detail, NOT_ALLOWED, settings().hub_models)
    return found(session, tenant_id, where)
