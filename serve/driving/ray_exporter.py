"""RayExporter: metrics of an endpoint through Ray's own exporter, beside those of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ray.util import metrics as ray_metrics

from ensemble_ray.serve.metrics import METRICS, Metric, MetricKind


class RayExporter:
    """Reports changes to Ray, which writes `ray_` before their names."""

    def __init__(self) -> None:
        made = cast("Any", ray_metrics)
        self._reported: dict[str, Any] = {
            metric.name: (made.Counter if metric.kind is MetricKind.COUNTER else made.Gauge)(
                metric.name.removesuffix("_total"), description=metric.description, tag_keys=metric.labels
            )
            for metric in METRICS
        }

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        """Take notice that a counter grew."""
        self._reported[metric.name].inc(amount, tags=dict(labels))

    def put(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        """Take notice of what a gauge shows."""
        self._reported[metric.name].set(amount, tags=dict(labels))
