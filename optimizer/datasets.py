"""The texts a model is measured on: built in, or uploaded as JSON lines.

A line is an object with `text`, or with `messages` of `role` and `content`. A dataset
has two halves, and no document is in both: the model is calibrated on one and
validated on the other.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from optimizer.errors import DatasetError

MAX_FILE_BYTES = 256 << 20  # all of it is held in memory
MAX_LINE_BYTES = 4 << 20  # a long book is 3 MB
MAX_LINES = 200_000
MAX_MESSAGES = 10_000  # of one conversation
ROLES = ("system", "user", "assistant", "tool")
MIN_SEQUENCE_TOKENS = 32  # what a token sees before it in a shorter one is not typical

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], str]
"""Turns a conversation into the text that the model reads: its chat template."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A built-in data distribution; `file` lies in `data/corpora`."""

    name: str
    title: str
    origin: str
    licence: str
    file: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Documents in two halves that share none; `sha256` is the file's."""

    name: str
    sha256: str
    calibration: tuple[str, ...]
    validation: tuple[str, ...]
    origin: str
    licence: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Packed:
    """Token sequences of one length; only the last may be shorter."""

    sequences: tuple[tuple[int, ...], ...]
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)


_CHATTERBOT = "chatterbot-corpus 1.3.3"

DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        d.name: d
        for d in (
            Distribution(
                "web_text",
                "Encyclopedia articles in wiki markup",
                "English Wikipedia, 2016 (test data of gensim 4.4.0)",
                "CC BY-SA 3.0",
                "web_text.jsonl",
            ),
            Distribution(
                "chat",
                "English small talk and questions with their answers",
                f"{_CHATTERBOT}, English",
                "BSD",
                "chat.jsonl",
            ),
            Distribution(
                "code",
                "Python source code",
                "CPython 3.11 standard library",
                "PSF-2.0",
                "code.jsonl",
            ),
            Distribution(
                "math",
                "Mathematics explained with worked examples",
                "documentation strings of SymPy 1.14.0",
                "BSD-3-Clause",
                "math.jsonl",
            ),
            Distribution(
                "multilingual",
                "Conversations in 25 languages other than English, and Tang poems",
                f"{_CHATTERBOT}; 300 Tang poems (fortunes-zh 2.98)",
                "BSD; the poems are public domain",
                "multilingual.jsonl",
            ),
        )
    }
)
"""What a request may name; `data/corpora/README.md` has the notices."""


def chatml(messages: Sequence[Message]) -> str:
    r"""Render as ChatML: `<|im_start|>role\ncontent<|im_end|>\n` for each message."""
    return "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages
    )


def load(name: str, path: Path | None = None, render: Render = chatml) -> Dataset:
    """Return the built-in distribution `name`, or the JSON lines at `path` as `name`.

    Raises DatasetError: an unknown name, a line that is not as it must be (with its
    number), more than the limits above, or fewer than two documents left.
    """
    if path is not None:
        return _split(name, _read(path), render, "uploaded", "as its owner says")
    if name not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise DatasetError(f"no data distribution {name!r}; built in are: {known}")
    built_in = DISTRIBUTIONS[name]
    content = files("optimizer").joinpath("data/corpora", built_in.file).read_bytes()
    return _split(name, content, render, built_in.origin, built_in.licence)


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise DatasetError(f"no dataset file {path.name!r}")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise DatasetError(
            f"{path.name} has {size} bytes, the limit is {MAX_FILE_BYTES}: "
            "a few thousand lines are enough, send a sample"
        )
    return path.read_bytes()


def _split(
    name: str, content: bytes, render: Render, origin: str, licence: str
) -> Dataset:
    texts = list(_documents(content, render))
    kept = [text for text in texts if text is not None and text.strip()]
    unique = list(dict.fromkeys(kept))
    dropped = {
        "blank": len(texts) - len(kept),
        "repeated": len(kept) - len(unique),
    }
    if len(unique) < 2:
        raise DatasetError(_too_few(name, len(texts), unique, dropped))
    calibration, validation = halves(unique)
    return Dataset(
        name,
        hashlib.sha256(content).hexdigest(),
        calibration,
        validation,
        origin,
        licence,
        tuple(f"{n} {why} samples dropped" for why, n in dropped.items() if n),
    )


def halves(documents: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Deal distinct documents into calibration and validation, evenly by characters.

    Each goes, in the order of its sha256, to the half that is shorter so far: the
    order in the file (often by topic or date) makes no difference.
    """
    calibration: list[str] = []
    validation: list[str] = []
    longer_by = 0  # characters by which calibration is ahead
    for text in sorted(documents, key=lambda t: hashlib.sha256(t.encode()).digest()):
        if longer_by <= 0:
            calibration.append(text)
            longer_by += len(text)
        else:
            validation.append(text)
            longer_by -= len(text)
    return tuple(calibration), tuple(validation)


def _too_few(
    name: str, samples: int, unique: list[str], dropped: Mapping[str, int]
) -> str:
    characters = sum(len(text) for text in unique)
    lost = ", ".join(f"{n} {why}" for why, n in dropped.items())
    return (
        f"dataset {name!r}: {len(unique)} of {samples} samples survived ({lost}), with "
        f"{characters} characters; calibration and validation need one each. Give at "
        "least two different samples with text, one JSON object a line"
    )


def _documents(content: bytes, render: Render) -> Iterator[str | None]:
    """Yield the text of each line; None where there is none in it."""
    lines = content.splitlines()
    if len(lines) > MAX_LINES:
        raise DatasetError(f"{len(lines)} lines, the limit is {MAX_LINES}")
    for number, line in enumerate(lines, start=1):
        if line.strip():  # a newline too many is not a sample
            yield document(line, number, render)


def document(line: bytes, number: int, render: Render = chatml) -> str | None:
    """Return the text of a line; None where there is none in it.

    Raises DatasetError naming the line by its number.
    """
    try:
        return _document(line, render)
    except ValueError as error:
        raise DatasetError(f"line {number}: {error}") from None
    except TemplateError as error:  # Gemma's knows no system role, for one
        raise DatasetError(
            f"line {number}: the model's chat template refuses it: {error}"
        ) from None


def _document(line: bytes, render: Render) -> str | None:
    """Return a line's text. Raises ValueError saying what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{len(line)} bytes, the limit is {MAX_LINE_BYTES}")
    sample = _parse(line)
    if ("text" in sample) == ("messages" in sample):
        raise ValueError('give exactly one of the keys "text" and "messages"')
    if "text" in sample:
        return _string(sample["text"], '"text"')
    messages = _messages(sample["messages"])
    if not any(m["content"].strip() for m in messages):
        return None
    return render(messages)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        sample = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    except ValueError:
        raise ValueError("a whole number has thousands of digits") from None
    if not isinstance(sample, dict):
        raise ValueError('not a JSON object such as {"text": "..."}')
    return sample


def _messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise ValueError(f'"messages" must be a list of 1 to {MAX_MESSAGES} objects')
    return [_message(m, f'"messages"[{i}]') for i, m in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise ValueError(f'{where} must be an object with "role" and "content"')
    if message["role"] not in ROLES:
        raise ValueError(f'{where}: "role" must be one of {", ".join(ROLES)}')
    content = _string(message["content"], f'{where}: "content"')
    return {"role": message["role"], "content": content}


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can escape one, UTF-8 cannot hold it
        raise ValueError(f"{where} has half of a surrogate pair") from None
    return value


def pack(
    token_lists: Iterable[Sequence[int]], sequence_tokens: int, max_tokens: int
) -> Packed:
    """Concatenate documents and cut them into sequences of `sequence_tokens`.

    Reads no further than `max_tokens`, so documents may be tokenized as they are
    asked for; one of a single token, which alone would predict nothing, lies beside
    others like any. What is left at the end is a shorter, last sequence if it has at
    least MIN_SEQUENCE_TOKENS, and is dropped otherwise. That, and fewer tokens than
    asked for, are warnings; raises DatasetError, with the counts, where no sequence
    remains.
    """
    documents = 0

    def stream() -> Iterator[int]:
        nonlocal documents
        for tokens in token_lists:
            documents += 1
            yield from tokens

    taken = list(islice(stream(), max_tokens))
    starts = range(0, len(taken), sequence_tokens)
    cut = [tuple(taken[start : start + sequence_tokens]) for start in starts]
    shortest = max(2, min(sequence_tokens, MIN_SEQUENCE_TOKENS))  # one predicts none
    packed = [sequence for sequence in cut if len(sequence) >= shortest]
    if not packed:
        raise DatasetError(
            f"{documents} samples with {len(taken)} tokens in all; at least "
            f"{shortest} tokens are needed: give more text"
        )
    warnings = []
    if len(taken) < max_tokens:
        warnings.append(
            f"{max_tokens} tokens were asked for; the {documents} samples have "
            f"{len(taken)}"
        )
    if len(packed) < len(cut):
        warnings.append(
            f"the last {len(cut[-1])} tokens are too few for a sequence: dropped"
        )
    return Packed(tuple(packed), tuple(warnings))
