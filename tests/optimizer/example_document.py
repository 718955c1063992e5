"""A report document as a job on SmolLM2-135M makes it, built by arithmetic.

Shapes are the model's own; seconds are bytes over an H100's bandwidth plus a launch
of a microsecond; nats follow a smooth profile over depth, so that no two sites agree.
"""

import math
from collections import Counter
from typing import Any

HIDDEN, FFN, VOCAB, KV = 576, 1536, 49_152, 192
SLA_S = 3.66e-4
BANDWIDTH, LAUNCH_S = 3.35e12, 1e-6  # bytes/s of an H100 SXM
LAYER = {  # component: weight elements
    "attn_qkv": HIDDEN * (HIDDEN + 2 * KV),
    "kv_cache": 0,
    "attn_scores": 0,
    "attn_softmax": 0,
    "attn_values": 0,
    "attn_out": HIDDEN * HIDDEN,
    "ffn_in": HIDDEN * 2 * FFN,
    "ffn_act": 0,
    "ffn_out": FFN * HIDDEN,
    "norms": 2 * HIDDEN,
}
WHOLE = {"embeddings": VOCAB * HIDDEN, "norms": HIDDEN, "lm_head": VOCAB * HIDDEN}
LINEAR = ("attn_qkv", "attn_out", "ffn_in", "ffn_out", "lm_head")
NATS = {  # of per-tensor e4m3 in a middle layer
    "attn_qkv": 7e-4,
    "kv_cache": 5e-4,
    "attn_scores": 3e-4,
    "attn_softmax": 2.4e-3,
    "attn_values": 2e-4,
    "attn_out": 4e-4,
    "ffn_in": 9e-4,
    "ffn_act": 1.6e-3,
    "ffn_out": 1.9e-3,
    "lm_head": 2.7e-2,
    "embeddings": 1.1e-3,
}
FACTOR = {  # of a choice's nats over those of fp8_e4m3
    "fp32": 0.0,
    "bf16": 0.012,
    "fp8_e4m3": 1.0,
    "fp8_e4m3_token": 0.78,
    "fp8_e5m2": 2.9,
    "fp8_e4m3_weight_only": 0.47,
}
NO_KERNEL = "No H100 attention kernel takes FP8 probabilities at head_dim 64."
REASONS = {
    "norms": "Norms are kept at 16 bits or more: they have no FP8 choice.",
    "attn_softmax": "FP8 buys no time here: it adds {kl:.2g} nats and saves 0 µs.",
    "lm_head": "FP8 would add {kl:.2g} nats, more than the rest of the stack.",
}


def nats(component: str, layer: int | None, choice: str, layers: int) -> float:
    depth = 0.5 if layer is None else layer / max(layers - 1, 1)
    profile = 0.35 + 2.2 * math.exp(-9 * depth) + 1.5 * depth**6
    ripple = 1 + 0.3 * math.sin(1.7 * (layer or 0) + len(component))
    return NATS.get(component, 2e-4) * profile * ripple * FACTOR[choice]


def alternative(
    component: str, layer: int | None, choice: str, n: int
) -> dict[str, Any]:
    elements = WHOLE[component] if layer is None else LAYER[component]
    width = {"fp32": 4, "bf16": 2}.get(choice, 1)
    read = 0 if component == "embeddings" else elements * width
    refused = NO_KERNEL if component == "attn_values" and width == 1 else None
    kl = nats(component, layer, choice, n)
    return {
        "choice": choice,
        "kl_nats": None if refused else kl,
        "sqnr_db": {4: None, 2: 52.3}.get(width, 31.4 - 6 * (choice == "fp8_e5m2")),
        "saturated": None if width > 1 else 1.2e-6,
        "flushed": None if width > 1 else 2.1e-3,
        "per_token_s": LAUNCH_S * (1 + width / 40 + 0.06 * choice.endswith("only"))
        + read / BANDWIDTH,
        "bytes": 0 if component == "embeddings" else elements * width,
        "refused": refused,
    }


def site(component: str, layer: int | None, layers: int) -> dict[str, Any]:
    names = ["fp32", "bf16"]
    if component != "norms":
        names += ["fp8_e4m3", "fp8_e5m2"]
    if component in LINEAR:
        names += ["fp8_e4m3_token", "fp8_e4m3_weight_only"]
    return {
        "site": component if layer is None else f"layers.{layer}.{component}",
        "component": component,
        "layer": layer,
        "alternatives": [alternative(component, layer, c, layers) for c in names],
    }


def chosen_site(site: dict[str, Any], choice: str) -> dict[str, Any]:
    got = next(a for a in site["alternatives"] if a["choice"] == choice)
    narrow = [a for a in site["alternatives"][2:] if a["kl_nats"] is not None]
    best = min(narrow, key=lambda a: a["kl_nats"], default=None)
    return {
        **site,
        **{f: got[f] for f in ("choice", "kl_nats", "per_token_s", "bytes")},
        "first_token_s": got["per_token_s"] * 6,
        "reason": None if "8" in choice else reason(site["component"], best),
        "padding": None,
    }


def reason(component: str, best: dict[str, Any] | None) -> str:
    if component == "attn_values":
        return NO_KERNEL
    text = REASONS.get(component, "FP8 would add {kl:.2g} nats: over the SLA's price.")
    return text.format(kl=best["kl_nats"] if best else 0.0)


def component_rows(sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for component in dict.fromkeys(s["component"] for s in sites):
        own = [s for s in sites if s["component"] == component]
        choices = Counter(s["choice"] for s in own)
        total = {
            field: sum(s[field] for s in own)
            for field in ("kl_nats", "per_token_s", "first_token_s", "bytes")
        }
        (choice, _), *_ = choices.most_common(1)
        first = {"component": component, "choice": choice, "choices": dict(choices)}
        rows.append({**first, "sites": len(own), **total})
    return rows


def point(number: int, sites: list[dict[str, Any]], price: float) -> dict[str, Any]:
    """The stack that pays at most `price` nats for a second, site by site."""
    picked = []
    for s in sites:
        allowed = [a for a in s["alternatives"] if a["refused"] is None]
        picked.append(
            min(allowed, key=lambda a: a["kl_nats"] + price * a["per_token_s"])
        )
    total = {f: sum(p[f] for p in picked) for f in ("per_token_s", "kl_nats", "bytes")}
    weights = [p["bytes"] for p in picked if p["choice"].startswith("fp8")]
    return {
        "id": f"p{number}",
        **total,
        "first_token_s": total["per_token_s"] * 6,
        "memory_bytes": total["bytes"] + 14_745_600,
        "fp8_share": sum(weights) / (WHOLE["lm_head"] + 106_168_320),
        "stack": {s["site"]: p["choice"] for s, p in zip(sites, picked, strict=True)},
        "validated": number % 4 == 1,
    }


def sentence(p: dict[str, Any]) -> str:
    return (
        f"The chosen stack gives a token every {p['per_token_s'] * 1e6:.0f} µs, within "
        f"the SLA of {SLA_S * 1e6:.0f} µs, at {p['kl_nats'] * 0.83:.4f} nats of KL from "
        f"the fp32 reference; {p['fp8_share']:.0%} of its weights are FP8."
    )


def interval(value: float, part: float) -> dict[str, float]:
    return {"value": value, "low": value * (1 - part), "high": value * (1 + part)}


def interval_to_one(value: float, part: float) -> dict[str, float]:
    return {k: min(v, 1.0) for k, v in interval(value, part).items()}


def validated(
    name: str, label: str, p: dict[str, Any], front_id: str | None
) -> dict[str, Any]:
    kl = p["kl_nats"] * 0.83
    return {
        "id": name,
        "label": label,
        "front_id": front_id,
        "predicted_kl_nats": p["kl_nats"],
        "per_token_s": p["per_token_s"],
        "first_token_s": p["first_token_s"],
        "bytes": p["bytes"],
        "kl_nats": interval(kl, 0.12),
        "perplexity": interval(17.83 * math.exp(0.6 * kl), 0.06),
        "top1_agreement": interval_to_one(1 - 0.35 * math.sqrt(kl), 0.008),
        "worst_token_kl_nats": 31 * kl,
        "p99_token_kl_nats": 9 * kl,
        "fallback": 0.0025,
    }


def uniform(sites: list[dict[str, Any]], choice: str) -> dict[str, Any]:
    picked = [
        next(
            (a for a in s["alternatives"] if a["choice"] == choice),
            s["alternatives"][1],
        )
        for s in sites
    ]
    fields = ("per_token_s", "kl_nats", "bytes")
    total = {f: sum(p[f] or 0.0 for p in picked) for f in fields}
    return {**total, "first_token_s": total["per_token_s"] * 6}


def example_document(layers: int = 30) -> dict[str, Any]:
    sites = [site("embeddings", None, layers)]
    sites += [site(c, n, layers) for n in range(layers) for c in LAYER]
    sites += [site("norms", None, layers), site("lm_head", None, layers)]
    prices = sorted({0.0, *(10.0 ** (e / 5) for e in range(5, 26))})
    front = [point(n, sites, price) for n, price in enumerate(prices)]
    front = [
        p for n, p in enumerate(front) if n == 0 or p["stack"] != front[n - 1]["stack"]
    ]
    chosen = next((p for p in front if p["per_token_s"] <= SLA_S), front[-1])
    sites = [chosen_site(s, chosen["stack"][s["site"]]) for s in sites]
    stacks = [validated("chosen", "chosen", chosen, chosen["id"])]
    stacks += [
        validated(p["id"], p["id"], p, p["id"])
        for p in front
        if p["validated"] and p is not chosen
    ]
    for name, label, choice in (
        ("all_bf16", "all bf16", "bf16"),
        ("all_e4m3", "all e4m3", "fp8_e4m3"),
        ("all_fp32", "all fp32", "fp32"),
    ):
        stacks.append(validated(name, label, uniform(sites, choice), None))
    components = component_rows(sites)
    return {
        "schema": "precision.report/1",
        "request": REQUEST,
        "verdict": {
            "outcome": "sla_met",
            "sentence": sentence(chosen),
            "sla": {"per_token_s": SLA_S, "first_token_s": None},
            "chosen": chosen["id"],
            "would_meet": [],
        },
        "model": MODEL | {"layers": layers},
        "data": DATA,
        "hardware": HARDWARE,
        "executed_on": {
            "device": "cpu",
            "emulated": True,
            "kernels": None,
            "processor": "AMD EPYC 9B45",
            "also": [],
            "matmul": "fp32",
            "torch": "2.13.0",
            "threads": 2,
        },
        "workload": {
            "batch_size": 1,
            "prompt_tokens": 512,
            "output_tokens": 128,
            "tensor_parallel": 1,
        },
        "precision_stack": {c["component"]: c["choice"] for c in components},
        "components": components,
        "layers": [
            {
                "layer": n,
                "choices": {
                    s["component"]: s["choice"] for s in sites if s["layer"] == n
                },
            }
            for n in range(layers)
        ],
        "sites": sites,
        "front": front,
        "validation": {
            "tokens": 2048,
            "bootstrap": {"samples": 1000, "block_tokens": 64, "confidence": 0.95},
            "reference": {"perplexity": 17.83},
            "stacks": stacks,
        },
        "rounding": {
            "asked": "nearest",
            "used": "nearest",
            "nearest_kl_nats": {"value": 0.0042, "low": 0.0039, "high": 0.0045},
            "compensated_kl_nats": None,
            "gain": None,
        },
        "contrast": {
            "distribution": "code",
            "rank_correlation": 0.871,
            "components": [
                {
                    "component": c["component"],
                    "choice": "fp8_e4m3",
                    "kl_nats": NATS[c["component"]] * 30,
                    "contrast_kl_nats": NATS[c["component"]] * 30 * (0.6 + 0.2 * n),
                }
                for n, c in enumerate(components)
                if c["component"] in NATS
            ],
        },
        "stability": STABILITY,
        "by_position": BY_POSITION,
        "by_distribution": BY_DISTRIBUTION,
        "worst_tokens": WORST_TOKENS,
        "generation": GENERATION,
        "limits": [
            "KL is estimated on 2,048 tokens; rare tokens are not represented.",
            "Sensitivities are second-order estimates; whole stacks are measured.",
        ],
        "warnings": ["embeddings and lm_head are tied: one tensor, chosen once."],
        "provenance": {
            "versions": {"precision": "0.1.0", "torch": "2.13.0", "numpy": "2.4.1"},
            "seed": 0,
            "code_sha256": "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab",
            "request": {"model": "smollm2-135m", "hardware": "h100"},
            "reproduce": "precision reproduce report.json",
        },
    }


REQUEST = {
    "model": "smollm2-135m",
    "model_path": "models/smollm2-135m",
    "model_sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "hardware": "h100",
    "latency_sla": {"per_token_s": SLA_S, "first_token_s": None},
    "workload": {"batch_size": 1, "prompt_tokens": 512, "output_tokens": 128},
    "task": "chat",
    "data_distribution": "web_text",
    "dataset_path": None,
    "formats": ["bf16", "fp8_e4m3", "fp8_e5m2", "fp32"],
    "engine": "any",
    "calibration_tokens": 2048,
    "validation_tokens": 2048,
    "sequence_tokens": 256,
    "max_memory_bytes": None,
    "seed": 0,
}
MODEL = {
    "name": "smollm2-135m",
    "sha256": REQUEST["model_sha256"],
    "architecture": "LlamaForCausalLM",
    "parameters": 134_515_008,
    "stored_bytes": 269_060_552,
    "stored_dtypes": {"bfloat16": 269_030_016},
    "tied_embeddings": True,
    "coverage_percent": 99.98,
    "unrecognized": [
        {"module": "model.rotary_emb", "reason": "has no weights", "parameters": 0}
    ],
    "warnings": [],
}
DATA = {
    "distribution": "web_text",
    "origin": "Common Crawl extracts by way of C4",
    "licence": "ODC-BY 1.0",
    "sha256": "5d41402abc4b2a76b9719d911017c592ae3f1ea1d5b0b9d2f5d3c3c0f2a4b6c8",
    "calibration": {"samples": 64, "tokens": 2048, "sequence_tokens": 256},
    "validation": {"samples": 61, "tokens": 2048, "sequence_tokens": 256},
}
HARDWARE = {
    "id": "h100",
    "name": "NVIDIA H100 SXM5 80 GB",
    "arch": "Hopper",
    "basis": "modelled",
    "method": "measured kernels of vllm 0.24.0 (90%), roofline (10%)",
    "basis_shares": {"kernels": 0.9, "roofline": 0.1},
    "engine": "vllm",
    "engine_version": "0.24.0",
    "origin": "aiconfigurator-core 0.12.0",
    "expected_error": 0.03,
    "profile": None,
    "memory_bytes": 80_000_000_000,
    "devices": 1,
    "per_device": {
        "weights_bytes": 196_000_000,
        "kv_cache_bytes": 15_000_000,
        "activations_bytes": 9_000_000,
        "total_bytes": 220_000_000,
    },
    "notes": ["Dense peaks of the data sheet; real kernels reach less."],
}
STABILITY = {
    "saturated": 1.2e-6,
    "fallback": 0.0025,
    "fallback_at_most": 0.0131,
    "p99_token_kl_nats": 0.031,
    "worst_token_kl_nats": 0.41,
    "pays_up_to": {"per_token": 0.35, "first_token": 0.005},
    "narrow_sites": 61,
    "components": [
        {
            "component": "attn_qkv",
            "sites": 28,
            **{
                share: {
                    "median": 0.001 * n,
                    "largest": 0.0021 * n,
                    "site": "layers.7.attn_qkv",
                    "choice": "fp8_e4m3",
                }
                for n, share in enumerate(("saturated", "flushed", "collapsed"))
            },
        }
    ],
}
BY_POSITION = [
    {
        "from": start,
        "to": stop,
        "tokens": 256,
        "kl_nats": interval(kl, 0.2),
        "top1_agreement": interval_to_one(0.93, 0.02),
        "worst_token_kl_nats": 20 * kl,
        "source": source,
    }
    for start, stop, kl, source in (
        (0, 31, 0.0043, "held-out sequences"),
        (32, 63, 0.0039, "held-out sequences"),
        (64, 255, 0.0037, "held-out sequences"),
        (256, 639, 0.0048, "one long sequence"),
    )
]
BY_DISTRIBUTION = [
    {
        "distribution": name,
        "tokens": tokens,
        "kl_nats": interval(kl, 0.2),
        "top1_agreement": interval_to_one(0.93, 0.02),
        "worst_token_kl_nats": 20 * kl,
        "p99_token_kl_nats": 8 * kl,
    }
    for name, tokens, kl in (("web_text", 2048, 0.0042), ("code", 128, 0.0057))
]
WORST_TOKENS = [
    {
        "sequence": 6,
        "position": 25,
        "kl_nats": 0.41,
        "before": "the award-winning stage play by Josep Maria",
        "next": " Benet",
        "reference": " Benet",
        "stack": " de",
    },
    {
        "sequence": 1,
        "position": 255,
        "kl_nats": 0.3,
        "before": "the end of a sequence",
        "next": None,
        "reference": ".",
        "stack": ".",
    },
]
GENERATION = {
    "prompt_tokens": 32,
    "new_tokens": 64,
    "ngram": 4,
    "continuations": [
        {
            "prompt": "The aardvark is a",
            "same_tokens": 3,
            "reference": {
                "text": " medium-sized, burrowing mammal.",
                "tokens": 9,
                "repeated": 0.0,
                "loop": None,
            },
            "stack": {
                "text": " medium-sized mammal. A mammal. A mammal. A mammal.",
                "tokens": 18,
                "repeated": 0.61,
                "loop": {"start": 3, "period": 3},
            },
        }
    ],
    "repeated": {"reference": 0.0, "stack": 0.61},
    "loops": {"reference": 0, "stack": 1},
}
