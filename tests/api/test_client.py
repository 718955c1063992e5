"""The client against a site of our own making: what it sends, retries and raises."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from api.client import TRIES, Client, ClientError

Answer = httpx.Response | Exception


class Site:
    """Answers in order, the last one for ever; remembers every request."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        # a response is read once; the last answer is given again and again
        return httpx.Response(
            answer.status_code, headers=answer.headers, content=answer.content
        )

    def client(self) -> Client:
        transport = httpx.MockTransport(self)
        return Client(
            "http://site", "po_live_x", transport=transport, sleep=self.slept.append
        )


def job(status: str, percent: float = 0.0) -> httpx.Response:
    body = {"id": "job_1", "status": status, "progress": {"percent": percent}}
    return httpx.Response(200, json=body)


def test_the_key_goes_as_a_bearer() -> None:
    site = Site(job("queued"))
    site.client().job("job_1")
    assert site.requests[0].headers["Authorization"] == "Bearer po_live_x"


def test_a_get_is_tried_again_until_the_service_is_back() -> None:
    site = Site(
        httpx.ConnectError("refused"), httpx.Response(503), job("succeeded", 100)
    )
    assert site.client().job("job_1")["status"] == "succeeded"
    assert len(site.requests) == 3
    assert site.slept == sorted(site.slept)  # later each time


def test_an_operators_work_is_told_at_once() -> None:
    said = {"code": "maintenance", "title": "Under maintenance", "detail": "Back soon."}
    site = Site(httpx.Response(503, json=said, headers={"Retry-After": "300"}))
    with pytest.raises(ClientError, match="Back soon") as caught:
        site.client().optimize({})
    assert (caught.value.code, len(site.requests), site.slept) == ("maintenance", 1, [])


def test_a_get_is_given_up_after_its_tries() -> None:
    site = Site(httpx.ConnectError("refused"))
    with pytest.raises(ClientError) as caught:
        site.client().job("job_1")
    assert len(site.requests) == TRIES
    assert (caught.value.code, caught.value.status) == ("unreachable", None)
    assert "precision serve" in str(caught.value)


def test_retry_after_is_obeyed_up_to_half_a_minute() -> None:
    late = httpx.Response(429, headers={"Retry-After": "7"})
    later = httpx.Response(429, headers={"Retry-After": "86400"})
    site = Site(late, later, job("queued"))
    site.client().job("job_1")
    assert site.slept == [7.0, 30.0]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.ReadTimeout("slow"),
        httpx.Response(503, json={"detail": "busy"}),
        httpx.Response(409, json={"code": "idempotency_in_progress"}),
    ],
)
def test_a_creation_is_sent_again_under_one_key(answer: Answer) -> None:
    site = Site(answer, answer, job("queued"))
    site.client().optimize({"model": "m", "hardware": "h100"})
    keys = {request.headers["Idempotency-Key"] for request in site.requests}
    assert (len(site.requests), len(keys)) == (3, 1)
    site.client().optimize({"model": "m", "hardware": "h100"})
    assert site.requests[-1].headers["Idempotency-Key"] not in keys
    site.client().retry("job_1", "mine")
    assert site.requests[-1].headers["Idempotency-Key"] == '"mine"'


@pytest.mark.parametrize(
    "answer", [httpx.ReadTimeout("slow"), httpx.Response(503, json={"detail": "busy"})]
)
def test_a_post_without_a_key_is_never_sent_twice(answer: Answer) -> None:
    site = Site(answer)
    with pytest.raises(ClientError):
        site.client().add_model("m", "/folder")
    assert len(site.requests) == 1


def test_a_conflict_is_not_tried_again() -> None:
    site = Site(httpx.Response(409, json={"code": "invalid_state"}))
    with pytest.raises(ClientError):
        site.client().retry("job_1")
    assert len(site.requests) == 1


def test_filters_become_parameters() -> None:
    site = Site(httpx.Response(200, json={"data": []}))
    site.client().jobs(status=["failed", "expired"], metadata={"t": "a"}, order="asc")
    query = site.requests[0].url.params
    assert query.get_list("status") == ["failed", "expired"]
    assert (query["metadata[t]"], query["order"], query["limit"]) == ("a", "asc", "20")
    assert "hardware" not in query


def test_trials_are_read_to_the_last_page() -> None:
    def page(cursor: str | None, *ids: str) -> httpx.Response:
        data = [{"id": i} for i in ids]
        more = cursor is not None
        body = {"data": data, "has_more": more, "next_cursor": cursor}
        return httpx.Response(200, json=body)

    site = Site(page("c", "a", "b"), page(None, "d"))
    assert [t["id"] for t in site.client().trials("job_1", "site")] == ["a", "b", "d"]
    assert site.requests[1].url.params["after"] == "c"


def test_the_problem_document_travels_with_the_error() -> None:
    problem = {
        "code": "unknown_model",
        "detail": "no model x",
        "errors": [{"known": []}],
    }
    site = Site(httpx.Response(422, json=problem))
    with pytest.raises(ClientError, match="no model x") as caught:
        site.client().optimize({})
    assert caught.value.problem == {**problem, "status": 422}


def test_an_answer_without_json_is_told_from_a_problem() -> None:
    site = Site(httpx.Response(404, text="<html>nginx</html>"))
    with pytest.raises(ClientError) as caught:
        site.client().models()
    assert caught.value.code == "not_the_api"


def test_wait_shows_every_poll_and_returns_the_final_state() -> None:
    seen: list[str] = []
    site = Site(job("queued"), job("running", 40), job("cancelling"), job("cancelled"))
    end = site.client().wait("job_1", lambda j: seen.append(j["status"]), poll_s=0.5)
    assert end["status"] == "cancelled"
    assert seen == ["queued", "running", "cancelling", "cancelled"]
    assert site.slept == [0.5, 0.5, 0.5]


def test_wait_gives_up_and_says_where_the_job_is() -> None:
    with pytest.raises(TimeoutError, match="running"):
        Site(job("running", 40)).client().wait("job_1", timeout_s=0.0)


def test_events_are_read_to_the_last_page() -> None:
    def page(*seqs: int) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"seq": n} for n in seqs]})

    site = Site(page(1, 2), page(3), page())
    assert [e["seq"] for e in site.client().events("job_1")] == [1, 2, 3]
    assert [r.url.params["after"] for r in site.requests] == ["0", "2", "3"]


@pytest.mark.parametrize(
    "call",
    [
        lambda client, name: client.job(name),
        lambda client, name: client.cancel(name),
        lambda client, name: client.report(name),
    ],
    ids=["job", "cancel", "report"],
)
def test_an_id_cannot_name_another_path(call: Callable[[Client, str], Any]) -> None:
    site = Site(job("queued"))
    call(site.client(), "../models?x=1")
    assert site.requests[0].url.raw_path.startswith(b"/v1/jobs/..%2Fmodels%3Fx%3D1")


def test_ready_never_raises() -> None:
    assert Site(httpx.Response(200, json={})).client().ready()
    assert not Site(httpx.Response(503)).client().ready()
    assert not Site(httpx.ConnectError("refused")).client().ready()
