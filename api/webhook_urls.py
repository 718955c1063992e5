"""Where a request of ours may go: public addresses over https, and what is allowed.

Webhooks have their own list of what is allowed beside that, and so has the hub.

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
    """Nothing is sent there; the message says why, and what would be accepted."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator allows beside the public internet, and to whom."""

    who: str
    allow: tuple[str, ...]  # hosts and networks, over http and to any port as well
    ports: tuple[int, ...]  # of all others
    setting: str  # where an operator allows more
    longest: int = MAX_LENGTH  # of a URL, in characters

    @classmethod
    def of_webhooks(cls) -> "Rules":
        """Return those of webhooks."""
        say = settings()
        allow, ports = tuple(say.webhook_allow), tuple(say.webhook_ports)
        return cls("webhooks", allow, ports, "PRECISION_WEBHOOK_ALLOW")

    @classmethod
    def of_hub(cls) -> "Rules":
        """Return those of a hub's models, and of where it sends us for them."""
        allow = tuple(settings().hub_allow)
        signed = 4 * MAX_LENGTH  # addresses that a hub redirects to
        return cls("the hub", allow, (443,), "PRECISION_HUB_ALLOW", signed)


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart as it will be used."""

    url: str  # in its one normal form
    scheme: str
    host: str  # in ASCII; an IPv6 address without brackets
    port: int
    authority: str  # the `Host` header


def parse(text: str, rules: Rules | None = None) -> Target:
    """Return where a URL leads. Raises UrlRefused; nothing is looked up.

    The rules are those of webhooks, unless others are given.
    """
    rules = rules or Rules.of_webhooks()
    if len(text) > rules.longest:
        raise UrlRefused(f"the URL is longer than {rules.longest} characters")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UrlRefused(f"not a URL: {error}") from None
    _require_plain(url)
    host = url.raw_host.decode("ascii")
    allowed = _is_host_allowed(host, rules)
    _require_host(host, allowed, rules)
    if url.scheme != "https" and not allowed:
        raise UrlRefused("the URL must start with https://")
    usual = 443 if url.scheme == "https" else 80
    port = usual if url.port is None else url.port
    if port not in rules.ports and not allowed:
        known = ", ".join(map(str, rules.ports))
        raise UrlRefused(f"port {port} is not open to {rules.who}; those are: {known}")
    if len(str(url)) > rules.longest:
        raise UrlRefused(f"the URL is longer than {rules.longest} bytes once encoded")
    return Target(str(url), url.scheme, host, port, url.netloc.decode("ascii"))


def refusal(host: str, address: Address, rules: Rules | None = None) -> str | None:
    """Return why nothing may connect to an address of `host`. None: it may."""
    rules = rules or Rules.of_webhooks()
    if host in rules.allow or _is_allowed(address, rules) or is_public(address):
        return None
    return (
        f"{host} is at {address}, which is not a public address; an operator may add "
        f"it to {rules.setting}"
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


def _require_host(host: str, allowed: bool, rules: Rules) -> None:
    address = _address(host)
    if address is not None:
        if reason := refusal(host, address, rules):
            raise UrlRefused(reason)
        return
    if not NAME.fullmatch(host) or NUMBER.fullmatch(host.rpartition(".")[2]):
        raise UrlRefused(f"{host[:80]!r} is no host name and no IP address")
    if "." not in host and not allowed:
        raise UrlRefused(f"{host[:80]!r} is no public host name: it has no dot")


def _is_host_allowed(host: str, rules: Rules) -> bool:
    address = _address(host)
    if address is None:
        return host in rules.allow
    return _is_allowed(address, rules)


def _is_allowed(address: Address, rules: Rules) -> bool:
    networks = (_network(text) for text in rules.allow)
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
