"""A real HTTP server that takes webhooks, and answers as a test wants."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass(frozen=True)
class Received:
    """One request, as it came in."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    at: float  # time.monotonic()


@dataclass
class Receiver:
    """Where it listens, what came, and what is answered next."""

    port: int
    received: list[Received] = field(default_factory=list)
    answer: Answer = field(default=lambda handler: status(200)(handler))
    scheme: str = "http"
    hung_up: threading.Event = field(default_factory=threading.Event)

    def url(self, host: str = "127.0.0.1", path: str = "/hook") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"


def status(code: int, **headers: str) -> Answer:
    """Answer with a status and nothing else."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Give each answer once, and the last one from then on."""
    left = list(answers)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler)

    return answer


def after(seconds: float, then: Answer) -> Answer:
    """Let the sender wait."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        then(handler)

    return answer


def drip(head: bytes, byte: bytes, every_s: float, times: int) -> Answer:
    """Send `head`, and then one byte after the other, slowly."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head)
        for _ in range(times):
            handler.wfile.write(byte)
            time.sleep(every_s)

    return answer


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Listen on a free port of the loopback interface until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            names = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(length)
            state.received.append(Received(self.path, names, body, time.monotonic()))
            try:
                state.answer(self)
            except OSError:  # the sender has hung up
                state.hung_up.set()
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False  # an answer may take longer than the test
    state = Receiver(server.server_address[1])
    if tls is not None:
        state.scheme = "https"
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
