"""Intel AutoRound's AutoScheme: |gradient × error| of weights and inputs, and its DP."""

import os
import tempfile
from typing import Any

os.environ["AR_AUTO_SCHEME_CACHE"] = tempfile.mkdtemp()  # scores of no other tokens

import auto_round
import torch
from auto_round import AutoRound, AutoScheme, QuantizationScheme
from auto_round.auto_scheme import delta_loss
from exchange import NARROW_BITS, Clock, answer, batches, linears, load
from transformers import AutoTokenizer

# AutoRound's FP8_STATIC with one scale for a matrix, as everybody has it here.
FP8 = QuantizationScheme(
    bits=8,
    group_size=0,
    data_type="fp",
    act_bits=8,
    act_group_size=0,
    act_data_type="fp",
    act_dynamic=False,
    act_sym=True,
)


def run(request: dict[str, Any]) -> dict[str, Any]:
    data = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for ids in batches(request)
    ]
    delta_loss.get_dataloader = lambda *args, **kwargs: data  # the same tokens
    took: dict[str, float] = {}
    narrow = {}
    for bits in request["bits"]:
        model = load(request)
        names = list(linears(model))
        clock = Clock()
        config = schemes(request, model, bits, len(data))
        took = took or clock()
        narrow[str(bits)] = [n for n in names if config[n]["bits"] == NARROW_BITS]
    return {**took, "narrow": narrow, "version": auto_round.__version__}


def schemes(
    request: dict[str, Any], model: Any, bits: float, count: int
) -> dict[str, dict[str, Any]]:
    """Return the scheme of every layer, without quantizing the model by it."""
    scheme = AutoScheme(
        avg_bits=bits,
        options=["BF16", FP8],
        ignore_scale_zp_bits=True,
        batch_size=1,
        nsamples=count,
        seqlen=len(request["sequences"][0]),
        low_gpu_mem_usage=False,
    )
    compressor = AutoRound(
        model,
        AutoTokenizer.from_pretrained(request["folder"]),
        scheme=scheme,
        iters=0,
        amp=False,
        device_map="cpu",
    )
    compressor.post_init()
    layers: dict[str, dict[str, Any]] = compressor.layer_config
    return layers


if __name__ == "__main__":
    answer(run)
