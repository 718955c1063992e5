"""What Prometheus reads of a training run: the monitor's counts and its last sample.

    serve(monitor, port=9400, run="pretrain-7b")        # in the first process
    registry.register(TrainingCollector(monitor, "pretrain-7b"))   # or your own

Figures of layers are of the last sampled step. Labels are the run, the layer (a
model's few hundred) and the tensor; there are no ids in them.
"""

import math
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from optimizer.training.health import LayerReading
from optimizer.training.monitor import HealthMonitor

PREFIX = "precision_training"
OF_LAYERS = (  # field of a LayerReading, name, meaning
    ("zero_rate", "gradient_zero_ratio", "Share of the gradient that is zero."),
    (
        "bf16_underflow",
        "bf16_underflow_ratio",
        "Share of the nonzero gradient below bf16's smallest normal number.",
    ),
    ("gradient_norm", "layer_gradient_norm", "Norm of the gradient, as applied."),
    ("update_ratio", "update_ratio", "Learning rate times ‖g‖ over ‖w‖."),
    ("unchanged", "unchanged_ratio", "Share of weights that an update left as is."),
    ("output_amax", "output_amax", "Largest finite output."),
)


def serve(monitor: HealthMonitor, port: int, run: str) -> None:
    """Answer scrapes at :port/metrics, in a thread."""
    registry = CollectorRegistry()
    registry.register(TrainingCollector(monitor, run))
    start_http_server(port, registry=registry)


class TrainingCollector(Collector):
    """The figures of one monitor, read when they are asked for."""

    def __init__(self, monitor: HealthMonitor, run: str) -> None:
        self._monitor, self._run = monitor, run

    def describe(self) -> Iterator[Metric]:
        """Registering reads nothing."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every figure that there is by now."""
        yield from self._counts()
        yield from self._gauges()
        reading = self._monitor.latest
        if reading is not None:
            yield from self._layers(reading.layers, reading.precision)

    def _counts(self) -> Iterator[Metric]:
        monitor = self._monitor
        yield self._count("steps", "Steps of the optimizer.", monitor.steps)
        yield self._count("samples", "Steps that were looked into.", monitor.samples)
        said = "Steps that the scaler left out: back-offs of the loss scale."
        yield self._count("backoffs", said, monitor.skipped)
        over = CounterMetricFamily(
            f"{PREFIX}_fp8_overflow",
            "Values beyond FP8, in sampled steps.",
            labels=["run", "layer", "tensor"],
        )
        for (layer, tensor), count in sorted(monitor.overflowed.items()):
            over.add_metric([self._run, layer, tensor], count)
        yield over
        alarms = CounterMetricFamily(
            f"{PREFIX}_alarms", "Alarms of the monitor.", labels=["run", "metric"]
        )
        for metric, count in sorted(monitor.alarms.items()):
            alarms.add_metric([self._run, str(metric)], count)
        yield alarms

    def _count(self, name: str, meaning: str, value: int) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}_{name}", meaning, labels=["run"])
        family.add_metric([self._run], value)
        return family

    def _gauges(self) -> Iterator[Metric]:
        monitor, reading = self._monitor, self._monitor.latest
        values = {
            "loss": (monitor.loss, "Loss of the last step that was looked at."),
            "loss_scale": (monitor.loss_scale, "Loss scale of the next step."),
            "gradient_norm": (
                reading.gradient_norm if reading else None,
                "Norm of all gradients, before clipping where the loop gives it.",
            ),
            "learning_rate": (
                reading.learning_rate if reading else None,
                "Learning rate.",
            ),
        }
        for name, (value, meaning) in values.items():
            family = GaugeMetricFamily(f"{PREFIX}_{name}", meaning, labels=["run"])
            if value is not None:
                family.add_metric([self._run], value)
            yield family

    def _layers(
        self, layers: Mapping[str, LayerReading], precision: str
    ) -> Iterator[Metric]:
        labels = ["run", "layer", "precision"]
        for figure, name, meaning in OF_LAYERS:
            family = GaugeMetricFamily(f"{PREFIX}_{name}", meaning, labels=labels)
            for layer, reading in layers.items():
                value = getattr(reading, figure)
                if value is not None:
                    family.add_metric([self._run, layer, precision], value)
            yield family
        yield from self._tensors(layers)

    def _tensors(self, layers: Mapping[str, LayerReading]) -> Iterator[Metric]:
        labels = ["run", "layer", "tensor"]
        scales = GaugeMetricFamily(
            f"{PREFIX}_fp8_scale_log2",
            "log2 of an FP8 scale: x = q·scale.",
            labels=labels,
        )
        flushed = GaugeMetricFamily(
            f"{PREFIX}_fp8_flushed_ratio",
            "Share of the nonzero values that become zero in FP8.",
            labels=labels,
        )
        for layer, reading in layers.items():
            for tensor, scale in reading.scales.items():
                if scale > 0:
                    scales.add_metric([self._run, layer, tensor], math.log2(scale))
            for tensor, share in reading.flushed.items():
                flushed.add_metric([self._run, layer, tensor], share)
        yield scales
        yield flushed
