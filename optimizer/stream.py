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
import transformers
from torch import nn

from optimizer.checkpoint import inspect
from optimizer.errors import ModelError
from optimizer.model import SAVE_AGAIN, LoadedModel, instrument
from optimizer.shards import Shards

META = torch.device("meta")


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A parameter of the network, and the tensor of the files that fills it."""

    module: nn.Module
    attribute: str
    stored: str
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
    """Put the weight of the files in its place. Raises ModelError for another shape."""
    values = shards.get(place.stored)
    if values.shape != place.empty.shape:
        raise ModelError(
            f"{place.stored} has the shape {tuple(values.shape)}, and config.json "
            f"makes it {tuple(place.empty.shape)}"
        )
    setattr(place.module, place.attribute, nn.Parameter(values, requires_grad=False))


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

    Raises ModelError where the files have no such tensor: they are laid out in
    another way than the network, or incomplete.
    """
    stage_of = {
        id(module): index + 1
        for index, layer in enumerate(layers)
        for module in layer.modules()
    }
    stages: list[list[Place]] = [[] for _ in range(len(layers) + 2)]
    staying: list[Place] = []
    names = _Names(network, shards)
    for path, module in network.named_modules():
        for attribute, empty in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            place = Place(module, attribute, names.stored(name), empty)
            if id(module) in stage_of:
                stages[stage_of[id(module)]].append(place)
            elif isinstance(module, nn.Embedding):
                stages[0].append(place)
            elif isinstance(module, nn.Linear):
                stages[-1].append(place)
            else:
                staying.append(place)
    names.refuse_unread()
    return stages, staying


class _Names:
    """Finds the name that the files have for a parameter."""

    def __init__(self, network: Any, shards: Shards) -> None:
        self._stored = set(shards.names())
        self._read: set[str] = set()
        self._prefix = f"{network.base_model_prefix}."
        self._tied: dict[str, str] = dict(network.all_tied_weights_keys)
        ignored = network._keys_to_ignore_on_load_unexpected or ()
        self._ignored = tuple(ignored)

    def stored(self, name: str) -> str:
        """Return what the files call it. Raises ModelError where they have nothing."""
        for known in (name, self._tied.get(name, name)):
            for spelled in (known, known.removeprefix(self._prefix)):
                if spelled in self._stored:
                    self._read.add(spelled)
                    return spelled
        raise ModelError(f"no tensor {name} in the files of the model")

    def refuse_unread(self) -> None:
        """Raise ModelError for a tensor that nothing in the network takes."""
        left = sorted(self._stored - self._read)
        left = [n for n in left if not n.endswith((".inv_freq", ".masked_bias"))]
        if left:
            raise ModelError(
                f"{len(left)} tensors that the network has no place for: {left[0]}"
            )


def outline(folder: Path, name: str = "") -> LoadedModel:
    """Return the model without any weight: its sites and sizes, in a second.

    Raises ModelError for an architecture that is not in the allow-list or a config
    that it cannot be built from.
    """
    checkpoint = inspect(folder)
    cls = getattr(transformers, checkpoint.architecture)  # of the allow-list
    plain = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    try:
        config = cls.config_class.from_dict(plain)
        config._attn_implementation = "eager"  # until the sites are routed
        network = without_weights(cls, config)
    except (MemoryError, RuntimeError):  # this machine's, not the model's
        raise
    except Exception as error:  # whatever a config makes transformers raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{checkpoint.architecture} cannot be built from config.json: {why}. "
            f"{SAVE_AGAIN}"
        ) from error
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
