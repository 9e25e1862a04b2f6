"""What is shown of a run while it goes on. Pure; every event comes with its time.

In: the run's events in order, and seconds since the start. Out: lines of text, and the block that a terminal redraws.
`Progress` is what the display knows of it; `TaskProgress` follows runs of a plan, `ItemProgress` runs over many items.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from ensemble_ray.cli.view.terminal import count_noun, is_terminal, say, screen_line
from ensemble_ray.definition.loop import Loop
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
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.process.context import NOTICES
from ensemble_ray.text.foreign_text import escape_controls
from ensemble_ray.values.ids import delegating_call, is_inside_unit, node_key, task_instance

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ensemble_ray.definition.ensemble import EnsembleDefinition


_NAME = 32


class UnitProgress:
    """What is shown of the units of a run.

    Args:
        caps: Most iterations of loops and steps of the graph, by `loop:NAME` and `graph:NAME`; others come with events.
        start: State that the graph begins with.
    """

    def __init__(self, caps: Mapping[str, int] | None = None, start: str = "") -> None:
        self._caps = dict(caps or {})
        #: by the unit: the state that routing chose last
        self._states: dict[str, str] = {}
        self._start = start

    @classmethod
    def of(cls, definition: EnsembleDefinition) -> UnitProgress:
        """Return one that knows the caps of a team's loops and graph from the start."""
        loops = [*definition.loops, *(loop for phase in definition.phases for loop in phase.loops)]
        caps: dict[str, int] = {}
        graph = definition.graph
        if graph is not None:
            caps[f"graph:{graph.name}"] = graph.max_steps
            loops += [state for state in graph.states.values() if isinstance(state, Loop)]
        caps.update({f"loop:{loop.name}": loop.max_iterations for loop in loops if loop.max_iterations is not None})
        return cls(caps, "" if graph is None else graph.start)

    def receive(self, event: Event) -> str | None:
        """Take over the end of an iteration or a step; return its line."""
        match event:
            case LoopIterationCompletedEvent():
                self._caps[f"loop:{event.loop_name}"] = event.max_iterations
                took = event.iteration_duration.total_seconds()
                done = f"iteration {event.iteration_number} of at most {event.max_iterations}"
                return f"loop     {screen_line(event.loop_name, _NAME)}: {done} in {took:.1f} s"
            case GraphStateCompletedEvent():
                self._caps[f"graph:{event.graph_name}"] = event.max_steps
                self._states[f"graph:{event.graph_name}"] = event.next_state
                took = event.step_duration.total_seconds()
                led = f"{screen_line(event.state_name, _NAME)} -> {screen_line(event.next_state, _NAME)}"
                done = f"{led}, step {event.step_number} of at most {event.max_steps}"
                return f"graph    {screen_line(event.graph_name, _NAME)}: {done} in {took:.1f} s"
            case _:
                return None

    def lines(self, running: Iterable[str]) -> list[str]:
        """Return a line for each unit in which a task runs, in the order of those tasks."""
        segments = (segment for instance in running for segment in instance.split("/")[:-1])
        return [line for segment in dict.fromkeys(segments) for line in self._describe(segment)]

    def _describe(self, segment: str) -> Iterator[str]:
        key, _, occurrence = segment.rpartition("#")
        kind, _, name = key.partition(":")
        shown = screen_line(name, _NAME)
        number = int(occurrence) + 1 if occurrence.isdecimal() else 1
        cap = self._caps.get(key)
        match kind:
            case "loop":
                yield f"  loop {shown}: iteration {number}" + (f" of at most {cap}" if cap else "")
            case "graph":
                state = self._states.get(key, self._start)
                where = f"state {screen_line(state, _NAME)}, " if state else ""
                yield f"  graph {shown}: {where}step {number}" + (f" of at most {cap}" if cap else "")
            case "phase":
                yield f"  phase {shown}: attempt {number}"
            case _:
                return


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


_TEXT_DISPLAY = 200
#: Warnings of one kind that are shown.
_SHOWN_WARNINGS = 20
_NUMBER = re.compile(r"\d+")
#: What the library logs of a failure that the command line shows in its own words.
_SHOWN_ANYWAY = {
    "Delegation by '%s' to '%s' failed: %s",
    "Run %s: %s failed and is left out%s",
}


class Display:
    """Shows one run: `with Display(...) as display`, and `display.listener` among the run's listeners.

    Args:
        progress: What is shown.
        is_quiet: Show nothing.
        count: Counts what there is to do, beside the run; it may take as long as a look through a large file.
        clock: Seconds; for tests.
        is_live: Whether to redraw; default: on a terminal.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        is_quiet: bool = False,
        count: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_live: bool | None = None,
    ) -> None:
        self.listener = _make_listener(self.show, progress.event_types)
        self._progress = progress
        self._is_quiet = is_quiet
        self._is_live = not is_quiet and (is_terminal() if is_live is None else is_live)
        self._count = None if is_quiet else count
        self._clock = clock
        self._began = clock()
        self._note = ""
        self._is_catching_up = False
        self._lock = threading.Lock()
        #: held while events wait for what comes before them
        self._turn = threading.Lock()
        self._live: Any = None
        self._log = _Warnings(self.note_line)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._began

    def __enter__(self) -> Self:
        log = logging.getLogger("ensemble_ray")
        if not log.isEnabledFor(logging.DEBUG):  # with --debug the log itself is shown
            log.addHandler(self._log)
        if self._count is not None:
            threading.Thread(target=self._set_total, args=(self._count,), daemon=True).start()
        if self._is_live:
            from rich.console import Console  # only terminals pay for it
            from rich.live import Live

            self._live = Live(
                get_renderable=self._render,
                console=Console(stderr=True, highlight=False),
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("ensemble_ray").removeHandler(self._log)
        self._log.show_counts()
        if self._live is not None:
            self._live.stop()

    def _set_total(self, count: Callable[[], int]) -> None:
        with contextlib.suppress(OSError):  # the run says what is wrong with its items
            total = count()
            with self._lock:
                self._progress.set_total(total)

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Let events wait until the end of the block: a run that goes on shows first what it has on record."""
        with self._turn:
            yield

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:
        """Count and show the tasks that were done before the run went on, so many of them of items."""
        with self._lock:
            self._progress.add_recorded(tasks, items=items)
        if tasks:
            self.note_line(f"{count_noun(tasks, 'task')} from the record")

    def note(self, text: str) -> None:
        """Show what is going on besides tasks; the newest note stands in the block."""
        self._note = escape_controls(text)
        if self._live is None:
            self.note_line(text)

    def note_line(self, text: str) -> None:
        """Show a line that stays."""
        if self._is_quiet:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(escape_controls(text)))  # a text: no markup, no names of emoji
        else:
            say(text)

    def summary(self, *, is_complete: bool = False) -> str:
        """Return the counts at the end in one line; `is_complete`: the run has taken all that there was."""
        at = self.elapsed_s
        with self._lock:
            return f"{self._progress.counts(is_complete=is_complete)} in {at:.1f} s: {self._progress.pace(at)}"

    @contextlib.contextmanager
    def catch_up(self) -> Generator[None]:
        """Count events inside the block without a line for each: they happened before anybody watched."""
        self._is_catching_up = True
        try:
            yield
        finally:
            self._is_catching_up = False

    def standing(self) -> str:
        """Return the counts so far in one line."""
        with self._lock:
            return self._progress.counts()

    def show(self, event: Event) -> None:
        """Count the next event, and show its line if it gets one."""
        with self._turn:
            at = self.elapsed_s
            with self._lock:
                line = self._progress.receive(event, at, is_live=self._live is not None)
            if line is not None and not self._is_catching_up:
                self.note_line(f"{at:7.1f} s  {line}")

    def _render(self) -> RenderableType:
        """Return the block that a terminal shows."""
        from rich.console import Group  # only terminals pay for it
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        at = self.elapsed_s
        with self._lock:
            block = self._progress.block(at)
        bar = Text("") if block.bar is None else ProgressBar(completed=block.bar[0], total=block.bar[1], width=24)
        head = Table.grid(padding=(0, 1))
        head.add_row(Text(self._progress.title, style="bold"), bar, Text(f"{block.counts}, {at:.0f} s"))
        rows: list[RenderableType] = [head]
        if block.pace:
            rows.append(Text(f"  {block.pace}", style="cyan"))
        rows += [Text(line, style="dim") for line in block.lines]
        if self._note and block.is_idle:
            rows.append(Text(f"  {self._note}", style="dim"))
        return Group(*rows)


def _make_listener(show: Callable[[Event], None], event_types: Sequence[type[Event]]) -> EnsembleListener:
    """Return a listener that overrides the methods of those events alone: no other ones are made and sent for it."""

    def show_start(_listener: object, ensemble_id: str, workflow: str, total_tasks: int) -> None:
        show(EnsembleStartedEvent(ensemble_id=ensemble_id, workflow=workflow, total_tasks=total_tasks))

    def show_event(_listener: object, event: Event) -> None:
        show(event)

    methods = {each.method: show_start if each is EnsembleStartedEvent else show_event for each in event_types}
    listener: EnsembleListener = type("ProgressListener", (EnsembleListener,), methods)()
    return listener


class _Warnings(logging.Handler):
    """Puts the library's warnings and notices among the progress lines."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show
        #: lines by their text without numbers, and by template
        self._shown: dict[str, str] = {}
        self._kinds: defaultdict[str, list[str]] = defaultdict(list)
        #: by shown line: how many more there were like it
        self._more: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Show one. Count those that differ from an earlier one in numbers alone, and those of a kind that has many."""
        template = str(getattr(record, "template", record.msg))
        if record.name == NOTICES:
            self._show(record.getMessage())
        elif record.levelno >= logging.WARNING and template not in _SHOWN_ANYWAY:
            line = f"{record.levelname.lower()}: {screen_line(record.getMessage(), _TEXT_DISPLAY)}"
            text, kind = _NUMBER.sub("#", line), self._kinds[template]
            shown = self._shown.get(text, kind[-1] if len(kind) >= _SHOWN_WARNINGS else "")
            if shown:
                self._more[shown] += 1
                return
            self._shown[text] = line
            kind.append(line)
            self._show(f"  {line}")

    def show_counts(self) -> None:
        """Show how many more there were like a line."""
        for line, count in self._more.items():
            self._show(f"  {count:,} more like {line}")
