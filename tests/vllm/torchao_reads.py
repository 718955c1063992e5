"""Whether torchao reads a configuration: run by the Python that has it.

    python torchao_reads.py FILE

Prints, as JSON, the class of the configuration of every module that is named.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Read the file with torchao's own parser, and narrow a small network by it."""
    import torch
    from torchao.core.config import config_from_dict
    from torchao.quantization import quantize_

    asked = json.loads(Path(sys.argv[1]).read_text())["quant_type"]["default"]
    whole = config_from_dict(asked)
    found = {name: type(c).__name__ for name, c in whole.fqn_to_config.items()}
    weight_only = [n for n, kind in found.items() if kind == "Float8WeightOnlyConfig"]
    root = torch.nn.Module()
    for name in weight_only[:1]:  # the others need a GPU to be made
        inner = root
        *path, last = name.split(".")
        for step in path:
            inner.add_module(step, torch.nn.Module())
            inner = inner.get_submodule(step)
        inner.add_module(last, torch.nn.Linear(32, 16))
        inner.add_module("other", torch.nn.Linear(32, 16))
        quantize_(root, whole, filter_fn=None)
        found["narrowed"] = type(inner.get_submodule(last).weight).__name__
        found["other"] = type(inner.get_submodule("other").weight).__name__
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
