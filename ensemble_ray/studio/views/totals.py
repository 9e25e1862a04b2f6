"""The totals of a run for its row in the run list, folded from its facts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar

from ensemble_ray.facts.fact import as_mapping, as_sequence, as_text, kinds_of
from ensemble_ray.facts.runs import (
    FailureRecorded,
    OutputRecorded,
    PlanRecorded,
    ReviewDecided,
    ReviewRequested,
    RunResumed,
)
from ensemble_ray.record.head import HEAD_KINDS, RunHead
from ensemble_ray.record.open_reviews import END_KINDS, GATE_KINDS, ends_of, fold_gates
from ensemble_ray.record.totals import PAID, UsageTally
from ensemble_ray.studio.schemas import CostSchema, RunRow
from ensemble_ray.studio.views.steps import as_millis, cost_of, title_of, wire_status
from ensemble_ray.values.ids import delegating_call, node_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.facts.fact import Fact, FactData
    from ensemble_ray.facts.runs import RecordedBudget, RecordedOutput
    from ensemble_ray.record.open_reviews import Gate
    from ensemble_ray.record.stores import RecordedRun
    from ensemble_ray.values.outputs import RunState

#: Kinds of facts that affect the totals. The fold ignores other kinds.
TOTAL_KINDS = tuple(dict.fromkeys((*HEAD_KINDS, *GATE_KINDS, *kinds_of(*PAID, OutputRecorded, FailureRecorded))))


class RunTotals:
    """The totals of a run.

    Attributes:
        head: How it began and ended.
        budget: Its budget; None: no limit.
        usage: Its usage.
        cost: Sum of the known costs of its tasks; None: no cost is known.
        last_at: Time of its newest fact, Unix time, s.
        cursor: Position of that fact.
    """

    def __init__(self, usage: UsageTally | None = None) -> None:
        """Start without facts.

        Args:
            usage: The tally of a history of the run; None: count the usage here.
        """
        self.head = RunHead()
        self.budget: RecordedBudget | None = None
        self.usage = usage or UsageTally()
        self.cost: Decimal | None = None
        self.currency = ""
        self.last_at = 0.0
        self.cursor = 0
        self._first_task = ""
        self._planned = 0
        self._ended = 0
        #: keys of tasks that review a phase: their answer is a decision
        self._reviewers: set[str] = set()
        self._result = ""
        #: facts that open or close gates
        self._gate_facts: list[Fact] = []
        self._closing: set[str] = set()

    def apply(self, fact: Fact) -> None:
        """Apply the next fact, its usage included."""
        self.usage.apply(fact)
        self.add(fact, fact.data.read() if isinstance(fact.data, OutputRecorded) else None)

    def add(self, fact: Fact, output: RecordedOutput | None) -> None:
        """Apply the next fact, except its usage.

        Args:
            fact: The fact.
            output: The output in the fact; None: it has none.
        """
        self.last_at, self.cursor = max(self.last_at, fact.at), fact.seq
        if output is not None:
            self._add_output(fact, output)
        elif (rule := self._RULES.get(type(fact.data))) is not None:
            rule(self, fact)
        else:
            self.head.apply(fact)
        if fact.name in self._closing and fact.kind in END_KINDS:
            self._gate_facts.append(fact)

    def _begin(self, fact: Fact[PlanRecorded]) -> None:
        self.head.apply(fact)
        header = fact.data
        self.budget = header.budget
        nodes = [*map(as_mapping, as_sequence((header.plan or {}).get("nodes")))]
        units = map(as_mapping, as_sequence((header.plan or {}).get("units")))
        self._reviewers = {as_text(unit.get("review")) for unit in units}
        self._planned = len(nodes)
        self._first_task = title_of(as_text(nodes[0].get("description"))) if nodes else ""

    def _resume(self, fact: Fact[RunResumed]) -> None:
        self.head.apply(fact)
        if not fact.data.is_restart and fact.data.budget is not None:
            self.budget = fact.data.budget

    def _ask(self, fact: Fact[ReviewRequested]) -> None:
        self._gate_facts.append(fact)
        self._closing.update(name for _, name in ends_of(fact.name))

    def _add_decision(self, fact: Fact[ReviewDecided]) -> None:
        self._gate_facts.append(fact)

    def _add_output(self, fact: Fact, output: RecordedOutput) -> None:
        self._add_end(fact, output.metrics)
        if delegating_call(fact.name) is None and node_key(fact.name) not in self._reviewers:
            self._result = title_of(output.raw[:2000])

    def _add_failure(self, fact: Fact[FailureRecorded]) -> None:
        self._add_end(fact, as_mapping(as_mapping(fact.data.trace).get("metrics")))

    def _add_end(self, fact: Fact, metrics: Mapping[str, object]) -> None:
        self._ended += delegating_call(fact.name) is None
        if (cost := cost_of(metrics)) is not None:
            self.cost, self.currency = (self.cost or Decimal(0)) + cost[0], cost[1]

    @property
    def gates(self) -> Sequence[Gate]:
        """Its review gates, oldest first."""
        return fold_gates(self._gate_facts) if self._gate_facts else ()

    @property
    def tokens(self) -> int | None:
        """Tokens of all executions (S-MET-38); None: no model was called, or a provider did not count (S-MET-22)."""
        return self.usage.tokens if self.usage.model_calls and self.usage.tokens >= 0 else None

    def state(self, summary: RecordedRun) -> RunState:
        """Return the state of the run. An end in the record overrides the summary."""
        return summary.state if self.head.end is None else self.head.state

    def row(self, summary: RecordedRun) -> RunRow:
        """Return the row of the run."""
        state = self.state(summary)
        created = round(summary.created_at.timestamp() * 1000)
        is_over = not state.is_active
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

    _RULES: ClassVar[Mapping[type[FactData], Callable[..., None]]] = {
        PlanRecorded: _begin,
        RunResumed: _resume,
        ReviewRequested: _ask,
        ReviewDecided: _add_decision,
        FailureRecorded: _add_failure,
    }
