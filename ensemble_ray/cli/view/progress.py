"""How far a run is: events are counted here. Room: cli. Pure; every event comes with its time.

In: the run's events in order, and seconds since the start. Out: counts, running tasks, tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ensemble_ray.events import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    EnsembleStartedEvent,
    Event,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
    ToolCallEvent,
)
from ensemble_ray.values.ids import delegating_call, task_instance

__all__ = ["RunningDelegation", "RunningTask", "Tally", "counted", "depth_of", "label_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTask:
    """A task that has begun."""

    key: str
    label: str
    agent_role: str
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDelegation:
    """An agent that works for another one."""

    asker_role: str
    worker_role: str
    #: 1: for a task of the plan
    depth: int
    started_at: float


def depth_of(event: DelegationStartedEvent | DelegationCompletedEvent | DelegationFailedEvent) -> int:
    """How deep a delegation is nested; 1: asked for by a task of the plan."""
    depth, asker = 1, delegating_call(event.instance)
    while asker is not None:
        depth, asker = depth + 1, delegating_call(asker)
    return depth


def label_of(event: TaskStartEvent | TaskCompleteEvent | TaskFailedEvent) -> str:
    """The task's key, as plans and traces show it."""
    return event.instance.partition("#")[0] or f"task-{event.task_index}"


def counted(number: int, noun: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Tally:
    """The counts of one run. Times are seconds since its start."""

    def __init__(self) -> None:
        self.workflow = ""
        self.total_tasks = 0
        self.done = 0
        self.failed = 0
        self.model_calls = 0
        self.tool_calls = 0
        self.delegations = 0
        self.refusals = 0
        self.failed_delegations = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self._running: dict[str, RunningTask] = {}
        #: by the task of the plan that they are for in the end, then by id
        self._delegated: dict[str, dict[str, RunningDelegation]] = {}
        self._agents: set[str] = set()
        self._calls_open = 0
        self._first_call_at: float | None = None
        self._last_call_at = 0.0

    def is_recorded(self, tasks: int) -> None:
        """So many tasks were done when the run went on."""
        self.done += tasks

    def take(self, event: Event, at: float) -> None:
        """Count the next event."""
        match event:
            case EnsembleStartedEvent():
                self.workflow, self.total_tasks = event.workflow, event.total_tasks
            case TaskStartEvent():
                self._begin(event, at)
            case TaskCompleteEvent():
                self.done += 1
                self._end(event)
            case TaskFailedEvent():
                self.failed += 1
                self._end(event)
            case LlmIterationStartedEvent():
                self._calls_open += 1
                self._first_call_at = at if self._first_call_at is None else self._first_call_at
            case LlmIterationCompletedEvent():
                self._calls_open = max(0, self._calls_open - 1)
                self._last_call_at = at
                self.model_calls += 1
                self.input_tokens += event.input_tokens
                self.output_tokens += event.output_tokens
            case ToolCallEvent():
                self.tool_calls += 1
            case DelegationStartedEvent() | DelegationCompletedEvent() | DelegationFailedEvent():
                self._take_delegation(event, at)
            case _:
                pass

    def _begin(self, event: TaskStartEvent, at: float) -> None:
        key = event.instance or label_of(event)
        self._running[key] = RunningTask(key=key, label=label_of(event), agent_role=event.agent_role, started_at=at)
        if self.total_tasks:  # of a map-reduce only the items are known before its reduces are made
            self.total_tasks = max(self.total_tasks, self.done + self.failed + len(self._running))
        if not event.agent_role.startswith("("):  # "(deterministic)": a handler, and no agent
            self._agents.add(event.agent_role)

    def _take_delegation(
        self, event: DelegationStartedEvent | DelegationCompletedEvent | DelegationFailedEvent, at: float
    ) -> None:
        open_ones = self._delegated.setdefault(task_instance(event.instance), {})
        if isinstance(event, DelegationStartedEvent):
            self.delegations += 1
            self._agents.add(event.worker_role)
            open_ones[event.delegation_id] = RunningDelegation(
                asker_role=event.delegating_agent_role,
                worker_role=event.worker_role,
                depth=depth_of(event),
                started_at=at,
            )
            return
        open_ones.pop(event.delegation_id, None)
        if isinstance(event, DelegationFailedEvent):
            # Only what a worker raised has a cause (S-DEL-51): everything else was refused before anybody was asked.
            if event.cause is None:
                self.refusals += 1
            else:
                self.failed_delegations += 1

    def _end(self, event: TaskCompleteEvent | TaskFailedEvent) -> None:
        key = event.instance or label_of(event)
        self._running.pop(key, None)
        self._delegated.pop(key, None)  # those that were stopped with it have no event of their own
        if not self._running:
            self._calls_open = 0  # a failed call ends without an event of its own

    @property
    def running(self) -> Sequence[RunningTask]:
        """Tasks that have begun and not ended, oldest first."""
        return tuple(self._running.values())

    def delegated(self, task: RunningTask) -> Sequence[RunningDelegation]:
        """Agents that work for a running task, oldest first."""
        return tuple(self._delegated.get(task.key, {}).values())

    @property
    def agents(self) -> int:
        """Agents that have worked."""
        return len(self._agents)

    @property
    def calls_open(self) -> int:
        """Model calls in flight."""
        return self._calls_open

    def tokens_per_s(self, at: float) -> float:
        """Output tokens per second, from the first model call to now, or to the last answer when nothing is open."""
        if self._first_call_at is None:
            return 0.0
        end = at if self._calls_open else self._last_call_at
        passed_s = end - self._first_call_at
        return self.output_tokens / passed_s if passed_s > 0 else 0.0

    def summary(self, at: float) -> str:
        """The counts in one line."""
        parts = [counted(self.model_calls, "model call")]
        if self._calls_open:
            parts[0] += f" (+{self._calls_open} open)"
        parts.append(f"{self.input_tokens:,} + {self.output_tokens:,} tokens, {self.tokens_per_s(at):.0f} tokens/s")
        if self.tool_calls:
            parts.append(counted(self.tool_calls, "tool call"))
        if self.delegations or self.refusals:
            outcomes = {"refused": self.refusals, "failed": self.failed_delegations}
            told = ", ".join(f"{number:,} {what}" for what, number in outcomes.items() if number)
            parts.append(counted(self.delegations, "delegation") + (f" ({told})" if told else ""))
        return ", ".join(parts)
