"""The head of a run: how it began and its state now. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import Origin
from ensemble_ray.definition.run_options import tags_in
from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import (
    LossAccepted,
    PlanRecorded,
    RecordedError,
    RecordedFork,
    RunEnded,
    RunInterrupted,
    RunResumed,
)
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.trace import CaptureMode

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunReader

HEAD_KINDS = kinds_of(PlanRecorded, RunResumed, RunEnded, RunInterrupted)


class RunHead:
    """The state of a run as a whole. The facts of `HEAD_KINDS` are enough for most of it.

    Attributes:
        header: The record's first fact; an empty one if the run recorded none.
        end: None if the run has not ended, or was resumed after its end.
        interruption: Why the run stopped without an end; None also if it was resumed since.
        beginnings: How often the run was resumed.
        reported_until: When the run last ended and reported all its tasks, Unix time, s; 0 if never. Waiting tasks are
            not reported (S-INT-36).
        last_at: When the run ended, or when the last fact was recorded, Unix time, s.
        lost: Lost parts of the record that a user accepted.
    """

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self.run_id = ""
        self.header = PlanRecorded()
        self.end: RunEnded | None = None
        self.interruption: RunInterrupted | None = None
        self.beginnings = 0
        self.reported_until = self.last_at = 0.0
        self.tags: Mapping[str, str] = {}
        self.lost: list[str] = []
        self._recorded_at = 0.0
        for fact in facts:
            self.apply(fact)

    def apply(self, fact: Fact) -> None:
        if not self.run_id:
            self.run_id, self._recorded_at = fact.run, fact.at
        self.last_at = max(self.last_at, fact.at)
        match fact.data:
            case PlanRecorded() as header:
                self.header, self._recorded_at = header, fact.at
                self._take_tags(header.options)
            case RunResumed(options=options, is_restart=is_restart):
                self.end = self.interruption = None  # a cancelled run that is resumed has no end any more
                self.beginnings += not is_restart
                if options is not None and "tags" in options:
                    self._take_tags(options)
            case RunEnded() as end:
                self.end, self.interruption = end, None
                self.last_at = max(fact.at, self.started_at)
                if end.state is not RunState.WAITING:
                    self.reported_until = fact.at
            case RunInterrupted() as interruption:
                self.interruption = interruption
            case LossAccepted(reason=reason):
                self.lost.append(reason)
            case _:
                pass

    def _take_tags(self, options: Mapping[str, object] | None) -> None:
        self.tags = {**tags_in({"tags": self.header.tags}), **tags_in(options)}

    @property
    def name(self) -> str:
        return name_in(self.header)

    @property
    def state(self) -> RunState:
        """How the run ended; without an end it is interrupted."""
        return RunState.INTERRUPTED if self.end is None else self.end.state or RunState.INTERRUPTED

    @property
    def exit_reason(self) -> ExitReason:
        return ExitReason.COMPLETED if self.end is None else self.end.reason

    @property
    def capture_mode(self) -> CaptureMode:
        mode = self.header.capture_mode
        return CaptureMode(mode) if mode in set(CaptureMode) else CaptureMode.OFF

    @property
    def errors(self) -> Sequence[RecordedError]:
        if self.interruption is not None:
            return (self.interruption.reason,)
        return () if self.end is None else self.end.errors

    @property
    def own_error(self) -> RecordedError | None:
        """The error of the run itself, unless a task failed the run."""
        if self.interruption is not None:
            return self.interruption.reason
        return None if self.end is None else self.end.own_error

    @property
    def failed_unit(self) -> str:
        """Path of the loop, phase or graph that failed the run, or of its execution; empty: a task or the run itself failed."""
        first = self.errors[0] if self.errors else None
        return "" if first is None or first.key else first.instance

    @property
    def started_at(self) -> float:
        """Unix time, s; 0 if no fact is recorded."""
        return self._recorded_at if self.header.started_at is None else self.header.started_at

    @property
    def source(self) -> Origin:
        return origin_in(self.header)

    @property
    def forked_from(self) -> RecordedFork | None:
        return self.header.forked_from

    @property
    def is_dynamic(self) -> bool:
        return self.header.is_dynamic


def origin_in(header: PlanRecorded) -> Origin:
    overrides = {name: str(value) for name, value in (header.overrides or {}).items()}
    return Origin(place=header.origin or "", overrides=overrides)


def name_in(header: PlanRecorded) -> str:
    """Return the team's name; earlier versions recorded only the origin of the definition."""
    return header.name or origin_in(header).name


async def read_head(store: RunReader, run_id: str, *, is_partial: bool = False) -> RunHead:
    return RunHead(await head_facts(store, run_id, is_partial=is_partial))


@contextlib.contextmanager
def locate_errors(location: str) -> Generator[None]:
    try:
        yield
    except RecordError as error:
        if error.path:
            raise
        raise RecordError(f"{error} (in {location})", location) from error


async def head_facts(store: RunReader, run_id: str, *, is_partial: bool = False) -> list[Fact]:
    return [fact async for page in store.read(run_id, kinds=HEAD_KINDS, is_partial=is_partial) for fact in page]
