"""What a client is told where something goes wrong: one exception, with the document."""

from typing import Any

import httpx

Json = dict[str, Any]


class ClientError(Exception):
    """The service refused, or could not be reached.

    `problem` is the RFC 9457 document; without an answer from the service it has
    `code` "unreachable" and a `detail`.
    """

    def __init__(self, problem: Json) -> None:
        super().__init__(problem.get("detail") or problem.get("title") or "error")
        self.problem = problem

    @property
    def code(self) -> str:
        """The stable name of what went wrong."""
        return str(self.problem.get("code", "unknown"))

    @property
    def status(self) -> int | None:
        """The HTTP status. None: the service did not answer."""
        return self.problem.get("status")


def problem_of(response: httpx.Response) -> Json:
    """Return the problem document of an answer, or one that says that it has none."""
    try:
        problem = response.json()
    except ValueError:
        return no_api(response)
    if not isinstance(problem, dict):
        return no_api(response)
    return {"status": response.status_code, **problem}


def no_api(response: httpx.Response) -> Json:
    """Return a problem: something else than this API has answered."""
    return {
        "title": "Not an answer of this API",
        "status": response.status_code,
        "code": "not_the_api",
        "detail": f"{response.url} answered {response.status_code} without JSON",
    }
