"""The endpoint of the public key that reports are signed for."""

from fastapi import APIRouter
from pydantic import BaseModel

from api import signatures
from api.access import Caller
from api.strict import StrictRoute

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["jobs"])


class ReportKey(BaseModel):
    """An Ed25519 public key. Keep it: it checks reports when the service is gone."""

    object: str = "report_key"
    algorithm: str = signatures.ALGORITHM
    key_id: str
    public_key: str  # PEM


@router.get("/report_key")
def get_report_key(caller: Caller) -> ReportKey:
    """Return the public key that checks the signatures of this service's reports."""
    key = signatures.public_key()
    return ReportKey(key_id=signatures.key_id(key), public_key=signatures.pem(key))
