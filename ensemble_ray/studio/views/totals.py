"""What one row of the run list tells, folded from a run's facts. Pure.

In: facts of `TOTAL_KINDS`, in order; others are passed over. Out: how it began and ended, what it spent, which gates are open.
Never: a text longer than a line.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.ends import FailureRecorded, OutputRecorded
from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.facts.reflection import ReflectionRecorded
from ensemble_ray.facts.reviews import ReviewRequested
from ensemble_ray.facts.runs import PlanRecorded, RunResumed
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.record.open_reviews import END_KINDS, GATE_KINDS, ends_of, fold_gates
from ensemble_ray.record.resume.run_head import HEAD_KINDS, RunHead
from ensemble_ray.record.spent import SpentTally
from ensemble_ray.record.totals import ExecutionTotals
from ensemble_ray.studio.schemas.runs import RunRow
from ensemble_ray.studio.schemas.wire import CostSchema
from ensemble_ray.studio.views.step_state import as_millis, title_of
from ensemble_ray.studio.views.words import wire_status
from ensemble_ray.values.ids import delegating_call, node_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import RecordedBudget
    from ensemble_ray.record.open_reviews import Gate
    from ensemble_ray.record.stores import RecordedRun
    from ensemble_ray.values.outputs import RunState

#: Kinds of facts that the totals are made of.
TOTAL_KINDS = tuple(
    dict.fromkeys(
        (
            *HEAD_KINDS,
            *GATE_KINDS,
            *kinds_of(
                SamplingAnswered,
                ModelAnswered,
                OutputRecorded,
                FailureRecorded,
                MemoryRecalled,
                MemoryStored,
                ReflectionRecorded,
            ),
        )
    )
)


class RunTotals:
    """What is known of a run as a whole.

    Attributes:
        head: How it began and ended.
        budget: What it may spend; None: as much as it likes.
        cost: What its tasks cost, as far as it is known; None: not known.
        last_at: Time of its newest fact, Unix time, s.
        cursor: Position of that fact.
    """

    def __init__(self, totals: ExecutionTotals | None = None) -> None:
        """Start without facts; `totals` are those of a history that receives the same facts, default: own ones."""
        self.head = RunHead()
        self.budget: RecordedBudget | None = None
        self.cost: Decimal | None = None
        self.currency = ""
        self.last_at = 0.0
        self.cursor = 0
        self._spent = SpentTally(None)
        self._first_task = ""
        self._planned = 0
        self._ended = 0
        #: keys of tasks whose answers are decisions about phases
        self._reviewers: set[str] = set()
        self._result = ""
        self._totals = totals or ExecutionTotals()
        self._has_own_totals = totals is None
        #: facts of gates, and of what closed them
        self._gate_facts: list[Fact] = []
        self._closing: set[str] = set()

    def apply(self, fact: Fact) -> None:
        """Take the next fact."""
        self.last_at, self.cursor = max(self.last_at, fact.at), fact.seq
        self.head.apply(fact)
        self._spent.apply((fact,))
        if self._has_own_totals:
            self._totals.apply(fact)
        if fact.kind in END_KINDS:
            if fact.name in self._closing:
                self._gate_facts.append(fact)
        elif fact.kind in GATE_KINDS:
            self._gate_facts.append(fact)
            if isinstance(fact.data, ReviewRequested):
                self._closing.update(name for _, name in ends_of(fact.name))
        match fact.data:
            case PlanRecorded() as header:
                self.budget = header.budget
                nodes = [*map(as_mapping, as_sequence((header.plan or {}).get("nodes")))]
                units = map(as_mapping, as_sequence((header.plan or {}).get("units")))
                self._reviewers = {as_text(unit.get("review")) for unit in units}
                self._planned = len(nodes)
                self._first_task = title_of(as_text(nodes[0].get("description"))) if nodes else ""
            case RunResumed(is_restart=False, budget=budget) if budget is not None:
                self.budget = budget
            case OutputRecorded() as given:
                self._take_output(fact, given)
            case FailureRecorded(trace=trace):
                self._ended += delegating_call(fact.name) is None
                self._add_cost(as_mapping(as_mapping(trace).get("metrics")).get("cost_estimate"))
            case _:
                pass

    @property
    def gates(self) -> Sequence[Gate]:
        """Its review gates, oldest first."""
        return fold_gates(self._gate_facts) if self._gate_facts else ()

    @property
    def tokens(self) -> int | None:
        """Tokens of all executions (S-MET-38); None: no model was called, or a provider did not count (S-MET-22)."""
        return self._totals.tokens if self._totals.model_calls and self._totals.tokens >= 0 else None

    @property
    def spent_tokens(self) -> int:
        """What its budget counts, estimates included."""
        return self._spent.total.tokens

    def state(self, summary: RecordedRun) -> RunState:
        """Return how the run stands: as its record says, where it has an end."""
        return summary.state if self.head.end is None else self.head.state

    def row(self, summary: RecordedRun) -> RunRow:
        """Return its row."""
        state = self.state(summary)
        created = round(summary.created_at.timestamp() * 1000)
        is_over = not state.is_going_on
        ended = as_millis(self.last_at) if is_over and self.cursor else None
        fork = self.head.forked_from
        return RunRow(
            run_id=summary.run_id,
            ensemble=self.head.name,
            status=wire_status(state),  # type: ignore[arg-type]  # the words are the endpoint's
            summary=self._result or self._first_task,
            created_at=created,
            ended_at=ended,
            duration_ms=None if ended is None else max(0, ended - as_millis(self.head.started_at)),
            tokens=self.tokens,
            cost=None if self.cost is None else CostSchema(amount=f"{self.cost:f}", currency=self.currency),
            tags=dict(self.head.tags),
            open_reviews=0 if state.is_final else sum(gate.is_open for gate in self.gates),
            origin_run=None if fork is None else fork.run,
            place=summary.location,
            workflow=self.head.header.workflow or "",
            tasks=self._planned or self._ended,
        )

    def _take_output(self, fact: Fact, given: OutputRecorded) -> None:
        self._ended += delegating_call(fact.name) is None
        output = given.read()
        self._add_cost(output.metrics.get("cost_estimate"))
        if delegating_call(fact.name) is None and node_key(fact.name) not in self._reviewers:
            self._result = title_of(output.raw[:2000])

    def _add_cost(self, estimate: object) -> None:
        data = as_mapping(estimate)
        if not data:
            return
        try:
            amount = Decimal(str(data.get("total_cost")))
        except InvalidOperation:  # a record that somebody else wrote
            return
        self.cost = (self.cost or Decimal(0)) + amount
        self.currency = as_text(data.get("currency"))
