"""A job's model and data, each loaded when it is first needed."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from optimizer import memory, stream, tokens
from optimizer.execute import WeightCodes
from optimizer.model import LoadedModel, load
from optimizer.spec import OptimizeSpec
from optimizer.stack import ModelShape
from optimizer.tokens import Tokens
from optimizer.walk import Activations, Told


class Opened:
    """What is loaded of one job by now."""

    spec: OptimizeSpec
    memory_bytes: int | None  # for the weights; None: a share of what is free
    on_layer: Callable[[int], None]
    inside: Told  # hears from within a piece

    @cached_property
    def folder(self) -> Path:
        """Where the model lies."""
        return Path(self.spec.model_path)

    @cached_property
    def outline(self) -> LoadedModel:
        """The model without weights: sites and sizes."""
        return stream.outline(self.folder, self.spec.model)

    @cached_property
    def model(self) -> LoadedModel:
        """The model, in memory or streamed from its files."""
        room = self.memory_bytes
        if room is None:
            room = memory.resident_bytes()
        if 4 * self.outline.shape.parameters > room:
            model = self._streamed()
        else:
            model = load(self.folder, self.spec.model)
        model.on_layer = self.on_layer
        return model

    def _streamed(self) -> LoadedModel:
        return stream.stream(self.folder, self.spec.model)

    @cached_property
    def weights(self) -> WeightCodes:
        """The rounded matrices, each made once."""
        return WeightCodes(self.model)

    @cached_property
    def tokens(self) -> Tokens:
        """The caller's data as the model reads it."""
        return self._read(self.spec)

    def _read(self, spec: OptimizeSpec) -> Tokens:
        return tokens.read(
            self.folder,
            spec.data_distribution,
            Path(spec.dataset_path) if spec.dataset_path else None,
            calibration_tokens=spec.calibration_tokens,
            validation_tokens=spec.validation_tokens,
            sequence_tokens=spec.sequence_tokens,
        )

    @cached_property
    def kept(self) -> Activations:
        """What calibration leaves for the sweep."""
        return Activations()

    def opened(self) -> ModelShape:
        """Read the data, then the model's outline: what cannot be served is refused."""
        assert self.tokens.calibration.sequences
        return self.outline.shape
