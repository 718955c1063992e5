"""The tables of `watched`: what workers leave for whoever watches the service."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from api.base import Base


class TrialTally(Base):
    """How many measurements of a tenant's jobs ended so, and took about so long."""

    __tablename__ = "trial_tallies"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    result: Mapped[str] = mapped_column(primary_key=True)
    precision: Mapped[str] = mapped_column(primary_key=True)
    within_s: Mapped[float] = mapped_column(primary_key=True)  # the bound it is under
    total: Mapped[int] = mapped_column(BigInteger)
    seconds: Mapped[float]  # all together


class Gpu(Base):
    """A GPU that a worker computes on."""

    __tablename__ = "gpus"

    device: Mapped[str] = mapped_column(primary_key=True)
    used_bytes: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime]
