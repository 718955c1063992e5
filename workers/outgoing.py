"""One request to an address that was checked, and to no other.

The name is looked up once; every address that it stands for must be allowed, and the
connection goes to one of those very addresses, so that a name which points elsewhere
a moment later changes nothing. No proxy, no redirect, no cookie, no environment; one
deadline for all of it, however slowly the answer drips.
"""

import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from ipaddress import ip_address
from typing import Any

import httpcore

from api.webhook_urls import Rules, Target, UrlRefused, parse, refusal

LIMIT_S = 10.0  # from the look-up to the end of the answer
MAX_RESPONSE_BYTES = 64 * 1024  # more is not read
MAX_ADDRESSES = 4  # tried one after the other where they refuse connections
CHUNK_BYTES = 16 * 1024

Resolve = Callable[[str, int], list[str]]


class NotSent(Exception):
    """There was no answer; the message says why."""


def look_up(host: str, port: int) -> list[str]:
    """Return every address of a host, best first. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    limit_s: float = LIMIT_S,
    resolve: Resolve = look_up,
) -> int:
    """Send `body` and return the status of the answer. Raises NotSent."""
    with _answered(
        "POST", url, headers, body, Rules.of_webhooks(), limit_s, resolve
    ) as response:
        _read_some(response)
        return response.status


@contextmanager
def get(
    url: str,
    headers: Mapping[str, str],
    rules: Rules,
    limit_s: float = LIMIT_S,
    resolve: Resolve = look_up,
) -> Iterator[httpcore.Response]:
    """Give the answer, to be read in the block within the limit. Raises NotSent.

    Redirects are answers like others: whoever follows one asks here again.
    """
    with _answered("GET", url, headers, None, rules, limit_s, resolve) as response:
        yield response


@contextmanager
def _answered(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None,
    rules: Rules,
    limit_s: float,
    resolve: Resolve,
) -> Iterator[httpcore.Response]:
    deadline = time.monotonic() + limit_s
    try:
        target = parse(url, rules)
        addresses = _checked(target, rules, deadline, resolve)
        said = [("Host", target.authority), *headers.items()]
        with (
            httpcore.ConnectionPool(
                ssl_context=_tls(),
                network_backend=_Pinned(addresses, deadline),
                keepalive_expiry=0.0,
            ) as pool,
            pool.stream(method, target.url, headers=said, content=body) as response,
        ):
            yield response
    except UrlRefused as refused:
        raise NotSent(f"refused: {refused}") from None
    except (httpcore.TimeoutException, TimeoutError):
        raise NotSent(f"no answer within {limit_s:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise NotSent(f"{_kind(error)}: {str(error)[:200]}") from None


def _checked(
    target: Target, rules: Rules, deadline: float, resolve: Resolve
) -> list[str]:
    """Return the addresses of a target. Raises UrlRefused where one is not allowed."""
    addresses = _in_time(partial(resolve, target.host, target.port), deadline)
    for address in addresses:
        if reason := refusal(target.host, ip_address(address), rules):
            raise UrlRefused(reason)
    return addresses[:MAX_ADDRESSES]


def _in_time(call: Callable[[], list[str]], deadline: float) -> list[str]:
    """Return what `call` does; where it takes too long, leave it to itself."""
    answer: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def answered() -> None:
        try:
            answer.put(call())
        except (OSError, UnicodeError) as error:
            answer.put(OSError(f"the host's name cannot be resolved: {error}"))

    threading.Thread(target=answered, name="look-up", daemon=True).start()
    try:
        found = answer.get(timeout=_left_s(deadline))
    except queue.Empty:
        raise httpcore.ConnectTimeout from None
    if isinstance(found, OSError):
        raise httpcore.ConnectError(str(found))
    return found


def _read_some(response: httpcore.Response) -> None:
    """Let the receiver say what it has to say, within bounds; nobody keeps it.

    The status decides, and it has arrived: an end that is missing changes nothing.
    """
    seen = 0
    try:
        for part in response.iter_stream():
            seen += len(part)
            if seen > MAX_RESPONSE_BYTES:
                return
    except (
        httpcore.TimeoutException,
        httpcore.NetworkError,
        httpcore.ProtocolError,
    ):
        return


@cache
def _tls() -> ssl.SSLContext:
    """The authorities of this machine (`SSL_CERT_FILE` adds some) and of certifi."""
    return httpcore.default_ssl_context()


class _Pinned(httpcore.NetworkBackend):
    """Connects to the addresses that were checked, whatever host is asked for."""

    def __init__(self, addresses: list[str], deadline: float) -> None:
        self.addresses = addresses
        self.deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address that accepts."""
        with _told_as(httpcore.ConnectTimeout, httpcore.ConnectError):
            return _Stream(self._connect(port), self.deadline)

    def _connect(self, port: int) -> socket.socket:
        last = OSError("the host has no address")
        for tried, address in enumerate(self.addresses):
            # One that is deaf leaves time for the others.
            share_s = _left_s(self.deadline) / (len(self.addresses) - tried)
            try:
                return socket.create_connection((address, port), share_s)
            except OSError as error:
                last = error
        raise last


class _Stream(httpcore.NetworkStream):
    """A socket whose every wait ends at one deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.socket = connection
        self.deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what has come, b"" at the end."""
        with _told_as(httpcore.ReadTimeout, httpcore.ReadError):
            self.socket.settimeout(_left_s(self.deadline))
            return self.socket.recv(min(max_bytes, CHUNK_BYTES))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of it."""
        with _told_as(httpcore.WriteTimeout, httpcore.WriteError):
            while buffer:
                self.socket.settimeout(_left_s(self.deadline))
                buffer = buffer[self.socket.send(buffer) :]

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Shake hands with `server_hostname`, who must prove that it is."""
        with _told_as(httpcore.ConnectTimeout, httpcore.ConnectError):
            self.socket.settimeout(_left_s(self.deadline))
            safe = ssl_context.wrap_socket(self.socket, server_hostname=server_hostname)
        return _Stream(safe, self.deadline)

    def get_extra_info(self, info: str) -> Any:
        """Tell nothing but the socket: connections are used once."""
        return self.socket if info == "socket" else None


@contextmanager
def _told_as(
    late: type[httpcore.TimeoutException], broken: type[httpcore.NetworkError]
) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise late from None
    except OSError as error:
        raise broken(str(error)) from None


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _kind(error: Exception) -> str:
    if isinstance(error, httpcore.ProtocolError):
        return "the answer is not HTTP"
    early = isinstance(error, httpcore.ConnectError)
    return "no connection" if early else "the connection broke"
