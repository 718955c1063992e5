"""Where webhooks may go: a table of what leads into networks that are not public."""

from ipaddress import ip_address
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from api.settings import settings
from api.webhook_urls import UrlRefused, is_public, parse, refusal

PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "93.184.216.34",
    "172.15.255.255",
    "172.32.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "2606:4700:4700::1111",
    "2001:4860:4860::8888",
    "2a00:1450:4001::200e",
]
NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "169.254.170.2",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:8.8.8.8",
    "::ffff:0:10.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::8.8.8.8",
    "64:ff9b:1::a9fe:a9fe",
    "100::1",
    "2001::1",
    "2001:0:a9fe:a9fe::1",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "2001:db8::1",
    "2002:a9fe:a9fe::1",
    "2002:7f00:1::",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1%1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
]
REFUSED = [
    ("http://example.com/", "https"),
    ("http://169.254.169.254/latest/meta-data/", "not a public address"),
    ("https://169.254.169.254/", "not a public address"),
    ("https://[64:ff9b::a9fe:a9fe]/", "not a public address"),
    ("https://[::ffff:127.0.0.1]/", "not a public address"),
    ("https://[::ffff:7f00:1]/", "not a public address"),
    ("https://[fe80::1%25eth0]/", "."),
    ("https://[fe80::1%eth0]/", "."),
    ("https://2130706433/", "no host name"),  # 127.0.0.1 as one number
    ("https://0x7f000001/", "no host name"),
    ("https://017700000001/", "no host name"),
    ("https://0x7f.0.0.1/", "no host name"),
    ("https://0177.0.0.1/", "."),
    ("https://127.1/", "no host name"),
    ("https://127.0.1/", "no host name"),
    ("https://10.0.0.0x1/", "no host name"),
    ("https://127。0。0。1/", "not a public address"),
    ("https://①②⑦.0.0.1/", "."),
    ("https://1.2.3.4.5/", "no host name"),
    ("https://256.1.1.1/", "."),
    ("https://localhost/", "no dot"),
    ("https://intranet/", "no dot"),
    ("https://example.com./", "no host name"),
    ("https://a_b.example.com/", "no host name"),
    ("https://-a.example.com/", "no host name"),
    ("https://exa mple.com/", "no host name"),
    ("https://ex%61mple.com/", "no host name"),
    ("https://127.0.0.1%00.example.com/", "no host name"),
    (f"https://{'a' * 64}.example.com/", "no host name"),
    (f"https://{'a.' * 130}com/", "no host name"),
    ("https://user@example.com/", "user name"),
    ("https://user:secret@example.com/", "user name"),
    ("https://example.com\\@127.0.0.1/", "user name"),
    ("https://example.com/#fragment", "fragment"),
    ("https://example.com/#", "fragment"),
    ("https://example.com:22/", "port 22"),
    ("https://example.com:80/", "port 80"),
    ("https://example.com:0/", "."),
    ("https://example.com:65536/", "."),
    ("https://example.com:x/", "."),
    ("https:///path", "."),
    ("https://", "."),
    ("example.com/hook", "https"),
    ("//example.com/hook", "https"),
    ("ftp://example.com/", "https"),
    ("file:///etc/passwd", "https"),
    ("gopher://127.0.0.1:6379/_FLUSHALL", "https"),
    ("javascript:alert(1)", "."),
    ("https://example.com/\r\nHost: x", "."),
    ("https://example.com/\x00", "."),
    ("", "https"),
    ("https://example.com/" + "a" * 2048, "longer"),
    ("https://example.com/" + "é" * 1000, "longer"),
]


@pytest.fixture(autouse=True)
def nothing_private(data_dir: Path) -> None:
    assert settings().webhook_allow == []


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses(text: str) -> None:
    assert is_public(ip_address(text))
    assert refusal("hooks.example.com", ip_address(text)) is None


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_addresses_that_lead_elsewhere(text: str) -> None:
    assert not is_public(ip_address(text))
    assert str(ip_address(text)) in str(refusal("hooks.example.com", ip_address(text)))


@pytest.mark.parametrize(("url", "why"), REFUSED)
def test_urls_that_no_webhook_goes_to(url: str, why: str) -> None:
    with pytest.raises(UrlRefused, match=why):
        parse(url)


@pytest.mark.parametrize(
    ("url", "kept", "host", "port"),
    [
        ("https://Example.COM", "https://example.com", "example.com", 443),
        ("https://example.com:443/a", "https://example.com/a", "example.com", 443),
        ("https://e.com:8443/a?b=c", "https://e.com:8443/a?b=c", "e.com", 8443),
        (
            "https://bücher.example/ä",
            "https://xn--bcher-kva.example/%C3%A4",
            "xn--bcher-kva.example",
            443,
        ),
        (
            "https://[2606:4700:4700::1111]/",
            "https://[2606:4700:4700::1111]/",
            "2606:4700:4700::1111",
            443,
        ),
        ("https://1.1.1.1/x", "https://1.1.1.1/x", "1.1.1.1", 443),
    ],
)
def test_a_url_is_kept_in_one_form_that_is_read_alike_again(
    url: str, kept: str, host: str, port: int
) -> None:
    target = parse(url)
    assert (target.host, target.port) == (host, port)
    assert parse(target.url) == target
    assert target.url.rstrip("/") == kept.rstrip("/")
    assert target.url.isascii()


def test_what_an_operator_allows_may_be_private_plain_and_on_any_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION_WEBHOOK_ALLOW", "10.1.0.0/16,portal,fd00::/8")
    settings.cache_clear()
    for url in (
        "http://10.1.2.3:3000/x",
        "http://portal:7007/",
        "https://portal/",
        "https://[fd00::1]/",
    ):
        assert parse(url).url.startswith(url[:12])
    for url in ("http://10.2.0.1/", "https://127.0.0.1/", "http://other.corp/"):
        with pytest.raises(UrlRefused):
            parse(url)
    assert refusal("hooks.corp", ip_address("10.1.0.9")) is None
    assert refusal("portal", ip_address("192.168.0.1")) is None
    assert refusal("hooks.corp", ip_address("10.2.0.9")) is not None


PARTS = st.text(
    alphabet=st.one_of(st.sampled_from("/:@?#[]%.\\0x1aé。-_"), st.characters())
)


@given(
    st.one_of(
        st.builds(
            "".join, st.tuples(st.sampled_from(["https://", "http:", ""]), PARTS)
        ),
        st.builds("https://{}.example.com{}".format, PARTS, PARTS),
        st.builds("https://example.com:{}".format, PARTS),
    )
)
def test_any_text_is_refused_or_read_alike_twice(text: str) -> None:
    try:
        target = parse(text)
    except UrlRefused:
        return
    assert parse(target.url) == target
    assert target.scheme == "https"
    assert target.port in (443, 8443)
    assert "." in target.host or ":" in target.host


def test_other_ports_may_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_WEBHOOK_PORTS", "443,10443")
    settings.cache_clear()
    assert parse("https://example.com:10443/").port == 10443
    with pytest.raises(UrlRefused, match="those are: 443, 10443"):
        parse("https://example.com:8443/")
