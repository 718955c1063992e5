"""The real vLLM loads exported checkpoints of the demo model, and answers as we say.

Its Python is that of `make vllm`. FP8 layers run weight-only there (`filled_in`), so
that is what they are compared with: FP8 inputs turn bf16's last bit into a whole code.

Each checkpoint is served twice. With activations in float32 rounding decides nothing,
and the likeliest token has to be the emulation's, strictly. In bf16 logits are an eighth
apart, so that ties are as frequent as errors: tokens count as the same that are within
two steps or within what bf16 moved them by, which the emulation measures, and
log-probabilities may differ by what they differ by where nothing is FP8.
"""

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from optimizer.execute import Stacked, apply_scale
from optimizer.export_checkpoint import write_checkpoint
from optimizer.export_files import Target
from optimizer.export_scheme import plan
from optimizer.formats import E4M3
from optimizer.pieces import Memory
from optimizer.quantize import scale_from_amax
from optimizer.sites import LinearPart
from optimizer.spec import OptimizeSpec
from optimizer.stack import LINEAR, Choice, Component, Precision, Role, Site, Stack
from optimizer.work import Work
from tests.optimizer.exporting import stack_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / ".venv-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
PROMPTS, TOKENS = 32, 16
BF16_STEPS = 2  # of a logit: what ties may be apart
NOISE = 1.5  # times what bf16 alone differs by
NOISE_OF_CODES = (
    2.0  # with a cache in FP8: a last bit of bf16 may be a whole code there
)
DROPPED_BITS = 20  # of float32's 23, where e4m3 keeps three
MATRICES = ("attn_qkv", "attn_out", "ffn_in", "ffn_out")
LAYERS = 30


def everywhere(choice: str, *components: str) -> dict[str, str]:
    return {f"layers.{n}.{c}": choice for n in range(LAYERS) for c in components}


STACKS = {
    "bf16": {},
    "static, per tensor": everywhere("fp8_e4m3", *MATRICES),
    "dynamic, per channel": everywhere("fp8_e4m3_token", *MATRICES),
    "one down_proj": {"layers.7.ffn_out": "fp8_e4m3"},
    "cache": {
        **everywhere("fp8_e4m3", "kv_cache", "ffn_out"),
        **everywhere("fp8_e4m3_token", "ffn_in"),
    },
}
NARROW = [name for name in STACKS if name != "bf16"]


@dataclass
class Served:
    """What vLLM and the emulation say to the same prompts."""

    work: Work
    prompts: Tensor
    theirs: dict[str, Any]  # in bf16
    ours: dict[str, Tensor]  # log-probabilities (prompts, tokens, vocabulary)


@dataclass
class Both:
    """What was served in each of two dtypes."""

    bf16: Served
    float32: Served


@pytest.fixture(scope="module")
def both(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    if not PYTHON.is_file():
        pytest.skip("`make vllm` makes the environment that has it")
    folder = tmp_path_factory.mktemp("served")
    spec = OptimizeSpec(
        model="demo",
        model_path=str(demo_model),
        model_sha256="0" * 64,
        hardware="h100",
        calibration_tokens=128,
        validation_tokens=PROMPTS * 32,
        sequence_tokens=32,
    )
    work = Work(spec, Memory())
    every = [ids[0, :TOKENS] for ids in work.tokens.validation.sequences]
    prompts = torch.stack(every[:PROMPTS])
    ours: dict[str, dict[str, Tensor]] = {"bfloat16": {}, "float32": {}}
    for name, choices in STACKS.items():
        stack = stack_of(work.outline.shape, choices)
        made = plan(stack, work.outline.shape)
        target = Target(folder, name, "checkpoint", "vllm", [])
        weights, amaxes = work.weights, work.amaxes()
        write_checkpoint(work.model, demo_model, stack, made, weights, amaxes, target)
        runs = {
            "bfloat16": AsServed(_weight_only(made.served), amaxes, weights),
            "float32": InFloat32(_in_float32(made.served), amaxes, weights),
        }
        for dtype, run in runs.items():
            with torch.no_grad():
                logits = work.model.forward(prompts, run)
            ours[dtype][name] = logits.log_softmax(-1)
    folders = {name: str(folder / name) for name in STACKS}
    asked = {"folders": folders, "prompts": prompts.tolist(), "dtypes": [*ours]}
    theirs = ask(asked, folder)
    return Both(*(Served(work, prompts, theirs[d], ours[d]) for d in ours))


@pytest.fixture(scope="module")
def served(both: Both) -> Served:
    return both.bf16


class AsServed(Stacked):
    """A stack whose FP8 cache is cut off, not rounded.

    vLLM 0.32's CPU kernel drops the low bits of what it stores, and rounds only below
    the smallest normal number; its CUDA kernels, which the emulation follows, round to
    nearest.
    """

    def tap(self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None) -> Any:
        codes, scale = super().tap(site, role, x, mask)
        if site.component is not Component.KV_CACHE or scale is None:
            return codes, scale
        within = (x / scale).clamp(-E4M3.max, E4M3.max)
        cut = within.view(torch.int32).bitwise_and(~((1 << DROPPED_BITS) - 1))
        small = within.abs() < E4M3.smallest_normal
        return torch.where(small, codes, cut.view(torch.float32)), scale


class InFloat32(AsServed):
    """A stack whose matrices are as they are stored, and the rest in float32."""

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        choice = self._choices[part.site]
        assert choice.weight is not None
        stored = apply_scale(*self._weights.get(part, choice.weight))
        return functional.linear(x, stored, part.bias)


def _in_float32(stack: Stack) -> Stack:
    """Keep what is stored in fewer bits: matrices, the table, an FP8 cache."""
    stored = {*LINEAR, Component.EMBEDDINGS}
    return Stack(
        {
            site: choice
            for site, choice in stack.choices.items()
            if site.component in stored
            or (site.component is Component.KV_CACHE and choice.is_narrow)
        }
    )


def _weight_only(stack: Stack) -> Stack:
    def alone(site: Site, choice: Choice) -> Choice:
        if site.component not in LINEAR or not choice.is_narrow:
            return choice
        return replace(choice, name="weight_only", input=Precision("bf16"))

    return Stack({s: alone(s, c) for s, c in stack.choices.items()})


def ask(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Have vLLM's Python answer, in a process of its own."""
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [PYTHON, HERE / "log_probabilities.py", "asked.json", "out.json"]
    own = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one import for all checkpoints
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(HERE),
        "HOME": str(folder),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def differences(served: Served, name: str) -> Tensor:
    """|log p| of the prompts' own tokens apart, by position."""
    following = served.prompts[:, 1:, None]
    ours = served.ours[name][:, :-1].gather(2, following)[..., 0]
    return (ours - torch.tensor(served.theirs[name]["log_p"])).abs().flatten()


@pytest.mark.parametrize("name", STACKS)
def test_it_loads(both: Both, name: str) -> None:
    for served in (both.bf16, both.float32):
        assert "error" not in served.theirs[name], served.theirs[name]


@pytest.mark.parametrize("name", STACKS)
def test_the_likeliest_token_is_the_emulations(both: Both, name: str) -> None:
    likely = torch.tensor(both.float32.theirs[name]["likely"])
    agree = both.float32.ours[name][:, :-1].argmax(-1) == likely
    assert agree.numel() == PROMPTS * (TOKENS - 1)
    assert float(agree.float().mean()) >= 0.99


@pytest.mark.parametrize("name", STACKS)
def test_in_bf16_only_ties_are_broken_otherwise(both: Both, name: str) -> None:
    """A tie: two tokens nearer than bf16's steps, or than bf16 itself moved them.

    Of the FP8 cache five positions are farther apart than two steps, by up to 1.4 nats.
    In float32 both sides agree on all five: in two of them it is our emulation that
    bf16 turned around (which `moved` sees), in three it is vLLM, which counts.
    """
    likely = torch.tensor(both.bf16.theirs[name]["likely"])
    ours, exact = (s.ours[name][:, :-1] for s in (both.bf16, both.float32))
    best = ours.argmax(-1)
    behind = apart(ours, best, likely)
    moved = (behind - apart(exact, best, likely)).abs()
    # Logits of 16 to 32 are an eighth apart in bf16: what is nearer is a tie.
    agree = behind <= moved.clamp(min=BF16_STEPS * 0.125)
    assert agree.numel() == PROMPTS * (TOKENS - 1)
    assert float(agree.float().mean()) >= 0.99


def apart(log_p: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """By how many nats one token is likelier than another, at each position."""
    first, second = (log_p.gather(2, t[..., None])[..., 0] for t in (one, other))
    return first - second


@pytest.mark.parametrize("name", NARROW)
def test_log_probabilities_are_within_the_noise_of_bf16(
    served: Served, name: str
) -> None:
    found, noise = differences(served, name), differences(served, "bf16")
    times = NOISE_OF_CODES if name == "cache" else NOISE
    assert float(found.mean()) < times * float(noise.mean())
    assert float(found.quantile(0.95)) < times * float(noise.quantile(0.95))


@pytest.mark.parametrize("name", NARROW)
def test_without_that_noise_log_probabilities_are_the_same(
    both: Both, name: str
) -> None:
    found, noise = differences(both.float32, name), differences(both.bf16, "bf16")
    share = 1.0 if name == "cache" else 0.01  # there a last bit may be a whole code
    assert float(found.mean()) < share * float(noise.mean())


@pytest.mark.parametrize("name", NARROW)
def test_a_checkpoint_is_not_mistaken_for_another(served: Served, name: str) -> None:
    """The comparison can fail: what FP8 changes is more than what is let pass."""
    if name == "one down_proj":
        pytest.skip("one matrix of 120 changes less than bf16 does")
    other = {**served.theirs, "bf16": served.theirs[name]}
    mistaken = differences(replace(served, theirs=other), "bf16")
    noise = differences(served, "bf16")
    assert float(mistaken.mean()) > NOISE * float(noise.mean())


def test_static_scales_are_those_of_the_calibration(served: Served) -> None:
    scales = served.theirs["static, per tensor"]["scales"]
    largest = served.work.amaxes()
    for layer in range(LAYERS):
        for component, module in (
            (Component.ATTN_QKV, "self_attn.qkv_proj"),
            (Component.FFN_IN, "mlp.gate_up_proj"),
            (Component.FFN_OUT, "mlp.down_proj"),
        ):
            amax = largest[Site(layer, component), Role.INPUT].amax()
            found = scales[f"model.layers.{layer}.{module}.input_scale"]
            assert found == pytest.approx(float(scale_from_amax(amax, E4M3)), rel=1e-6)


def test_scales_of_the_cache_are_loaded(served: Served) -> None:
    scales = served.theirs["cache"]["scales"]
    largest = served.work.amaxes()
    for layer in range(LAYERS):
        site = Site(layer, Component.KV_CACHE)
        for name, role in (("_k_scale", Role.INPUT), ("_v_scale", Role.WEIGHT)):
            wanted = float(scale_from_amax(largest[site, role].amax(), E4M3))
            found = scales[f"model.layers.{layer}.self_attn.attn.{name}"]
            assert found == pytest.approx(wanted, rel=1e-6)


# torchao, which lies beside it


def test_torchao_reads_its_configuration(tmp_path: Path, spec: OptimizeSpec) -> None:
    apart = ENVIRONMENT / "apart"
    if not apart.is_dir():
        pytest.skip("`make vllm` makes the folder that has it")
    from optimizer.export_torchao import configuration, write_configuration

    work = Work(spec, Memory())
    choices = {
        "layers.0.ffn_out": "fp8_e4m3_weight_only",
        "layers.0.attn_qkv": "fp8_e4m3_token",
        "layers.1.ffn_in": "fp8_e4m3",
    }
    stack = stack_of(work.outline.shape, choices)
    whole, _ = configuration(stack, work.outline)
    write_configuration(whole, Target(tmp_path, "", "configuration", "torchao", []))
    done = subprocess.run(
        [PYTHON, HERE / "torchao_reads.py", tmp_path / "torchao.json"],
        env={**os.environ, "PYTHONPATH": str(apart)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("narrowed") == "Float8Tensor"
    assert found.pop("other") == "Parameter"
    layer = "model.layers.{}".format
    assert found == {
        f"{layer(0)}.mlp.down_proj": "Float8WeightOnlyConfig",
        f"{layer(1)}.mlp.gate_proj": "Float8DynamicActivationFloat8WeightConfig",
        f"{layer(1)}.mlp.up_proj": "Float8DynamicActivationFloat8WeightConfig",
        **{
            f"{layer(0)}.self_attn.{name}_proj": (
                "Float8DynamicActivationFloat8WeightConfig"
            )
            for name in "qkv"
        },
    }
