"""How far a run is: events are counted here. Room: cli. Pure; every event comes with its time.

In: the run's events in order, and seconds since the start. Out: counts, running tasks, tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ensemble_ray.events import (
    EnsembleStartedEvent,
    Event,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
    ToolCallEvent,
)

__all__ = ["RunningTask", "Tally", "counted", "label_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTask:
    """A task that has begun."""

    label: str
    agent_role: str
    started_at: float


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
        self.input_tokens = 0
        self.output_tokens = 0
        self._running: dict[str, RunningTask] = {}
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
                key = event.instance or label_of(event)
                self._running[key] = RunningTask(label=label_of(event), agent_role=event.agent_role, started_at=at)
                if not event.agent_role.startswith("("):  # "(deterministic)": a handler, and no agent
                    self._agents.add(event.agent_role)
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
            case _:
                pass

    def _end(self, event: TaskCompleteEvent | TaskFailedEvent) -> None:
        self._running.pop(event.instance or label_of(event), None)
        if not self._running:
            self._calls_open = 0  # a failed call ends without an event of its own

    @property
    def running(self) -> Sequence[RunningTask]:
        """Tasks that have begun and not ended, oldest first."""
        return tuple(self._running.values())

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
        return ", ".join(parts)
