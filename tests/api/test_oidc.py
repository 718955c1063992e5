"""Bearer tokens of a portal, from an issuer with real keys that answers over HTTP."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from fastapi.testclient import TestClient
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from api import auth, callers, db, oidc, page_session, tenants
from api.app import create_app
from api.models import AuditEvent
from api.settings import settings
from tests.api.conftest import Json, Refused

AUDIENCE = "precision"
RSA = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
GROUPS = {"ml-platform": ["admin"], "ads": ["jobs:*", "models:read"]}


def public(kid: str, key: Any, **more: Any) -> Json:
    kind = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
    found: Json = kind.to_jwk(key.public_key(), as_dict=True)
    return found | {"kid": kid, "use": "sig"} | more


@dataclass
class Issuer:
    """A portal: its address, the keys that it shows, and who asked for them."""

    url: str = ""
    keys: list[Json] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    away: bool = False

    def answer(self, path: str) -> tuple[int, Any]:
        self.asked.append(path)
        if self.away:
            return 503, {}
        if path == "/keys":
            return 200, {"keys": self.keys}
        return 200, {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}

    def token(self, key: Any = RSA, kid: str = "rsa", **changes: Any) -> str:
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "jane",
            "iat": now,
            "exp": now + 300,
            "tenant": "acme",
            "scope": "openid jobs:read",
        } | changes
        algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
        said = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(said, key, algorithm=algorithm, headers={"kid": kid})


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    portal = Issuer(keys=[public("rsa", RSA), public("ec", EC)])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = portal.answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    portal.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield portal
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(
    database: str, bells: list[str], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestClient]:
    """The API beside a portal, on SQLite and on PostgreSQL. It knows acme."""
    monkeypatch.setenv("PRECISION_OIDC_ISSUER", issuer.url)
    monkeypatch.setenv("PRECISION_OIDC_AUDIENCE", AUDIENCE)
    monkeypatch.setenv("PRECISION_OIDC_GROUP_SCOPES", json.dumps(GROUPS))
    monkeypatch.setenv("PRECISION_OIDC_GROUP_TENANTS", '{"ads": "acme", "web": "web"}')
    settings.cache_clear()
    with db.transaction() as session:
        tenants.named(session, "acme")
    with TestClient(create_app()) as client:
        yield client


def ask(client: TestClient, token: str, path: str = "/v1/jobs") -> Any:
    return client.get(path, headers={"Authorization": f"Bearer {token}"})


@pytest.mark.parametrize(("kid", "key"), [("rsa", RSA), ("ec", EC)])
def test_a_token_of_the_portal_opens_its_tenant(
    client: TestClient, issuer: Issuer, kid: str, key: Any
) -> None:
    assert ask(client, issuer.token(key, kid)).status_code == 200
    with db.reading() as session:
        acme = tenants.get(session, "acme").id
    proof = oidc.prove(issuer.token(key, kid))
    assert proof.caller == auth.Caller(
        acme, "oidc:jane", "personal", frozenset({"jobs:read"})
    )
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]


def test_keys_of_ours_work_beside_tokens(client: TestClient, issuer: Issuer) -> None:
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "ci")
    assert ask(client, key).status_code == 200
    assert issuer.asked == []


def test_scopes_come_from_words_and_from_groups(
    client: TestClient, issuer: Issuer, refused: Refused
) -> None:
    def held(**claims: Any) -> set[str]:
        return set(oidc.prove(issuer.token(**claims)).caller.scopes)

    assert held(scope=["jobs:read", "email", 7]) == {"jobs:read"}
    assert held(scope=None, groups=["ads", "cats"]) == {
        "jobs:read",
        "jobs:write",
        "models:read",
    }
    assert "admin" in held(groups=["ml-platform"])
    assert held(scope=None, groups={"admin": 1}) == set()
    nobody = ask(client, issuer.token(scope="openid profile"))
    assert refused(nobody, 403, "insufficient_scope")["required_scope"] == "jobs:read"


def altered(token: str, header: Json) -> str:
    """Put another header before what was signed."""
    raw = base64.urlsafe_b64encode(json.dumps(header).encode()).decode().rstrip("=")
    return ".".join([raw, *token.split(".")[1:]])


def forged(issuer: Issuer) -> dict[str, str]:
    """Tokens that are not good, by what is wrong with them."""
    now, good = int(time.time()), issuer.token()
    claims = jwt.decode(good, options={"verify_signature": False})
    pem = RSA.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    confused = _hs256(claims, pem)
    head, body, signature = good.split(".")
    deep = base64.urlsafe_b64encode(b"[" * 5000).decode().rstrip("=")
    return {
        "expired": issuer.token(exp=now - 60),
        "not yet": issuer.token(nbf=now + 120),
        "from the future": issuer.token(iat=now + 120),
        "for others": issuer.token(aud="other"),
        "for almost us": issuer.token(aud="precision/"),
        "of another issuer": issuer.token(iss=issuer.url + "/"),
        "without end": issuer.token(exp=None),
        "without audience": issuer.token(aud=None),
        "without issuer": issuer.token(iss=None),
        "without subject": issuer.token(sub=None),
        "with an odd subject": issuer.token(sub="jane\n"),
        "with a huge subject": issuer.token(sub="j" * 201),
        "with a numeric subject": issuer.token(sub=7),
        "signed by another": issuer.token(OTHER_RSA),
        "under the other key's id": issuer.token(RSA, "ec"),
        "under an unknown id": issuer.token(RSA, "nobody"),
        "unsigned": jwt.encode(claims, None, algorithm="none", headers={"kid": "rsa"}),
        "said to be unsigned": altered(good, {"alg": "none", "kid": "rsa"}),
        "signed with the public key": confused,
        "with a critical header": altered(
            good, {"alg": "RS256", "kid": "rsa", "crit": ["b64"], "b64": True}
        ),
        "with a list for a kid": altered(good, {"alg": "RS256", "kid": ["rsa"]}),
        "with a list for a header": altered(good, []),  # type: ignore[arg-type]
        "without an algorithm": altered(good, {"kid": "rsa"}),
        "tampered with": f"{head}.{body[:-2]}AA.{signature}",
        "cut": good[:-4],
        "without signature": f"{head}.{body}.",
        "deep": f"{deep}.{body}.{signature}",
        "huge": issuer.token(more="x" * 9000),
        "no token": "a.b.c",
    }


def _hs256(claims: Json, secret: bytes) -> str:
    """Sign with HMAC under a public key, which PyJWT itself declines to do."""
    import hashlib
    import hmac

    parts = [json.dumps({"alg": "HS256", "kid": "rsa"}), json.dumps(claims)]
    signed = b".".join(
        base64.urlsafe_b64encode(part.encode()).rstrip(b"=") for part in parts
    )
    mac = hmac.digest(secret, signed, hashlib.sha256)
    return (signed + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")).decode()


def test_every_other_token_is_refused_in_the_same_words(
    client: TestClient, issuer: Issuer, refused: Refused
) -> None:
    assert ask(client, issuer.token()).status_code == 200
    said, wrong = set(), {}
    for name, token in forged(issuer).items():
        answer = ask(client, token)
        if answer.status_code != 401:
            wrong[name] = answer.text
        else:
            said.add(refused(answer, 401, "unauthenticated")["detail"])
        assert token not in answer.text
    assert wrong == {}
    assert len(said) == 1
    assert len(issuer.asked) == 2  # unknown ids were looked for no more than once


def test_a_clock_may_be_a_little_off(client: TestClient, issuer: Issuer) -> None:
    now = int(time.time())
    for claims in ({"exp": now - 10}, {"nbf": now + 10}, {"iat": now + 10}):
        assert ask(client, issuer.token(**claims)).status_code == 200, claims
    several = issuer.token(aud=["other", AUDIENCE])
    assert ask(client, several).status_code == 200


@pytest.mark.parametrize(
    "keys",
    [
        [{"kty": "oct", "k": "c2VjcmV0", "kid": "rsa", "alg": "HS256"}],
        [public("rsa", RSA, use="enc")],
        [public("rsa", RSA, alg="RS512")],
        [public("rsa", RSA, alg="HS256")],
        [{"kty": "RSA", "kid": "rsa", "n": "!", "e": "AQAB"}],
        [{"kty": "RSA", "kid": ["rsa"]}, None, 7],
        [public("rsa", ec.generate_private_key(ec.SECP384R1()))],
        [public("rsa", rsa.generate_private_key(public_exponent=3, key_size=1024))],
    ],
)
def test_keys_that_are_not_for_this_are_left_alone(
    client: TestClient, issuer: Issuer, keys: list[Json]
) -> None:
    issuer.keys = [*keys, public("ec", EC)]
    assert ask(client, issuer.token()).status_code == 401
    assert ask(client, issuer.token(EC, "ec")).status_code == 200


@pytest.mark.parametrize("end", [1e18, 10**400])
def test_a_token_that_never_ends_does_no_harm(
    client: TestClient, issuer: Issuer, end: float
) -> None:
    assert ask(client, issuer.token(exp=end)).status_code in (200, 401)


def test_new_keys_are_found_and_old_ones_survive_an_outage(
    client: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "REFETCH_S", 0.0)
    monkeypatch.setattr(callers, "KEPT_S", 0.0)
    assert ask(client, issuer.token()).status_code == 200
    issuer.keys.append(public("next", OTHER_RSA))
    assert ask(client, issuer.token(OTHER_RSA, "next")).status_code == 200
    issuer.away = True
    monkeypatch.setattr(oidc, "FRESH_S", 0.0)
    assert ask(client, issuer.token(OTHER_RSA, "next")).status_code == 200
    assert ask(client, issuer.token(OTHER_RSA, "unknown")).status_code == 401
    issuer.away, issuer.keys = False, [public("next", OTHER_RSA)]
    ask(client, issuer.token(OTHER_RSA, "next"))
    assert ask(client, issuer.token()).status_code == 401  # it was withdrawn
    monkeypatch.setattr(oidc, "KEPT_S", 0.0)
    issuer.away = True
    assert ask(client, issuer.token(OTHER_RSA, "next")).status_code == 401


def test_an_issuer_that_is_away_or_lies_lets_nobody_in(
    client: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "REFETCH_S", 0.0)
    issuer.away = True
    assert ask(client, issuer.token()).status_code == 401
    issuer.away = False
    for said in (
        {"issuer": "https://evil.example", "jwks_uri": f"{issuer.url}/keys"},
        {"issuer": issuer.url, "jwks_uri": "file:///etc/passwd"},
        {"issuer": issuer.url},
        [],
        {"issuer": issuer.url, "jwks_uri": issuer.url, "more": "x" * 600_000},
    ):
        monkeypatch.setattr(issuer, "answer", lambda _, said=said: (200, said))
        assert ask(client, issuer.token()).status_code == 401, said
    monkeypatch.undo()


def test_the_tenant_is_named_once_and_known(
    client: TestClient, issuer: Issuer, refused: Refused
) -> None:
    for claims in (
        {"tenant": None},
        {"tenant": "nobody"},
        {"tenant": ["acme", "web"]},
        {"tenant": {"name": "acme"}},
        {"tenant": None, "groups": ["ads", "web"]},
    ):
        refused(ask(client, issuer.token(**claims)), 403, "unknown_tenant")
    assert ask(client, issuer.token(tenant=["acme"])).status_code == 200
    assert ask(client, issuer.token(tenant=None, groups=["ads"])).status_code == 200


def test_a_tenant_is_made_where_the_operator_wants_it(
    client: TestClient,
    issuer: Issuer,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION_OIDC_CREATE_TENANTS", "true")
    settings.cache_clear()
    for _ in range(2):
        assert ask(client, issuer.token(tenant="newcomer")).status_code == 200
        callers.verified.clear()
    refused(ask(client, issuer.token(tenant="../x y")), 403, "unknown_tenant")
    with db.reading() as session:
        (row,) = session.query(AuditEvent)
        assert (row.action, row.actor) == ("tenant.created", "oidc:jane")
        assert row.tenant_id == tenants.get(session, "newcomer").id


def test_a_portals_token_signs_in_to_the_pages_until_it_ends(
    client: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"key": issuer.token(scope="jobs:read"), "next": "/ui/jobs"}
    answer = client.post("/ui/signin", data=form, follow_redirects=False)
    assert answer.headers["location"] == "/ui/jobs", answer.text
    cookie = answer.headers["set-cookie"].partition(";")[0]
    there = {"Cookie": cookie}
    assert "<h1>Jobs</h1>" in client.get("/ui/jobs", headers=there).text
    seconds = time.time() + 300 + oidc.LEEWAY_S + 1
    monkeypatch.setattr(page_session.time, "time", lambda: seconds)
    client.cookies.clear()
    callers.verified.clear()  # what was true a moment ago
    late = client.get("/ui/jobs", headers=there, follow_redirects=False)
    assert late.headers["location"].startswith("/ui/signin")


def test_without_a_portal_no_token_is_looked_at(
    sqlite: object, issuer: Issuer, bells: list[str]
) -> None:
    with TestClient(create_app()) as client:
        assert ask(client, issuer.token()).status_code == 401
    assert issuer.asked == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"AUDIENCE": ""}, "oidc_audience"),
        ({"GROUP_SCOPES": '{"ads": ["jobs:rm"]}'}, "jobs:rm"),
        ({"GROUP_SCOPES": "ads=admin"}, "oidc_group_scopes"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    data_dir: object,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    named: str,
) -> None:
    given = {"ISSUER": "https://portal.example", "AUDIENCE": AUDIENCE} | changes
    for name, value in given.items():
        monkeypatch.setenv(f"PRECISION_OIDC_{name}", value)
    settings.cache_clear()
    with pytest.raises(ValueError, match=named):
        settings()
