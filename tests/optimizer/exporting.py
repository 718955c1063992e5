"""Tiny models with stacks of every kind that exports have, and what is around them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.export_files import Outlet
from optimizer.exports import Chosen, export
from optimizer.pieces import Memory
from optimizer.spec import OptimizeSpec
from optimizer.stack import ModelShape, Site, Stack, choice_named
from optimizer.validate import quality
from optimizer.work import Work
from tests.optimizer import tiny
from tests.service import byte_tokenizer

TOKENS = 272  # what the tokenizer of bytes needs, in steps of 16
Choices = Mapping[str, str]
# One layer of each: all matrices static and by tensor, and a mixture.
DENSE: Choices = {
    "layers.0.attn_qkv": "fp8_e4m3",
    "layers.0.attn_out": "fp8_e4m3_token",
    "layers.0.ffn_in": "fp8_e4m3_weight_only",
    "layers.0.ffn_out": "fp8_e4m3",
    "layers.1.ffn_out": "fp8_e4m3_token",
}
EXPERTS: Choices = {
    "layers.0.attn_qkv": "fp8_e4m3",
    "layers.0.ffn_in": "fp8_e4m3_token",
    "layers.0.ffn_out": "fp8_e4m3_token",
    "layers.1.ffn_in": "fp8_e4m3",
    "layers.1.ffn_out": "fp8_e4m3",
}
CACHE: Choices = {f"layers.{n}.kv_cache": "fp8_e4m3" for n in range(tiny.LAYERS)}


def saved(architecture: str, folder: Path) -> Path:
    """Write a tiny model as transformers does, with a tokenizer of bytes."""
    network: Any = tiny.network(architecture)
    network.resize_token_embeddings(TOKENS)
    network.save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


def stack_of(shape: ModelShape, choices: Choices, base: str = "bf16") -> Stack:
    """Return the stack with these choices, and `base` wherever nothing is said."""

    def name(site: Site) -> str:
        return choices.get(str(site), base)

    return Stack(
        {s.site: choice_named(s.site.component, name(s.site)) for s in shape.sites}
    )


@dataclass
class Exported:
    """A stack, its emulation, and what was written of it."""

    work: Work
    stack: Stack
    folder: Path
    section: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"


def exported(
    spec: OptimizeSpec,
    out: Path,
    choices: Choices,
    rounding: str = "nearest",
    pieces: Memory | None = None,
    room_bytes: int | None = None,
    vllm: Path | None = None,
) -> Exported:
    """Measure a stack, and export it as a job does."""
    work = Work(spec, pieces or Memory())
    stack = stack_of(work.outline.shape, choices)
    values = (
        work.validated([stack])[0]
        if rounding == "nearest"
        else work.compensated(stack)[0]
    )
    chosen = Chosen(stack, rounding, quality(values, spec.seed))
    out.mkdir(parents=True, exist_ok=True)
    outlet = Outlet(out, room_bytes, vllm)
    return Exported(work, stack, out, export(work, chosen, outlet))
