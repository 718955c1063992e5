"""A hub on this machine: the two addresses that are asked for, over real HTTP."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Files = dict[str, bytes]
Disturb = Callable[[BaseHTTPRequestHandler], bool]
"""Answers in the hub's stead; False: it did not."""

RESOLVE = re.compile(
    r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<commit>[0-9a-f]{40})/(?P<file>.+)"
)
LIST = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<commit>[0-9a-f]{40})\?blobs=true"
)


@dataclass
class Hub:
    """Where it listens, what it has, and what it was asked for."""

    port: int
    repositories: dict[tuple[str, str], Files] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # path, Range
    disturb: Disturb = field(default=lambda handler: False)
    lies: dict[str, str] = field(default_factory=dict)  # sha256 by file

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def files_asked(self) -> list[str]:
        """Return the files that were asked for, each once, in order."""
        found = [m["file"] for path, _ in self.asked if (m := RESOLVE.fullmatch(path))]
        return list(dict.fromkeys(found))

    def listing(self, repo: str, commit: str) -> bytes:
        siblings = []
        for name, content in self.repositories[repo, commit].items():
            row: dict[str, object] = {"rfilename": name, "size": len(content)}
            if name.endswith(".safetensors"):
                own = self.lies.get(name) or hashlib.sha256(content).hexdigest()
                row["lfs"] = {"sha256": own, "size": len(content), "pointerSize": 135}
            siblings.append(row)
        return json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()


def answer(
    handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str
) -> bool:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
    return True


def part(
    handler: BaseHTTPRequestHandler, content: bytes, cut: int | None = None
) -> None:
    """Send the bytes that are asked for; of those no more than `cut`."""
    said = handler.headers.get("Range", "")
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", said)
    if found is None:
        answer(handler, 200, content)
        return
    begin, end = int(found[1]), min(int(found[2]) + 1, len(content))
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
    handler.send_header("Content-Length", str(end - begin))
    handler.end_headers()
    handler.wfile.write(content[begin:end][:cut])


@contextmanager
def serving() -> Iterator[Hub]:
    """Listen on a free port of the loopback interface until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.path, self.headers.get("Range", "")))
            with suppress(OSError):  # who asked has hung up
                if not state.disturb(self):
                    self._answer()
            self.close_connection = True

        def _answer(self) -> None:
            path, _, elsewhere = self.path.partition("?Policy")[0].partition("/cdn")
            if (found := LIST.fullmatch(self.path)) and self._known(found):
                answer(self, 200, state.listing(found["repo"], found["commit"]))
            elif (found := RESOLVE.fullmatch(elsewhere or path)) and self._known(found):
                content = state.repositories[found["repo"], found["commit"]]
                if found["file"].endswith(".safetensors") and not elsewhere:
                    signed = f"?Policy={'x' * 4000}"  # as those of storages are
                    answer(self, 302, Location=f"{state.url}/cdn{self.path}{signed}")
                else:
                    part(self, content[found["file"]])
            else:
                answer(self, 404, b'{"error":"Repository not found"}')

        def _known(self, found: re.Match[str]) -> bool:
            return (found["repo"], found["commit"]) in state.repositories

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    state = Hub(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
