"""stack.json: written, read back, and refused with every fault named."""

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from optimizer import stack_file
from optimizer.hardware import device
from optimizer.stack import (
    WHOLE_MODEL,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
    choice_named,
)
from optimizer.stack_file import StackFile, StackFileError
from tests.optimizer.example_document import example_document

SHA = "a" * 64
SCHEMA = json.loads(
    files("optimizer").joinpath("data/schemas/stack-1.json").read_text()
)
QKV, HEAD = Site(0, Component.ATTN_QKV), Site(WHOLE_MODEL, Component.LM_HEAD)
Change = Callable[[dict[str, Any]], object]


def shape() -> ModelShape:
    sites = (SiteShape(QKV, n=64, k=64), SiteShape(HEAD, n=97, k=64))
    return ModelShape("LlamaForCausalLM", 1, 64, 97, 64, 1, 4, False, sites)


def file(qkv: str = "fp8_e4m3", head: str = "bf16") -> StackFile:
    named = {QKV: qkv, HEAD: head}
    choices = {s: choice_named(s.component, c) for s, c in named.items()}
    return StackFile(Stack(choices), SHA, "tiny", "h100")


def faults(content: dict[str, Any]) -> list[str]:
    with pytest.raises(StackFileError) as refused:
        stack_file.read(json.dumps(content).encode())
    return [f.pointer for f in refused.value.faults]


def test_what_is_written_is_read_back_and_fits_the_schema() -> None:
    written = file().to_json()
    jsonschema.validate(written, SCHEMA)
    assert stack_file.read(json.dumps(written).encode()) == file()


def test_a_documents_stack_has_every_site_of_it() -> None:
    made = stack_file.of_document(example_document())
    jsonschema.validate(made.to_json(), SCHEMA)
    assert made.stack.to_json() == {
        s["site"]: s["choice"] for s in example_document()["sites"]
    }


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        (lambda f: f.update(schema="precision.stack/2"), "/schema"),
        (lambda f: f.update(extra=1), "/extra"),
        (lambda f: f["model"].update(sha256="A" * 64), "/model/sha256"),
        (lambda f: f["model"].update(path="x"), "/model/path"),
        (lambda f: f.update(rounding="up"), "/rounding"),
        (lambda f: f.update(hardware=7), "/hardware"),
        (lambda f: f.update(stack={}), "/stack"),
        (lambda f: f["stack"].update(lm_head=7), "/stack/lm_head"),
        (lambda f: f["stack"].update(lm_head="fp9"), "/stack/lm_head"),
        (
            lambda f: f["stack"].update({"layers.0.nose": "bf16"}),
            "/stack/layers.0.nose",
        ),
        (lambda f: f.update(padding={"lm_head": {"n": 97}}), "/padding/lm_head"),
    ],
)
def test_a_fault_is_named_by_where_it_is(change: Change, pointer: str) -> None:
    content = file().to_json()
    change(content)
    assert pointer in faults(content)
    if pointer != "/stack/lm_head":  # the schema knows no list of choices
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content, SCHEMA | {"properties": _named()})


def _named() -> dict[str, Any]:
    """The schema's properties, with the components that there are."""
    names = "|".join(Component)
    pattern = rf"^(layers\.(0|[1-9][0-9]*)\.)?({names})$"
    properties: dict[str, Any] = dict(SCHEMA["properties"])
    properties["stack"] = {**properties["stack"], "propertyNames": {"pattern": pattern}}
    return properties


def test_all_faults_are_named_at_once() -> None:
    content = file().to_json()
    content["stack"] |= {"layers.0.attn_qkv": "fp9", "nose": "bf16"}
    content["rounding"] = "up"
    assert {*faults(content)} == {
        "/rounding",
        "/stack/layers.0.attn_qkv",
        "/stack/nose",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "cannot be read"),
        (b"[]", "not a JSON object"),
        (b'{"schema": "a", "schema": "b"}', "comes twice"),
        (b" " * (stack_file.MAX_BYTES + 1), "over 4194304 bytes"),
        (b"\xff", "cannot be read"),
    ],
)
def test_what_is_no_json_object_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(StackFileError, match=said):
        stack_file.read(content)


def test_the_stack_of_its_own_model_is_taken() -> None:
    stack_file.check(file(), shape(), SHA, device("h100"))


def test_another_model_is_named() -> None:
    with pytest.raises(
        StackFileError, match=r"made for the model aaaaaaaaaaaa… \(tiny\)"
    ):
        stack_file.check(file(), shape(), "b" * 64)


def test_sites_too_many_and_too_few_are_named() -> None:
    choices = dict(file().stack.choices)
    del choices[HEAD]
    norms = Site(3, Component.NORMS)
    choices[norms] = choice_named(Component.NORMS, "bf16")
    with pytest.raises(StackFileError) as refused:
        stack_file.check(StackFile(Stack(choices), SHA), shape(), SHA)
    assert [f.pointer for f in refused.value.faults] == [
        "/stack/layers.3.norms",
        "/stack/lm_head",
    ]


def test_what_the_device_cannot_run_is_named_with_the_reason() -> None:
    with pytest.raises(StackFileError, match="has no FP8 matmul"):
        stack_file.check(file(), shape(), SHA, device("a100"))
    with pytest.raises(StackFileError, match="compressed-tensors, which vLLM loads"):
        stack_file.check(file("fp8_e5m2"), shape(), SHA, device("h100"), "vllm")


def test_padding_counts_as_the_engine_has_it() -> None:
    padded = file(head="fp8_e4m3")  # 97 rows
    stack_file.check(padded, shape(), SHA, device("h100"))
    with pytest.raises(StackFileError, match="N = 97 is not a multiple of 16"):
        stack_file.check(padded, shape(), SHA, device("h100"), "vllm")
