"""Model folders with one defect each: refused, naming the file and what to do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.checkpoint import ARCHITECTURES, check_values, fingerprint, inspect
from optimizer.errors import ModelError
from optimizer.folder import WEIGHTS
from tests.optimizer.by_hand import (
    CONFIG,
    entry,
    write_config,
    write_file,
    write_folder,
    write_tensors,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


# --- what a good folder says -----------------------------------------------------


def test_inspect_counts_by_hand(folder: Path) -> None:
    checkpoint = inspect(folder)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.parameters == 2 * 3 + 3
    assert checkpoint.stored_bytes == (2 * 3 + 3) * 4
    assert checkpoint.dtype_bytes == {"F32": 36}
    assert checkpoint.files == (WEIGHTS,)
    assert checkpoint.tensors["w"].shape == (2, 3)
    assert checkpoint.warnings == ()


def test_stored_tensors_lie_where_the_header_says(folder: Path) -> None:
    tensor = inspect(folder).tensors["w"]
    content = (folder / tensor.file).read_bytes()[tensor.start : tensor.end]
    assert np.frombuffer(content, np.float32).tolist() == [1.0] * 6


@pytest.mark.slow  # imports transformers
def test_every_allowed_architecture_has_the_model_type_transformers_gives_it() -> None:
    import transformers

    for architecture, model_type in ARCHITECTURES.items():
        config_class = getattr(transformers, architecture).config_class
        assert config_class.model_type == model_type


# --- stored dtype against declared dtype (case C15) --------------------------------


def test_declared_float32_over_stored_bf16_counts_stored_bytes_and_warns(
    folder: Path,
) -> None:
    write_tensors(folder / WEIGHTS, {"w": np.ones((1000, 1000))}, "BF16")
    checkpoint = inspect(folder)
    assert checkpoint.stored_bytes == 2_000_000  # not 4,000,000
    assert checkpoint.declared_dtype == "float32"
    (warning,) = checkpoint.warnings
    assert "declares float32" in warning
    assert "bfloat16 2000000 bytes" in warning


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_the_declared_dtype_are_read(folder: Path, key: str) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "dtype"}
    (folder / "config.json").write_text(json.dumps({**config, key: "torch.float16"}))
    assert inspect(folder).declared_dtype == "float16"


def test_no_declared_dtype_is_no_mismatch(folder: Path) -> None:
    write_config(folder, dtype=None)
    checkpoint = inspect(folder)
    assert checkpoint.declared_dtype is None
    assert checkpoint.warnings == ()


def test_mixed_stored_dtypes_are_reported_by_bytes(folder: Path) -> None:
    header = {"w": entry("BF16", [4], 0, 8), "norm": entry("F32", [2], 8, 16)}
    write_file(folder / WEIGHTS, header, bytes(16))
    checkpoint = inspect(folder)
    assert checkpoint.dtype_bytes == {"BF16": 8, "F32": 8}
    assert "several dtypes" in checkpoint.warnings[0]


# --- folders ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.ckpt", "m.pkl"]
)
def test_pickled_weights_are_refused_unopened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match=f"{name} is pickled.*as safetensors"):
        inspect(folder)


def test_pickled_weights_beside_safetensors_are_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert inspect(folder).files == (WEIGHTS,)


def test_no_weights_at_all_says_what_is_wanted(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"neither {WEIGHTS} nor"):
        inspect(folder)


def test_weights_without_tensors_are_refused(folder: Path) -> None:
    write_file(folder / WEIGHTS, {})
    with pytest.raises(ModelError, match="no tensors"):
        inspect(folder)


def test_missing_folder_is_named_without_the_path_above_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^no model folder 'nothing'$"):
        inspect(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "chat_template.jinja"])
def test_link_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes(b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(ModelError, match=f"{name} is a link that leads out"):
        inspect(folder)


def test_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "real")
    (folder / WEIGHTS).symlink_to("real")
    assert inspect(folder).parameters == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "config.json cannot be read"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe{}", "can't decode"),
        (b'{"a": 1, "a": 2}', "'a' comes twice"),
        (b" " * (1 << 20) + b"{}", "the limit is"),
    ],
    ids=["empty", "cut", "list", "utf-16", "duplicate key", "oversized"],
)
def test_broken_config_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        inspect(folder)


def test_missing_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        inspect(folder)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"architectures": ["BloomForCausalLM"]},
        "'BloomForCausalLM' is not supported; LlamaForCausalLM, .* are",
    ),
    "no architecture": ({"architectures": []}, "must name one architecture"),
    "two architectures": ({"architectures": ["A", "B"]}, "must name one architecture"),
    "architecture that is a number": ({"architectures": [7]}, "must name one"),
    "other model type": ({"model_type": "evil"}, "model_type is 'evil'"),
    "remote code": ({"auto_map": {"AutoModel": "x.X"}}, "auto_map.*never run"),
    "empty remote code": ({"auto_map": {}}, "auto_map.*never run"),
    "remote code of a part": (
        {"text_config": {"deeper": [{"auto_map": {"AutoModel": "x.X"}}]}},
        "auto_map.*never run",
    ),
    "a pipeline": ({"custom_pipelines": {"x": {"impl": "x.X"}}}, "custom_pipelines"),
    "trusted code": ({"trust_remote_code": True}, "says trust_remote_code"),
    "kernels from a hub": (
        {"_attn_implementation": "somebody/kernels"},
        "_attn_implementation 'somebody/kernels'.*never",
    ),
    "kernels by part": ({"attn_implementation": {"text": "a/b"}}, "never loaded"),
    "too deep": (
        {"a": json.loads("[" * 40 + "]" * 40)},
        "nested more than 16 levels",
    ),
    "too many lists": ({"a": [[] for _ in range(30_000)]}, "lists and objects"),
    "redirected weights": ({"transformers_weights": "x.safetensors"}, "redirects"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_is_refused(folder: Path, kind: str) -> None:
    changes, message = CONFIGS[kind]
    write_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        inspect(folder)


def test_words_of_older_configs_are_no_requests(folder: Path) -> None:
    write_config(
        folder,
        _attn_implementation="sdpa",
        _attn_implementation_autoset=True,
        trust_remote_code=False,
    )
    assert inspect(folder).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["generation_config.json", "special_tokens_map.json"])
def test_other_json_is_judged_as_the_config_is(folder: Path, name: str) -> None:
    (folder / name).write_text('{"custom_generate": "x", "a": 1}')
    with pytest.raises(ModelError, match=f"{name} has a custom_generate"):
        inspect(folder)
    (folder / name).write_text('{"a": 1, "a": 2}')
    with pytest.raises(ModelError, match=f"{name} cannot be read: the key 'a' comes"):
        inspect(folder)


def test_a_tokenizer_of_gigabytes_is_refused(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)  # sparse: takes no disk
    with pytest.raises(ModelError, match=r"tokenizer\.json has 1073741824 bytes"):
        inspect(folder)


# --- the config against the weights ------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name", "shape", "said"),
    [
        (
            {"num_hidden_layers": 3},
            "model.layers.1.mlp.up_proj.weight",
            (2, 2),
            "num_hidden_layers is 3, the weights have 2 layers",
        ),
        ({"n_layer": 1}, "h.1.attn.c_attn.weight", (2, 2), "n_layer is 1, .* 2 layers"),
        (
            {"vocab_size": 8},
            "model.embed_tokens.weight",
            (9, 4),
            r"vocab_size is 8, 'model\.embed_tokens\.weight' is \[9, 4\]",
        ),
        (
            {"n_embd": 5},
            "wte.weight",
            (9, 4),
            r"n_embd is 5, 'wte\.weight' is \[9, 4\]",
        ),
    ],
    ids=["layers", "layers of GPT-2", "vocabulary", "width"],
)
def test_weights_of_another_config_are_refused_by_their_header(
    folder: Path, changes: dict[str, Any], name: str, shape: tuple[int, int], said: str
) -> None:
    write_tensors(folder / WEIGHTS, {name: np.ones(shape)}, "F32")
    inspect(folder)  # a config without sizes says nothing
    write_config(folder, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: {said}.*save_pretrained"):
        inspect(folder)


# Case C1
def test_tied_weights_forced_apart_are_refused_with_the_values(folder: Path) -> None:
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    own = np.array([[0.3, 0.7], [1.0, -0.2]])
    both = {table: own, head: own}
    write_config(folder, tie_word_embeddings=True)
    write_tensors(folder / WEIGHTS, both, "BF16")
    check_values(inspect(folder))
    for other in (own * 2, own.T[:1]):
        write_tensors(folder / WEIGHTS, {**both, head: other}, "BF16")
        with pytest.raises(
            ModelError, match=r"ties lm_head\.weight to .*two different"
        ):
            check_values(inspect(folder))
    write_config(folder, tie_word_embeddings=False)
    check_values(inspect(folder))


# --- code that comes with a model (case C13) ---------------------------------------


def test_remote_code_is_not_executed(folder: Path) -> None:
    write_config(folder, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    marker = folder.parent / "executed"
    (folder / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w').close()")
    with pytest.raises(ModelError, match="auto_map"):
        inspect(folder)
    assert not marker.exists()


def test_remote_code_of_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": []}}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json has an auto_map"):
        inspect(folder)


def test_adapter_without_its_base_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge it into its base model"):
        inspect(folder)


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json"])
def test_other_kinds_of_tokenizer_are_refused_by_name(folder: Path, other: str) -> None:
    (folder / "tokenizer.json").rename(folder / other)
    with pytest.raises(
        ModelError, match=rf"tokenizer\.json is missing \({other} alone"
    ):
        inspect(folder)


def test_missing_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing: write one"):
        inspect(folder)


# --- fingerprint -----------------------------------------------------------------


def test_fingerprint_is_that_of_the_content_not_of_the_folder(folder: Path) -> None:
    import shutil

    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    assert fingerprint(copy) == fingerprint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_fingerprint_changes_with_every_file_that_matters(
    folder: Path, name: str
) -> None:
    before = fingerprint(folder)
    (folder / name).write_text((folder / name).read_text() + " ")
    assert fingerprint(folder) != before


def test_fingerprint_changes_with_one_bit_of_a_weight(folder: Path) -> None:
    before = fingerprint(folder)
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    assert fingerprint(folder) != before


def test_fingerprint_ignores_what_no_step_reads(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "README.md").write_text("about this model")
    assert fingerprint(folder) == before
