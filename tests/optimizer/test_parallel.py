"""Several devices that share every layer: who can, and what a job says of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from optimizer.architectures import architecture
from optimizer.errors import HardwareError
from optimizer.hardware import device
from optimizer.parallel import refusal
from optimizer.report import render_html
from optimizer.run import optimize
from optimizer.spec import OptimizeSpec
from tests.optimizer.conftest import Document, chosen, quiet
from tests.optimizer.page import Page


@pytest.mark.parametrize(
    ("name", "ways", "said"),
    [
        ("t4", 1, None),
        ("h100", 2, None),
        ("l40s", 4, None),  # no NVLink, but its sums over PCIe were timed
        ("l40s", 7, "no link to 6 others"),
        ("t4", 2, "no link to 1 others"),
        ("h100", 3, "28 attention heads are not split evenly over 3"),
        ("h100", 8, "may be one of 1, 2, 4, 7, 14, 28"),
    ],
)
def test_heads_and_links_decide_who_is_joined(
    name: str, ways: int, said: str | None
) -> None:
    known = architecture("qwen2-7b")
    assert known is not None
    found = refusal(known.shape, device(name), ways)
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


@pytest.fixture(scope="module")
def pair(spec: OptimizeSpec) -> Document:
    work = replace(spec.workload, tensor_parallel=2)
    return optimize(replace(spec, workload=work), quiet)


def test_two_devices_hold_a_part_each_and_exchange_what_they_add_up(
    pair: Document, document_of: Callable[[str], Document]
) -> None:
    alone = document_of("h100")
    one, two = alone["hardware"], pair["hardware"]
    assert (one["devices"], two["devices"]) == (1, 2)
    base = next(s for s in pair["validation"]["stacks"] if s["id"] == "all_bf16")
    whole = next(s for s in alone["validation"]["stacks"] if s["id"] == "all_bf16")
    assert base["bytes"] == whole["bytes"]  # of both together
    assert base["kl_nats"] == whole["kl_nats"]
    # So small a model only waits for its sums.
    assert base["per_token_s"] > whole["per_token_s"]
    held = two["per_device"]
    assert held["total_bytes"] == sum(
        held[f"{k}_bytes"] for k in ("weights", "kv_cache", "activations")
    )
    assert 0.5 <= held["weights_bytes"] / chosen(pair)["bytes"] < 0.6
    assert pair["workload"]["tensor_parallel"] == 2
    assert pair["provenance"]["request"]["workload"]["tensor_parallel"] == 2
    assert "2 × NVIDIA H100" in pair["verdict"]["sentence"]
    assert any(said.startswith("2 devices share") for said in pair["limits"])


def test_the_page_says_how_many_devices_and_what_each_holds(pair: Document) -> None:
    page = Page(render_html(pair))
    assert "2 devices" in page.text["asked"]
    assert "Memory of each device" in page.text["latency"]


def test_a_limit_on_memory_is_of_each_device(spec: OptimizeSpec) -> None:
    def smallest(ways: int, limit: int) -> str:
        work = replace(spec.workload, tensor_parallel=ways)
        asked = replace(spec, workload=work, max_memory_bytes=limit)
        return str(optimize(asked, quiet)["verdict"]["outcome"])

    held = chosen(optimize(spec, quiet))["memory_bytes"]
    assert smallest(1, held // 8) == "sla_not_met"
    assert smallest(2, held) != "sla_not_met"


def test_a_worker_refuses_what_devices_cannot_share(spec: OptimizeSpec) -> None:
    for hardware, ways, said in (
        ("t4", 2, "no link"),
        ("h100", 64, "attention heads"),
        ("local", 2, "one device"),
    ):
        work = replace(spec.workload, tensor_parallel=ways)
        with pytest.raises(HardwareError, match=said):
            optimize(replace(spec, hardware=hardware, workload=work), quiet)
