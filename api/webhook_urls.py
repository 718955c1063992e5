"""Where a webhook may go: public addresses over https, and what the operator allows.

A URL is read here once, and kept as it was read: whoever sends to it must not read
another host out of it. Names are looked up at each sending alone (what they stand for
may change), and each address that is found is held against the same rules.
"""

import re
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

import httpx

from api.settings import settings

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_LENGTH = 2048
LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
NAME = re.compile(rf"(?=.{{1,253}}$){LABEL}(?:\.{LABEL})*")
NUMBER = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)")  # the last label of an IPv4 address
GLOBAL_V6 = ip_network("2000::/3")

# What is not the public internet, or leads to what is not. `is_global` knows most of
# it; it follows the Python that runs, and this list does not.
REFUSED: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local: the cloud's metadata
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "2001::/23",  # Teredo and other protocols
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "3fff::/20",  # documentation
    )
)


class UrlRefused(Exception):
    """No webhook goes there; the message says why, and what would be accepted."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart as it will be used."""

    url: str  # in its one normal form
    scheme: str
    host: str  # in ASCII; an IPv6 address without brackets
    port: int
    authority: str  # the `Host` header


def parse(text: str) -> Target:
    """Return where a URL leads. Raises UrlRefused; nothing is looked up."""
    if len(text) > MAX_LENGTH:
        raise UrlRefused(f"the URL is longer than {MAX_LENGTH} characters")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UrlRefused(f"not a URL: {error}") from None
    _require_plain(url)
    host = url.raw_host.decode("ascii")
    allowed = _is_host_allowed(host)
    _require_host(host, allowed)
    if url.scheme != "https" and not allowed:
        raise UrlRefused("the URL must start with https://")
    usual = 443 if url.scheme == "https" else 80
    port = usual if url.port is None else url.port
    if port not in settings().webhook_ports and not allowed:
        known = ", ".join(map(str, settings().webhook_ports))
        raise UrlRefused(f"port {port} is not open to webhooks; those are: {known}")
    if len(str(url)) > MAX_LENGTH:
        raise UrlRefused(f"the URL is longer than {MAX_LENGTH} bytes once encoded")
    return Target(str(url), url.scheme, host, port, url.netloc.decode("ascii"))


def refusal(host: str, address: Address) -> str | None:
    """Return why no webhook may connect to an address of `host`. None: it may."""
    if host in settings().webhook_allow or _is_allowed(address) or is_public(address):
        return None
    return (
        f"{host} is at {address}, which is not a public address; an operator may add "
        "it to PRECISION_WEBHOOK_ALLOW"
    )


def is_public(address: Address) -> bool:
    """Whether an address is of the public internet, and hides no other inside it."""
    if isinstance(address, IPv6Address) and not _is_plain_v6(address):
        return False
    refused = any(address in net for net in REFUSED if net.version == address.version)
    return address.is_global and not address.is_multicast and not refused


def _is_plain_v6(address: IPv6Address) -> bool:
    """No NAT64, no IPv4 inside, no unique local, link-local or multicast address."""
    return address.scope_id is None and address in GLOBAL_V6


def _require_plain(url: httpx.URL) -> None:
    if url.scheme not in ("https", "http"):
        raise UrlRefused("the URL must start with https://")
    if url.userinfo:
        raise UrlRefused("a URL with a user name or a password is not accepted")
    if "#" in str(url):
        raise UrlRefused("a URL with a fragment (#…) is not accepted")


def _require_host(host: str, allowed: bool) -> None:
    address = _address(host)
    if address is not None:
        if reason := refusal(host, address):
            raise UrlRefused(reason)
        return
    if not NAME.fullmatch(host) or NUMBER.fullmatch(host.rpartition(".")[2]):
        raise UrlRefused(f"{host[:80]!r} is no host name and no IP address")
    if "." not in host and not allowed:
        raise UrlRefused(f"{host[:80]!r} is no public host name: it has no dot")


def _is_host_allowed(host: str) -> bool:
    address = _address(host)
    if address is None:
        return host in settings().webhook_allow
    return _is_allowed(address)


def _is_allowed(address: Address) -> bool:
    networks = (_network(text) for text in settings().webhook_allow)
    return any(
        address in net for net in networks if net and net.version == address.version
    )


def _address(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _network(text: str) -> Network | None:
    try:
        return ip_network(text)
    except ValueError:
        return None
