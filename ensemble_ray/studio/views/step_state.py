"""What is known of one step of a run while its facts pass by. Package: studio. Pure.

In: what a step did, and when. Out: its row. Never: a text of a model or a tool longer than a line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

from ensemble_ray.studio.schemas.steps import StepPlace, StepSchema, StepTokens
from ensemble_ray.studio.schemas.wire import CostSchema
from ensemble_ray.text.foreign_text import one_line

if TYPE_CHECKING:
    from ensemble_ray.studio.schemas.steps import Effect, SegmentKind, StepKind, StepStatus

__all__ = ["ENDED", "TITLE", "StepState", "as_millis", "title_of"]

#: Longest title, characters; and longest line that tells of an error.
TITLE = 120
_ERROR = 300
#: Segments and calls that one row has; later segments lengthen the last one, later calls are in the step's details.
_MOST_PARTS = 200
#: How a step can have ended; one that was interrupted may go on.
ENDED: frozenset[StepStatus] = frozenset({"completed", "failed", "exited", "skipped", "cancelled", "interrupted"})


def as_millis(at: float) -> int:
    """Return an instant of Unix time in s as ms."""
    return round(at * 1000)


def title_of(text: str) -> str:
    """Return the first line of a text that says something, as a title; a longer one ends with `…`."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    shown = str(one_line(first[: TITLE + 1], None))
    return shown if len(shown) <= TITLE else f"{shown[: TITLE - 1]}…"


@dataclass(slots=True, kw_only=True)
class StepState:
    """One step."""

    id: str
    kind: StepKind
    title: str
    agent: str = ""
    node: str | None = None
    parent: str | None = None
    number: int | None = None
    level: int | None = None
    status: StepStatus = "pending"
    attempts: int = 0
    #: when the run wanted it done; Unix time, s, as all times here
    wanted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    spans: list[tuple[SegmentKind, float, float]] = field(default_factory=list["tuple[SegmentKind, float, float]"])
    tools: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    #: -1: not known
    input_tokens: int = 0
    output_tokens: int = 0
    model_calls: int = 0
    cost: Decimal | None = None
    currency: str = ""
    error: str | None = None
    #: of its output's text
    output_digest: str | None = None
    #: epoch under which it was handed out last
    epoch: int | None = None
    #: calls without a result, and names of all that were begun
    open_calls: set[str] = field(default_factory=set[str])
    intents: dict[str, str] = field(default_factory=dict[str, str])
    #: names of tools that hand work on, by their calls
    asked: dict[str, str] = field(default_factory=dict[str, str])
    is_repeated: bool = False
    has_unknown: bool = False
    #: when somebody was asked at gates that are open, by their names
    gates: dict[str, float] = field(default_factory=dict[str, float])
    is_reviewed: bool = False
    #: position of the last fact that changed it
    changed: int = 0
    _row: StepSchema | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.status in ENDED

    def touch(self, seq: int) -> None:
        """Take notice of a change."""
        self.changed = max(self.changed, seq)
        self._row = None

    def want(self, at: float) -> None:
        """Take notice that the run wants it done."""
        if self.wanted_at is None or self.is_ended:
            self.wanted_at = at
        self.attempts = max(1, self.attempts)
        self.started_at = at if self.started_at is None else self.started_at
        self.ended_at, self.status = None, "running"

    def note_epoch(self, epoch: int) -> None:
        """Take notice of the epoch of a fact of it: a higher one is another attempt."""
        if self.epoch is not None and epoch > self.epoch:
            self.attempts += 1
        self.epoch = epoch if self.epoch is None else max(epoch, self.epoch)

    def begin(self, at: float) -> None:
        """Take notice of the first thing that it did, or of a later one."""
        if self.wanted_at is not None and not self.spans and at > self.wanted_at:
            self.spans.append(("queue", self.wanted_at, at))
        if self.started_at is None or at < self.started_at:
            self.started_at = at
        self.attempts = max(1, self.attempts)
        if not self.is_ended or self.status in {"interrupted", "skipped"}:
            self.status, self.ended_at = "waiting" if self.gates else "running", None

    def spend(self, kind: SegmentKind, start: float, end: float) -> None:
        """Take notice of what time went to."""
        end = max(start, end)
        if len(self.spans) < _MOST_PARTS:
            self.spans.append((kind, start, end))
        else:
            kind, start, _ = self.spans[-1]
            self.spans[-1] = (kind, start, end)

    def call(self, name: str, outcome: str, at: float) -> None:
        """Take notice of the end of a call."""
        if len(self.tools) < _MOST_PARTS:
            self.tools.append((str(one_line(name, TITLE)), outcome, at))

    def count(self, input_tokens: int, output_tokens: int) -> None:
        """Add the tokens of a model call; -1: the provider did not say."""
        self.model_calls += 1
        self.input_tokens = -1 if -1 in {self.input_tokens, input_tokens} else self.input_tokens + input_tokens
        self.output_tokens = -1 if -1 in {self.output_tokens, output_tokens} else self.output_tokens + output_tokens

    def end(self, status: StepStatus, at: float, error: str | None = None) -> None:
        """Take notice of its end."""
        self.status, self.ended_at = status, at
        self.error = None if error is None else str(one_line(error, _ERROR))
        self.gates.clear()

    def go_on(self) -> None:
        """Take notice that its run goes on, and that it may be done again."""
        if self.status in {"cancelled", "skipped", "interrupted", "running"}:
            self.status, self.ended_at, self.error = "pending", None, None

    @property
    def effect(self) -> Effect | None:
        """What is known of its calls; None: it made none."""
        if self.has_unknown or (self.is_ended and self.open_calls):
            return "unknown"
        if self.is_repeated:
            return "repeated"
        return "recorded" if self.intents else None

    @property
    def total_tokens(self) -> int | None:
        """Tokens of all its model calls; None: one of them was not counted."""
        known = self.input_tokens >= 0 and self.output_tokens >= 0
        return self.input_tokens + self.output_tokens if known else None

    def row(self) -> StepSchema:
        """Return it as the page shows it."""
        if self._row is None:
            self._row = self._make_row()
        return self._row

    def _make_row(self) -> StepSchema:
        spans: list[tuple[SegmentKind, int, int]] = [
            (kind, as_millis(start), as_millis(end)) for kind, start, end in self.spans
        ]
        for asked in self.gates.values():
            spans.append(("person", as_millis(asked), as_millis(asked)))  # noqa: PERF401  a list would lose the kind's type
        tokens = None
        if self.model_calls:
            tokens = StepTokens(input=_drop_unknown(self.input_tokens), output=_drop_unknown(self.output_tokens))
        return StepSchema(
            id=self.id,
            node=self.node,
            parent=self.parent,
            kind=self.kind,
            title=self.title,
            agent=self.agent,
            status=self.status,
            number=self.number,
            attempts=self.attempts,
            started_at=None if self.started_at is None else as_millis(self.started_at),
            ended_at=None if self.ended_at is None else as_millis(self.ended_at),
            segments=spans,
            tools=[(name, outcome, as_millis(at)) for name, outcome, at in self.tools],
            tokens=tokens,
            cost=None if self.cost is None else CostSchema(amount=f"{self.cost:f}", currency=self.currency),
            level=self.level,
            error=self.error,
            effect=self.effect,
            place=self.place,
            reviewed=self.is_reviewed,
        )

    @property
    def place(self) -> StepPlace | None:
        """Where it runs; the record does not say."""
        return None


def _drop_unknown(tokens: int) -> int | None:
    return None if tokens < 0 else tokens
