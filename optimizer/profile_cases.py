"""What a device is timed at: the kernels that a model's sites ask for, case by case."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from optimizer.formats import E4M3
from optimizer.matmul import linear
from optimizer.native import widened
from optimizer.sizes import size_bytes
from optimizer.spec import Workload
from optimizer.stack import LINEAR, Component, ModelShape, SiteShape

BETWEEN = (1, 16, 64, 256)  # tokens that are timed beside the workload's own
FP8 = torch.float8_e4m3fn

Op = Callable[[], object]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be: what it says, the work in it, and how to make a call."""

    kind: str  # the list of the profile that it belongs to
    row: Row
    flops: float
    bytes: float  # that a call must move
    make: Callable[[torch.device], Op]  # operands of its own at every call

    @property
    def name(self) -> str:
        """What a progress bar says."""
        return " ".join([self.kind, *(str(v) for v in self.row.values())])

    @property
    def format(self) -> str:
        """What the row's kernel is told apart by."""
        return str(self.row.get("fmt") or self.row.get("kv_fmt") or "fp8")


def cases(model: ModelShape, workload: Workload, formats: Sequence[str]) -> list[Case]:
    """Return everything that a model's sites ask of a device at a workload."""
    found = [*_matrices(model, workload, formats), *_attention(model, workload)]
    if "fp8" in formats:
        found += _passes(model, workload)
    return list({(c.kind, *c.row.items()): c for c in found}.values())


def _tokens(workload: Workload, last_only: bool) -> list[int]:
    batch = workload.batch_size
    most = batch if last_only else batch * workload.prompt_tokens
    return sorted({batch, most, *(m for m in BETWEEN if m < max(most, 64))})


def _matrices(
    model: ModelShape, workload: Workload, formats: Sequence[str]
) -> Iterator[Case]:
    for shape in model.sites:
        if shape.site.component in LINEAR:
            head = shape.site.component is Component.LM_HEAD
            few = head and not model.every_row
            for m, fmt in itertools.product(_tokens(workload, few), formats):
                yield _matrix(fmt, m, shape.n, shape.k)


def _matrix(fmt: str, m: int, n: int, k: int) -> Case:
    size = {"fp32": 4, "bf16": 2}.get(fmt, 1)
    wide = max(size, 2)  # of inputs and outputs
    return Case(
        "gemm",
        {"fmt": fmt, "m": m, "n": n, "k": k},
        2.0 * m * n * k,
        n * k * size + m * (n + k) * wide,
        lambda where: _GEMMS[fmt](where, m, n, k),
    )


def _gemm_fp32(where: torch.device, m: int, n: int, k: int) -> Op:
    x, weight = torch.randn(m, k, device=where), torch.randn(n, k, device=where)
    return lambda: linear(x, weight)


def _gemm_bf16(where: torch.device, m: int, n: int, k: int) -> Op:
    x = torch.randn(m, k, device=where, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=where, dtype=torch.bfloat16)
    return lambda: functional.linear(x, weight)


def _gemm_fp8_wo(where: torch.device, m: int, n: int, k: int) -> Op:
    """FP8 weights that are widened at every call."""
    x = torch.randn(m, k, device=where, dtype=torch.bfloat16)
    codes = torch.randint(0, 127, (n, k), device=where, dtype=torch.uint8)
    return lambda: functional.linear(x, widened(codes))


def _gemm_fp8(where: torch.device, m: int, n: int, k: int) -> Op:
    """FP8 on both sides, with the pass that finds a scale for every token."""
    x = torch.randn(m, k, device=where, dtype=torch.bfloat16)
    weight = torch.ones(n, k, device=where).to(FP8)
    by_row = torch.ones(1, n, device=where)

    def call() -> Tensor:
        codes, scale = _narrowed(x, None)
        return torch._scaled_mm(
            codes, weight.t(), scale_a=scale, scale_b=by_row, out_dtype=x.dtype
        )

    return call


_GEMMS: Mapping[str, Callable[[torch.device, int, int, int], Op]] = {
    "fp32": _gemm_fp32,
    "bf16": _gemm_bf16,
    "fp8_wo": _gemm_fp8_wo,
    "fp8": _gemm_fp8,
}


def _narrowed(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers of x, clamped first, and their scale: given, or by token."""
    if scale is None:
        scale = (x.abs().amax(-1, keepdim=True).float() / E4M3.max).clamp(min=2.0**-120)
    return (x / scale).clamp(-E4M3.max, E4M3.max).to(FP8), scale


def _passes(model: ModelShape, workload: Workload) -> Iterator[Case]:
    """The pass from bf16 to FP8: 2 bytes read and 1 written for each number."""
    for shape in model.sites:
        if shape.site.component not in LINEAR:
            continue
        for rows, dynamic in itertools.product(_tokens(workload, False), (False, True)):
            yield _pass(rows, shape.k, dynamic)


def _pass(rows: int, columns: int, dynamic: bool) -> Case:
    def make(where: torch.device) -> Op:
        x = torch.randn(rows, columns, device=where, dtype=torch.bfloat16)
        known = None if dynamic else torch.ones((), device=where)
        return lambda: _narrowed(x, known)

    row = {"rows": rows, "columns": columns, "dynamic": dynamic}
    return Case("quantize", row, 0.0, 3.0 * rows * columns, make)


def _attention(model: ModelShape, workload: Workload) -> Iterator[Case]:
    """Attention over a prompt, and of one token over a cache, without windows."""
    prompt, most = workload.prompt_tokens, workload.prompt_tokens
    most += workload.output_tokens
    for shape in model.sites:
        if shape.site.component is not Component.ATTN_SCORES:
            continue
        if shape.window is not None and shape.window < most:
            continue
        for tokens in sorted({max(prompt // 4, 1), max(prompt // 2, 1), prompt}):
            yield _attend(shape, workload.batch_size, tokens, tokens)
        for context in sorted({prompt, (prompt + most) // 2, most}):
            yield _attend(shape, workload.batch_size, 1, context)


def _attend(shape: SiteShape, batch: int, queries: int, context: int) -> Case:
    heads, kv, dim = shape.heads, shape.kv_heads, shape.head_dim
    prompt = queries > 1
    row = {"kv_fmt": "bf16", "batch": batch, "tokens" if prompt else "context": context}
    row |= {"heads": heads, "kv_heads": kv, "head_dim": dim, "window": None}

    def make(where: torch.device) -> Op:
        def made(count: int, tokens: int) -> Tensor:
            sizes = (batch, count, tokens, dim)
            return torch.randn(sizes, device=where, dtype=torch.bfloat16)

        k, v = made(kv, context), made(kv, context)
        attend = functional.scaled_dot_product_attention
        if prompt:
            q = made(heads, queries)
            return lambda: attend(q, k, v, is_causal=True, enable_gqa=True)
        packed = made(kv, heads // kv)  # the heads that share K and V, as its queries
        return lambda: attend(packed, k, v)

    pairs = context * (context + 1) / 2 if prompt else context
    moved = batch * (2 * kv * context + 2 * heads * queries) * dim * size_bytes("bf16")
    kind = "context_attention" if prompt else "generation_attention"
    return Case(kind, row, 4.0 * batch * heads * dim * pairs, moved, make)
