"""The commands that look things up, against the real API."""

import json
from typing import Any

import pytest

from optimizer.hardware import DEVICES
from tests.api.conftest import Run


@pytest.fixture
def precision(precision: Run) -> Run:
    """What is printed for people fits their terminal."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code, out, err = precision(*arguments)
        if "--json" not in arguments:
            assert max(map(len, out.splitlines()), default=0) <= 80
        return code, out, err

    return run


def test_devices_are_listed_with_dense_peaks(precision: Run) -> None:
    code, out, _ = precision("hardware", "list")
    assert code == 0
    (h100,) = [line for line in out.splitlines() if line.startswith("h100 ")]
    assert h100.split()[-5:] == ["9.0", "989.4", "1979", "3350", "80"]
    assert [name for name in (*DEVICES, "local") if name not in out] == []


def test_a_device_is_shown_for_people_and_for_machines(precision: Run) -> None:
    code, out, _ = precision("hardware", "show", "h100")
    assert code == 0
    assert "NVIDIA H100 SXM5" in out
    assert "132 at 1.98 GHz" in out
    assert "450 GB/s in one direction" in out
    assert "989.4 TFLOP/s, 295.3 FLOP per byte" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["fp8_e4m3", "×", "fp8_e4m3", "block", "yes"] in rows
    assert ["fp8_e5m2", "×", "fp8_e5m2", "tensor", "no"] in rows
    by_engine = ["yes", "yes", "yes", "no", "no"]  # any, vLLM, TRT, TE, torchao
    assert ["linear", "sites", "fp8_e4m3_block", *by_engine] in rows
    assert ["every", "site", "bf16", *["yes"] * 5] in rows
    assert "take e5m2 for one operand at most" in out
    document: dict[str, Any] = json.loads(
        precision("hardware", "show", "h100", "--json")[1]
    )
    assert document["id"] == "h100"


@pytest.mark.parametrize(
    ("name", "said", "absent"),
    [
        ("local", "what it can do is unknown", "matmuls"),
        ("h20", "NVLink", "units"),  # no source agrees on its clock
        ("l4", "fp8_e4m3_block       other", "in one direction"),
        ("a100", "linear sites       fp8_e4m3_weight_only weights", "fp8  "),
    ],
)
def test_what_is_not_known_is_not_shown(
    precision: Run, name: str, said: str, absent: str
) -> None:
    code, out, _ = precision("hardware", "show", name)
    assert code == 0
    assert " ".join(said.split()) in " ".join(out.split())
    assert absent not in out


def test_an_unknown_device_exits_1(precision: Run) -> None:
    code, _, err = precision("hardware", "show", "h1000")
    assert code == 1
    assert "'h1000'" in err


# -- bits: no service is asked ---------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("0.1", "--format", "bf16"), "0 01111011 1001101 0x3DCD normal"),
        (("0.1", "--format", "bf16"), "error +9.765625e-05, relative +0.000977"),
        (("-1e9", "--format", "fp8_e4m3"), "beyond the largest number, saturated"),
        (("-1e9", "--format", "fp8_e4m3"), "below none"),
        (("1e-9", "--format", "fp4_e2m1"), "flushed to zero"),
        (("0", "--format", "bf16"), "error +0"),
        (("448.1", "--format", "fp8_e4m3"), "overflow -0.000322 binades away"),
        (("3", "--format", "e8m0"), "bits 10000001 0x81 normal"),
        (("inf", "--format", "fp16"), "stored infinite"),
        (("-0.1",), "bf16 1 01111011 1001101 -0.10009765625 +0.000977"),
        (("1e9",), "448 (overflow)"),
        (("nan",), "fp8_e4m3 0 1111 111 nan"),
    ],
)
def test_bits_are_shown(precision: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, _ = precision("bits", *arguments)
    assert code == 0
    assert said in " ".join(out.split())


def test_bits_are_json_too(precision: Run) -> None:
    one = json.loads(precision("bits", "0.1", "--format", "bf16", "--json")[1])
    assert one["code"] == "0x3DCD"
    every = json.loads(precision("bits", "0.1", "--json")[1])
    assert one in every


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("0x39", "--format", "bf16"), "is not a decimal number"),
        (("1", "--format", "bf61"), "did you mean bf16"),
        (("nan", "--format", "int8"), "int8 has no code for NaN"),
    ],
)
def test_bits_of_nothing_are_a_usage_error(
    precision: Run, arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = precision("bits", *arguments)
    assert code == 2
    assert said in err
