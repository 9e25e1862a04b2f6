"""One row of a run's steps: an execution of the run's history, and what its changes add for a page. Pure.

It never holds a text of a model or a tool longer than a line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from ensemble_ray.record import history
from ensemble_ray.studio.schemas.steps import StepSchema, StepTokens
from ensemble_ray.studio.schemas.wire import CostSchema
from ensemble_ray.text.foreign_text import one_line

if TYPE_CHECKING:
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.facts.ends import RecordedOutput
    from ensemble_ray.studio.schemas.steps import Effect, SegmentKind

#: Longest title, characters.
TITLE = 120
#: Segments and calls that one row has; later segments lengthen the last one, later calls are in the step's details.
_MOST_PARTS = 200
#: Beginning of the names of the tools that delegate work.
_DELEGATING = "delegate"


def as_millis(at: float) -> int:
    """Return an instant of Unix time in s as ms."""
    return round(at * 1000)


def title_of(text: str) -> str:
    """Return the first line of a text that says something, as a title; a longer one ends with `…`."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    shown = str(one_line(first[: TITLE + 1], None))
    return shown if len(shown) <= TITLE else f"{shown[: TITLE - 1]}…"


@dataclass(slots=True, eq=False)
class ShownStep:
    """One row of a run's steps."""

    execution: history.RecordedExecution
    title: str
    #: of its output's text
    output_digest: str | None = None
    spans: list[tuple[SegmentKind, float, float]] = field(default_factory=list["tuple[SegmentKind, float, float]"])
    tools: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    _row: tuple[int, StepSchema] | None = None

    def apply(self, change: history.ExecutionChange) -> None:
        """Add what a change tells of its time, calls and output."""
        match change:
            case history.ModelReplied(fact=fact):
                self._begin(fact.data.started_at)
                self._add_answer(fact.data)
            case history.CallEnded(fact=fact):
                self._begin(fact.data.started_at)
                self._add_call(change)
            case history.CallStarted(fact=fact) | history.GateOpened(fact=fact) | history.WorkRecorded(fact=fact):
                self._begin(fact.at)
            case history.DelegationStarted(fact=fact):
                self._begin(fact.data.started_at)
            case history.GateClosed(fact=fact, asked=asked) if asked is not None:
                self._spend("person", asked.at, fact.at)
            case history.ExecutionEnded(output=output) if output is not None:
                self._add_output(output)
            case _:
                pass

    def row(self) -> StepSchema:
        """Return the row."""
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

    def _add_answer(self, answer: ModelAnswered) -> None:
        asked_at = answer.started_at + min(answer.waited_s, max(0.0, answer.latency_s))
        if answer.waited_s:
            self._spend("rate_limit", answer.started_at, asked_at)
        self._spend("model", asked_at, answer.started_at + answer.latency_s)

    def _add_call(self, change: history.CallEnded) -> None:
        result, name = change.fact.data, change.fact.name
        ended = result.started_at + max(0.0, result.duration_s)
        if name.endswith("/handler"):
            self._spend("other", result.started_at, ended)
        elif not name.endswith("/runner"):  # its answer is shown as that of a model
            self._spend("tool", result.started_at, ended)
            if len(self.tools) < _MOST_PARTS:
                outcome = "skipped" if result.outcome.startswith("skipped") else result.outcome
                self.tools.append((str(one_line(_tool_of(change), TITLE)), outcome, ended))

    def _add_output(self, output: RecordedOutput) -> None:
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
        tokens = None
        if step.model_calls:
            tokens = StepTokens(input=_drop_unknown(step.input_tokens), output=_drop_unknown(step.output_tokens))
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
            tokens=tokens,
            cost=None if step.cost is None else CostSchema(amount=f"{step.cost:f}", currency=step.currency),
            level=step.level,
            error=step.error,
            effect=_effect_of(step),
            place=None,
            reviewed=step.is_reviewed,
        )


def _tool_of(change: history.CallEnded) -> str:
    if change.intent is not None:
        return change.intent.tool_name
    requested = "" if change.requested is None else change.requested.name
    return requested if requested.startswith(_DELEGATING) else _DELEGATING


def _effect_of(step: history.RecordedExecution) -> Effect | None:
    """Return what is known of its calls; None: it made none."""
    if step.has_unknown or (step.is_ended and step.open_calls):
        return "unknown"
    if step.is_repeated:
        return "repeated"
    return "recorded" if step.has_calls else None


def _drop_unknown(tokens: int) -> int | None:
    return None if tokens < 0 else tokens
