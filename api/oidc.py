"""Bearer tokens of a portal (OIDC): signed by its issuer, checked against its keys.

The issuer's keys are fetched when a token names one that is not known, at most twice
a minute, and kept while the issuer is away. Only RS256 and ES256 are taken, each with
a key of its own kind; whatever else is wrong with a token, the answer is the same.
"""

import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from json import loads
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt
import structlog
from jwt import PyJWK, PyJWTError

from api import audit, db, scopes, tenants
from api.callers import Caller, Proof
from api.errors import Unauthenticated, UnknownTenant
from api.models import now
from api.settings import Settings, settings

MAX_TOKEN = 8192  # characters; longer ones are refused unread
MAX_DOCUMENT_BYTES = 512 * 1024
MAX_KEYS = 100
MIN_RSA_BITS = 2048
MAX_SUBJECT = 200
LEEWAY_S = 30  # clocks differ
MAX_LEFT_S = 86_400.0  # a token that says it lives longer is looked at again
FETCH_S = 5.0
REFETCH_S = 30.0  # an unknown key id is looked for this often, whoever sends it
FRESH_S = 600.0
KEPT_S = 24 * 3600.0  # without a word from the issuer its keys are good for this long
REQUIRED = ("exp", "iat", "iss", "aud", "sub")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says that concerns us."""

    subject: str
    tenant: str
    scopes: frozenset[str]
    expires_at: datetime


def prove(token: str) -> Proof:
    """Return who a portal's token stands for.

    Raises Unauthenticated, or UnknownTenant where the token is good but of nobody's.
    """
    claims = check(token)
    caller = Caller(
        _tenant_id(claims), f"oidc:{claims.subject}", "personal", claims.scopes
    )
    return Proof(caller, claims.expires_at)


def check(token: str) -> Claims:
    """Check a token's signature, issuer, audience and times, and read it."""
    say = settings()
    if not say.oidc_issuer or len(token) > MAX_TOKEN:
        raise Unauthenticated()
    try:
        return _claims(_verified(token, say), say)
    except (PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
        raise Unauthenticated() from None


def _verified(token: str, say: Settings) -> dict[str, Any]:
    header = jwt.get_unverified_header(token)
    key = _keys(say.oidc_issuer, say.oidc_jwks_url).find(str(header.get("kid", "")))
    if key is None or header.get("alg") != key.algorithm_name or "crit" in header:
        raise Unauthenticated()
    return jwt.decode(
        token,
        key,
        algorithms=[key.algorithm_name],
        audience=say.oidc_audience,
        issuer=say.oidc_issuer,
        leeway=LEEWAY_S,
        options={"require": list(REQUIRED)},
    )


def _claims(said: dict[str, Any], say: Settings) -> Claims:
    groups = _words(said.get(say.oidc_groups_claim))
    words = [*_words(said.get(say.oidc_scopes_claim))]
    for group in groups:
        words += say.oidc_group_scopes.get(group, [])
    subject = said["sub"]
    if not subject.isprintable() or not 0 < len(subject) <= MAX_SUBJECT:
        raise ValueError("no subject to be written down")
    left_s = min(int(said["exp"]) + LEEWAY_S - time.time(), MAX_LEFT_S)
    ends = now() + timedelta(seconds=left_s)
    return Claims(subject, _tenant(said, groups, say), scopes.expand(words), ends)


def _words(claim: object) -> list[str]:
    """Read a claim that is a list, or words with spaces between them."""
    if isinstance(claim, str):
        return claim.split()
    return [w for w in claim if isinstance(w, str)] if isinstance(claim, list) else []


def _tenant(said: dict[str, Any], groups: list[str], say: Settings) -> str:
    """Return the one tenant that the claim names, or that the groups stand for."""
    named = said.get(say.oidc_tenant_claim)
    found = {named} if isinstance(named, str) else set(_words(named))
    if not found:
        known = say.oidc_group_tenants
        found = {known[group] for group in groups if group in known}
    if len(found) != 1:
        raise UnknownTenant(
            f"the token must name one tenant, in {say.oidc_tenant_claim!r} or by its "
            f"groups; it names {len(found)}"
        )
    return str(found.pop())


def _tenant_id(claims: Claims) -> str:
    with db.reading() as session:
        tenant = tenants.find(session, claims.tenant)
    if tenant is not None:
        return tenant.id
    if not settings().oidc_create_tenants or not tenants.NAME.fullmatch(claims.tenant):
        raise UnknownTenant(
            "the tenant that the token names is not known here; "
            "'precision tenants create' makes it"
        )
    with db.transaction() as session:
        made = tenants.named(session, claims.tenant)
        actor = f"oidc:{claims.subject}"
        audit.record(session, made.id, actor, "tenant.created", made.id)
    return made.id


# -- the issuer's keys -------------------------------------------------------------


@cache
def _keys(issuer: str, url: str) -> "IssuerKeys":
    return IssuerKeys(issuer, url)


@dataclass
class IssuerKeys:
    """The public keys of an issuer, by their ids."""

    issuer: str
    url: str  # empty: what the issuer's own description says
    _known: dict[str, PyJWK] = field(default_factory=dict)
    _fetched_at: float = float("-inf")
    _tried_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, kid: str) -> PyJWK | None:
        """Return a key, asking the issuer where need be. None: there is none."""
        known = kid in self._known
        if known and self._age_s() < FRESH_S:
            return self._known[kid]
        if self._lock.acquire(blocking=not known):  # who waited finds what was fetched
            try:
                self._fetch()
            finally:
                self._lock.release()
        return self._known.get(kid) if self._age_s() < KEPT_S else None

    def _age_s(self) -> float:
        return time.monotonic() - self._fetched_at

    def _fetch(self) -> None:
        if time.monotonic() - self._tried_at < REFETCH_S:
            return
        self._tried_at = time.monotonic()
        try:
            with httpx.Client(timeout=FETCH_S) as client:
                url = self.url or self._described(client)
                self._known = _usable(_document(client, url))
            self._fetched_at = time.monotonic()
        except (httpx.HTTPError, ValueError, KeyError, RecursionError) as error:
            log.warning("oidc_keys_not_fetched", issuer=self.issuer, error=str(error))

    def _described(self, client: httpx.Client) -> str:
        """Return where the issuer says that its keys are."""
        place = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
        said = _document(client, place)
        if said.get("issuer") != self.issuer:
            raise ValueError(f"{place} is of another issuer: {said.get('issuer')!r}")
        url = str(said["jwks_uri"])
        if urlsplit(url).scheme != urlsplit(self.issuer).scheme:
            raise ValueError(f"the keys at {url} are less safe than the issuer")
        return url


def _document(client: httpx.Client, url: str) -> dict[str, Any]:
    """Return a JSON object, unless it is absurdly large."""
    read = b""
    with client.stream("GET", url) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{url} answers {answer.status_code}")
        for chunk in answer.iter_bytes():
            read += chunk
            if len(read) > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{url} is larger than {MAX_DOCUMENT_BYTES} bytes")
    found = loads(read)
    if not isinstance(found, dict):
        raise ValueError(f"{url} is no JSON object")
    return found


def _usable(document: dict[str, Any]) -> dict[str, PyJWK]:
    """Return the keys that may sign tokens for us; others are left out."""
    found = {}
    for entry in list(document["keys"])[:MAX_KEYS]:
        algorithm = _algorithm(entry)
        if algorithm is None:
            continue
        try:
            key = PyJWK(entry, algorithm)
        except (PyJWTError, ValueError, TypeError):
            continue  # one broken key is no reason to refuse the others
        if algorithm != "RS256" or key.key.key_size >= MIN_RSA_BITS:
            found[entry["kid"]] = key
    return found


def _algorithm(entry: Any) -> str | None:
    """Return the one algorithm that a key is for. None: none of ours."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kid"), str):
        return None
    if entry.get("use", "sig") != "sig":
        return None
    kind = f"{entry.get('kty')} {entry.get('crv', '')}".strip()
    algorithm = {"RSA": "RS256", "EC P-256": "ES256"}.get(kind)
    return algorithm if entry.get("alg", algorithm) == algorithm else None
