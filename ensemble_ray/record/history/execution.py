"""One execution of a task, of delegated work, or of a loop, a phase or a graph: its state while facts are applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ensemble_ray.text.foreign_text import one_line

if TYPE_CHECKING:
    from ensemble_ray.facts.effects import ToolIntended
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import ReviewRequested
    from ensemble_ray.values.messages import ToolCall

ExecutionKind = Literal[
    "task",
    "handler",
    "manager",
    "delegation",
    "map",
    "reduce",
    "final-reduce",
    "direct",
    "loop",
    "iteration",
    "phase",
    "attempt",
    "graph",
    "state",
]
ExecutionStatus = Literal[
    "pending", "running", "waiting", "completed", "failed", "exited", "skipped", "cancelled", "interrupted"
]
UNIT_KINDS: frozenset[ExecutionKind] = frozenset({"loop", "phase", "graph"})
#: Executions of units.
ROUND_KINDS: frozenset[ExecutionKind] = frozenset({"iteration", "attempt", "state"})
_RESULTS: frozenset[ExecutionStatus] = frozenset({"completed", "failed", "exited"})
_ENDS: frozenset[ExecutionStatus] = frozenset({*_RESULTS, "skipped", "cancelled", "interrupted"})
#: Longest text of an error, characters.
_ERROR = 300


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedExecution:
    """One execution. Times are Unix times, s."""

    id: str
    kind: ExecutionKind
    #: key of its task or unit in the plan; None if it is in no plan
    node: str | None = None
    #: the unit, the execution of a unit, or the delegating task that it is part of
    parent: RecordedExecution | None = None
    #: role of the agent that does it
    agent: str = ""
    #: 1-based for an execution of a unit; 0-based within the level for an item or a reduce
    number: int | None = None
    #: in the tree of a map-reduce
    level: int | None = None
    #: description of delegated work, or name of a graph's state for its step
    label: str = ""
    status: ExecutionStatus = "pending"
    attempts: int = 0
    #: of the last dispatch
    epoch: int | None = None
    #: whether a change reported its start, or the end of an execution of a unit
    is_announced: bool = False
    #: when the run requested it
    wanted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    #: one line
    error: str | None = None
    #: tool calls of the last answer
    requested: tuple[ToolCall, ...] = ()
    #: calls without a result, by name; None if there are none
    open_calls: dict[str, ToolIntended] | None = None
    #: open review gates, by name; None if there are none
    gates: dict[str, Fact[ReviewRequested]] | None = None
    #: executions of a unit, or members of an execution of a unit; None if none has begun
    children: dict[str, RecordedExecution] | None = None
    #: position of the last fact that changed it
    changed: int = 0
    #: how often it changed
    version: int = 0

    @property
    def is_unit(self) -> bool:
        """Whether it is a loop, a phase, a graph or an execution of one, which only has members."""
        return self.kind in UNIT_KINDS or self.kind in ROUND_KINDS

    @property
    def is_ended(self) -> bool:
        """Whether it has ended; it may still start again when the run is resumed."""
        return self.status in _ENDS

    @property
    def has_result(self) -> bool:
        """Whether it completed, failed or ended the run."""
        return self.status in _RESULTS

    @property
    def task(self) -> RecordedExecution:
        """The task of the plan that it belongs to, at any depth of delegation."""
        found = self
        while found.kind == "delegation" and found.parent is not None:
            found = found.parent
        return found

    def touch(self, seq: int) -> None:
        """Note the position of a fact that changed it."""
        self.changed = max(self.changed, seq)
        self.version += 1

    def want(self, at: float) -> None:
        """Note that the run requested it."""
        if self.wanted_at is None or self.status in _ENDS:
            self.wanted_at = at
        self.attempts = max(1, self.attempts)
        self.started_at = at if self.started_at is None else self.started_at
        self.ended_at, self.status = None, "running"

    def dispatch(self, epoch: int) -> None:
        """Note the epoch of a fact: a higher one is another attempt."""
        if self.epoch is None:
            self.epoch = epoch
        elif epoch > self.epoch:
            self.epoch = epoch
            self.attempts += 1

    def begin(self, at: float) -> None:
        """Note that it was active."""
        if self.started_at is None or at < self.started_at:
            self.started_at = at
        if not self.attempts:
            self.attempts = 1
        if self.status not in _ENDS or self.status in {"interrupted", "skipped"}:
            self.status, self.ended_at = "waiting" if self.gates else "running", None

    def open_call(self, name: str, intent: ToolIntended) -> None:
        """Note a call that begins."""
        if self.open_calls is None:
            self.open_calls = {}
        self.open_calls[name] = intent

    def close_call(self, name: str) -> ToolIntended | None:
        """Note a call that ended and return its intent, or None if it had none."""
        if self.open_calls is None:
            return None
        intent = self.open_calls.pop(name, None)
        if not self.open_calls:
            self.open_calls = None
        return intent

    def open_gate(self, fact: Fact[ReviewRequested]) -> None:
        """Note that it waits at a gate."""
        if self.gates is None:
            self.gates = {}
        self.gates.setdefault(fact.name, fact)
        self.status = "waiting"

    def close_gate(self, name: str) -> Fact[ReviewRequested] | None:
        """Note a decision at a gate and return its request, or None if no such gate was open."""
        asked = None if self.gates is None else self.gates.pop(name, None)
        if not self.gates:
            self.gates = None
            if self.status not in _ENDS:
                self.status = "running"
        return asked

    def end(self, status: ExecutionStatus, at: float, error: str | None = None) -> None:
        """Note its end."""
        self.status, self.ended_at, self.requested = status, at, ()
        self.error = None if error is None else str(one_line(error, _ERROR))

    def close(self, status: ExecutionStatus, at: float | None) -> None:
        """Set the status of a unit or of an execution of one; the time is used only if the status is an end."""
        self.status = status
        self.ended_at = at if status in _ENDS else None

    def resume(self) -> None:
        """Note that the run is resumed; an execution without a result may repeat."""
        if self.status in {"cancelled", "skipped", "interrupted", "running"}:
            self.status, self.ended_at, self.error = "pending", None, None
