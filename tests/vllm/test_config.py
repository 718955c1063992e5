"""vLLM's own reading of a checkpoint's configuration: what it takes, and what it refuses.

No engine is started: its parser, its matching of fused siblings, its cache and its
loader are called. What is refused there never leaves us: siblings are one site, a cache
in e5m2 is exported in 16 bits and a padded matrix not at all, each with the reason.
"""

import copy
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from optimizer.errors import SpecError
from optimizer.export_scheme import plan, refusal
from optimizer.stack import Component, Site, choice_named
from optimizer.work import Work
from tests.optimizer.exporting import stack_of
from tests.vllm.test_served import HERE, PYTHON
from tests.vllm.test_tiny import tiny, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHOICES = {
    "layers.0.attn_qkv": "fp8_e4m3_token",
    "layers.0.ffn_in": "fp8_e4m3",
    "layers.1.ffn_out": "fp8_e4m3",
    "layers.0.kv_cache": "fp8_e4m3",
    "layers.1.kv_cache": "fp8_e4m3",
}
ATTENTION, FFN = "model.layers.{}.self_attn.{}", "model.layers.{}.mlp.{}"
SCHEMES = {
    ATTENTION.format(0, "qkv_proj"): ["channel", "token"],
    ATTENTION.format(0, "o_proj"): None,
    FFN.format(0, "gate_up_proj"): ["tensor", "tensor"],
    FFN.format(0, "down_proj"): None,
    ATTENTION.format(1, "qkv_proj"): None,
    ATTENTION.format(1, "o_proj"): None,
    FFN.format(1, "gate_up_proj"): None,
    FFN.format(1, "down_proj"): ["tensor", "tensor"],
}
STORED, BUILT = (208, 128), (200, 128)  # padded to 16, and as config.json says


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    if not PYTHON.is_file():
        pytest.skip("`make vllm` makes the environment that has it")
    return tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def config(work: Work, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quantization_config that is written."""
    folder = tmp_path_factory.mktemp("config")
    written(work, CHOICES, "written", folder)
    found = json.loads((folder / "written" / "config.json").read_text())
    return dict(found["quantization_config"])


def without_k(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose k_proj is not like its siblings."""
    changed = copy.deepcopy(config)
    name = ATTENTION.format(0, "k_proj")
    for group in changed["config_groups"].values():
        group["targets"] = [each for each in group["targets"] if each != name]
    changed["ignore"].append(name)
    return changed


@pytest.fixture(scope="module")
def said(
    config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("said")
    asked = {
        "configs": {"written": config, "unlike siblings": without_k(config)},
        "modules": list(SCHEMES),
        "shapes": [STORED, BUILT],
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [PYTHON, HERE / "reads_config.py", "asked.json", "out.json"],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads((folder / "out.json").read_text()))


def test_it_reads_the_scheme_of_every_fused_matrix(said: Mapping[str, Any]) -> None:
    assert said["configs"]["written"]["schemes"] == SCHEMES


def test_siblings_that_differ_are_refused_and_are_one_site_here(
    said: Mapping[str, Any],
) -> None:
    refused = said["configs"]["unlike siblings"]["schemes"]
    assert "different quantization schemes for the shards" in refused
    with pytest.raises(SpecError, match="k_proj"):  # as in a stack.json
        Site.parse("layers.0.k_proj")


def test_a_cache_in_e5m2_is_refused_and_exported_in_16_bits_with_the_reason(
    said: Mapping[str, Any], work: Work
) -> None:
    assert "fp8_e5m2 kv-cache is not supported" in said["configs"]["written"]["e5m2"]
    shape = work.outline.shape
    caches = {f"layers.{n}.kv_cache": "fp8_e5m2" for n in (0, 1)}
    made = plan(stack_of(shape, {**CHOICES, **caches}), shape)
    assert made.cache is None
    (reason,) = {d.reason for d in made.deviations if "kv_cache" in d.site}
    assert "no e5m2" in reason


def test_a_padded_matrix_is_refused_and_not_exported_with_the_reason(
    said: Mapping[str, Any], work: Work
) -> None:
    assert "(208, 128)" in said["shape"].replace("[", "(").replace("]", ")")
    shape = work.outline.shape
    (down,) = (s for s in shape.sites if str(s.site) == "layers.0.ffn_out")
    odd = replace(down, n=200, weight_elements=200 * down.k)
    choice = choice_named(Component.FFN_OUT, "fp8_e4m3")
    reason = refusal(odd, choice, shape)
    assert reason is not None
    assert "padded from 200×256 to 208×256" in reason
    assert refusal(down, choice, shape) is None
