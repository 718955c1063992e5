"""Datasets: what is refused and where, what is in which half, what is packed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from jinja2 import TemplateError

from optimizer import datasets
from optimizer.datasets import DISTRIBUTIONS, Dataset, chatml, halves, load, pack
from optimizer.errors import DatasetError

CORPORA = Path(datasets.__file__).parent / "data" / "corpora"


@pytest.fixture
def upload(tmp_path: Path) -> Any:
    """Write samples (objects, or raw lines) as JSON lines, then load them."""

    def write_and_load(*samples: Any, render: datasets.Render = chatml) -> Dataset:
        lines = [s if isinstance(s, bytes) else json.dumps(s).encode() for s in samples]
        (tmp_path / "mine.jsonl").write_bytes(b"\n".join(lines))
        return load("mine", tmp_path / "mine.jsonl", render)

    return write_and_load


def texts(*values: str) -> list[dict[str, str]]:
    return [{"text": value} for value in values]


# --- built in ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_built_in_halves_share_no_200_characters(name: str) -> None:
    dataset = load(name)

    def windows(half: tuple[str, ...]) -> set[str]:
        return {t[i : i + 200] for t in half for i in range(len(t) - 199)}

    assert not set(dataset.calibration) & set(dataset.validation)
    assert not windows(dataset.calibration) & windows(dataset.validation)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_built_in_halves_hold_2048_tokens_each(name: str) -> None:
    dataset = load(name)
    for half in (dataset.calibration, dataset.validation):
        # A byte-pair token of a language it was not trained on is a byte or more, of
        # English 4 characters: 5 characters a token is beyond both.
        assert sum(map(len, half)) > 5 * 2048


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_built_in_origin_and_licence_are_in_the_notices(name: str) -> None:
    notices = (CORPORA / "README.md").read_text()
    (row,) = [r for r in notices.splitlines() if f"`{DISTRIBUTIONS[name].file}` |" in r]
    documents = (CORPORA / DISTRIBUTIONS[name].file).read_text().splitlines()
    assert f"| {len(documents)} |" in row
    assert DISTRIBUTIONS[name].licence.split(";")[0] in row


def test_every_built_in_document_says_where_it_is_from() -> None:
    for file in sorted(CORPORA.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            assert json.loads(line)["source"]


def test_all_corpora_are_a_few_hundred_kilobytes() -> None:
    assert sum(file.stat().st_size for file in CORPORA.iterdir()) < 450_000


def test_unknown_distribution_lists_what_there_is() -> None:
    with pytest.raises(DatasetError, match="'poetry'; built in are: web_text, chat"):
        load("poetry")


# --- halves ------------------------------------------------------------------------


@given(st.sets(st.text(min_size=1), min_size=2))
def test_halves_share_nothing_and_lose_nothing(documents: set[str]) -> None:
    calibration, validation = halves(documents)
    assert calibration
    assert validation
    assert len(calibration) + len(validation) == len(documents)
    assert {*calibration, *validation} == documents


@given(st.sets(st.text(min_size=1), min_size=2))
def test_halves_differ_by_no_more_than_the_longest_document(
    documents: set[str],
) -> None:
    calibration, validation = (sum(map(len, half)) for half in halves(documents))
    assert abs(calibration - validation) <= max(map(len, documents))


def test_halves_do_not_depend_on_the_order_of_the_file() -> None:
    documents = [f"document {i}" for i in range(20)]
    assert halves(documents) == halves(reversed(documents))


# --- uploads -----------------------------------------------------------------------


def test_texts_are_kept_as_they_are(upload: Any) -> None:
    dataset = upload(*texts(" héllo\n", "世界"))
    assert {*dataset.calibration, *dataset.validation} == {" héllo\n", "世界"}
    assert dataset.warnings == ()


def test_sha256_is_that_of_the_file(upload: Any) -> None:
    import hashlib

    content = b'{"text": "a"}\n{"text": "b"}'
    expected = hashlib.sha256(content).hexdigest()
    assert upload(*content.split(b"\n")).sha256 == expected


def test_messages_are_rendered_as_chatml_by_hand(upload: Any) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    dataset = upload({"messages": turns}, {"text": "other"})
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert expected in {*dataset.calibration, *dataset.validation}


def test_messages_are_rendered_by_the_caller_if_it_can(upload: Any) -> None:
    def render(messages: Any) -> str:
        return "|".join(m["content"] for m in messages)

    sample = {"messages": [{"role": "user", "content": c} for c in "ab"]}
    dataset = upload(sample, {"text": "other"}, render=render)
    assert "a|b" in {*dataset.calibration, *dataset.validation}


def test_a_chat_template_that_refuses_names_the_line(upload: Any) -> None:
    def render(messages: Any) -> str:
        raise TemplateError("System role not supported")

    sample = {"messages": [{"role": "system", "content": "Be brief"}]}
    with pytest.raises(DatasetError, match=r"line 2: .*System role not supported"):
        upload({"text": "fine"}, sample, render=render)


def test_keys_beside_the_text_are_ignored(upload: Any) -> None:
    assert upload({"text": "a", "id": 7}, {"text": "b", "meta": None})


def test_blank_and_repeated_samples_are_dropped_and_counted(upload: Any) -> None:
    blank_turn = {"messages": [{"role": "user", "content": " "}]}
    dataset = upload(*texts("a", " ", "", "b", "a"), blank_turn)
    assert {*dataset.calibration, *dataset.validation} == {"a", "b"}
    assert dataset.warnings == (
        "3 blank samples dropped",
        "1 repeated samples dropped",
    )


def test_empty_lines_and_windows_line_ends_are_no_samples(upload: Any) -> None:
    dataset = upload(b'{"text": "a"}\r', b"", b'{"text": "b\\u2028c"}\r', b"")
    assert dataset.warnings == ()
    assert {*dataset.calibration, *dataset.validation} == {"a", "b\u2028c"}


REFUSED: dict[str, tuple[bytes, str]] = {
    "bad JSON": (b'{"text": "a"', "not JSON: .* at column 13"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    "nested too deeply": (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
    "number of 5,000 digits": (
        b'{"text": ' + b"9" * 5000 + b"}",
        "thousands of digits",
    ),
    "not an object": (b'"just text"', "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "neither key": (b'{"content": "a"}', 'exactly one of the keys "text" and'),
    "both keys": (b'{"text": "a", "messages": []}', "exactly one of the keys"),
    "text is null": (b'{"text": null}', '"text" must be a string, not NoneType'),
    "text is a list": (b'{"text": ["a"]}', '"text" must be a string, not list'),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    "messages is a string": (b'{"messages": "a"}', '"messages" must be a list'),
    "no messages": (b'{"messages": []}', "list of 1 to 10000"),
    "message is a string": (
        b'{"messages": ["a"]}',
        r'"messages"\[0\] must be an object',
    ),
    "no role": (b'{"messages": [{"content": "a"}]}', 'with "role" and "content"'),
    "no content": (b'{"messages": [{"role": "user"}]}', 'with "role" and "content"'),
    "unknown role": (
        b'{"messages": [{"role": "root", "content": "a"}]}',
        '"role" must be one of system, user, assistant, tool',
    ),
    "role is a list": (b'{"messages": [{"role": [], "content": "a"}]}', '"role" must'),
    "content is null": (
        b'{"messages": [{"role": "user", "content": null}]}',
        '"content" must be a string, not NoneType',
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_line_is_refused_with_its_number(upload: Any, kind: str) -> None:
    line, message = REFUSED[kind]
    with pytest.raises(DatasetError, match=f"^line 3: .*{message}"):
        upload({"text": "a"}, b"", line, {"text": "b"})


def test_limits_are_refused_by_number(
    upload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "MAX_LINE_BYTES", 20)
    with pytest.raises(DatasetError, match="line 2: 41 bytes, the limit is 20"):
        upload(*texts("a", "b" * 29))
    monkeypatch.setattr(datasets, "MAX_LINES", 2)
    with pytest.raises(DatasetError, match="3 lines, the limit is 2"):
        upload(*texts("a", "b", "c"))
    monkeypatch.setattr(datasets, "MAX_FILE_BYTES", 10)
    with pytest.raises(DatasetError, match=r"has 27 bytes, the limit is 10: .* sample"):
        upload(*texts("a", "b"))


def test_missing_file_is_named_without_the_path_above_it(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"^no dataset file 'gone\.jsonl'$"):
        load("mine", tmp_path / "gone.jsonl")


# --- empty datasets, short samples (case B6) ---------------------------------------


def test_empty_dataset_is_an_error_that_says_so(upload: Any) -> None:
    with pytest.raises(DatasetError, match=r"0 of 0 samples survived .* 0 characters"):
        upload()


def test_blank_dataset_is_an_error_that_counts(upload: Any) -> None:
    with pytest.raises(DatasetError) as caught:
        upload(*texts("", " "))
    assert "0 of 2 samples survived (2 blank, 0 repeated)" in str(caught.value)
    assert "Give at least two different samples" in str(caught.value)


def test_one_document_cannot_be_in_both_halves(upload: Any) -> None:
    with pytest.raises(DatasetError, match=r"1 of 2 samples survived .* 5 characters"):
        upload(*texts("alone", "alone"))


def test_three_samples_shorter_than_a_sequence_are_packed_into_one() -> None:
    packed = pack([[1] * 10, [2] * 20, [3] * 30], 2048, 2048)
    assert packed.sequences == ((1,) * 10 + (2,) * 20 + (3,) * 30,)
    assert packed.tokens == 60
    expected = "2048 tokens were asked for; the 3 samples have 60"
    assert packed.warnings == (expected,)


def test_iterator_that_can_be_read_once_is_read_no_further_than_needed() -> None:
    read: list[int] = []

    def samples() -> Iterator[list[int]]:
        for i in range(1000):
            read.append(i)
            yield [i] * 40

    packed = pack(samples(), 32, 128)
    assert packed.tokens == 128
    assert packed.warnings == ()
    assert read == [0, 1, 2, 3]  # 4 · 40 ≥ 128


def test_sequences_have_one_length_and_the_order_of_the_text() -> None:
    packed = pack([list(range(100)), list(range(100, 200))], 64, 192)
    assert [len(s) for s in packed.sequences] == [64, 64, 64]
    assert [t for s in packed.sequences for t in s] == list(range(192))


@pytest.mark.parametrize(("rest", "lengths"), [(31, [64]), (32, [64, 32])])
def test_last_sequence_is_kept_from_32_tokens_on(rest: int, lengths: list[int]) -> None:
    packed = pack([[0] * (64 + rest)], 64, 1000)
    assert [len(s) for s in packed.sequences] == lengths
    assert packed.tokens == sum(lengths)
    dropped = f"the last {rest} tokens are too few for a sequence: dropped"
    assert (dropped in packed.warnings) is (rest == 31)


def test_samples_of_one_token_are_packed_with_others() -> None:
    packed = pack([[i] for i in range(64)], 32, 64)
    assert packed.sequences == (tuple(range(32)), tuple(range(32, 64)))
    assert packed.warnings == ()


def test_a_sequence_of_one_token_predicts_nothing() -> None:
    with pytest.raises(DatasetError, match=r"3 samples with 3 tokens .* at least 2"):
        pack([[1], [2], [3]], 1, 3)


def test_a_sample_longer_than_a_sequence_is_cut() -> None:
    packed = pack([list(range(100))], 40, 100)
    assert [len(s) for s in packed.sequences] == [40, 40]
    assert packed.warnings == (
        "the last 20 tokens are too few for a sequence: dropped",
    )


def test_sequences_may_be_shorter_than_32_if_asked_for() -> None:
    assert pack([[0] * 16], 8, 16).sequences == ((0,) * 8, (0,) * 8)


@pytest.mark.parametrize("samples", [[], [[]], [[1, 2], [3]]])
def test_too_few_tokens_is_an_error_that_counts(samples: list[list[int]]) -> None:
    tokens = sum(map(len, samples))
    counts = f"{len(samples)} samples with {tokens} tokens in all; at least 32"
    with pytest.raises(DatasetError, match=counts):
        pack(samples, 256, 2048)


# --- the texts are what they are said to be ------------------------------------------


def test_distributions_are_told_apart_by_their_characters() -> None:
    joined = {name: "".join(load(name).calibration) for name in DISTRIBUTIONS}
    assert max(joined, key=lambda n: joined[n].count("[[")) == "web_text"
    assert max(joined, key=lambda n: joined[n].count("<|im_start|>")) == "chat"
    assert max(joined, key=lambda n: joined[n].count("def ")) == "code"
    assert max(joined, key=lambda n: joined[n].count(">>> ")) == "math"
    assert max(joined, key=lambda n: sum(c > "\u02ff" for c in joined[n])) == (
        "multilingual"
    )
