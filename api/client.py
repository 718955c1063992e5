"""A small client of the HTTP API: one method per call, JSON in, JSON out.

    with Client("http://127.0.0.1:8080", key) as client:
        job = client.optimize({"model": "qwen2-7b", "hardware": "h100"})
        job = client.wait(job["id"])

Everything that goes wrong is a `ClientError` that carries the problem document.
"""

import hashlib
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote
from uuid import uuid4

import httpx

from api.client_errors import ClientError, no_api, problem_of

__all__ = ["FINAL", "TRIES", "Client", "ClientError"]

Json = dict[str, Any]

FINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})
KEY = "Idempotency-Key"  # with it, sending again has no second effect
RETRIED = frozenset({429, 502, 503, 504})  # the request was not served
READING_S = 900.0  # the service reads gigabytes of weights before it answers
TRIES = 5  # 0.2 + 0.4 + 0.8 + 1.6 = 3 s: longer than a supervised restart


class Client:
    """The API at `base_url`, as the holder of `key` sees it."""

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A loopback service must not be asked for through a proxy of the environment.
        self._http = httpx.Client(
            base_url=base_url,
            headers=headers,
            timeout=timeout_s,
            transport=transport,
            trust_env=False,
        )
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- estimates -------------------------------------------------------------

    def estimate(self, body: Json) -> Json:
        """Estimate what `body`, as of a job, would get; no job is made."""
        return self._json("POST", "/v1/estimate", json=body)

    def diagnose(self, log: bytes) -> Json:
        """Say what a training run's log looks like: the bytes of the file."""
        headers = {"Content-Type": "application/octet-stream"}
        return self._json("POST", "/v1/diagnose", content=log, headers=headers)

    # -- jobs ------------------------------------------------------------------

    def optimize(self, body: Json, idempotency_key: str | None = None) -> Json:
        """Create a job. The same key again, within a day: the same job.

        Without one each call has its own, so that sending again makes no second job.
        """
        return self._create("/v1/optimize", idempotency_key, json=body)

    def retry(self, job_id: str, idempotency_key: str | None = None) -> Json:
        """Create a job like one that has ended; see `optimize`."""
        return self._create(_path("/v1/jobs", job_id, "retry"), idempotency_key)

    def job(self, job_id: str) -> Json:
        """Return the job."""
        return self._json("GET", _path("/v1/jobs", job_id))

    def jobs(
        self,
        *,
        limit: int = 20,
        status: str | Sequence[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        **filters: str | None,
    ) -> list[Json]:
        """Return the newest jobs first, those that all the filters let through.

        `filters`: hardware, created_after, created_before, order.
        """
        pairs = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        said = {"status": status, **filters, **pairs}
        params = {"limit": limit, **{k: v for k, v in said.items() if v}}
        return _rows(self._json("GET", "/v1/jobs", params=params))

    def delete(self, job_id: str) -> None:
        """Delete the files of a job that has ended."""
        self._send("DELETE", _path("/v1/jobs", job_id))

    def trials(self, job_id: str, kind: str | None = None) -> Iterator[Json]:
        """Yield everything that the job tried, page by page."""
        path = _path("/v1/jobs", job_id, "trials")
        params: Json = {"limit": 1000, **({"kind": kind} if kind else {})}
        while True:
            page = self._json("GET", path, params=params)
            yield from page["data"]
            if not page["has_more"]:
                return
            params["after"] = page["next_cursor"]

    def cancel(self, job_id: str) -> Json:
        """Ask the job to stop. Harmless where it has stopped."""
        return self._json("POST", _path("/v1/jobs", job_id, "cancel"))

    def events(self, job_id: str, after: int = 0) -> Iterator[Json]:
        """Yield every event so far with `seq` > `after`, page by page."""
        path = _path("/v1/jobs", job_id, "events")
        while rows := _rows(self._json("GET", path, params={"after": after})):
            yield from rows
            after = rows[-1]["seq"]

    def wait(
        self,
        job_id: str,
        on_change: Callable[[Json], None] | None = None,
        *,
        poll_s: float = 1.0,
        timeout_s: float | None = None,
    ) -> Json:
        """Return the job in its final state; show every poll to `on_change`.

        Raises TimeoutError after `timeout_s` seconds; the job goes on.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            if on_change:
                on_change(job)
            if job["status"] in FINAL:
                return job
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{job_id} is {job['status']} after {timeout_s} s")
            self._sleep(poll_s)

    def report(self, job_id: str) -> Json:
        """Return the report document."""
        return self._json(
            "GET",
            _path("/v1/jobs", job_id, "report"),
            headers={"Accept": "application/json"},
        )

    def report_html(self, job_id: str) -> str:
        """Return the report for people, one HTML page."""
        path = _path("/v1/jobs", job_id, "report")
        return self._send("GET", path, headers={"Accept": "text/html"}).text

    def report_as(self, job_id: str, form: str) -> bytes:
        """Return the report as json, html, md, csv or pdf."""
        path = _path("/v1/jobs", job_id, "report")
        return self._send("GET", path, params={"format": form}).content

    def report_key(self) -> Json:
        """Return the public key that checks the service's reports."""
        return self._json("GET", "/v1/report_key")

    def artifacts(self, job_id: str) -> list[Json]:
        """Return the files that a job left."""
        return _rows(self._json("GET", _path("/v1/jobs", job_id, "artifacts")))

    @contextmanager
    def artifact(
        self, job_id: str, name: str, start: int = 0, sha256: str | None = None
    ) -> Iterator[httpx.Response]:
        """Stream a file from byte `start` on, if it still has this sha256: 206, or 200.

        Raises httpx.TransportError where it is cut; `transfers.download` goes on then.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        if start and sha256:
            headers["If-Range"] = f'"{sha256}"'
        path = _path("/v1/jobs", job_id, "artifacts") + "/" + quote(name)
        with self._http.stream("GET", path, headers=headers) as response:
            if not response.is_success:
                response.read()
                raise ClientError(problem_of(response))
            yield response

    def pause(self, tries: int) -> None:
        """Wait before another try: 0.1 s, and twice as long each time."""
        self._sleep(0.1 * 2.0**tries)

    # -- uploads: `kind` is models or datasets; see `api.transfers` --------------

    def open_upload(self, kind: str, body: Json, key: str | None = None) -> Json:
        """Open an upload of files in parts. The same key again: the same upload."""
        return self._create(_path("/v1", kind), key, json=body)

    def upload(self, kind: str, upload_id: str, wait_s: int = 0) -> Json:
        """Return an upload with its missing parts, or what it has become."""
        params = {"wait": wait_s} if wait_s else {}
        path = _path("/v1", kind, upload_id)
        return self._json("GET", path, params=params, timeout=READING_S)

    def put_part(self, kind: str, upload_id: str, number: int, content: bytes) -> Json:
        """Send part `number`, with its digest. Sending it again is harmless."""
        digest = b64encode(hashlib.sha256(content).digest()).decode()
        return self._json(
            "PUT",
            _path("/v1", kind, upload_id, "parts", str(number)),
            content=content,
            headers={"Content-Digest": f"sha-256=:{digest}:"},
            timeout=READING_S,
        )

    def complete(self, kind: str, upload_id: str, sha256: Mapping[str, str]) -> Json:
        """Make a model or dataset of the parts; its files must have these digests."""
        files = [{"path": path, "sha256": value} for path, value in sha256.items()]
        path = _path("/v1", kind, upload_id, "complete")
        body = {"files": files} if files else {}
        return self._json("POST", path, json=body, timeout=READING_S)

    # -- what there is ---------------------------------------------------------

    def models(self) -> list[Json]:
        """Return the registered models."""
        return _rows(self._json("GET", "/v1/models"))

    def model(self, name: str) -> Json:
        """Return a model, by name or id, with its files and tensors."""
        return self._json("GET", _path("/v1/models", name))

    def add_model(self, name: str, path: str) -> Json:
        """Register the folder `path`, as the service sees it, under `name`."""
        body = {"name": name, "path": path}
        return self._json("POST", "/v1/models", json=body, timeout=READING_S)

    def delete_model(self, name: str) -> None:
        """Delete a model of yours, and the files that were uploaded for it."""
        self._send("DELETE", _path("/v1/models", name))

    def datasets(self) -> list[Json]:
        """Return the datasets: those built in, and yours."""
        return _rows(self._json("GET", "/v1/datasets", params={"limit": 100}))

    def delete_dataset(self, name: str) -> None:
        """Delete a dataset of yours."""
        self._send("DELETE", _path("/v1/datasets", name))

    def hardware(self) -> list[Json]:
        """Return the devices that a request may name."""
        return _rows(self._json("GET", "/v1/hardware"))

    def device(self, device_id: str) -> Json:
        """Return a device, with what it refuses and why."""
        return self._json("GET", _path("/v1/hardware", device_id))

    def add_dataset(self, name: str, lines: bytes) -> Json:
        """Upload JSON lines of `{"text"}` or `{"messages"}` under `name`."""
        return self._json(
            "PUT",
            _path("/v1/datasets", name),
            content=lines,
            headers={"Content-Type": "application/jsonl"},
            timeout=READING_S,
        )

    # -- webhooks --------------------------------------------------------------

    def webhooks(self) -> list[Json]:
        """Return the newest webhook endpoints first."""
        return _rows(self._json("GET", "/v1/webhook_endpoints", params={"limit": 100}))

    def add_webhook(self, body: Json) -> Json:
        """Add an endpoint; the answer has its secret, this once."""
        return self._json("POST", "/v1/webhook_endpoints", json=body)

    def test_webhook(self, endpoint_id: str) -> Json:
        """Send a test event and return its delivery."""
        return self._json("POST", _path("/v1/webhook_endpoints", endpoint_id, "test"))

    def webhook_deliveries(
        self, endpoint_id: str, state: str | None = None
    ) -> list[Json]:
        """Return the newest deliveries to an endpoint, with every attempt."""
        path = _path("/v1/webhook_endpoints", endpoint_id, "deliveries")
        params: Json = {"limit": 100, **({"state": state} if state else {})}
        return _rows(self._json("GET", path, params=params))

    def delete_webhook(self, endpoint_id: str) -> None:
        """Delete an endpoint and its deliveries."""
        self._send("DELETE", _path("/v1/webhook_endpoints", endpoint_id))

    # -- whether it is there ---------------------------------------------------

    def ready(self) -> bool:
        """Whether the service answers `/readyz` with 200. Never raises."""
        try:
            return self._http.get("/readyz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    # -- the wire --------------------------------------------------------------

    def _create(self, path: str, key: str | None, **options: Any) -> Json:
        headers = {KEY: f'"{key or uuid4()}"'}
        return self._json("POST", path, headers=headers, timeout=READING_S, **options)

    def _json(self, method: str, path: str, **options: Any) -> Json:
        response = self._send(method, path, **options)
        try:
            return dict(response.json())
        except ValueError:
            raise ClientError(no_api(response)) from None

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        safe = method in ("GET", "PUT", "DELETE") or KEY in options.get("headers", {})
        tries = TRIES if safe else 1
        for attempt in range(1, tries + 1):
            last = attempt == tries
            try:
                response = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if last:
                    raise ClientError(self._unreachable(error)) from None
                self._sleep(0.1 * 2**attempt)
                continue
            if last or not _try_again(response):
                break
            self._sleep(_retry_after_s(response, 0.1 * 2**attempt))
        if not response.is_success:
            raise ClientError(problem_of(response))
        return response

    def _unreachable(self, error: httpx.TransportError) -> Json:
        detail = f"no answer from {self._http.base_url}: {error}; is `precision serve` running?"
        return {"title": "The service cannot be reached", "code": "unreachable"} | {
            "detail": detail
        }


def _try_again(response: httpx.Response) -> bool:
    if response.status_code == 409:  # the first of two is being served
        return str(problem_of(response).get("code")) == "idempotency_in_progress"
    if response.status_code == 503:  # an operator's work outlasts all tries
        return problem_of(response).get("code") != "maintenance"
    return response.status_code in RETRIED


def _path(*parts: str) -> str:
    """Join; ids are quoted, so that no id can name another path."""
    first, *rest = parts
    return "/".join([first, *(quote(part, safe="") for part in rest)])


def _rows(page: Json) -> list[Json]:
    return list(page["data"])


def _retry_after_s(response: httpx.Response, default_s: float) -> float:
    """Seconds to wait, at most 30; the header may also be a date, which we ignore."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), 30.0) if value.isdigit() else default_s
