"""Makes `api/examples.json`, the answers that the description shows.

`python -m tests.api.examples` asks a service of its own for everything, keeps two
items of each list, and writes no key or secret down. A test holds what is in the file
against the schemas.
"""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from api import auth, db, openapi
from tests.api import tenancy
from tests.api.conftest import write_model
from tests.api.tenancy import MARK, Call

NAME = "qwen2-7b-ft"  # what the example's things are called
KEPT = 2  # items of a list
SECRETS = (
    (r"po_live_\w+", "po_live_…"),
    (r"whsec_[\w+/=]+", "whsec_…"),
    ("0" * 64, "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"),
    (MARK, NAME),
    (r"\btiny\b", NAME),
)
FILES = [
    {"path": "config.json", "bytes": 663},
    {"path": "tokenizer.json", "bytes": 7_031_645},
    {"path": "model.safetensors", "bytes": 15_231_271_864},
]
ASKED: dict[str, Any] = {  # of operations that want a body
    "optimize": {
        "model": "tiny",
        "hardware": "h100",
        "latency_sla": 0.02,
        "task": "chat",
        "data_distribution": "web_text",
        "metadata": {"team": "ads"},
    },
    "estimate": {"model": "qwen2-7b", "hardware": "h100", "latency_sla": 0.02},
    "create_model": {"name": "uploaded", "files": FILES},
    "create_dataset": {"name": "traffic", "bytes": 1_048_576, "expires_in": 604_800},
    "complete_model": {
        "files": [{"path": "model.safetensors", "sha256": "0" * 64}],
    },
    "complete_dataset": {},
    "create_api_key": {"name": "portal", "scopes": ["jobs:*"], "kind": "service"},
    "update_api_key": {"name": "the portal", "scopes": ["jobs:read"]},
    "rotate_api_key": {"overlap_seconds": 3600},
    "create_webhook_endpoint": {
        "url": "https://hooks.example.com/precision",
        "events": ["job.succeeded", "job.failed"],
    },
    "create_view_token": {"use": "view", "expires_in": 600},
    "update_webhook_endpoint": {"description": "the portal's scorecards"},
}
LINES = {  # of operations that want JSON lines
    "put_dataset": '{"text": "a line of what comes in, %n"}',
    "diagnose": '{"step": %n, "loss": 2.5}',
}
QUERIES = {"inspect_format": "?value=0.1"}


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PRECISION_DATA_DIR"] = folder
        os.environ["PRECISION_BROKER_URL"] = "memory://"
        write_model(Path(folder) / "models" / "tiny")
        found = _recorded()
    text = json.dumps(found, indent=1, ensure_ascii=False)
    openapi.EXAMPLES.write_text(_clean(text) + "\n", "utf-8")


def _recorded() -> dict[str, Any]:
    from api import catalog
    from api.app import create_app

    db.migrate()
    catalog.register_folders()
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "admin", ["admin"])
        values = tenancy.furnish(session, auth.tenant_named(session, "acme").id)
    app = create_app()
    found: dict[str, Any] = {}
    with TestClient(app, headers={"Authorization": f"Bearer {key}"}) as client:
        for call in sorted(_calls(app, values), key=_order):
            answer = client.request(call.method, call.path, **call.request)
            kind = answer.headers.get("content-type", "")
            said: dict[str, Any] = {}
            if "json" in call.request:
                said["request"] = call.request["json"]
            if kind == "application/json" and answer.content and answer.is_success:
                said["status"] = str(answer.status_code)
                said["response"] = _short(answer.json())
            if said:
                found[call.operation] = said
    found.pop("get_artifact")  # bytes, whatever they are
    for noun in ("model", "dataset"):  # what an upload becomes
        whole = {"status": "201", "response": found[f"get_{noun}"]["response"]}
        found[f"complete_{noun}"] |= whole
        part = {"object": "part", "number": 1, "bytes": 8_388_608, "sha256": "0" * 64}
        found[f"put_{noun}_part"] = {"status": "200", "response": part}
    queued = found["optimize"]["response"]
    found["retry_job"] = {"status": "202", "response": queued}
    return found


def _calls(app: Any, values: dict[str, str]) -> list[Call]:
    calls = []
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            name = operation["operationId"]
            url = _filled(path, name, values)
            request: dict[str, Any] = {"headers": {"If-Match": "*"}}
            if name in ASKED:
                request["json"] = ASKED[name]
            elif "application/jsonl" in str(operation.get("requestBody")):
                line = LINES[name]
                lines = [line.replace("%n", str(n)) for n in range(1, 100)]
                request["content"] = "\n".join(lines).encode()
                request["headers"]["Content-Type"] = "application/jsonl"
                url = url.replace(values["dataset_id"], "lines")
            calls.append(
                Call(method.upper(), url + QUERIES.get(name, ""), name, request)
            )
    return calls


def _filled(path: str, operation: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: _value(m[1], operation, values), path)


def _value(parameter: str, operation: str, values: dict[str, str]) -> str:
    if parameter == "name" and operation != "get_artifact":
        return "h100" if "hardware" in operation else "bf16"
    return values[parameter]


def _order(call: Call) -> tuple[int, int]:
    """Look first, then change, then delete."""
    order = ("GET", "POST", "PUT", "PATCH", "DELETE").index(call.method)
    return order, "rotate" in call.operation or "complete" in call.operation


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value[:KEPT]]
    return value


def _clean(text: str) -> str:
    for pattern, said in SECRETS:
        text = re.sub(pattern, said, text)
    return text


if __name__ == "__main__":
    main()
