"""Text becomes sequences of token ids, with the model's own tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from optimizer import datasets
from optimizer.errors import DatasetError, ModelError


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
    """Load `tokenizer.json` of a model folder; no other code, no network."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    template = None
    config = folder / "tokenizer_config.json"
    if config.is_file():
        template = json.loads(config.read_text("utf-8")).get("chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file), chat_template=template or None
    )


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
