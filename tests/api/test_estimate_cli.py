"""`precision estimate`, against the real API, on a terminal of 80 columns."""

import json
from pathlib import Path

from tests.api.conftest import CONFIG, Run, write_model
from tests.api.test_estimate import SIZES


def test_the_answer_fits_a_terminal(precision: Run) -> None:
    code, out, _ = precision(
        "estimate", "qwen2-7b", "--hardware", "h100", "--sla", "20ms"
    )
    assert code == 0
    tables = [line for line in out.splitlines() if "  " in line]
    assert max(len(line.rstrip()) for line in tables) <= 80
    for said in ("7.616 B", "kernels: vllm", "weights", "ms per token by batch"):
        assert said in out
    assert "target met by: fp32, bf16, fp8_weight_only, fp8, fp8_kv_cache" in out
    assert "recommended: bf16" in out


def test_json_is_the_services_own(precision: Run) -> None:
    asked = ("--batch", "8", "--context", "1024", "--tensor-parallel", "2", "--json")
    code, out, _ = precision("estimate", "qwen2-7b", "--hardware", "h100", *asked)
    assert code == 0
    load = json.loads(out)["workload"]
    assert (load["batch_size"], load["prompt_tokens"]) == (8, 1024)
    assert load["tensor_parallel"] == 2


def test_several_devices_have_a_ledger_each(precision: Run) -> None:
    _, out, _ = precision(
        "estimate", "llama-3.1-70b", "--hardware", "h100", "--devices", "4"
    )
    assert "on each of 4 devices" in out


def test_a_folder_is_a_model(precision: Run, data_dir: Path) -> None:
    folder = write_model(data_dir / "models" / "own")
    config = {**CONFIG, **SIZES, "max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config))
    code, out, _ = precision("estimate", str(folder), "--hardware", "v100")
    assert code == 0
    assert "no kernels were timed on this device" in out
    assert "warning: prompt and output are 640 tokens" in out
    assert "fp8: NVIDIA V100" in out


def test_a_target_that_nothing_meets(precision: Run) -> None:
    _, out, _ = precision("estimate", "qwen2-7b", "--hardware", "l4", "--sla", "30ms")
    assert "target met by: nothing" in out
    assert "would need: weights of at most" in out
    assert "recommended: none" in out


def test_training_has_its_own_ledger(precision: Run) -> None:
    asked = ("--hardware", "h100", "--train", "pretraining")
    _, out, _ = precision("estimate", "qwen2-7b", *asked)
    for said in ("optimizer_state", "train in: bf16 with FP8 matrices", "[folklore]"):
        assert said in out
    assert "mixed precision saves memory" in out
    assert "fits: no" in out
    _, out, _ = precision("estimate", "gpt2", *asked)
    assert "fits: yes" in out


def test_what_is_refused_is_told(precision: Run) -> None:
    code, _, err = precision(
        "estimate", "qwen2-7b", "--hardware", "h100", "--sla", "1ms"
    )
    assert code == 1
    assert "physical limit" in err
    code, _, err = precision(
        "estimate", "qwen2-7b", "--hardware", "h100", "--sla", "soon"
    )
    assert code == 2
