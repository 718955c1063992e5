"""A small transformer over real text, byte by byte: trains in seconds on a CPU."""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import FIRST, batches
from optimizer.training.trainer import NextToken, Problem

VOCAB, WIDTH, HEADS, TOKENS = 256, 32, 2, 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            part.view(rows, tokens, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).split(width, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Small(nn.Module):
    """Ids (rows, tokens) to logits (rows, tokens, 256)."""

    def __init__(self, width: int = WIDTH, layers: int = 2, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__()
            self.embed = nn.Embedding(VOCAB, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@cache
def text(tokens: int = TOKENS, most: int = 512) -> Tensor:
    """Real text as ids (sequences, tokens)."""
    path = Path(str(files("optimizer").joinpath("data/corpora/web_text.jsonl")))
    lines = path.read_text("utf-8").splitlines()
    content = b"\n".join(json.loads(line)["text"].encode() for line in lines)
    ids = torch.tensor(list(content[: tokens * most]))
    return ids[: len(ids) // tokens * tokens].view(-1, tokens)


def problem(
    how: TrainingSpec, network: nn.Module | None = None, order: int = FIRST
) -> Problem:
    """The small model on real text; 8 sequences are held out."""
    ids = text(how.sequence_tokens)
    held_out = tuple(ids[:8].split(1))
    dealt = batches(ids[8:], how.step_sequences, how.steps, 0, order)
    return Problem(network or Small(), NextToken(), dealt, held_out)
