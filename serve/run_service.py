"""The port through which routes start, follow, steer and cancel runs, and the metrics of those runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from ensemble_ray.access.quotas import Account
from ensemble_ray.serve import schemas
from ensemble_ray.serve.schemas import Metrics

if TYPE_CHECKING:
    from ensemble_ray.serve.driving.queue import RunQueue
    from ensemble_ray.serve.driving.run_driver import Outcome


_COUNTED = frozenset({"DRAINING", "QUEUE_FULL", "QUOTA_EXCEEDED", "RATE_LIMITED", "UNAUTHENTICATED"})
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


class Metric(Struct, frozen=True, kw_only=True):
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
KEY_USAGE = Metric(
    name="ensemble_ray_key_usage_total",
    kind=MetricKind.COUNTER,
    description="Runs that keys started, and tokens and cost of those that ended",
    labels=("key", "quantity"),
)
DELIVERIES = Metric(
    name="ensemble_ray_webhook_attempts_total",
    kind=MetricKind.COUNTER,
    description="Attempts to deliver webhooks: delivered, retried (it failed, and another one follows), failed (it was the last)",
    labels=("ensemble", "outcome"),
)
VERSION_SHARE = Metric(
    name="ensemble_ray_version_share",
    kind=MetricKind.GAUGE,
    description="Share of new runs that a loaded version of a team's file gets, 0 to 1",
    labels=("ensemble", "version"),
)
VERSION_ENDED = Metric(
    name="ensemble_ray_version_runs_ended_total",
    kind=MetricKind.COUNTER,
    description="Runs that ended, by the version of their team's file",
    labels=("ensemble", "version", "status"),
)
DRAINING = Metric(
    name="ensemble_ray_draining",
    kind=MetricKind.GAUGE,
    description="1 while the endpoint refuses new runs because it drains, else 0",
    labels=(),
)
METRICS = (RUNS, ENDED, TOKENS, COST, REFUSED, DELIVERIES, VERSION_SHARE, VERSION_ENDED, DRAINING, KEY_USAGE)


class Sample(Struct, frozen=True, kw_only=True):
    metric: Metric
    #: in the order of the metric's labels
    values: tuple[str, ...]
    amount: float

    @property
    def team(self) -> str | None:
        return self.label("ensemble")

    def label(self, name: str) -> str | None:
        return dict(zip(self.metric.labels, self.values, strict=True)).get(name)


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

    def set_draining(self, is_draining: bool) -> None:  # noqa: FBT001  the value of the gauge
        self._put(DRAINING, (), float(is_draining))

    def set_shares(self, team: str, shares: Mapping[str, float]) -> None:
        """Record the shares of a team's versions. Versions that are gone have none."""
        known = {values[1] for metric, values in self._amounts if metric is VERSION_SHARE and values[0] == team}
        for version in known | shares.keys():
            self._put(VERSION_SHARE, (team, version), shares.get(version, 0.0))

    def end(self, team: str, outcome: Outcome, version: str | None = None) -> None:
        """Record the end of a run and the usage of its completed tasks."""
        self._add(ENDED, (team, outcome.status.value), 1)
        if version is not None:
            self._add(VERSION_ENDED, (team, version, outcome.status.value), 1)
        if outcome.result is not None:
            self._spend(team, [outcome.result.metrics])
        elif outcome.error is not None:
            self._spend(team, [task.metrics for task in outcome.error.tasks])

    def charge(self, key: str, quantity: str, amount: float) -> None:
        self._add(KEY_USAGE, (key, quantity), amount)

    def refuse(self, code: str) -> None:
        if code in _COUNTED:
            self._add(REFUSED, (code,), 1)

    def deliver(self, team: str, outcome: str) -> None:
        """Record an attempt to deliver a webhook."""
        self._add(DELIVERIES, (team, outcome), 1)

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
            shown = f"{{{labels}}}" if labels else ""
            lines.append(f"{metric.name}{shown} {each.amount:.12g}")
    return "".join(f"{line}\n" for line in lines)


#: Runs on one page of a list.
DEFAULT_PAGE, LARGEST_PAGE = 50, 200


class RunService(Protocol):
    """The runs of all served teams, in the process that drives them (`DrivenRuns`) or in a replica (`RemoteRuns`).

    An operation raises `Refusal` if its run, gate or tool does not exist. `by` is the caller's name, empty if unknown.
    """

    async def ensembles(self) -> Sequence[schemas.EnsembleInfo]:
        """Return the teams, sorted by name."""
        ...

    async def metrics(self) -> Sequence[Sample]:
        """Return usage and cost since the driver started."""
        ...

    async def start(
        self, asked: schemas.NewRun, *, idempotency_key: str | None = None, account: Account | None = None
    ) -> schemas.AcceptedRun:
        """Accept a run, which then survives the loss of any process, and return before it starts.

        The run counts for the quotas of `account`.
        A repeated `run_id` or key returns the existing run (S-SRV-14, S-SRV-15). `Refusal`: the request is invalid, its id is used by
        another one, or a limit is exceeded.
        """
        ...

    async def wait(self, run_id: str, timeout_s: float) -> schemas.RunDetail:
        """Return the run when it has ended, waits for a person, or `timeout_s` is over."""
        ...

    async def get(self, run_id: str) -> schemas.RunDetail: ...

    async def list(
        self, wanted: schemas.RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE
    ) -> schemas.RunPage:
        """Return the newest runs, or those behind the `next_cursor` of a page."""
        ...

    def events(
        self, run_id: str, after: str | None = None, *, types: frozenset[str] | None = None
    ) -> AsyncGenerator[schemas.RunEvent]:
        """Yield the events of a run from its start or behind a cursor, up to `ensemble_completed`.

        With `types` only events of these types and the last one are yielded, and `skipped` ones with the cursors of the others.

        Events with a cursor arrive once and in order, also long after the end. A slow reader misses the others.
        """
        ...

    async def cancel(self, run_id: str) -> schemas.RunDetail:
        """Request the end of the run. `Refusal`: it has ended."""
        ...

    async def inject(self, run_id: str, directive: schemas.NewDirective, *, by: str = "") -> schemas.RunDetail:
        """Send a directive to the tasks that start from now on. `Refusal`: the run is not running."""
        ...

    async def switch_model(self, run_id: str, model: schemas.NewModel, *, by: str = "") -> schemas.RunDetail:
        """Switch the model of the tasks that start from now on. `Refusal`: the run is not running."""
        ...

    async def deliveries(self, run_id: str) -> Sequence[schemas.WebhookDelivery]:
        """Return the webhooks of a run, oldest first."""
        ...

    async def redeliver(self, run_id: str, delivery_id: str) -> schemas.WebhookDelivery:
        """Send a webhook again, with its id and content. `Refusal`: the run has no such delivery."""
        ...

    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[schemas.ReviewOfEnsemble]:
        """Return the open gates of these teams, oldest first; None: of all teams."""
        ...

    async def decide(
        self,
        run_id: str,
        gate_id: str,
        decision: schemas.NewDecision,
        *,
        by: str = "",
        roles: frozenset[str] | None = None,
    ) -> schemas.DecidedReview | schemas.ReviewConflict:
        """Decide a gate. Return the decision, or the earlier decision that counts.

        `Refusal`: the gate is closed, or `roles`, unless None, lacks the role that the gate requires.
        """
        ...

    async def drain_info(self) -> schemas.DrainInfo:
        """Return whether new runs are refused, and the open runs."""
        ...

    async def drain(self, asked: schemas.NewDrain, *, by: str = "") -> schemas.DrainInfo:
        """Refuse new runs from now on. Accepted ones continue."""
        ...

    async def end_drain(self) -> schemas.DrainInfo:
        """Accept new runs again."""
        ...

    async def versions(self, ensemble: str) -> schemas.TeamVersionList:
        """Return the loaded versions of a team. `Refusal`: the team has no file."""
        ...

    async def load_version(self, ensemble: str, asked: schemas.NewVersion) -> schemas.TeamVersionList:
        """Load the file of a team again. `Refusal`: it has none, or its text cannot be served; the versions before stay."""
        ...

    async def share_version(self, ensemble: str, version: str, asked: schemas.NewShare) -> schemas.TeamVersionList:
        """Change the share of new runs that a version gets."""
        ...

    async def capabilities(self) -> schemas.Capabilities:
        """Return the callable tools, and the models and tasks of all teams."""
        ...

    async def invoke_tool(self, name: str, body: schemas.ToolCallBody) -> schemas.ToolReply:
        """Call a tool outside of a run. `Refusal`: too many calls are running, or it timed out."""
        ...

    async def schedules(self, ensembles: frozenset[str] | None = None) -> Sequence[schemas.ScheduleInfo]:
        """Return the schedules of these teams, sorted by team and name; None: of all teams."""
        ...

    async def schedule(self, ensemble: str, name: str) -> schemas.ScheduleDetail:
        """Return a schedule with its history. `Refusal`: the team has no such schedule."""
        ...

    async def pause_schedule(self, ensemble: str, name: str, *, is_paused: bool) -> schemas.ScheduleInfo:
        """Pause a schedule, or let it continue. A repetition has no effect."""
        ...

    async def run_schedule(
        self, ensemble: str, name: str, *, run_id: str, user: str | None = None, account: Account | None = None
    ) -> schemas.AcceptedRun:
        """Start a run of a schedule now, for this user. A repeated `run_id` starts none.

        The run counts for the quotas of `account`. `Refusal`: the schedule waits for files, or a limit is exceeded.
        """
        ...
