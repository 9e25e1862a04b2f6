"""The steps of a run: rows of the executions in its history. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from sys import intern

from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact, as_mapping, as_text
from ensemble_ray.facts.runs import RecordedOutput
from ensemble_ray.plan.plan import GraphUnit
from ensemble_ray.record import history
from ensemble_ray.record.history import RecordedExecution
from ensemble_ray.schedule.instructions import StepEnded
from ensemble_ray.studio.schemas import CostSchema, Effect, SegmentKind, StepSchema, StepTokens
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import add_tokens
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.trace import GraphTrace, GraphTraceStep

TITLE = 120
_MOST_PARTS = 200  # segments and calls of a row. Later segments extend the last one.
_DELEGATING = "delegate"  # tools that delegate work begin so


def as_millis(at: float) -> int:
    return round(at * 1000)


def title_of(text: str) -> str:
    """Return the first line with text as a title."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    shown = str(one_line(first[: TITLE + 1], None))
    return shown if len(shown) <= TITLE else f"{shown[: TITLE - 1]}…"


def cost_of(metrics: Mapping[str, object]) -> tuple[Decimal, str] | None:
    """Return the estimated cost in JSON data of `TaskMetrics`, and its currency."""
    estimate = as_mapping(metrics.get("cost_estimate"))
    if not estimate:
        return None
    try:
        return Decimal(str(estimate.get("total_cost"))), intern(as_text(estimate.get("currency")))
    except InvalidOperation:  # another program wrote the record
        return None


@dataclass(slots=True, eq=False)
class ShownStep:
    execution: history.RecordedExecution
    title: str
    input_tokens: int = 0  # -1: unknown
    output_tokens: int = 0
    model_calls: int = 0
    output_digest: str | None = None
    cost: tuple[Decimal, str] | None = None  # with its currency
    effect: Effect | None = None  # of its calls that ended or were repeated
    is_reviewed: bool = False
    spans: list[tuple[SegmentKind, float, float]] = field(default_factory=list["tuple[SegmentKind, float, float]"])
    tools: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    _begun_calls: set[str] | None = None  # until the step is completed
    _row: tuple[int, StepSchema] | None = None

    @property
    def total_tokens(self) -> int | None:
        """None: a provider did not count."""
        known = self.input_tokens >= 0 and self.output_tokens >= 0
        return self.input_tokens + self.output_tokens if known else None

    def apply(self, change: history.ExecutionChange) -> None:
        match change:
            case history.ModelReplied():
                self._add_answer(change.fact.data)
            case history.CallStarted():
                self._begin_call(change.fact)
            case history.CallEnded():
                self._add_call(change)
            case history.DelegationStarted():
                self._begin(change.fact.data.started_at)
            case history.GateOpened():
                self._begin(change.fact.at)
            case history.GateClosed():
                self.is_reviewed = True
                if change.asked is not None:
                    self._spend("person", change.asked.at, change.fact.at)
            case history.WorkRecorded():
                self._begin(change.fact.at)
                self.model_calls += change.model_calls
                self._count(change.input_tokens, change.output_tokens)
            case history.ExecutionEnded():
                self._end(change)
            case _:
                pass

    def row(self) -> StepSchema:
        version = self.execution.version
        if self._row is None or self._row[0] != version:
            self._row = (version, self._make_row())
        return self._row[1]

    def _begin(self, at: float) -> None:
        wanted_at = self.execution.wanted_at
        if not self.spans and wanted_at is not None and at > wanted_at:
            self.spans.append(("queue", wanted_at, at))

    def _spend(self, kind: SegmentKind, start: float, end: float) -> None:
        end = max(start, end)
        if len(self.spans) < _MOST_PARTS:
            self.spans.append((kind, start, end))
        else:
            kind, start, _ = self.spans[-1]
            self.spans[-1] = (kind, start, end)

    def _count(self, sent: int, received: int) -> None:
        self.input_tokens = add_tokens((self.input_tokens, sent))
        self.output_tokens = add_tokens((self.output_tokens, received))

    def _add_answer(self, answer: ModelAnswered) -> None:
        self._begin(answer.started_at)
        self.model_calls += 1
        self._count(int(answer.input_tokens), int(answer.output_tokens))
        asked_at = answer.started_at + min(answer.waited_s, max(0.0, answer.latency_s))
        if answer.waited_s:
            self._spend("rate_limit", answer.started_at, asked_at)
        self._spend("model", asked_at, answer.started_at + answer.latency_s)

    def _begin_call(self, fact: Fact) -> None:
        self._begin(fact.at)
        if self._begun_calls is None:
            self._begun_calls = set()
        if fact.name in self._begun_calls and self.effect != "unknown":
            self.effect = "repeated"
        self._begun_calls.add(fact.name)
        self.effect = self.effect or "recorded"

    def _add_call(self, change: history.CallEnded) -> None:
        result, name = change.fact.data, change.fact.name
        self._begin(result.started_at)
        ended = result.started_at + max(0.0, result.duration_s)
        if name.endswith("/handler"):
            self._spend("other", result.started_at, ended)
            return
        if result.is_unknown:
            self.effect = "unknown"
        if not name.endswith("/runner"):  # its answer is shown as an answer of a model
            self._spend("tool", result.started_at, ended)
            if len(self.tools) < _MOST_PARTS:
                outcome = "skipped" if result.outcome.startswith("skipped") else result.outcome
                tool = change.intent.tool_name if change.intent else change.requested.name if change.requested else ""
                if change.intent is None and not tool.startswith(_DELEGATING):
                    tool = _DELEGATING
                self.tools.append((str(one_line(tool, TITLE)), outcome, ended))

    def _end(self, change: history.ExecutionEnded) -> None:
        self.cost = cost_of(change.metrics) or self.cost
        output = change.output
        if output is None:
            return
        self._begun_calls = None
        self.output_digest = sha256(output.raw.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        if self.execution.node is None or not self.title or self.title == self.execution.node:
            self.title = title_of(output.task_description) or self.title

    def _make_row(self) -> StepSchema:
        step = self.execution
        spans: list[tuple[SegmentKind, int, int]] = [
            (kind, as_millis(start), as_millis(end)) for kind, start, end in self.spans
        ]
        for asked in step.gates.values() if step.gates and not step.is_ended else ():
            spans.append(("person", as_millis(asked.at), as_millis(asked.at)))  # noqa: PERF401  a list would lose the kind's type
        sent, received = (None if each < 0 else each for each in (self.input_tokens, self.output_tokens))
        return StepSchema(
            id=step.id,
            node=step.node,
            parent=None if step.parent is None else step.parent.id,
            kind=step.kind,
            title=(step.label if step.kind == "state" else "") or self.title,
            agent=step.agent,
            status=step.status,
            number=step.number,
            attempts=step.attempts,
            started_at=None if step.started_at is None else as_millis(step.started_at),
            ended_at=None if step.ended_at is None else as_millis(step.ended_at),
            segments=spans,
            tools=[(name, outcome, as_millis(at)) for name, outcome, at in self.tools],
            tokens=StepTokens(input=sent, output=received) if self.model_calls else None,
            cost=None if self.cost is None else CostSchema(amount=f"{self.cost[0]:f}", currency=self.cost[1]),
            level=step.level,
            error=step.error,
            effect="unknown" if step.is_ended and step.open_calls else self.effect,
            place=None,
            reviewed=self.is_reviewed,
        )


MOST_STEPS = 50_000  # the first steps of a run
_NOT_SHOWN = (history.ExecutionStarted, history.RunStarted, history.RunContinued, history.RunFinished)
_ROUNDS: Mapping[str, str] = {"iteration": "Iteration", "attempt": "Attempt", "state": "Step"}


class StepsView:
    """The steps of one run.

    Attributes:
        history: The run, with its executions and usage, without executions over the limit.
    """

    def __init__(self) -> None:
        self.history = history.RunHistory(limit=MOST_STEPS)
        self._shown: dict[str, ShownStep] = {}
        self._graph_steps: list[GraphTraceStep] = []

    def rows(self, *, after: int = 0) -> list[StepSchema]:
        """Return the rows of all steps that changed after a position."""
        return [self.show(state).row() for state in self.history.executions.values() if state.changed > after]

    def show(self, state: RecordedExecution) -> ShownStep:
        found = self._shown.get(state.id)
        if found is None:
            unit, node = self.history.units.get(state.node or ""), self.history.nodes.get(state.node or "")
            text = unit.name if unit is not None else node.description if node is not None else state.label
            title = title_of(text) or node_key(state.id) or state.id.rpartition("/")[2]
            if state.kind in _ROUNDS:
                title = f"{_ROUNDS[state.kind]} {state.number}"
            found = self._shown[state.id] = ShownStep(state, title)
        return found

    def counts(self) -> dict[str, int]:
        """Return the number of steps by status, without units and their executions."""
        return dict(Counter(state.status for state in self.history.executions.values() if not state.is_unit))

    def first_failed(self) -> RecordedExecution | None:
        """Return the step that failed first."""
        failed = (each for each in self.history.executions.values() if each.status == "failed" and not each.is_unit)
        return min(failed, key=lambda each: each.ended_at or 0.0, default=None)

    def apply(self, fact: Fact) -> RecordedOutput | None:
        """Apply the next fact, and return the output in it."""
        output = None
        for change in self.history.apply(fact):
            if isinstance(change, _NOT_SHOWN):
                continue
            if isinstance(change, history.ExecutionEnded):
                output = change.output or output
            elif isinstance(change, history.RoundEnded) and isinstance(ended := change.what, StepEnded):
                path, state = change.execution.id, ended.state
                step = GraphTraceStep(path=path, state_name=state, step_number=ended.step, next_state=ended.next_state)
                self._graph_steps.append(step)
            if not self.history.left_out or change.execution.id in self.history.executions:
                self.show(change.execution).apply(change)
        return output

    def graph_trace(self) -> GraphTrace | None:
        """Return the ended steps of the graph of the run."""
        states = self.history.executions.values()
        found = next((state for state in states if state.kind == "graph" and state.started_at), None)
        unit = None if found is None else self.history.units.get(found.node or "")
        if found is None or not isinstance(unit, GraphUnit):
            return None
        return GraphTrace(
            graph_name=unit.name,
            path=found.id,
            start_state=unit.start,
            termination_reason=None,
            steps_run=len(self._graph_steps),
            max_steps=unit.max_steps,
            steps=tuple(self._graph_steps),
        )


_EXITS: Mapping[ExitReason, str] = {
    ExitReason.COMPLETED: "All of it is done.",
    ExitReason.USER_EXIT_EARLY: "A user ended it early. Finished steps have their outputs.",
    ExitReason.TIMEOUT: "A review timed out, so it ended. Finished steps have their outputs.",
    ExitReason.ERROR: "It failed.",
    ExitReason.CANCELLED: "A user cancelled it.",
    ExitReason.BUDGET_EXHAUSTED: "Its budget is exhausted. Resume it with a larger budget.",
    ExitReason.WAITING: "It waits for a review decision.",
}
_INTERRUPTED = "Its process is gone, but it has not ended. It can be resumed."


def exit_text(reason: ExitReason | None, state: RunState) -> str | None:
    """Return why a run ended, in words."""
    if state.is_active:
        return None
    if state is RunState.INTERRUPTED:
        return _INTERRUPTED
    return None if reason is None else _EXITS[reason]


def wire_status(state: RunState) -> str:
    """Return the endpoint's word for the state of a run (S-SRV-3)."""
    return "accepted" if state is RunState.PENDING else state.value
