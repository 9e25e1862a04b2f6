"""One run as the page shows it: its steps and its totals. Pure."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from ensemble_ray.record.open_reviews import obstacle_at
from ensemble_ray.record.stores import resume_advice
from ensemble_ray.studio.schemas import (
    AgentBudget,
    BudgetSchema,
    ForkOrigin,
    ReviewSchema,
    RunDetailSchema,
    RunError,
    SpentCost,
    SpentTokens,
)
from ensemble_ray.studio.views.steps import StepsView, as_millis, exit_text
from ensemble_ray.studio.views.totals import RunTotals
from ensemble_ray.values.outputs import ExitReason, RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.record.open_reviews import Gate
    from ensemble_ray.record.stores import RecordedRun

#: Costs in records of budgets are whole numbers of the 8th decimal place.
_UNITS = Decimal(10**8)
#: Most characters of the texts of a review in a run. The inbox has the full texts.
_SHOWN = 4000


def review_of(gate: Gate, *, ensemble: str, at: float, is_owned: bool, can_decide: bool) -> ReviewSchema:
    """Return a gate as the page shows it.

    Args:
        gate: The gate.
        ensemble: The team of its run.
        at: The current time, Unix time, s.
        is_owned: Whether a process owns the run.
        can_decide: Whether this page accepts decisions.
    """
    review, decided = gate.review(), gate.decided
    is_free = gate.is_open and obstacle_at(gate, at=at, is_owned=is_owned) is None
    return ReviewSchema(
        run_id=review.run_id,
        gate_id=review.gate_id,
        ensemble=ensemble,
        timing=review.timing.value,
        step=gate.asked.instance,
        task_description=review.task_description,
        task_output=review.task_output,
        prompt=review.prompt,
        required_role=review.required_role,
        created_at=as_millis(gate.asked.at),
        expires_at=None if gate.expires_at is None else as_millis(gate.expires_at),
        on_timeout=review.on_timeout.value,
        decision=None if decided is None else decided.data.verdict,
        text=None if decided is None else decided.data.text,
        comment=None if decided is None else decided.data.comment or None,
        timed_out=decided is not None and decided.data.timed_out,
        decided_by=None if decided is None else decided.data.by or None,
        decided_at=None if decided is None else as_millis(decided.at),
        decidable=can_decide and is_free,
    )


class RunView:
    """A run, folded from its facts.

    Attributes:
        run_id: Its id.
        totals: Its totals.
        steps: Its steps.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.steps = StepsView()
        self.totals = RunTotals(self.steps.usage)

    @property
    def cursor(self) -> int:
        """Position of its newest fact."""
        return self.totals.cursor

    def apply(self, facts: Iterable[Fact]) -> None:
        """Apply the next facts.

        Raises:
            RecordError: a fact is damaged.
        """
        for fact in facts:
            output = None
            try:
                output = self.steps.apply(fact)
            finally:  # the reader continues after a damaged fact
                self.totals.add(fact, output)

    def settle(self, summary: RecordedRun) -> None:
        """Mark open steps as interrupted if the run has no owner and no end."""
        if self.totals.state(summary) is RunState.INTERRUPTED:
            self.steps.interrupt(self.totals.last_at)

    def reviews(self, summary: RecordedRun, *, at: float, can_decide: bool) -> list[ReviewSchema]:
        """Return its review gates with their full texts, oldest first; see `detail`."""
        totals = self.totals
        return [
            review_of(
                gate,
                ensemble=totals.head.name,
                at=at,
                is_owned=bool(summary.owner),
                can_decide=can_decide and not totals.state(summary).is_final,
            )
            for gate in totals.gates
        ]

    def detail(
        self,
        summary: RecordedRun,
        *,
        at: float,
        can_decide: bool,
        forks: Sequence[str] = (),
        problem: str | None = None,
        has_texts: bool = True,
    ) -> RunDetailSchema:
        """Return the run in all detail.

        Args:
            summary: Its state in the store.
            at: The current time, Unix time, s.
            can_decide: Whether this page accepts decisions.
            forks: Its known forks.
            problem: Why its record cannot be read to the end; None: it can.
            has_texts: Whether to include long texts.
        """
        totals, state = self.totals, self.totals.state(summary)
        head = totals.head
        header, fork = head.header, head.forked_from
        reason = self._exit_reason(state)
        failed = self.steps.first_failed()
        if self.steps.left_out:
            problem = problem or f"{self.steps.left_out:,} more steps are not shown"
        reviews = self.reviews(summary, at=at, can_decide=can_decide)
        if not has_texts:
            reviews = [
                each.model_copy(
                    update={"task_output": each.task_output[:_SHOWN], "prompt": (each.prompt or "")[:_SHOWN]}
                )
                for each in reviews
            ]
        return RunDetailSchema(
            **dict(totals.row(summary)),
            inputs={
                name: str(value) if has_texts else str(value)[:_SHOWN] for name, value in (header.inputs or {}).items()
            },
            exit_reason=None if reason is None else reason.value,
            exit_reason_text=exit_text(reason, state),
            error=self._error(failed.id if failed else None),
            first_error_step=None if failed is None else failed.id,
            counts=self.steps.counts(),
            reviews=reviews,
            budget=self._budget(exit_text(reason, state)),
            forked_from=None if fork is None else ForkOrigin(run_id=fork.run, step=fork.task),
            forks=list(forks),
            cursor=self.cursor,
            is_live=state.is_active or state is RunState.WAITING,
            problem=problem,
            resume_advice=resume_advice(summary.run_id, head.source.place) if state is RunState.INTERRUPTED else None,
        )

    def _exit_reason(self, state: RunState) -> ExitReason | None:
        end = self.totals.head.end
        if state.is_active or state is RunState.INTERRUPTED:
            return None
        return state.exit_reason if end is None else end.reason

    def _error(self, first_failed: str | None) -> RunError | None:
        if not (errors := self.totals.head.errors):
            return None
        error = errors[0]
        return RunError(
            class_=error.error_type or "Exception",
            message=error.message,
            causes=[f"{each.error_type}: {each.message}" for each in error.causes],
            place=error.place,
            first_failed_step=first_failed,
        )

    def _budget(self, end_reason: str | None) -> BudgetSchema:
        totals, limits = self.totals, self.totals.budget
        agents: dict[str, list[int | None]] = {}
        costs: dict[str, Decimal] = {}
        for state in self.steps.states.values():
            if state.is_unit or not (state.agent and state.started_at is not None):
                continue
            shown = self.steps.show(state)
            agents.setdefault(state.agent, []).append(shown.total_tokens)
            if shown.cost is not None:
                costs[state.agent] = costs.get(state.agent, Decimal(0)) + shown.cost[0]
        by_agent = [
            AgentBudget(
                agent=agent,
                tokens=None if None in counts else sum(each or 0 for each in counts),
                cost=f"{costs[agent]:f}" if agent in costs else None,
                steps=len(counts),
            )
            for agent, counts in agents.items()
        ]
        max_cost = None if limits is None else limits.max_cost
        return BudgetSchema(
            tokens=SpentTokens(spent=totals.usage.spent_tokens, allowed=None if limits is None else limits.max_tokens),
            cost=SpentCost(
                spent=None if totals.cost is None else f"{totals.cost:f}",
                allowed=None if max_cost is None else f"{Decimal(max_cost) / _UNITS:f}",
                currency=totals.currency or None,
            ),
            by_agent=by_agent,
            end_reason=end_reason,
        )
