"""What leaves this machine: to one address, within ten seconds, and nowhere else."""

import datetime
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from api.settings import settings
from tests.receiver import Receiver, after, drip, receiver, status
from workers import outgoing
from workers.outgoing import MAX_RESPONSE_BYTES, NotSent, post

HEADERS = {"Content-Type": "application/json", "webhook-id": "evt_1"}
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def loopback(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who allows receivers on this machine."""
    allow(monkeypatch, "127.0.0.0/8,portal.corp")


@pytest.fixture
def site() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


def allow(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    monkeypatch.setenv("PRECISION_WEBHOOK_ALLOW", hosts)
    settings.cache_clear()


def test_the_very_bytes_arrive_with_the_headers_and_little_else(site: Receiver) -> None:
    body = '{"a":"ü"}'.encode()
    assert post(site.url(path="/a%20b?c=d"), body, HEADERS) == 200
    (got,) = site.received
    assert (got.path, got.body) == ("/a%20b?c=d", body)
    assert got.headers == {
        "host": f"127.0.0.1:{site.port}",
        "content-type": "application/json",
        "webhook-id": "evt_1",
        "content-length": str(len(body)),
    }


@pytest.mark.parametrize("code", [204, 301, 302, 307, 308, 400, 410, 500, 503])
def test_the_status_comes_back_and_no_redirect_is_followed(
    site: Receiver, code: int
) -> None:
    site.answer = status(code, Location=site.url(path="/elsewhere"))
    assert post(site.url(), b"{}", HEADERS) == code
    assert [got.path for got in site.received] == ["/hook"]


def test_a_name_goes_to_the_address_that_was_checked_with_its_host(
    site: Receiver,
) -> None:
    asked: list[tuple[str, int]] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.1"]

    url = site.url("portal.corp")
    assert post(url, b"{}", HEADERS, resolve=resolve) == 200
    assert site.received[0].headers["host"] == f"portal.corp:{site.port}"
    assert asked == [("portal.corp", site.port)]  # once


def test_a_name_that_points_elsewhere_the_next_time_is_refused(
    site: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, "127.0.0.1")
    monkeypatch.setenv("PRECISION_WEBHOOK_PORTS", f"443,{site.port}")
    settings.cache_clear()
    answers = [["1.1.1.1"], ["127.0.0.2"], ["169.254.169.254"]]
    connected: list[str] = []

    def connect(pair: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(pair[0])
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(socket, "create_connection", connect)
    rebinding = iter(answers)
    for why in ("nobody there", "127.0.0.2, which is not", "169.254.169.254, which"):
        with pytest.raises(NotSent, match=why):
            post(
                f"https://rebind.example.com:{site.port}/",
                b"{}",
                HEADERS,
                resolve=lambda *_: next(rebinding),
            )
    assert connected == ["1.1.1.1"]


@pytest.mark.parametrize(
    "addresses",
    [
        ["93.184.216.34", "10.0.0.1"],
        ["10.0.0.1", "93.184.216.34"],
        ["2606:4700::1111", "::ffff:10.0.0.1"],
        ["64:ff9b::a9fe:a9fe"],
    ],
)
def test_one_private_address_among_public_ones_is_enough_to_refuse(
    addresses: list[str],
) -> None:
    with pytest.raises(NotSent, match=r"refused: .* is not a public address"):
        post("https://a.example.com/", b"{}", HEADERS, resolve=lambda *_: addresses)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://[64:ff9b::a9fe:a9fe]/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://10.0.0.1:6379/",
    ],
)
def test_a_url_that_should_not_be_in_the_database_is_refused_again(url: str) -> None:
    with pytest.raises(NotSent, match="refused"):
        post(url, b"{}", HEADERS, resolve=lambda *_: pytest.fail("looked up"))


def test_names_that_the_machine_itself_resolves_to_loopback_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow(monkeypatch, "")
    # Spellings that only the C library reads as addresses never reach it.
    assert outgoing.look_up("127.1", 443) == ["127.0.0.1"]
    with pytest.raises(NotSent, match="refused"):
        post("https://127.1/", b"{}", HEADERS)


def test_proxies_of_the_environment_are_not_asked(
    site: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert post(site.url(), b"{}", HEADERS) == 200


def test_a_deaf_address_leaves_time_for_the_next(site: Receiver) -> None:
    with socket.socket() as deaf:  # bound, and nobody listens
        deaf.bind(("127.0.0.3", site.port))
        began = time.monotonic()
        addresses = ["127.0.0.3", "127.0.0.1"]
        url = site.url("portal.corp")
        assert post(url, b"{}", HEADERS, 2.0, lambda *_: addresses) == 200
    assert time.monotonic() - began < 2


# -- receivers that take their time ----------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        after(3, status(200)),
        drip(b"", b"H", 0.05, 40),
        drip(OK, b"X: y\r\n", 0.05, 40),  # headers that never end
        drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 2, b"H", 0.05, 40),
    ],
)
def test_there_is_one_deadline_however_slowly_it_drips(
    site: Receiver, answer: object
) -> None:
    site.answer = answer  # type: ignore[assignment]
    began = time.monotonic()
    with pytest.raises(NotSent, match=r"no answer within 0\.5 s"):
        post(site.url(), b"{}", HEADERS, 0.5)
    assert 0.4 < time.monotonic() - began < 1.5


def test_a_body_that_drips_takes_no_longer_and_the_status_counts(
    site: Receiver,
) -> None:
    site.answer = drip(OK + b"Content-Length: 1000\r\n\r\n", b".", 0.05, 60)
    began = time.monotonic()
    assert post(site.url(), b"{}", HEADERS, 0.5) == 200
    assert time.monotonic() - began < 1.5


def test_a_slow_name_server_is_waited_for_no_longer_either() -> None:
    def resolve(*_: object) -> list[str]:
        time.sleep(2)
        return ["127.0.0.1"]

    began = time.monotonic()
    with pytest.raises(NotSent, match="no answer within"):
        post("http://portal.corp/", b"{}", HEADERS, 0.3, resolve)
    assert time.monotonic() - began < 1


def test_ten_megabytes_are_not_read(site: Receiver) -> None:
    size = 10 * 2**20
    sent = [0]

    def flood(handler: object) -> None:
        site_handler = handler
        site_handler.wfile.write(  # type: ignore[attr-defined]
            OK + f"Content-Length: {size}\r\n\r\n".encode()
        )
        while sent[0] < size:
            site_handler.wfile.write(b"x" * 65536)  # type: ignore[attr-defined]
            sent[0] += 65536

    site.answer = flood  # type: ignore[assignment]
    assert post(site.url(), b"{}", HEADERS) == 200
    assert site.hung_up.wait(5)
    assert sent[0] < size
    assert MAX_RESPONSE_BYTES == 65536


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"), "not HTTP"),
        (lambda handler: None, "not HTTP"),  # hangs up without a word
        (drip(OK, b"X: " + b"y" * 65536 + b"\r\n", 0, 9), "not HTTP|broke"),
    ],
)
def test_what_is_no_answer_is_said(site: Receiver, answer: object, why: str) -> None:
    site.answer = answer  # type: ignore[assignment]
    with pytest.raises(NotSent, match=why):
        post(site.url(), b"{}", HEADERS)


def test_a_closed_port_and_an_unknown_name_are_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotSent, match="no connection"):
        post(f"http://127.0.0.1:{port}/", b"{}", HEADERS)

    def unknown(*_: object) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(NotSent, match="cannot be resolved"):
        post("https://no.example.com/", b"{}", HEADERS, resolve=unknown)


# -- TLS -------------------------------------------------------------------------


def certificate(folder: Path, *names: str) -> Path:
    """Write a self-signed certificate with its key, as one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.UTC)
    found = [
        x509.IPAddress(ipaddress.ip_address(name))
        if name[0].isdigit()
        else x509.DNSName(name)
        for name in names
    ]
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(found), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / "site.pem"
    path.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A certificate of `portal.corp` that this machine trusts."""
    pem = certificate(tmp_path, "portal.corp")
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    outgoing._tls.cache_clear()
    yield pem
    outgoing._tls.cache_clear()


@pytest.fixture
def names() -> list[str | None]:
    """The server names that clients asked for."""
    return []


@pytest.fixture
def safe_site(trusted: Path, names: list[str | None]) -> Iterator[Receiver]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted)
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    with receiver(context) as started:
        yield started


def test_the_pinned_connection_asks_for_and_verifies_the_name(
    safe_site: Receiver, names: list[str | None]
) -> None:
    url = safe_site.url("portal.corp")
    assert post(url, b"{}", HEADERS, resolve=lambda *_: ["127.0.0.1"]) == 200
    assert names == ["portal.corp"]
    assert safe_site.received[0].headers["host"] == f"portal.corp:{safe_site.port}"


def test_a_certificate_of_another_name_or_of_nobody_is_refused(
    safe_site: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotSent, match="CERTIFICATE_VERIFY_FAILED"):
        post(safe_site.url(), b"{}", HEADERS)  # 127.0.0.1 is not in it
    monkeypatch.delenv("SSL_CERT_FILE")
    outgoing._tls.cache_clear()
    url = safe_site.url("portal.corp")
    with pytest.raises(NotSent, match="CERTIFICATE_VERIFY_FAILED"):
        post(url, b"{}", HEADERS, resolve=lambda *_: ["127.0.0.1"])
    assert safe_site.received == []


def test_a_server_that_never_shakes_hands_is_left(trusted: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts
        url = f"https://portal.corp:{silent.getsockname()[1]}/"
        began = time.monotonic()
        with pytest.raises(NotSent, match="no answer within"):
            post(url, b"{}", HEADERS, 0.4, lambda *_: ["127.0.0.1"])
        assert time.monotonic() - began < 1.5
