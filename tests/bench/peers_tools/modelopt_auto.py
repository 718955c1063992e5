"""nvidia-modelopt's AutoQuantize: gradient scores, or KL of one layer at a time."""

from typing import Any

import modelopt.torch.quantization as mtq
from exchange import Clock, answer, batches, linears, load


def run(request: dict[str, Any]) -> dict[str, Any]:
    model = load(request)
    names = list(linears(model))
    data = [{"input_ids": ids, "labels": ids} for ids in batches(request)]
    # Without the pattern, lm_head counts as 16 bits and the layers get fewer.
    cost = {"excluded_module_name_patterns": ["*lm_head*"]}
    first, *others = request["bits"]
    clock = Clock()
    _, state = mtq.auto_quantize(
        model,
        constraints={"effective_bits": first, "cost": cost},
        quantization_formats=[mtq.FP8_DEFAULT_CFG],
        data_loader=data,
        forward_step=FORWARD[request["method"]],
        loss_func=lambda output, batch: output.loss,
        disabled_layers=["*lm_head*"],
        num_calib_steps=len(data),
        num_score_steps=len(data),
        method=request["method"],
    )
    took = clock()
    stacks = {str(bits): narrow(state, bits, names) for bits in (first, *others)}
    return {**took, "narrow": stacks, "version": version()}


FORWARD = {
    "gradient": lambda model, batch: model(**batch),
    "kl_div": lambda model, batch: model(input_ids=batch["input_ids"]).logits,
}


def narrow(state: dict[str, Any], bits: float, names: list[str]) -> list[str]:
    """Solve for `bits` from the scores at hand; return the modules that got FP8."""
    config = mtq.get_auto_quantize_config(state, {"effective_bits": bits})
    enabled = {
        e["quantizer_name"] for e in config["quant_cfg"] if e.get("enable", True)
    }
    return [name for name in names if f"{name}.weight_quantizer" in enabled]


def version() -> str:
    import modelopt

    return str(modelopt.__version__)


if __name__ == "__main__":
    answer(run)
