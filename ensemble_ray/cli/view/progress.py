"""What is shown of a run while it goes on. Pure; every event comes with its time.

In: the run's events in order, and seconds since the start. Out: lines of text, and the block that a terminal redraws.
`Progress` is what the display knows of it; `TaskProgress` follows runs of a plan, `ItemProgress` runs over many items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from ensemble_ray.cli.view.terminal import count_noun, screen_line
from ensemble_ray.cli.view.unit_progress import UnitProgress
from ensemble_ray.events import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    EnsembleStartedEvent,
    Event,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
    ToolCallEvent,
)
from ensemble_ray.text.foreign_text import escape_controls
from ensemble_ray.values.ids import delegating_call, is_inside_unit, node_key, task_instance

#: Running tasks that the block lists.
_SHOWN_TASKS = 8
#: Starts of tasks get lines of their own up to this many tasks.
_SHOWN_STARTS = 50
#: Ends of tasks get lines of their own up to this many; after that one gets a line every so often, s.
_SHOWN_ENDS = 1000
_EVERY_S = 2.0
_LABEL, _ROLE, _TEXT = 32, 24, 200
#: What an agent is asked, and what it answers.
_BRIEF = 80
_DelegationEvent = DelegationStartedEvent | DelegationCompletedEvent | DelegationFailedEvent
_TaskEvent = TaskStartEvent | TaskCompleteEvent | TaskFailedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What a terminal redraws: a head line with a bar, the pace, the work that runs."""

    #: stands right of the bar
    counts: str
    #: parts that have ended, and of how many; None: no bar
    bar: tuple[int, int] | None
    #: empty: no line
    pace: str = ""
    lines: Sequence[str] = ()
    #: whether no task has begun, so that a note may stand in their place
    is_idle: bool = False


class Progress(Protocol):
    """What is shown of one run. Times are seconds since its start."""

    title: str

    @property
    def event_types(self) -> Sequence[type[Event]]:
        """Events that it needs; no other ones are made for it."""
        ...

    def receive(self, event: Event, at: float, *, is_live: bool = False) -> str | None:
        """Count the next event and return its line, if it gets one; with `is_live` a block shows most of it."""
        ...

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:
        """Count what was done before the run went on: tasks, and how many of them were of items."""
        ...

    def set_total(self, total: int) -> None:
        """Take over how much there is to do."""
        ...

    def counts(self, *, is_complete: bool = False) -> str:
        """Return in words what is done; `is_complete`: the run has taken all that there was."""
        ...

    def pace(self, at: float) -> str:
        """Return in words how quickly it goes and what it took."""
        ...

    def block(self, at: float) -> Block:
        """Return the block of that moment."""
        ...


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


def _depth_of(event: _DelegationEvent) -> int:
    """Return how deep a delegation is nested; 1: asked for by a task of the plan."""
    depth, asker = 1, delegating_call(event.instance)
    while asker is not None:
        depth, asker = depth + 1, delegating_call(asker)
    return depth


def label_of(event: _TaskEvent) -> str:
    """Return the task's key, as plans and traces show it."""
    return node_key(event.instance) or f"task-{event.task_index}"


class TaskProgress:
    """`Progress` of a run of a plan: its tasks, their model calls, the agents that work for others."""

    event_types = (
        EnsembleStartedEvent,
        TaskStartEvent,
        TaskCompleteEvent,
        TaskFailedEvent,
        ToolCallEvent,
        DelegationStartedEvent,
        DelegationCompletedEvent,
        DelegationFailedEvent,
        LlmIterationStartedEvent,
        LlmIterationCompletedEvent,
        LoopIterationCompletedEvent,
        GraphStateCompletedEvent,
    )

    def __init__(self, title: str = "", units: UnitProgress | None = None) -> None:
        self.title = escape_controls(title)
        self._units = units or UnitProgress()
        #: whether tasks run more than once, so that nobody knows how many executions there will be
        self._has_units = False
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
        #: when the last completed task got a line
        self._shown_at = 0.0

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:  # noqa: ARG002  for runs over items
        """Count the tasks that were done before the run went on."""
        self.done += tasks

    def set_total(self, total: int) -> None:
        """Take over how many tasks there are; 0: that is not known before they are made."""
        self.total_tasks = total

    def receive(self, event: Event, at: float, *, is_live: bool = False) -> str | None:
        """Count the next event and return its line; in a block only failures get one."""
        is_refused = isinstance(event, DelegationFailedEvent) and self._is_refused(event)
        self._count(event, at)
        of_unit = self._units.receive(event)
        if of_unit is not None and not is_live:
            return of_unit
        match event:
            case TaskFailedEvent():  # the run's error, or the delegation, says why
                return f"failed   {self._ended_of_total()}  {_describe_task(event)}"
            case DelegationFailedEvent():
                return _describe_delegation(event, is_refused=is_refused)
            case _ if is_live:
                return None
            case EnsembleStartedEvent():
                total = f"{count_noun(event.total_tasks, 'task')}, " if event.total_tasks else ""
                return f"{self.title}: {total}{event.workflow}"
            case TaskStartEvent() if max(self.total_tasks, self.done) <= _SHOWN_STARTS:
                return f"started  {_describe_task(event)}"
            case DelegationStartedEvent() | DelegationCompletedEvent():
                return _describe_delegation(event)
            case TaskCompleteEvent() if self._is_due(at):
                took = f"in {_seconds(event.duration)}; {self.pace(at)}"
                return f"done     {self._ended_of_total()}  {_describe_task(event)} {took}"
            case _:
                return None

    def _is_due(self, at: float) -> bool:
        """Whether a completed task gets a line: the first ones do, of a hundred thousand one every few seconds."""
        if self.done > _SHOWN_ENDS and at - self._shown_at < _EVERY_S:
            return False
        self._shown_at = at
        return True

    def _count(self, event: Event, at: float) -> None:
        match event:
            case EnsembleStartedEvent():
                self.set_total(event.total_tasks)
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
                self._receive_delegation(event, at)
            case _:
                pass

    def _begin(self, event: TaskStartEvent, at: float) -> None:
        key = event.instance or label_of(event)
        self._running[key] = RunningTask(key=key, label=label_of(event), agent_role=event.agent_role, started_at=at)
        if is_inside_unit(event.instance):
            self._has_units, self.total_tasks = True, 0
        if self.total_tasks:  # of a map-reduce only the items are known before its reduces are made
            self.total_tasks = max(self.total_tasks, self.done + self.failed + len(self._running))
        if not event.agent_role.startswith("("):  # "(deterministic)": a handler, and no agent
            self._agents.add(event.agent_role)

    def _receive_delegation(self, event: _DelegationEvent, at: float) -> None:
        open_ones = self._delegated.setdefault(task_instance(event.instance), {})
        if isinstance(event, DelegationStartedEvent):
            self.delegations += 1
            self._agents.add(event.worker_role)
            open_ones[event.delegation_id] = RunningDelegation(
                asker_role=event.delegating_agent_role,
                worker_role=event.worker_role,
                depth=_depth_of(event),
                started_at=at,
            )
            return
        if isinstance(event, DelegationFailedEvent):
            if self._is_refused(event):
                self.refusals += 1
            else:
                self.failed_delegations += 1
        open_ones.pop(event.delegation_id, None)

    def _is_refused(self, event: DelegationFailedEvent) -> bool:
        """Return whether no worker was asked. Only what a worker raised has a cause (S-DEL-51), which a record does not tell."""
        open_ones = self._delegated.get(task_instance(event.instance), {})
        return event.cause is None or event.delegation_id not in open_ones

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

    def list_delegations(self, task: RunningTask) -> Sequence[RunningDelegation]:
        """Return the agents that work for a running task, oldest first."""
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
        """Return output tokens per second, from the first model call to now, or to the last answer when nothing is open."""
        if self._first_call_at is None:
            return 0.0
        end = at if self._calls_open else self._last_call_at
        passed_s = end - self._first_call_at
        return self.output_tokens / passed_s if passed_s > 0 else 0.0

    def counts(self, *, is_complete: bool = False) -> str:  # noqa: ARG002  a plan says how many there are
        """Return what is done: `1 of 3 tasks, 1 failed`."""
        total = f" of {self.total_tasks}" if self.total_tasks else ""
        return f"{self.done}{total} tasks" + (f", {self.failed} failed" if self.failed else "")

    def _ended_of_total(self) -> str:
        return f"{self.done + self.failed}" + (f"/{self.total_tasks}" if self.total_tasks else "")

    def pace(self, at: float) -> str:
        """Return model calls, tokens, tool calls and delegations so far."""
        parts = [count_noun(self.model_calls, "model call")]
        if self._calls_open:
            parts[0] += f" (+{self._calls_open} open)"
        # A record does not say when calls begin.
        rate = "" if self.model_calls and self._first_call_at is None else f", {self.tokens_per_s(at):.0f} tokens/s"
        parts.append(f"{self.input_tokens:,} + {self.output_tokens:,} tokens{rate}")
        if self.tool_calls:
            parts.append(count_noun(self.tool_calls, "tool call"))
        if self.delegations or self.refusals:
            outcomes = {"refused": self.refusals, "failed": self.failed_delegations}
            failures = ", ".join(f"{number:,} {what}" for what, number in outcomes.items() if number)
            parts.append(count_noun(self.delegations, "delegation") + (f" ({failures})" if failures else ""))
        return ", ".join(parts)

    def block(self, at: float) -> Block:
        """Return the block of that moment: the first running tasks, and who works for them."""
        running, ended = self.running, self.done + self.failed
        bar = None if self._has_units else (ended, max(self.total_tasks, 1))
        if not (self.total_tasks or running or ended):
            return Block(counts="starting", bar=bar, is_idle=True)
        lines = self._units.lines(task.key for task in running)[:_SHOWN_TASKS]
        lines += [line for task in running[:_SHOWN_TASKS] for line in self._task_lines(task, at)]
        if len(running) > _SHOWN_TASKS:
            lines.append(f"    and {len(running) - _SHOWN_TASKS} more")
        return Block(
            counts=f"{self._ended_of_total()} tasks, {len(running)} running",
            bar=bar,
            pace=f"{self.agents} agents, {self.pace(at)}",
            lines=lines,
            is_idle=not (running or ended),
        )

    def _task_lines(self, task: RunningTask, at: float) -> list[str]:
        """Return the line of a running task, and below it those of the agents that work for it."""
        label, role = screen_line(task.label, _LABEL), screen_line(task.agent_role, _ROLE)
        lines = [f"  \u2022 {label}  {role}  {at - task.started_at:.0f} s"]
        open_ones = self.list_delegations(task)
        for each in open_ones[:_SHOWN_TASKS]:
            roles = f"{screen_line(each.asker_role, _ROLE)} asks {screen_line(each.worker_role, _ROLE)}"
            lines.append(f"  {'  ' * each.depth}\u21b3 {roles}  {at - each.started_at:.0f} s")
        if len(open_ones) > _SHOWN_TASKS:
            lines.append(f"      and {len(open_ones) - _SHOWN_TASKS} more")
        return lines


def _describe_task(event: _TaskEvent) -> str:
    role = screen_line(event.agent_role, _ROLE)
    path = event.instance.rpartition("#")[0] if is_inside_unit(event.instance) else label_of(event)
    return f"{screen_line(path, 2 * _LABEL if '/' in path else _LABEL)} {role if role.startswith('(') else f'({role})'}"


def _describe_delegation(event: _DelegationEvent, *, is_refused: bool = False) -> str:
    """Return what becomes of a delegation, indented by how deep it is."""
    asker, worker = screen_line(event.delegating_agent_role, _ROLE), screen_line(event.worker_role, _ROLE)
    inset = "  " * _depth_of(event)
    match event:
        case DelegationStartedEvent():
            return f"asks     {inset}{asker} -> {worker}: {screen_line(event.task_description, _BRIEF)}"
        case DelegationCompletedEvent():
            answer = screen_line(event.response.raw_output or "", _BRIEF)
            return f"answered {inset}{asker} <- {worker} in {_seconds(event.duration)}: {answer}"
        case DelegationFailedEvent():
            what = "refused" if is_refused else "failed"
            return f"{what:<8} {inset}{asker} -> {worker}: {screen_line(event.failure_reason, _TEXT)}"


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():.1f} s"
