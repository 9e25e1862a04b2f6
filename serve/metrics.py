"""Metrics of an endpoint in Prometheus text format. A value from a request is never a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.serve.schemas import Metrics

if TYPE_CHECKING:
    from ensemble_ray.serve.driving.run_driver import Outcome, RunQueue

_COUNTED = frozenset({"QUEUE_FULL", "RATE_LIMITED", "UNAUTHENTICATED"})
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...]


RUNS = Metric(
    name="ensemble_ray_runs",
    kind=MetricKind.GAUGE,
    description="Runs that have not ended: accepted ones wait for their turn, waiting ones for people",
    labels=("ensemble", "status"),
)
ENDED = Metric(
    name="ensemble_ray_runs_ended_total",
    kind=MetricKind.COUNTER,
    description="Runs that ended",
    labels=("ensemble", "status"),
)
TOKENS = Metric(
    name="ensemble_ray_tokens_total",
    kind=MetricKind.COUNTER,
    description="Tokens of runs that ended, as far as models report them",
    labels=("ensemble", "kind"),
)
COST = Metric(
    name="ensemble_ray_cost_total",
    kind=MetricKind.COUNTER,
    description="Cost of runs that ended, where the team says what tokens cost",
    labels=("ensemble", "currency"),
)
REFUSED = Metric(
    name="ensemble_ray_requests_refused_total",
    kind=MetricKind.COUNTER,
    description="Requests that were refused",
    labels=("code",),
)
METRICS = (RUNS, ENDED, TOKENS, COST, REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    metric: Metric
    #: in the order of the metric's labels
    values: tuple[str, ...]
    amount: float

    @property
    def team(self) -> str | None:
        return dict(zip(self.metric.labels, self.values, strict=True)).get("ensemble")


class Exporter(Protocol):
    """Receives changes for the metrics system of a cluster."""

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None: ...

    def put(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None: ...


class RunTally:
    def __init__(self, exporter: Exporter | None = None) -> None:
        self._exporter = exporter
        self._amounts: dict[tuple[Metric, tuple[str, ...]], float] = {}

    def set_gauges(self, team: str, queue: RunQueue) -> None:
        self._put(RUNS, (team, "accepted"), queue.queued)
        self._put(RUNS, (team, "running"), queue.running)
        self._put(RUNS, (team, "waiting"), queue.waiting)

    def end(self, team: str, outcome: Outcome) -> None:
        """Record the end of a run and the usage of its completed tasks."""
        self._add(ENDED, (team, outcome.status.value), 1)
        if outcome.result is not None:
            self._spend(team, [outcome.result.metrics])
        elif outcome.error is not None:
            self._spend(team, [task.metrics for task in outcome.error.tasks])

    def refuse(self, code: str) -> None:
        if code in _COUNTED:
            self._add(REFUSED, (code,), 1)

    def samples(self) -> Sequence[Sample]:
        return [
            Sample(metric=metric, values=values, amount=amount) for (metric, values), amount in self._amounts.items()
        ]

    def _spend(self, team: str, spent: Iterable[Metrics]) -> None:
        for each in spent:
            self._add(TOKENS, (team, "input"), each.input_tokens or 0)
            self._add(TOKENS, (team, "output"), each.output_tokens or 0)
            if each.cost is not None:
                self._add(COST, (team, each.cost.currency), float(each.cost.total))

    def _add(self, metric: Metric, values: tuple[str, ...], amount: float) -> None:
        if not amount:
            return
        key = metric, values
        self._amounts[key] = self._amounts.get(key, 0) + amount
        if self._exporter is not None:
            self._exporter.add(metric, dict(zip(metric.labels, values, strict=True)), amount)

    def _put(self, metric: Metric, values: tuple[str, ...], amount: float) -> None:
        if self._amounts.get((metric, values)) == amount:
            return
        self._amounts[metric, values] = amount
        if self._exporter is not None:
            self._exporter.put(metric, dict(zip(metric.labels, values, strict=True)), amount)


def render_samples(samples: Sequence[Sample]) -> str:
    lines: list[str] = []
    for metric in METRICS:
        found = sorted((each for each in samples if each.metric == metric), key=lambda each: each.values)
        if found:
            lines += [f"# HELP {metric.name} {metric.description}", f"# TYPE {metric.name} {metric.kind}"]
        for each in found:
            pairs = zip(metric.labels, each.values, strict=True)
            labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
            lines.append(f"{metric.name}{{{labels}}} {each.amount:.12g}")
    return "".join(f"{line}\n" for line in lines)
