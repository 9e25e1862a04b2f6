"""What scenarios share: scripts by task, waits, a listener that keeps all it hears, marks on the disk."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from ensemble_ray import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    EnsembleError,
    EnsembleListener,
    ExitReason,
    FileChangedEvent,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    LoopIterationCompletedEvent,
    RunState,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskInputEvent,
    TaskStartEvent,
    TokenEvent,
    ToolCallEvent,
)
from ensemble_ray.record.runs import RunDirectory, read_facts
from ensemble_ray.testing import ScriptedCall

#: Longest time to wait for what must come, s; a test that needs it has failed.
PATIENCE_S = 90.0

T = TypeVar("T")


def prompt_of(asked: ScriptedCall) -> str:
    """The user prompt of a model call."""
    return asked.messages[1].content or ""


def task_of(asked: ScriptedCall) -> str:
    """The description of the task that a model call belongs to."""
    return prompt_of(asked).partition("## Task\n")[2].partition("\n")[0]


def by_task(**answers: object) -> Callable[[ScriptedCall], object]:
    """One entry for a script that answers by task description; a callable is called with the call."""

    def entry(asked: ScriptedCall) -> object:
        chosen = answers[task_of(asked)]
        return chosen(asked) if callable(chosen) else chosen

    return entry


def wait_for(happened: threading.Event) -> None:
    """Wait for something that must come.

    Raises:
        TimeoutError: it did not.
    """
    if not happened.wait(PATIENCE_S):
        raise TimeoutError("it never happened")


def until(is_so: Callable[[], T], what: str) -> T:
    """Wait until that gives something; for states that nobody announces.

    Raises:
        TimeoutError: it did not.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {what}")
        time.sleep(0.005)
    return found


class Forever:
    """An entry of a script that never answers, and says when it was asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    async def __call__(self, _asked: ScriptedCall) -> str:
        self.asked.set()
        await asyncio.Event().wait()
        return "never"


def recorded_state(home: str, run_id: str) -> RunState:
    """Return how the record says that a run stands."""
    return RunDirectory(Path(home), run_id).state()


@dataclass(frozen=True)
class Marks:
    """Lines in a file: what happened in whatever process, in order. Travels; `wait` is a gate between processes."""

    path: Path

    def add(self, line: object) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    @property
    def lines(self) -> list[str]:
        """All lines so far."""
        return self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []

    def wait(self, line: object) -> None:
        """Return when that line is there.

        Raises:
            TimeoutError: it never came.
        """
        until(lambda: str(line) in self.lines, f"the mark {line!r}")


def until_recorded(home: str, run_id: str, stimulus: str) -> None:
    """Return when the scheduler of a run has taken a stimulus of that class, as the run's record shows.

    Raises:
        TimeoutError: it never did.
    """

    def is_recorded() -> bool:
        try:
            facts = read_facts(run_id, Path(home))
        except EnsembleError:  # nothing has been written yet
            return False
        return any(fact.data.to_data().get("type") == stimulus for fact in facts)

    until(is_recorded, f"{stimulus} in the record of {run_id}")


def told_by_us(records: Sequence[logging.LogRecord], level: int = logging.NOTSET) -> list[logging.LogRecord]:
    """Records of the library alone, from that level on: others of a process, its garbage too, log when they like."""
    ours = [record for record in records if record.name.partition(".")[0] in {"ensemble_ray", "actors"}]
    return [record for record in ours if record.levelno >= level]


class Watcher(EnsembleListener):
    """Keeps everything it hears: (listener method, event or arguments), in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []
        self.threads: set[str] = set()

    def _hear(self, method: str, what: object) -> None:
        self.threads.add(threading.current_thread().name)
        self.heard.append((method, what))

    @property
    def methods(self) -> list[str]:
        """Names of the methods that were called, in order."""
        return [method for method, _ in self.heard]

    @property
    def lines(self) -> list[str]:
        """Task events in short: `start writing`, `complete writing`, `failed writing`."""
        short = {"on_task_start": "start", "on_task_complete": "complete", "on_task_failed": "failed"}
        return [f"{short[method]} {event.task_description}" for method, event in self.heard if method in short]  # type: ignore[attr-defined]

    def of(self, kind: type[T]) -> list[T]:
        """The events of one type, in order."""
        return [event for _, event in self.heard if isinstance(event, kind)]

    def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> None:
        self._hear("on_ensemble_started", (ensemble_id, workflow, total_tasks))

    def on_ensemble_completed(self, ensemble_id: str, total_duration: timedelta, exit_reason: ExitReason) -> None:  # type: ignore[override]
        self._hear("on_ensemble_completed", (ensemble_id, total_duration, exit_reason))

    def on_task_start(self, event: TaskStartEvent) -> None:
        self._hear("on_task_start", event)

    def on_task_complete(self, event: TaskCompleteEvent) -> None:
        self._hear("on_task_complete", event)

    def on_task_failed(self, event: TaskFailedEvent) -> None:
        self._hear("on_task_failed", event)

    def on_tool_call(self, event: ToolCallEvent) -> None:
        self._hear("on_tool_call", event)

    def on_task_input(self, event: TaskInputEvent) -> None:
        self._hear("on_task_input", event)

    def on_llm_iteration_started(self, event: LlmIterationStartedEvent) -> None:
        self._hear("on_llm_iteration_started", event)

    def on_llm_iteration_completed(self, event: LlmIterationCompletedEvent) -> None:
        self._hear("on_llm_iteration_completed", event)

    def on_token(self, event: TokenEvent) -> None:
        self._hear("on_token", event)

    def on_delegation_started(self, event: DelegationStartedEvent) -> None:
        self._hear("on_delegation_started", event)

    def on_delegation_completed(self, event: DelegationCompletedEvent) -> None:
        self._hear("on_delegation_completed", event)

    def on_delegation_failed(self, event: DelegationFailedEvent) -> None:
        self._hear("on_delegation_failed", event)

    def on_file_changed(self, event: FileChangedEvent) -> None:
        self._hear("on_file_changed", event)

    def on_loop_iteration_completed(self, event: LoopIterationCompletedEvent) -> None:
        self._hear("on_loop_iteration_completed", event)

    def on_graph_state_completed(self, event: GraphStateCompletedEvent) -> None:
        self._hear("on_graph_state_completed", event)
