"""Metrics of an endpoint: their names, what they count, and how they are written for Prometheus. Pure.

Labels are names of teams, states and codes, all of the operator's and ours: nothing of a request is ever a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.serve.driving.active import Outcome, Turns
    from ensemble_ray.serve.schemas import Metrics

#: Refusals that are counted; what a client mistyped is its own affair.
_COUNTED = frozenset({"QUEUE_FULL", "RATE_LIMITED", "UNAUTHENTICATED"})


class MetricKind(StrEnum):
    """How a metric changes."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What is counted."""

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
    """What a metric says just now."""

    metric: Metric
    #: in the order of the metric's labels
    values: tuple[str, ...]
    amount: float

    @property
    def team(self) -> str | None:
        """The team that it is about; None: the endpoint as a whole."""
        return dict(zip(self.metric.labels, self.values, strict=True)).get("ensemble")


class Exporter(Protocol):
    """Passes changes on to where a cluster's metrics are collected."""

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        """Take notice that a counter grew."""
        ...

    def put(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        """Take notice of what a gauge shows."""
        ...


class RunTally:
    """Counts what happens at an endpoint.

    Args:
        exporter: Hears of every change; None: only `samples` has them.
    """

    def __init__(self, exporter: Exporter | None = None) -> None:
        self._exporter = exporter
        self._amounts: dict[tuple[Metric, tuple[str, ...]], float] = {}

    def stand(self, team: str, turns: Turns) -> None:
        """Note how many runs of a team wait for their turn, have it, and wait for people."""
        self._put(RUNS, (team, "accepted"), turns.queued)
        self._put(RUNS, (team, "running"), turns.running)
        self._put(RUNS, (team, "waiting"), turns.waiting)

    def end(self, team: str, outcome: Outcome) -> None:
        """Note that a run of a team ended, and what it cost; of one that failed, what its tasks that completed did."""
        self._add(ENDED, (team, outcome.status.value), 1)
        if outcome.result is not None:
            self._spend(team, [outcome.result.metrics])
        elif outcome.error is not None:
            self._spend(team, [task.metrics for task in outcome.error.tasks])

    def refuse(self, code: str) -> None:
        """Note that a request was refused."""
        if code in _COUNTED:
            self._add(REFUSED, (code,), 1)

    def samples(self) -> Sequence[Sample]:
        """Return everything as it stands."""
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
    """Return samples in the text format of Prometheus."""
    lines: list[str] = []
    for metric in METRICS:
        found = sorted((each for each in samples if each.metric == metric), key=lambda each: each.values)
        if found:
            lines += [f"# HELP {metric.name} {metric.description}", f"# TYPE {metric.name} {metric.kind}"]
        for each in found:
            labels = ",".join(
                f'{name}="{_escape(value)}"' for name, value in zip(metric.labels, each.values, strict=True)
            )
            lines.append(f"{metric.name}{{{labels}}} {each.amount:.12g}")
    return "".join(f"{line}\n" for line in lines)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
