"""Shows a run's progress on standard error: a block that redraws itself on a terminal, lines elsewhere. Room: cli.

A listener feeds it, on its delivery thread; a terminal redraws on a thread of its own. Nothing here is on the run's way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ensemble_ray.cli.view.progress import RunningTask, Tally, counted, depth_of, label_of
from ensemble_ray.cli.view.terminal import is_terminal, one_line, say
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
from ensemble_ray.events.listeners import EnsembleListener
from ensemble_ray.process.notices import NOTICES
from ensemble_ray.text.control_characters import escape_controls

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Display", "TaskWatcher", "Watcher"]

#: Running tasks that the block lists.
_SHOWN_TASKS = 8
#: Starts of tasks get lines of their own up to this many tasks.
_SHOWN_STARTS = 50
#: Ends of tasks get lines of their own up to this many; after that one gets a line every so often, s.
_SHOWN_ENDS = 1000
_EVERY_S = 2.0
_LABEL, _ROLE, _TEXT = 32, 24, 200
#: What is asked of an agent, and what it gave.
_BRIEF = 80
#: What the library logs of a failure is what the command line says in its own words.
_TOLD_ANYWAY = {
    "Delegation by '%s' to '%s' failed: %s",
    "Run %s: %s failed and is left out%s",
}


class TaskWatcher(EnsembleListener):
    """Hands beginnings and ends of tasks to a display; of a hundred thousand of them nothing else is sent."""

    def __init__(self, take: Callable[[Event], None]) -> None:
        self._take = take

    def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> None:
        """The run begins."""
        self._take(EnsembleStartedEvent(ensemble_id=ensemble_id, workflow=workflow, total_tasks=total_tasks))

    def on_task_start(self, event: TaskStartEvent) -> None:
        """A task begins."""
        self._take(event)

    def on_task_complete(self, event: TaskCompleteEvent) -> None:
        """A task succeeded."""
        self._take(event)

    def on_task_failed(self, event: TaskFailedEvent) -> None:
        """A task failed."""
        self._take(event)


class Watcher(TaskWatcher):
    """Hands all events that progress needs to a display."""

    def on_tool_call(self, event: ToolCallEvent) -> None:
        """A tool was executed."""
        self._take(event)

    def on_delegation_started(self, event: DelegationStartedEvent) -> None:
        """An agent is asked by another one."""
        self._take(event)

    def on_delegation_completed(self, event: DelegationCompletedEvent) -> None:
        """It answered."""
        self._take(event)

    def on_delegation_failed(self, event: DelegationFailedEvent) -> None:
        """It failed, or nobody was asked since a rule forbids it."""
        self._take(event)

    def on_llm_iteration_started(self, event: LlmIterationStartedEvent) -> None:
        """A model call begins."""
        self._take(event)

    def on_llm_iteration_completed(self, event: LlmIterationCompletedEvent) -> None:
        """A model call ended."""
        self._take(event)


class Display:
    """Progress of one run: `with Display(...) as display`, and `display.listener` among the run's listeners.

    Args:
        title: Names the run.
        is_quiet: Show nothing.
        clock: Seconds; for tests.
        is_live: Whether to redraw; default: on a terminal.
    """

    def __init__(
        self,
        title: str,
        *,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        is_live: bool | None = None,
    ) -> None:
        self.tally = Tally()
        self.listener: EnsembleListener = Watcher(self._hear)
        self._title = escape_controls(title)
        self._is_quiet = is_quiet
        self._is_live = not is_quiet and (is_terminal() if is_live is None else is_live)
        self._clock = clock
        self._began = clock()
        self._note = ""
        self._told_at = 0.0
        self._lock = threading.Lock()
        #: whose turn it is to be told of
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
        if self._is_live:
            from rich.console import Console  # only terminals pay for it
            from rich.live import Live

            self._live = Live(
                get_renderable=self._block,
                console=Console(stderr=True, highlight=False),
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("ensemble_ray").removeHandler(self._log)
        if self._live is not None:
            self._live.stop()

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Inside, nothing that happens is told: a run that goes on tells first what it has on record."""
        with self._turn:
            yield

    def is_recorded(self, tasks: int, *, items: int = 0) -> None:  # noqa: ARG002  for displays of items
        """So many tasks were done when the run went on, and so many of them are of items."""
        with self._lock:
            self.tally.is_recorded(tasks)
        if tasks:
            self.note_line(f"{counted(tasks, 'task')} from the record")

    def note(self, text: str) -> None:
        """What is going on besides tasks; the newest note stands in the block."""
        self._note = escape_controls(text)
        if self._live is None:
            self.note_line(text)

    def note_line(self, text: str) -> None:
        """A line that stays."""
        if self._is_quiet:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(escape_controls(text)))  # a text: no markup, no names of emoji
        else:
            say(text)

    def summary(self) -> str:
        """The counts at the end, in one line."""
        tally, at = self.tally, self.elapsed_s
        failed = f", {tally.failed} failed" if tally.failed else ""
        total = f" of {tally.total_tasks}" if tally.total_tasks else ""
        return f"{tally.done}{total} tasks{failed} in {at:.1f} s: {tally.summary(at)}"

    def _hear(self, event: Event) -> None:
        with self._turn:
            self._take(event)

    def _take(self, event: Event) -> None:
        at = self.elapsed_s
        with self._lock:
            self.tally.take(event, at)
            line = None if self._is_quiet else self._line(event, at)
        if line is not None:
            self.note_line(line)

    def _line(self, event: Event, at: float) -> str | None:
        """What a log shows of an event; a terminal shows failures only, the rest is in the block."""
        tally = self.tally
        done = f"{tally.done + tally.failed}" + (f"/{tally.total_tasks}" if tally.total_tasks else "")
        if isinstance(event, TaskFailedEvent):
            return f"{at:7.1f} s  failed   {done}  {_who(event)}"  # the run's error, or the delegation, says why
        if isinstance(event, DelegationFailedEvent):
            return f"{at:7.1f} s  {_handed(event)}"
        if self._live is not None:
            return None
        match event:
            case EnsembleStartedEvent():
                return f"{at:7.1f} s  {self._title}: {_total(event)}{event.workflow}"
            case TaskStartEvent() if max(tally.total_tasks, tally.done) <= _SHOWN_STARTS:
                return f"{at:7.1f} s  started  {_who(event)}"
            case DelegationStartedEvent() | DelegationCompletedEvent():
                return f"{at:7.1f} s  {_handed(event)}"
            case TaskCompleteEvent() if self._is_due(at):
                return f"{at:7.1f} s  done     {done}  {_who(event)} in {_seconds(event.duration)}; {tally.summary(at)}"
            case _:
                return None

    def _is_due(self, at: float) -> bool:
        """Whether a completed task gets a line: the first ones do, of a hundred thousand one every few seconds."""
        if self.tally.done > _SHOWN_ENDS and at - self._told_at < _EVERY_S:
            return False
        self._told_at = at
        return True

    def _block(self) -> RenderableType:
        """The block that a terminal shows."""
        from rich.console import Group  # only terminals pay for it
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        at = self.elapsed_s
        with self._lock:
            tally = self.tally
            ended, total, running = tally.done + tally.failed, tally.total_tasks, tally.running
            counted_ends = f"{ended}/{total}" if total else f"{ended}"
            counts = f"{counted_ends} tasks, {len(running)} running" if total or running or ended else "starting"
            lines = f"{tally.agents} agents, {tally.summary(at)}" if total or running or ended else ""
            tasks = [line for task in running[:_SHOWN_TASKS] for line in _task_lines(tally, task, at)]
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=max(total, 1), completed=ended, width=24),
            Text(f"{counts}, {at:.0f} s"),
        )
        rows: list[RenderableType] = [head]
        if lines:
            rows.append(Text(f"  {lines}", style="cyan"))
        rows += [Text(line, style="dim") for line in tasks]
        if len(running) > _SHOWN_TASKS:
            rows.append(Text(f"    and {len(running) - _SHOWN_TASKS} more", style="dim"))
        if self._note and not (running or ended):
            rows.append(Text(f"  {self._note}", style="dim"))
        return Group(*rows)


def _total(event: EnsembleStartedEvent) -> str:
    """How many tasks there are, where that is known before they are made."""
    return f"{counted(event.total_tasks, 'task')}, " if event.total_tasks else ""


def _who(event: TaskStartEvent | TaskCompleteEvent | TaskFailedEvent) -> str:
    role = one_line(event.agent_role, _ROLE)
    return f"{one_line(label_of(event), _LABEL)} {role if role.startswith('(') else f'({role})'}"


def _task_lines(tally: Tally, task: RunningTask, at: float) -> list[str]:
    """A running task in the block, and below it the agents that work for it."""
    label, role = one_line(task.label, _LABEL), one_line(task.agent_role, _ROLE)
    lines = [f"  \u2022 {label}  {role}  {at - task.started_at:.0f} s"]
    open_ones = tally.delegated(task)
    for each in open_ones[:_SHOWN_TASKS]:
        roles = f"{one_line(each.asker_role, _ROLE)} asks {one_line(each.worker_role, _ROLE)}"
        lines.append(f"  {'  ' * each.depth}\u21b3 {roles}  {at - each.started_at:.0f} s")
    if len(open_ones) > _SHOWN_TASKS:
        lines.append(f"      and {len(open_ones) - _SHOWN_TASKS} more")
    return lines


def _handed(event: DelegationStartedEvent | DelegationCompletedEvent | DelegationFailedEvent) -> str:
    """What becomes of a delegation, indented by how deep it is."""
    asker, worker = one_line(event.delegating_agent_role, _ROLE), one_line(event.worker_role, _ROLE)
    inset = "  " * depth_of(event)
    match event:
        case DelegationStartedEvent():
            return f"asks     {inset}{asker} -> {worker}: {one_line(event.task_description, _BRIEF)}"
        case DelegationCompletedEvent():
            gave = one_line(event.response.raw_output or "", _BRIEF)
            return f"answered {inset}{asker} <- {worker} in {_seconds(event.duration)}: {gave}"
        case DelegationFailedEvent():
            what = "refused" if event.cause is None else "failed"
            return f"{what:<8} {inset}{asker} -> {worker}: {one_line(event.failure_reason, _TEXT)}"


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():.1f} s"


class _Warnings(logging.Handler):
    """Puts the library's warnings and notices among the progress lines."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        """Show one."""
        if record.name == NOTICES:
            self._take(record.getMessage())
        elif record.levelno >= logging.WARNING and getattr(record, "template", record.msg) not in _TOLD_ANYWAY:
            self._take(f"  {record.levelname.lower()}: {one_line(record.getMessage(), _TEXT)}")
