"""`Progress` counts events of a run, `Display` shows lines or a block that is redrawn."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec import Struct

from ensemble_ray import events
from ensemble_ray.cli.view.terminal import count_noun, is_terminal, screen_line, write_note
from ensemble_ray.definition.loop import Loop
from ensemble_ray.errors import message_of
from ensemble_ray.events import Event
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.process.context import NOTICES
from ensemble_ray.record.identity.definition import is_direct, is_of_items
from ensemble_ray.text.foreign_text import escape_controls
from ensemble_ray.values.ids import delegating_call, is_inside_unit, node_key, task_instance

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun

_NAME = 32
_SHOWN_TASKS = 8  # of the block
_SHOWN_STARTS = 50  # each start of a task gets a line up to this many tasks
_SHOWN_ENDS = 1000  # later ends get a line every `_EVERY_S` seconds
_EVERY_S = 2.0
_ITEMS_EVERY_S = 10.0
_LABEL, _ROLE, _TEXT = 32, 24, 200
_BRIEF = 80  # of a delegated task, and of its answer
_SHOWN_WARNINGS = 20  # of one kind
_NUMBER = re.compile(r"\d+")
#: templates of log messages
_REPORTED_ELSEWHERE = {"Delegation by '%s' to '%s' failed: %s", "Run %s: %s failed and is left out%s"}
_DelegationEvent = events.DelegationStartedEvent | events.DelegationCompletedEvent | events.DelegationFailedEvent
_TaskEvent = events.TaskStartEvent | events.TaskCompleteEvent | events.TaskFailedEvent


class UnitProgress:
    def __init__(self, caps: Mapping[str, int] | None = None, start: str = "") -> None:
        self._caps = dict(caps or {})
        self._states: dict[str, str] = {}  # by graph: the state that routing chose last
        self._start = start

    @classmethod
    def of(cls, definition: EnsembleDefinition) -> UnitProgress:
        loops = [*definition.loops, *(loop for phase in definition.phases for loop in phase.loops)]
        caps: dict[str, int] = {}
        graph = definition.graph
        if graph is not None:
            caps[f"graph:{graph.name}"] = graph.max_steps
            loops += [state for state in graph.states.values() if isinstance(state, Loop)]
        caps.update({f"loop:{loop.name}": loop.max_iterations for loop in loops if loop.max_iterations is not None})
        return cls(caps, "" if graph is None else graph.start)

    def receive(self, event: Event) -> str | None:
        match event:
            case events.LoopIterationCompletedEvent():
                self._caps[f"loop:{event.loop_name}"] = event.max_iterations
                took = event.iteration_duration.total_seconds()
                done = f"iteration {event.iteration_number} of at most {event.max_iterations}"
                return f"loop     {screen_line(event.loop_name, _NAME)}: {done} in {took:.1f} s"
            case events.GraphStateCompletedEvent():
                self._caps[f"graph:{event.graph_name}"] = event.max_steps
                self._states[f"graph:{event.graph_name}"] = event.next_state
                took = event.step_duration.total_seconds()
                led = f"{screen_line(event.state_name, _NAME)} -> {screen_line(event.next_state, _NAME)}"
                done = f"{led}, step {event.step_number} of at most {event.max_steps}"
                return f"graph    {screen_line(event.graph_name, _NAME)}: {done} in {took:.1f} s"
            case _:
                return None

    def lines(self, running: Iterable[str]) -> list[str]:
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


class Block(Struct, frozen=True, kw_only=True):
    """The part of the terminal that is redrawn."""

    counts: str
    bar: tuple[int, int] | None  # ended parts and their total; None: no bar
    pace: str = ""
    lines: Sequence[str] = ()
    is_idle: bool = False  # no task has started; a note may be shown instead


class RunningTask(NamedTuple):
    key: str
    label: str
    agent_role: str
    started_at: float


class RunningDelegation(NamedTuple):
    asker_role: str
    worker_role: str
    depth: int  # 1: delegated by a task of the plan
    started_at: float


class TaskProgress:
    """Counts of a run of tasks. Times are seconds since its start; `is_live`: a block shows most events."""

    event_types = (
        events.EnsembleStartedEvent, events.TaskStartEvent, events.TaskCompleteEvent, events.TaskFailedEvent,
        events.ToolCallEvent, events.DelegationStartedEvent, events.DelegationCompletedEvent,
        events.DelegationFailedEvent, events.LlmIterationStartedEvent, events.LlmIterationCompletedEvent,
        events.LoopIterationCompletedEvent, events.GraphStateCompletedEvent,
    )  # fmt: skip

    def __init__(self, title: str = "", units: UnitProgress | None = None) -> None:
        self.title = escape_controls(title)
        self._units = units or UnitProgress()
        self._has_units = False  # tasks may run more than once, so that the number of executions is unknown
        self.total_tasks = self.done = self.failed = 0
        self.model_calls = self.tool_calls = self.calls_open = self.input_tokens = self.output_tokens = 0
        self.reused = 0  # answers of earlier runs
        self.delegations = self.refusals = self.failed_delegations = 0
        self._running: dict[str, RunningTask] = {}
        self._ended: set[str] = set()
        #: by the task of the plan for which they work, then by id
        self._delegated: dict[str, dict[str, RunningDelegation]] = {}
        self._agents: set[str] = set()
        self._first_call_at: float | None = None
        self._last_call_at = self._shown_at = 0.0

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:  # noqa: ARG002  only runs over items use it
        self.done += tasks

    def set_total(self, total: int) -> None:
        """0: unknown until they are created."""
        self.total_tasks = total

    def receive(self, event: Event, at: float, *, is_live: bool = False) -> str | None:
        is_refused = isinstance(event, events.DelegationFailedEvent) and self._is_refused(event)
        self._count(event, at)
        of_unit = self._units.receive(event)
        if of_unit is not None and not is_live:
            return of_unit
        match event:
            case events.TaskFailedEvent():  # the run's error or the delegation has the reason
                return f"failed   {self._ended_of_total()}  {_describe_task(event)}"
            case events.DelegationFailedEvent():
                return _describe_delegation(event, is_refused=is_refused)
            case _ if is_live:
                return None
            case events.EnsembleStartedEvent():
                total = f"{count_noun(event.total_tasks, 'task')}, " if event.total_tasks else ""
                return f"{self.title}: {total}{event.workflow}"
            case events.TaskStartEvent() if max(self.total_tasks, self.done) <= _SHOWN_STARTS:
                return f"started  {_describe_task(event)}"
            case events.DelegationStartedEvent() | events.DelegationCompletedEvent():
                return _describe_delegation(event)
            case events.TaskCompleteEvent() if self.done <= _SHOWN_ENDS or at - self._shown_at >= _EVERY_S:
                self._shown_at = at
                took = f"in {_seconds(event.duration)}; {self.pace(at)}"
                return f"done     {self._ended_of_total()}  {_describe_task(event)} {took}"
            case _:
                return None

    def _count(self, event: Event, at: float) -> None:
        match event:
            case events.EnsembleStartedEvent():
                self.set_total(event.total_tasks)
            case events.TaskStartEvent():
                self._begin(event, at)
            case events.TaskCompleteEvent():
                self.done += self._end(event)
            case events.TaskFailedEvent():
                self.failed += self._end(event)
            case events.LlmIterationStartedEvent():
                self.calls_open += 1
                self._first_call_at = at if self._first_call_at is None else self._first_call_at
            case events.LlmIterationCompletedEvent():
                self.calls_open = max(0, self.calls_open - 1)
                self._last_call_at = at
                if event.reused:
                    self.reused += 1
                else:
                    self.model_calls += 1
                self.input_tokens += event.input_tokens
                self.output_tokens += event.output_tokens
            case events.ToolCallEvent():
                self.tool_calls += 1
            case events.DelegationStartedEvent() | events.DelegationCompletedEvent() | events.DelegationFailedEvent():
                self._receive_delegation(event, at)
            case _:
                pass

    def _begin(self, event: events.TaskStartEvent, at: float) -> None:
        key = event.instance or label_of(event)
        self._running[key] = RunningTask(key, label_of(event), event.agent_role, at)
        if is_inside_unit(event.instance):
            self._has_units, self.total_tasks = True, 0
        if self.total_tasks:  # a map-reduce knows its items before its reduces
            self.total_tasks = max(self.total_tasks, self.done + self.failed + len(self._running))
        if not event.agent_role.startswith("("):  # "(deterministic)": a handler instead of an agent
            self._agents.add(event.agent_role)

    def _receive_delegation(self, event: _DelegationEvent, at: float) -> None:
        open_ones = self._delegated.setdefault(task_instance(event.instance), {})
        if isinstance(event, events.DelegationStartedEvent):
            self.delegations += 1
            self._agents.add(event.worker_role)
            roles = event.delegating_agent_role, event.worker_role
            open_ones[event.delegation_id] = RunningDelegation(*roles, _depth_of(event), at)
            return
        if isinstance(event, events.DelegationFailedEvent):
            if self._is_refused(event):
                self.refusals += 1
            else:
                self.failed_delegations += 1
        open_ones.pop(event.delegation_id, None)

    def _is_refused(self, event: events.DelegationFailedEvent) -> bool:
        """Only an error of a worker has a cause (S-DEL-51)."""
        open_ones = self._delegated.get(task_instance(event.instance), {})
        return event.cause is None or event.delegation_id not in open_ones

    def _end(self, event: events.TaskCompleteEvent | events.TaskFailedEvent) -> bool:
        """Return whether the end is new: after a crash, its event may arrive again."""
        key = event.instance or label_of(event)
        is_new = not event.instance or key not in self._ended
        self._ended.add(key)
        self._running.pop(key, None)
        self._delegated.pop(key, None)  # their ends have no event
        if not self._running:
            self.calls_open = 0  # a failed call has no event
        return is_new

    @property
    def running(self) -> Sequence[RunningTask]:
        return tuple(self._running.values())

    @property
    def agents(self) -> int:
        return len(self._agents)

    def list_delegations(self, task: RunningTask) -> Sequence[RunningDelegation]:
        return tuple(self._delegated.get(task.key, {}).values())

    def tokens_per_s(self, at: float) -> float:
        """Return the rate from the first model call to now, or to the last answer if no call is open."""
        if self._first_call_at is None:
            return 0.0
        passed_s = (at if self.calls_open else self._last_call_at) - self._first_call_at
        return self.output_tokens / passed_s if passed_s > 0 else 0.0

    def counts(self, *, is_complete: bool = False) -> str:  # noqa: ARG002  a plan says how many there are
        total = f" of {self.total_tasks}" if self.total_tasks else ""
        return f"{self.done}{total} tasks" + (f", {self.failed} failed" if self.failed else "")

    def _ended_of_total(self) -> str:
        return f"{self.done + self.failed}" + (f"/{self.total_tasks}" if self.total_tasks else "")

    def pace(self, at: float) -> str:
        parts = [count_noun(self.model_calls, "model call")]
        if self.calls_open:
            parts[0] += f" (+{self.calls_open} open)"
        # A record has no start times of calls.
        rate = "" if self.model_calls and self._first_call_at is None else f", {self.tokens_per_s(at):.0f} tokens/s"
        parts.append(f"{self.input_tokens:,} + {self.output_tokens:,} tokens{rate}")
        if self.reused:
            parts.append(count_noun(self.reused, "reused answer"))
        if self.tool_calls:
            parts.append(count_noun(self.tool_calls, "tool call"))
        if self.delegations or self.refusals:
            outcomes = {"refused": self.refusals, "failed": self.failed_delegations}
            failures = ", ".join(f"{number:,} {what}" for what, number in outcomes.items() if number)
            parts.append(count_noun(self.delegations, "delegation") + (f" ({failures})" if failures else ""))
        return ", ".join(parts)

    def block(self, at: float) -> Block:
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
        label, role = screen_line(task.label, _LABEL), screen_line(task.agent_role, _ROLE)
        open_ones = self.list_delegations(task)
        lines = [f"  \u2022 {label}  {role}  {at - task.started_at:.0f} s"]
        for each in open_ones[:_SHOWN_TASKS]:
            roles = f"{screen_line(each.asker_role, _ROLE)} asks {screen_line(each.worker_role, _ROLE)}"
            lines.append(f"  {'  ' * each.depth}\u21b3 {roles}  {at - each.started_at:.0f} s")
        if len(open_ones) > _SHOWN_TASKS:
            lines.append(f"      and {len(open_ones) - _SHOWN_TASKS} more")
        return lines


def label_of(event: _TaskEvent) -> str:
    return node_key(event.instance) or f"task-{event.task_index}"


def _depth_of(event: _DelegationEvent) -> int:
    depth, asker = 1, delegating_call(event.instance)
    while asker is not None:
        depth, asker = depth + 1, delegating_call(asker)
    return depth


def _describe_task(event: _TaskEvent) -> str:
    role = screen_line(event.agent_role, _ROLE)
    path = event.instance.rpartition("#")[0] if is_inside_unit(event.instance) else label_of(event)
    return f"{screen_line(path, 2 * _LABEL if '/' in path else _LABEL)} {role if role.startswith('(') else f'({role})'}"


def _describe_delegation(event: _DelegationEvent, *, is_refused: bool = False) -> str:
    asker, worker = screen_line(event.delegating_agent_role, _ROLE), screen_line(event.worker_role, _ROLE)
    inset = "  " * _depth_of(event)
    match event:
        case events.DelegationStartedEvent():
            return f"asks     {inset}{asker} -> {worker}: {screen_line(event.task_description, _BRIEF)}"
        case events.DelegationCompletedEvent():
            answer = screen_line(event.response.raw_output or "", _BRIEF)
            return f"answered {inset}{asker} <- {worker} in {_seconds(event.duration)}: {answer}"
        case events.DelegationFailedEvent():
            what = "refused" if is_refused else "failed"
            return f"{what:<8} {inset}{asker} -> {worker}: {screen_line(event.failure_reason, _TEXT)}"


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():.1f} s"


class Display:
    """Shows one run.

    `count` returns the number of items; it may read a large file, and runs in a thread beside the run.
    """

    def __init__(
        self,
        progress: TaskProgress | ItemProgress,
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
        self._turn = threading.Lock()  # serializes events; held while they must wait for recorded ones
        self._live: Any = None
        self._log = _Warnings(self.note_line)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def __enter__(self) -> Self:
        log = logging.getLogger("ensemble_ray")
        if not log.isEnabledFor(logging.DEBUG):  # with --debug, the log is shown instead
            log.addHandler(self._log)
        if (count := self._count) is not None:

            def set_total() -> None:
                with contextlib.suppress(OSError):  # the run reports problems of its items
                    total = count()
                    with self._lock:
                        self._progress.set_total(total)

            threading.Thread(target=set_total, daemon=True).start()
        if self._is_live:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            live = partial(Live, refresh_per_second=8, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live = live(get_renderable=self._render, console=console)
            self._live.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("ensemble_ray").removeHandler(self._log)
        self._log.show_counts()
        if self._live is not None:
            self._live.stop()

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Hold back events: a resumed run shows its recorded work first."""
        with self._turn:
            yield

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:
        with self._lock:
            self._progress.add_recorded(tasks, items=items)
        if tasks:
            self.note_line(f"{count_noun(tasks, 'task')} from the record")

    def note(self, text: str) -> None:
        """Show activity other than tasks."""
        self._note = escape_controls(text)
        if self._live is None:
            self.note_line(text)

    def note_line(self, text: str) -> None:
        if self._is_quiet:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(escape_controls(text)))  # `Text`: no markup or emoji codes
        else:
            write_note(text)

    def summary(self, *, is_complete: bool = False) -> str:
        at = self.elapsed_s
        with self._lock:
            return f"{self._progress.counts(is_complete=is_complete)} in {at:.1f} s: {self._progress.pace(at)}"

    @contextlib.contextmanager
    def catch_up(self) -> Generator[None]:
        """Count events without showing their lines."""
        self._is_catching_up = True
        try:
            yield
        finally:
            self._is_catching_up = False

    def standing(self) -> str:
        with self._lock:
            return self._progress.counts()

    def show(self, event: Event) -> None:
        with self._turn:
            at = self.elapsed_s
            with self._lock:
                line = self._progress.receive(event, at, is_live=self._live is not None)
            if line is not None and not self._is_catching_up:
                self.note_line(f"{at:7.1f} s  {line}")

    def _render(self) -> RenderableType:
        from rich.console import Group
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
    """Override the methods of these events alone: the run sends no other events to the listener."""

    def show_start(_listener: object, ensemble_id: str, workflow: str, total_tasks: int) -> None:
        show(events.EnsembleStartedEvent(ensemble_id=ensemble_id, workflow=workflow, total_tasks=total_tasks))

    def show_event(_listener: object, event: Event) -> None:
        show(event)

    methods = {each.method: show_start if each is events.EnsembleStartedEvent else show_event for each in event_types}
    listener: EnsembleListener = type("ProgressListener", (EnsembleListener,), methods)()
    return listener


class _Warnings(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show
        self._shown: dict[str, str] = {}  # shown lines by their text without numbers
        self._kinds: defaultdict[str, list[str]] = defaultdict(list)  # shown lines by template
        self._more: Counter[str] = Counter()  # further messages like a shown line

    def emit(self, record: logging.LogRecord) -> None:
        """Count a message if only numbers differ from an earlier one, or its kind has many."""
        template = str(getattr(record, "template", record.msg))
        if record.name == NOTICES:
            self._show(record.getMessage())
        elif record.levelno >= logging.WARNING and template not in _REPORTED_ELSEWHERE:
            line = f"{record.levelname.lower()}: {screen_line(record.getMessage(), _TEXT)}"
            text, kind = _NUMBER.sub("#", line), self._kinds[template]
            shown = self._shown.get(text, kind[-1] if len(kind) >= _SHOWN_WARNINGS else "")
            if shown:
                self._more[shown] += 1
                return
            self._shown[text] = line
            kind.append(line)
            self._show(f"  {line}")

    def show_counts(self) -> None:
        for line, count in self._more.items():
            self._show(f"  {count:,} more like {line}")


_SHOWN_FAILURES = 20


class ItemProgress:
    """`is_scanned`: a scan of a file counts the items while the run works."""

    # There may be a hundred thousand tasks.
    event_types = (
        events.EnsembleStartedEvent, events.TaskStartEvent, events.TaskCompleteEvent, events.TaskFailedEvent,
        events.BatchProgressEvent,
    )  # fmt: skip

    def __init__(self, title: str = "", total: int | None = None, *, is_scanned: bool = False) -> None:
        self.title = escape_controls(title)
        self.total = total
        self._reported_done = self._reported_failed = self.reduces_done = self.running = 0
        self.input_tokens = self.output_tokens = 0
        self.is_direct = False  # one task handled all items (S-MR-82)
        self.shown_failures: set[str] = set()
        self._batches: dict[str, events.BatchProgressEvent] = {}  # the newest event of each
        self._is_scanned = is_scanned
        self._run: MapReduceRun | None = None
        self._recorded = 0  # done before this process resumed the run
        self._first_at: float | None = None
        self._last_at = 0.0
        self._next_line_at = _ITEMS_EVERY_S

    def add_recorded(self, tasks: int, *, items: int = 0) -> None:
        self._reported_done += items
        self.reduces_done += tasks - items
        self._recorded = items

    def follow(self, run: MapReduceRun) -> None:
        """Refused items, and items that run as a loop, have no task event."""
        self._run = run

    @property
    def items_done(self) -> int:
        """By the run's count if it has one: after a crash, an event may arrive twice."""
        if self._run is None or self.is_direct:
            return self._reported_done
        return max(self._recorded, self._run.completed_count)

    @property
    def items_failed(self) -> int:
        return self._reported_failed if self._run is None or self.is_direct else self._run.failed_count

    def set_total(self, total: int) -> None:
        self.total = total

    def receive(self, event: Event, at: float, *, is_live: bool = False) -> str | None:
        self._count(event, at)
        match event:
            case events.TaskFailedEvent() if self._reported_failed <= _SHOWN_FAILURES:
                label = label_of(event)
                self.shown_failures.add(label)
                more = "; further ones are only counted" if self._reported_failed == _SHOWN_FAILURES else ""
                return f"failed   {label}: {screen_line(message_of(event.cause), _TEXT)}{more}"
            case events.EnsembleStartedEvent() if not is_live:
                return self.title + ("" if self.total is None else f": {self.total:,} items")
            case events.BatchProgressEvent() if not is_live:
                shown = screen_line(event.provider_batch or event.batch, _LABEL)
                state = screen_line(event.status if event.state == "submitted" else event.state, _ROLE)
                return f"batch    {shown}: {state}, {event.answered:,} of {event.total:,} answered"
            case events.TaskCompleteEvent() if not is_live and at >= self._next_line_at:
                self._next_line_at = at + _ITEMS_EVERY_S
                return f"{self.counts()}, {self.running:,} running; {self.pace(at)}"
            case _:
                return None

    def _count(self, event: Event, at: float) -> None:
        match event:
            case events.TaskStartEvent():
                self.running += 1
                self._first_at = at if self._first_at is None else self._first_at
            case events.TaskCompleteEvent():
                self._end(at)
                if is_inside_unit(event.instance):
                    pass  # one of several tasks of an item; the run counts the item
                elif is_of_items(event.instance):
                    self._reported_done += 1
                    self.is_direct = is_direct(event.instance)
                else:
                    self.reduces_done += 1
                metrics = event.task_output.metrics
                self._add_tokens(metrics.input_tokens, metrics.output_tokens)
            case events.LlmIterationCompletedEvent():  # outputs of an attached run have no metrics
                self._add_tokens(event.input_tokens, event.output_tokens)
            case events.TaskFailedEvent():
                self._end(at)
                if is_of_items(event.instance):
                    self._reported_failed += 1
                    self.is_direct = is_direct(event.instance)
            case events.BatchProgressEvent():
                self._batches[event.batch] = event
            case _:
                pass

    def _add_tokens(self, sent: int, received: int) -> None:
        self.input_tokens += max(0, sent)
        self.output_tokens += max(0, received)

    def _end(self, at: float) -> None:
        self.running = max(0, self.running - 1)
        self._last_at = at

    @property
    def ended(self) -> int:
        return self.items_done + self.items_failed

    def items_per_s(self, at: float) -> float:
        """Return the rate from the first start to now, or to the last end if no task is running."""
        if self._first_at is None:
            return 0.0
        passed_s = (at if self.running else self._last_at) - self._first_at
        return (self.ended - self._recorded) / passed_s if passed_s > 0 else 0.0

    def left_s(self, at: float) -> float | None:
        pace = self.items_per_s(at)
        if self.total is None or not pace or not self.running or self.ended >= self.total:
            return None
        return (self.total - self.ended) / pace

    def counts(self, *, is_complete: bool = False) -> str:
        # One task for all items does not reveal their number.
        total = self.ended if is_complete and self._is_scanned and not self.is_direct else self.total
        if self.is_direct:
            return "all items in one task" if total is None else f"{total:,} items in one task"
        of_total = "" if total is None else f"/{total:,}"
        failed = f", {self.items_failed:,} failed" if self.items_failed else ""
        reduces = f", {self.reduces_done:,} reduced" if self.reduces_done else ""
        return f"{self.items_done:,}{of_total} items{failed}{reduces}"

    def pace(self, at: float) -> str:
        parts = [f"{self.items_per_s(at):.1f} items/s", f"{self.input_tokens:,} + {self.output_tokens:,} tokens"]
        if (left_s := self.left_s(at)) is not None:
            minutes, seconds = divmod(round(left_s), 60)
            hours, minutes = divmod(minutes, 60)
            left = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
            parts.append(f"{left} left")
        return ", ".join(parts)

    def block(self, at: float) -> Block:
        return Block(
            counts=f"{self.counts()}, {self.running:,} running",
            bar=(self.ended, self.total) if self.total else None,
            pace=self.pace(at) if self.ended else "",
            lines=self._batch_lines(),
            is_idle=not (self.running or self.ended or self._batches),
        )

    def _batch_lines(self) -> Sequence[str]:
        if not self._batches:
            return ()
        batches = self._batches.values()
        open_count = sum(each.state not in {"collected", "void"} for each in batches)
        answered, total = sum(each.answered for each in batches), sum(each.total for each in batches)
        return (f"  {open_count:,} of {len(batches):,} batches open, {answered:,} of {total:,} requests answered",)
