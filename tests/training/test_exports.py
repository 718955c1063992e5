"""Every exported configuration is read by the parser of those who train with it."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision

from optimizer.te import recipes
from optimizer.training import exports, exports_fp8

GEMMS = ("fprop", "dgrad", "wgrad")


def row(matrix: str, *runs: str) -> dict[str, Any]:
    return {"matrix": matrix, "layer": "0", **dict(zip(GEMMS, runs, strict=True))}


STACK = [
    row("model.layers.0.q_proj", "fp8", "fp8", "fp8"),
    row("model.layers.0.up_proj", "fp8", "bf16", "bf16"),
    row("model.layers.10.up_proj", "bf16", "fp8", "bf16"),
    row("lm_head", "bf16", "bf16", "bf16"),
]


def document(chosen: str, arithmetic: str, **how: Any) -> dict[str, Any]:
    training = {
        "optimizer": "adam",
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "warmup_steps": 10,
        "clip": 1.0,
        "batch_size": 4,
        "accumulation": 2,
        **how,
    }
    return {
        "model": {"name": "m", "sha256": "0"},
        "hardware": {"id": "h100"},
        "verdict": {"chosen": chosen, "outcome": "recommended"},
        "candidates": [{"name": chosen, "candidate": {"arithmetic": arithmetic}}],
        "stack": STACK,
        "training": training,
        "kept_fp32": [],
        "loss_scaling": {"initial": 4096.0, "growth_interval": 2000},
    }


FP8 = document("fp8_current", "fp8")


def test_transformers_reads_its_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    for name in ("bf16", "fp16"):
        args = exports.training_arguments(document(name, name, optimizer="sgd"))
        read = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **args)
        assert (read.bf16, read.fp16) == (name == "bf16", name == "fp16")
        assert read.learning_rate == 3e-4
        assert read.gradient_accumulation_steps == 2
        assert read.max_grad_norm == 1.0


def test_deepspeeds_configuration_is_read_by_accelerate() -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    written = exports.deepspeed(document("fp16", "fp16"))
    read = HfDeepSpeedConfig(json.loads(json.dumps(written)))
    assert read.is_true("fp16.enabled")
    assert read.is_false("bf16.enabled")
    assert 2 ** read.get_value("fp16.initial_scale_power") == 4096
    assert read.get_value("gradient_accumulation_steps") == 2


def test_fsdp_takes_its_dtypes() -> None:
    written = exports.fsdp(FP8)["mixed_precision"]
    read = MixedPrecision(**{k: getattr(torch, v) for k, v in written.items()})
    assert read.param_dtype is torch.bfloat16
    assert read.reduce_dtype is torch.float32


# -- Transformer Engine


@pytest.fixture
def layers_read(tmp_path: Path) -> Iterator[Callable[[str, str], list[str] | None]]:
    """What NVIDIA's reader makes of a configuration: (text, layer) -> products.

    TE's own feature is registered. Its file imports TE's kernels for its base class
    alone: that is replaced.
    """
    api = pytest.importorskip("nvdlfw_inspect.api")
    from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
    from nvdlfw_inspect.config_manager import ConfigManager
    from nvdlfw_inspect.registry import Registry

    found = importlib.util.find_spec("transformer_engine")
    assert found is not None
    assert found.submodule_search_locations
    place = Path(found.submodule_search_locations[0])
    feature = "disable_quantization_gemm.py"
    features, logs = tmp_path / "features", tmp_path / "logs"
    features.mkdir()
    (features / feature).symlink_to(place / "debug/features" / feature)
    stand_in = types.ModuleType("transformer_engine.debug.features.api")
    stand_in.TEConfigAPIMapper = _concrete(BaseConfigAPIMapper)  # type: ignore[attr-defined]
    namespace = _concrete(BaseNamespaceAPI)

    def read(text: str, layer: str) -> list[str] | None:
        if not (tmp_path / "te.yaml").exists():
            (tmp_path / "te.yaml").write_text(text)
            Registry.register_namespace_api("transformer_engine")(namespace)
            api.initialize(
                str(tmp_path / "te.yaml"), [str(features)], log_dir=str(logs)
            )
        return _gemms(ConfigManager.get_config_for_layer(layer))

    sys.modules[stand_in.__name__] = stand_in
    yield read
    del sys.modules[stand_in.__name__]
    api.end_debug()
    Registry.data.clear()


def _concrete(abstract: type) -> type:
    methods = getattr(abstract, "__abstractmethods__", ())
    return type(abstract.__name__, (abstract,), dict.fromkeys(methods))


@pytest.mark.parametrize(
    ("layer", "gemms"),
    [
        ("model.layers.0.up_proj", ["dgrad", "wgrad"]),
        ("lm_head", ["fprop", "dgrad", "wgrad"]),
        ("model.layers.0.q_proj", None),
        ("x.model.layers.10.up_proj", ["fprop", "wgrad"]),  # names end as ours do
        ("model.layers.1.up_proj", None),  # layer 1 is not layer 10
    ],
)
def test_te_reads_which_products_leave_fp8(
    layers_read: Callable[[str, str], list[str] | None],
    layer: str,
    gemms: list[str] | None,
) -> None:
    assert layers_read(exports_fp8.debug_yaml(STACK), layer) == gemms


def _gemms(config: Any) -> list[str] | None:
    if not config:
        return None
    found: list[str] = config["transformer_engine"]["DisableQuantizationGEMM"]["gemms"]
    return found


def test_where_nothing_leaves_fp8_te_needs_no_configuration() -> None:
    whole = FP8 | {"stack": STACK[:1]}
    assert "transformer_engine.yaml" not in exports.files(whole)


@pytest.mark.parametrize("delayed", [True, False])
def test_te_makes_its_recipe(delayed: bool) -> None:
    real = recipes()
    written = exports_fp8.recipe(delayed)
    arguments = dict(written["arguments"])
    arguments["fp8_format"] = getattr(real.Format, arguments["fp8_format"])
    made = getattr(real, written["recipe"])(**arguments)
    assert made.fp8_format is real.Format.HYBRID
    assert not delayed or made.amax_history_len == 1024


# -- torchao


APART = Path(__file__).parents[2] / ".venv-vllm" / "apart"  # `make vllm` makes it


def test_torchao_converts_each_matrix_as_listed(tmp_path: Path) -> None:
    if not APART.is_dir():  # no library may find torchao by itself
        said = "torchao lies in .venv-vllm/apart: make vllm"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(said)
    file = tmp_path / "torchao_float8.py"
    file.write_text(exports.files(FP8)["torchao_float8.py"])
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("torchao_converts.py"), file],
        env={**os.environ, "PYTHONPATH": str(APART)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["classes"] == {
        "model.layers.0.q_proj": "Float8Linear",
        "model.layers.0.up_proj": "Float8Linear",
        "model.layers.10.up_proj": "Float8Linear",
        "lm_head": "Linear",
    }
    assert found["off"] == ["grad_output", "input_for_grad_weight"]
    assert found["trained"]


# -- which files


def test_files_are_those_of_the_chosen_precision() -> None:
    plain = {"training_stack.json", "training_arguments.json"}
    plain |= {"deepspeed.json", "fsdp.json"}
    narrow = {"transformer_engine.yaml", "transformer_engine_recipe.json"}
    assert exports.files(FP8).keys() == plain | narrow | {"torchao_float8.py"}
    assert exports.files(document("bf16", "bf16")).keys() == plain
    unstable = document("fp32", "fp32")
    unstable["verdict"]["outcome"] = "unstable"
    assert exports.files(unstable).keys() == {"training_stack.json"}
