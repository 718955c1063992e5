"""Scales of Transformer Engine's modules, as its source says that they lie."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from optimizer.formats import E4M3, E5M2
from optimizer.te import recipes
from optimizer.training.monitor import HealthMonitor
from optimizer.training.te_scales import te_scales


def meta(
    forward: list[float], backward: list[float], fp8_format: str
) -> dict[str, object]:
    recipe = SimpleNamespace(fp8_format=getattr(recipes().Format, fp8_format))
    return {
        "recipe": recipe,
        "scaling_fwd": SimpleNamespace(scale=torch.tensor(forward)),
        "scaling_bwd": SimpleNamespace(scale=torch.tensor(backward)),
    }


class Linear(nn.Linear):
    """TE's, as far as it tells of its scales: the product itself is in fp32."""

    def __init__(self, fp8_format: str = "HYBRID") -> None:
        super().__init__(4, 4, bias=False)
        self.fp8_meta = meta([2.0, 4.0, 1.0], [8.0, 1.0], fp8_format)


class LayerNormMLP(Linear):
    """Two products, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = meta(
            [2.0, 4.0, 1.0, 16.0, 32.0, 1.0], [8.0, 1.0, 64.0, 1.0], "E4M3"
        )


def watched(module: nn.Module, x: Tensor) -> HealthMonitor:
    model = nn.Sequential(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = HealthMonitor(model, optimizer, precision="fp8", every=1)
    model(x).sum().backward()
    optimizer.step()
    monitor.step()
    return monitor


def test_scales_are_the_reciprocals_of_tes() -> None:
    assert te_scales(Linear()) == {
        "input": (1 / 2, E4M3),
        "weight": (1 / 4, E4M3),
        "gradient": (1 / 8, E5M2),
    }
    assert te_scales(Linear("E4M3"))["gradient"] == (1 / 8, E4M3)
    assert te_scales(LayerNormMLP())["gradient2"] == (1 / 64, E4M3)


def test_what_lies_beyond_a_scale_is_counted() -> None:
    # TE multiplies by 2: 300 becomes 600, beyond 448; 200 becomes 400.
    monitor = watched(Linear(), torch.tensor([[300.0, 200.0, 1.0, 1.0]]))
    assert monitor.overflowed["0", "input"] == 1
    assert monitor.latest is not None
    assert monitor.latest.layers["0"].scales == {
        "input": 1 / 2,
        "weight": 1 / 4,
        "gradient": 1 / 8,
    }


def test_behind_a_norm_scales_alone_are_told() -> None:
    monitor = watched(LayerNormMLP(), torch.full((1, 4), 1e4))
    assert monitor.latest is not None
    assert monitor.latest.layers["0"].scales["weight2"] == 1 / 32
    assert monitor.overflowed == {}


def test_a_recipe_that_keeps_no_scales_has_none() -> None:
    module = Linear()
    module.fp8_meta = {"scaling_fwd": SimpleNamespace()}
    assert te_scales(module) == {}


def test_te_keeps_them_where_they_are_read() -> None:
    found = importlib.util.find_spec("transformer_engine")
    assert found is not None
    assert found.submodule_search_locations
    place = Path(found.submodule_search_locations[0]) / "pytorch"
    tree = ast.parse((place / "quantization.py").read_text())
    state = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "DelayedScalingRecipeState"
    )
    kept = {
        n.target.id
        for n in state.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assert {"scale", "amax_history"} <= kept
    base = (place / "module" / "base.py").read_text()
    assert 'self.fp8_meta["num_gemms"] * 3 if fwd else' in base
    assert 'self.fp8_meta["num_gemms"] * 2' in base


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_te_has_modules_of_these_names(name: str) -> None:
    found = importlib.util.find_spec("transformer_engine")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "pytorch" / "module"
    sources = [file.read_text() for file in folder.glob("*.py")]
    assert any(f"class {name}(" in source for source in sources)
