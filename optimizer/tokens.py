"""Text becomes sequences of token ids, with the model's own tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from optimizer import datasets, strict_json
from optimizer.checkpoint import TOKENIZER
from optimizer.errors import DatasetError, ModelError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class Half:
    """Packed sequences of one half of a dataset."""

    sequences: tuple[Tensor, ...]  # (1, tokens) each
    samples: int

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return sum(ids.numel() for ids in self.sequences)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A dataset as the model reads it. The halves share no document."""

    dataset: datasets.Dataset
    calibration: Half
    validation: Half
    warnings: tuple[str, ...]


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load `tokenizer.json` of a model folder; no other code, no network.

    Raises ModelError naming the file that is missing or cannot be read.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        raise ModelError(f"{folder.name} has no {TOKENIZER}")
    try:
        tok = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the library below raises nothing narrower
        raise ModelError(f"{TOKENIZER} cannot be read: {error}") from None
    config = _config(folder)
    tok.chat_template = _template(folder, config)
    for name in SPECIAL_TOKENS:  # templates add them to strings; no vocabulary grows
        token = config.get(name)
        setattr(tok, name, token.get("content") if isinstance(token, dict) else token)
    return tok


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        return strict_json.parse(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file.name} cannot be read: {error}") from None


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template: of its own file, as transformers 5 writes it, first."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # of several, the one that is meant for chats
        every = [t for t in template if isinstance(t, dict)]
        template = next(
            (t.get("template") for t in every if t.get("name") == "default"), None
        )
    return template if isinstance(template, str) and template else None


def chat_renderer(tok: PreTrainedTokenizerFast) -> datasets.Render:
    """Return what turns messages into text: the model's own template, or ChatML."""
    if not tok.chat_template:
        return datasets.chatml

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        text: Any = tok.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=False
        )
        return str(text)

    return render


def read(
    folder: Path,
    name: str,
    path: Path | None,
    *,
    calibration_tokens: int,
    validation_tokens: int,
    sequence_tokens: int,
) -> Tokens:
    """Tokenize both halves of a dataset and pack them into equal sequences.

    Raises DatasetError, before any model pass, naming how many samples and tokens
    survived where that is too few to measure on.
    """
    tok = tokenizer(folder)
    dataset = datasets.load(name, path, render=chat_renderer(tok))
    warnings = list(dataset.warnings)
    halves = []
    for label, texts, wanted in (
        ("calibration", dataset.calibration, calibration_tokens),
        ("validation", dataset.validation, validation_tokens),
    ):
        try:
            lists = (tok.encode(t, add_special_tokens=False) for t in texts)
            packed = datasets.pack(lists, sequence_tokens, wanted)
        except DatasetError as error:
            raise DatasetError(f"the {label} half of {name}: {error}") from None
        warnings += [f"{label}: {w}" for w in packed.warnings]
        sequences = tuple(torch.tensor([ids]) for ids in packed.sequences)
        halves.append(Half(sequences, len(texts)))
    return Tokens(dataset, halves[0], halves[1], tuple(warnings))
