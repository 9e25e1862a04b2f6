"""How a run began and how it stands: the part of its history that a few facts of the run as a whole decide. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import Origin
from ensemble_ray.definition.run_options import tags_in
from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import kinds_of
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
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.record.stores import RunStore

#: Kinds of facts that a head is made of.
HEAD_KINDS = kinds_of(PlanRecorded, RunResumed, RunEnded, RunInterrupted)


class RunHead:
    """What is known of a run as a whole. `RunHistory` has one; alone, the facts of `HEAD_KINDS` are enough for most of it.

    Attributes:
        run_id: The run's id; empty: no fact was applied.
        header: The record's first fact; an empty one when the run recorded nothing.
        end: Its end; None when it has not ended, or went on after it.
        interruption: Why it has no end, where it stopped by itself and did not go on since.
        beginnings: How often somebody went on with it.
        told_until: When it ended last and told of all that it had done, Unix time, s; 0: it never did. A run that waits for people
            has not told of the tasks that wait (S-INT-36).
        last_at: When it ended, or when the last fact was recorded, Unix time, s.
        tags: Words about it, by name: its team's, and those of its caller as it began or went on last.
        lost: What of its record is lost, as somebody accepted.
    """

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        """Apply the facts, in order."""
        self.run_id = ""
        self.header = PlanRecorded()
        self.end: RunEnded | None = None
        self.interruption: RunInterrupted | None = None
        self.beginnings = 0
        self.told_until = self.last_at = 0.0
        self.tags: Mapping[str, str] = {}
        self.lost: list[str] = []
        self._recorded_at = 0.0
        for fact in facts:
            self.apply(fact)

    def apply(self, fact: Fact) -> None:
        """Apply the next fact."""
        if not self.run_id:
            self.run_id, self._recorded_at = fact.run, fact.at
        self.last_at = max(self.last_at, fact.at)
        match fact.data:
            case PlanRecorded() as header:
                self.header, self._recorded_at = header, fact.at
                self._take_tags(header.options)
            case RunResumed(options=options, is_restart=is_restart):
                self.end = self.interruption = None  # it goes on: a cancelled run ended, and has not ended any more
                self.beginnings += not is_restart
                if options is not None and "tags" in options:
                    self._take_tags(options)
            case RunEnded() as end:
                self.end, self.interruption = end, None
                self.last_at = max(fact.at, self.started_at)
                if end.state is not RunState.WAITING:
                    self.told_until = fact.at
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
        """What its team is called; empty: nobody named it, and a program made it."""
        return name_in(self.header)

    @property
    def state(self) -> RunState:
        """How the run ended; without an end it was interrupted."""
        return RunState.INTERRUPTED if self.end is None else self.end.state or RunState.INTERRUPTED

    @property
    def exit_reason(self) -> ExitReason:
        """Why the run ended."""
        return ExitReason.COMPLETED if self.end is None else self.end.reason

    @property
    def capture_mode(self) -> CaptureMode:
        """What the run captured."""
        mode = self.header.capture_mode
        return CaptureMode(mode) if mode in set(CaptureMode) else CaptureMode.OFF

    @property
    def errors(self) -> Sequence[RecordedError]:
        """Why it failed or stopped, the earliest first; none where it did neither."""
        if self.interruption is not None:
            return (self.interruption.reason,)
        return () if self.end is None else self.end.errors

    @property
    def own_error(self) -> RecordedError | None:
        """The error of the run itself; None: a task's is the reason, or there is none."""
        if self.interruption is not None:
            return self.interruption.reason
        return None if self.end is None else self.end.own_error

    @property
    def started_at(self) -> float:
        """When the run began first, Unix time, s; 0: nothing is recorded."""
        return self._recorded_at if self.header.started_at is None else self.header.started_at

    @property
    def source(self) -> Origin:
        """Where the definition came from, and what was chosen in place of what stands there."""
        return origin_in(self.header)

    @property
    def forked_from(self) -> RecordedFork | None:
        """Of which run it is a fork; None: of none."""
        return self.header.forked_from

    @property
    def is_dynamic(self) -> bool:
        """Whether its tasks are made while it runs."""
        return self.header.is_dynamic


def origin_in(header: PlanRecorded) -> Origin:
    """Return where a definition came from, as a run's first fact tells it."""
    overrides = {name: str(value) for name, value in (header.overrides or {}).items()}
    return Origin(place=header.origin or "", overrides=overrides)


def name_in(header: PlanRecorded) -> str:
    """Return what a run's team is called, as its first fact tells it; one of an earlier version tells where it came from."""
    return header.name or origin_in(header).name


async def read_head(store: RunStore, run_id: str, *, is_partial: bool = False) -> RunHead:
    """Return the head of a recorded run; that of a run that recorded nothing where there is none.

    Args:
        store: Where it is.
        run_id: The run's id.
        is_partial: Whether what is left of a record that has lost something is enough.

    Raises:
        RecordError: the record is damaged, or of a newer format.
    """
    return RunHead(await head_facts(store, run_id, is_partial=is_partial))


@contextlib.contextmanager
def locate_errors(location: str) -> Generator[None]:
    """Name the place of the record in what goes wrong inside with what was read of it.

    Raises:
        RecordError: as raised inside, with the place where it names none.
    """
    try:
        yield
    except RecordError as error:
        if error.path:
            raise
        raise RecordError(f"{error} (in {location})", location) from error


async def head_facts(store: RunStore, run_id: str, *, is_partial: bool = False) -> list[Fact]:
    """Return the facts that the head of a run is made of.

    Raises:
        RecordError: the record is damaged, or of a newer format.
    """
    return [fact async for page in store.read(run_id, kinds=HEAD_KINDS, is_partial=is_partial) for fact in page]
