"""Shows a run's progress on standard error: a block that redraws itself on a terminal, lines elsewhere.

A listener feeds it, on its delivery thread; a terminal redraws on a thread of its own. Nothing here is on the run's way,
and what is shown is up to its `Progress`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ensemble_ray.cli.view.progress import Progress
from ensemble_ray.cli.view.terminal import count_noun, is_terminal, say, screen_line
from ensemble_ray.events import EnsembleStartedEvent, Event
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.process.context import NOTICES
from ensemble_ray.text.foreign_text import escape_controls

if TYPE_CHECKING:
    from rich.console import RenderableType

_TEXT = 200
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
        """Show how many more there were like a line."""
        for line, count in self._more.items():
            self._show(f"  {count:,} more like {line}")
