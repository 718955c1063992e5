"""One job of the whole service, one signed webhook."""

import json
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from tests.receiver import receiver
from tests.service import BODY, eventually, service, tiny_model

pytestmark = [pytest.mark.service, pytest.mark.slow]

END_S = 240.0  # importing torch on a busy machine is most of it


def test_a_job_that_ends_tells_the_receiver_once_and_signed(tmp_path: Path) -> None:
    tiny_model(tmp_path / "models" / "tiny")
    environment = {
        "PRECISION_WEBHOOK_ALLOW": "127.0.0.0/8",
        "PRECISION_PUBLIC_URL": "https://precision.example",
    }
    with (
        receiver() as site,
        service(tmp_path, environment=environment) as running,
    ):
        hook = running.client.add_webhook({"url": site.url()})
        job = running.client.optimize({**BODY, "metadata": {"team": "ads"}})
        ended = running.client.wait(job["id"], poll_s=0.2, timeout_s=END_S)
        assert ended["status"] == "succeeded", ended["error"]
        assert eventually(lambda: site.received, 20)

        def delivered() -> bool:
            (row,) = running.client.webhook_deliveries(hook["id"])
            return bool(row["state"] == "delivered")

        assert eventually(delivered, 20)
        (got,) = site.received
        body = Webhook(hook["secret"]).verify(got.body, got.headers)
        assert body["type"] == "job.succeeded"
        assert body["data"]["job_id"] == job["id"]
        assert body["data"]["outcome"] == ended["outcome"]
        assert body["data"]["metadata"] == {"team": "ads"}
        url = f"https://precision.example/v1/jobs/{job['id']}/report"
        assert body["data"]["report_url"] == url
        last = list(running.client.events(job["id"]))[-1]
        assert got.headers["webhook-id"] == last["id"]
        assert json.loads(got.body)["timestamp"] == last["timestamp"]
        parent = running.address["children"]["worker"]
        assert "libtorch" not in Path(f"/proc/{parent}/maps").read_text()
