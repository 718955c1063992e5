"""How often a caller may ask: counts per minute, per key and per address.

A minute is a minute of the clock, so that one number per caller is all there is to
keep, and one look at it says how many requests are left and when the next minute
begins. The numbers are this process's own, or in a Redis that all replicas share. Where that
does not answer, requests pass uncounted: it guards against haste, it is no lock.

Attempts without a valid key count for their client address, and an address that has
none left is refused before the database is asked. A key that was good before is not
held up by others' attempts from its address.
"""

import ipaddress
import time
from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from api.errors import RateLimited
from api.settings import settings

WINDOW_S = 60
MAX_COUNTED = 100_000  # callers in a minute; beyond it all start anew
PATIENCE_S = 0.25  # for an answer of Redis
AWAY_S = 5.0  # so long it is not asked again after it did not answer
CREATES = frozenset(  # operations that leave something behind, or start work
    {
        "optimize",
        "retry_job",
        "create_model",
        "create_dataset",
        "put_dataset",
        "create_webhook_endpoint",
        "create_api_key",
        "rotate_api_key",
    }
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Policy:
    """So many requests a minute. Names are part of the API: headers show them."""

    name: str
    quota: int

    def header(self) -> str:
        """Return it as `RateLimit-Policy` has it."""
        return f'"{self.name}";q={self.quota};w={WINDOW_S}'


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a policy for one caller."""

    policy: Policy
    used: int
    reset_s: int

    @property
    def remaining(self) -> int:
        """Return how many requests are left, at least 0."""
        return max(0, self.policy.quota - self.used)

    def header(self) -> str:
        """Return it as `RateLimit` has it."""
        return f'"{self.policy.name}";r={self.remaining};t={self.reset_s}'


class Counts(Protocol):
    """Numbers that are gone after the minute they belong to. None: nobody knows."""

    async def add(self, key: str, amount: int) -> int | None:
        """Add to a number, 0 at first, and return it."""

    async def close(self) -> None:
        """Let go of what is held."""


class Memory:
    """Counts of this process."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._window = 0

    async def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        window = _window()
        if window != self._window or len(self._counts) > MAX_COUNTED:
            self._counts.clear()
            self._window = window
        if amount:
            self._counts[key] += amount
        return self._counts[key]

    async def close(self) -> None:
        """Nothing is held."""


class Shared:
    """Counts of all replicas, in a server that speaks the Redis protocol."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = Redis.from_url(
            url, socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S
        )
        self._away_until = 0.0

    async def add(self, key: str, amount: int) -> int | None:
        """Add to a number, 0 at first, and return it. None: the server is away."""
        if time.monotonic() < self._away_until:
            return None
        place = f"precision:rate:{_window()}:{key}"
        try:
            async with self._redis.pipeline(transaction=False) as batch:
                batch.incrby(place, amount)
                batch.expire(place, 2 * WINDOW_S)
                total, _ = await batch.execute()
        except (RedisError, OSError) as error:
            self._away_until = time.monotonic() + AWAY_S
            log.warning("rate_limits_not_counted", error=str(error)[:200])
            return None
        return int(total)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


class Rates:
    """The policies of this installation, and who has used how much of them."""

    def __init__(self) -> None:
        say = settings()
        url = say.rate_limit_url.get_secret_value()
        self.default = Policy("default", say.requests_per_minute)
        self.create = Policy("create", say.creates_per_minute)
        self.address = Policy("address", say.refusals_per_minute)
        self._counts: Counts = Shared(url) if url else Memory()

    async def take(self, policy: Policy, who: str) -> Left | None:
        """Count a request, and return what is left. None: it was not counted."""
        return await self._add(policy, who, 1)

    async def look(self, policy: Policy, who: str) -> Left | None:
        """Return what is left, and count nothing."""
        return await self._add(policy, who, 0)

    async def _add(self, policy: Policy, who: str, amount: int) -> Left | None:
        if not policy.quota:  # 0 is no limit
            return None
        used = await self._counts.add(f"{policy.name}:{who}", amount)
        if used is None:
            return None
        return Left(policy, used, ceil(WINDOW_S - _now() % WINDOW_S))

    async def close(self) -> None:
        """Let go of the counts."""
        await self._counts.close()


def require(left: Left | None, needed: int = 0) -> None:
    """Raise RateLimited where more was used than there is, `needed` included."""
    if left is not None and left.used + needed > left.policy.quota:
        raise RateLimited(left.policy.name, left.policy.quota, left.reset_s)


def headers(found: list[Left]) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a caller what it may still do."""
    policies = ", ".join(left.policy.header() for left in found)
    rest = ", ".join(left.header() for left in found)
    return [(b"ratelimit-policy", policies.encode()), (b"ratelimit", rest.encode())]


def network(host: str) -> str:
    """Return whom an address stands for: itself, or the 64 bits of one IPv6 site."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a socket of this machine, or a test's
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address)


def _window() -> int:
    return int(_now()) // WINDOW_S


def _now() -> float:
    return time.time()
