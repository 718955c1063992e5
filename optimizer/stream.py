"""A model whose weights come from its shards as each stage runs, and go after it.

The network is built without memory for its weights. Norms and other small things
stay; embeddings, layers and head are read when their stage begins, from wherever the
operating system has the files by then, and let go when it ends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.checkpoint import inspect
from optimizer.construct import class_of, models_error, plain_config
from optimizer.model import LoadedModel, instrument
from optimizer.shards import Shards
from optimizer.stored import Source, read, sources

META = torch.device("meta")


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A parameter of the network, and the tensors of the files that fill it."""

    module: nn.Module
    attribute: str
    source: Source
    empty: nn.Parameter  # on the meta device, shared where weights are tied


@dataclass(slots=True, eq=False)
class Streamed:
    """Reads the weights of a stage when it begins. See `segments.Residency`."""

    shards: Shards
    stages: list[list[Place]]
    whole: bool = False
    _holders: dict[int, int] = field(default_factory=dict)
    _on_release: list[Callable[[], None]] = field(default_factory=list)

    @contextmanager
    def holding(self, stage: int) -> Iterator[None]:
        """Keep the weights of a stage until the context ends; contexts may nest."""
        self._holders[stage] = self._holders.get(stage, 0) + 1
        if self._holders[stage] == 1:
            self._fill(stage)
        try:
            yield
        finally:
            self._holders[stage] -= 1
            if not self._holders[stage]:
                self._empty(stage)

    def on_release(self, call: Callable[[], None]) -> None:
        """Call this whenever a stage has let its weights go."""
        self._on_release.append(call)

    def _fill(self, stage: int) -> None:
        for place in self.stages[stage]:
            fill(place, self.shards)

    def _empty(self, stage: int) -> None:
        for place in self.stages[stage]:
            setattr(place.module, place.attribute, place.empty)
        for call in self._on_release:
            call()


def fill(place: Place, shards: Shards) -> None:
    """Put the weight of the files in its place. Raises NonFiniteError naming it."""
    values = nn.Parameter(read(shards, place.source), requires_grad=False)
    setattr(place.module, place.attribute, values)


def without_weights(cls: Any, config: Any) -> nn.Module:
    """Return the network of a config, its parameters on the meta device.

    Buffers, such as the frequencies of rotary embeddings, are real, and float32.
    """
    with META:
        network: Any = cls(config)
    for module in network.modules():
        own = [b for b in module.buffers(recurse=False) if b.is_meta]
        if own:
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
            network._init_weights(module)
    network.eval().requires_grad_(False)
    made: nn.Module = network
    return made


def places(
    network: nn.Module, layers: nn.ModuleList, shards: Shards
) -> tuple[list[list[Place]], list[Place]]:
    """Return the parameters of every stage, and those that always stay.

    Raises ModelError where the files do not hold exactly those.
    """
    stage_of = {
        id(module): index + 1
        for index, layer in enumerate(layers)
        for module in layer.modules()
    }
    stages: list[list[Place]] = [[] for _ in range(len(layers) + 2)]
    staying: list[Place] = []
    stored = sources(network, shards)
    for path, module in network.named_modules():
        for attribute, empty in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            place = Place(module, attribute, stored[name], empty)
            if id(module) in stage_of:
                stages[stage_of[id(module)]].append(place)
            elif isinstance(module, nn.Embedding):
                stages[0].append(place)
            elif isinstance(module, nn.Linear):
                stages[-1].append(place)
            else:
                staying.append(place)
    return stages, staying


def outline(folder: Path, name: str = "") -> LoadedModel:
    """Return the model without any weight: its sites and sizes, in a second.

    Raises ModelError for an architecture that is not in the allow-list or a config
    that it cannot be built from.
    """
    checkpoint = inspect(folder)
    cls = class_of(checkpoint)
    with models_error(checkpoint):
        config = cls.config_class.from_dict(plain_config(checkpoint))
        config._attn_implementation = "eager"  # until the sites are routed
        network = without_weights(cls, config)
    return instrument(
        network, checkpoint.architecture, name or folder.name, checkpoint.stored_bytes
    )


def stream(folder: Path, name: str = "") -> LoadedModel:
    """Return the model with its weights left in the files until they are needed.

    Raises what `outline` raises, and ModelError where the files do not have exactly
    the network's own parameters.
    """
    model = outline(folder, name)
    shards = Shards.open(folder)
    stages, staying = places(model.network, model.layers, shards)
    for place in staying:
        fill(place, shards)
    model.residency = Streamed(shards, stages)
    return model
