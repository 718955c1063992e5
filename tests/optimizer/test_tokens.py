import json
from pathlib import Path
from typing import Any

import pytest

from optimizer import tokens
from optimizer.errors import DatasetError, ModelError
from optimizer.tokens import Tokens
from tests.service import tiny_model

CHAT = [
    {"role": "user", "content": "Is seven a prime number?"},
    {"role": "assistant", "content": "Yes: only one and seven divide it."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokenizer makes one token of each byte."""
    return tiny_model(tmp_path / "tiny")


def write(path: Path, *samples: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(s) + "\n" for s in samples))
    return path


def texts(*lengths: int) -> list[dict[str, Any]]:
    """Samples of so many bytes, all different."""
    return [{"text": chr(ord("a") + i) * n} for i, n in enumerate(lengths)]


def read(
    folder: Path, path: Path | None, wanted: int = 128, length: int = 64
) -> Tokens:
    return tokens.read(
        folder,
        "mine" if path else "web_text",
        path,
        calibration_tokens=wanted,
        validation_tokens=wanted,
        sequence_tokens=length,
    )


def settings(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Packing


def test_each_half_is_packed_into_sequences_of_one_length(folder: Path) -> None:
    found = read(folder, None, wanted=512, length=128)
    for half in (found.calibration, found.validation):
        assert [tuple(ids.shape) for ids in half.sequences] == [(1, 128)] * 4
        assert half.tokens == 512
    assert found.warnings == ()


def test_tokens_are_those_of_the_text_and_no_others(folder: Path) -> None:
    found = read(folder, None, wanted=256, length=64)
    tok = tokens.tokenizer(folder)
    for half, documents in (
        (found.calibration, found.dataset.calibration),
        (found.validation, found.dataset.validation),
    ):
        ids = [i for sequence in half.sequences for i in sequence[0].tolist()]
        text = "".join(documents)[:256].encode()[:256]
        assert tok.decode(ids).encode() == text  # no special token is added
        assert half.samples == len(documents)


def test_the_halves_share_no_document(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *texts(*[64] * 8))
    found = read(folder, path, wanted=256)
    letters = [
        {int(ids[0, 0]) for ids in half.sequences}
        for half in (found.calibration, found.validation)
    ]
    assert [len(some) for some in letters] == [4, 4]
    assert not letters[0] & letters[1]


def test_short_samples_are_packed_together(folder: Path, tmp_path: Path) -> None:
    # Case B6: every sample is shorter than a sequence.
    path = write(tmp_path / "d.jsonl", *texts(*[20] * 8))
    found = read(folder, path, wanted=64)
    assert [ids.shape[1] for ids in found.calibration.sequences] == [64]


def test_fewer_tokens_than_asked_for_is_a_warning_that_counts(
    folder: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "d.jsonl", *texts(100, 100))
    assert set(read(folder, path, wanted=512).warnings) == {
        "calibration: 512 tokens were asked for; the 1 samples have 100",
        "validation: 512 tokens were asked for; the 1 samples have 100",
    }


def test_reading_twice_gives_the_same(folder: Path) -> None:
    def ids() -> list[list[int]]:
        found = read(folder, None)
        halves = (*found.calibration.sequences, *found.validation.sequences)
        return [sequence[0].tolist() for sequence in halves]

    assert ids() == ids()


# Chats


def chat_text(folder: Path, tmp_path: Path) -> str:
    """Return the conversation as the model reads it."""
    path = write(tmp_path / "d.jsonl", {"messages": CHAT}, {"messages": CHAT[:1]})
    dataset = read(folder, path, length=16, wanted=16).dataset
    return max(*dataset.calibration, *dataset.validation, key=len)


def test_messages_are_rendered_by_the_models_own_template(
    folder: Path, tmp_path: Path
) -> None:
    assert chat_text(folder, tmp_path) == (
        "user: Is seven a prime number?\nassistant: Yes: only one and seven divide it.\n"
    )


def test_a_template_in_a_file_of_its_own_comes_first(
    folder: Path, tmp_path: Path
) -> None:
    # transformers 5 saves templates this way.
    (folder / "chat_template.jinja").write_text("{{ messages[-1]['role'] }}!" * 9)
    assert chat_text(folder, tmp_path).startswith("assistant!assistant!")


def test_of_several_templates_the_default_is_taken(
    folder: Path, tmp_path: Path
) -> None:
    several = [
        {"name": "tool_use", "template": "wrong" * 9},
        {"name": "default", "template": "{{ messages[-1]['role'] }}" * 9},
    ]
    settings(folder, chat_template=several)
    assert chat_text(folder, tmp_path) == "assistant" * 9


@pytest.mark.parametrize("token", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
def test_templates_may_add_special_tokens_to_strings(
    folder: Path, tmp_path: Path, token: object
) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    settings(folder, chat_template=template, bos_token=token, eos_token=token)
    found = chat_text(folder, tmp_path)
    contents = [str(m["content"]) for m in CHAT]
    assert found == "<|end|>" + "".join(f"{c}<|end|>" for c in contents)
    tok = tokens.tokenizer(folder)
    assert tok.encode(found, add_special_tokens=False)[0] == 0  # one token, not seven


def test_a_special_token_that_is_not_in_the_vocabulary_does_not_enlarge_it(
    folder: Path,
) -> None:
    before = len(tokens.tokenizer(folder))
    settings(folder, bos_token="<a token that the model never had>")
    assert len(tokens.tokenizer(folder)) == before


@pytest.mark.parametrize("nothing", [None, "", 5, []])
def test_without_a_template_messages_become_chatml(
    folder: Path, tmp_path: Path, nothing: object
) -> None:
    settings(folder, chat_template=nothing)
    assert chat_text(folder, tmp_path).startswith("<|im_start|>user\nIs seven")


def test_without_any_settings_messages_become_chatml(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert chat_text(folder, tmp_path).startswith("<|im_start|>user\nIs seven")


def test_a_template_that_cannot_be_compiled_is_the_datas_error(
    folder: Path, tmp_path: Path
) -> None:
    settings(folder, chat_template="{% for")
    with pytest.raises(DatasetError, match="line 1: the model's chat template"):
        chat_text(folder, tmp_path)


# Too little (case B6)


def test_a_half_that_is_too_short_is_named_with_its_counts(
    folder: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "d.jsonl", *texts(100, 9))
    # The first dealt is calibration's, whichever of the two comes first by hash.
    with pytest.raises(DatasetError) as caught:
        read(folder, path)
    assert "half of mine: 1 samples with 9 tokens in all" in str(caught.value)
    assert "at least 32 tokens are needed" in str(caught.value)
    assert str(caught.value).startswith(("the calibration half", "the validation half"))


@pytest.mark.parametrize("samples", [[], [{"text": ""}, {"text": " "}]])
def test_no_text_is_an_error_before_any_model_is_loaded(
    folder: Path, tmp_path: Path, samples: list[dict[str, Any]]
) -> None:
    path = write(tmp_path / "d.jsonl", *samples)
    with pytest.raises(DatasetError, match=str(len(samples))):
        read(folder, path)


# Tokenizers that cannot be used


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read(folder, None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", text) for text in ("", "{", "{}", "[]", '{"model": 5}')),
        *(("tokenizer_config.json", text) for text in ("", "{", "[]")),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_the_models_error(
    folder: Path, name: str, content: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        tokens.tokenizer(folder)
