"""One run as the page shows it, and its totals for the run list, folded from its facts. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import PurePath

from ensemble_ray.errors import AgentExecutionError, EnsembleError, message_of
from ensemble_ray.facts import runs
from ensemble_ray.facts.fact import Fact, as_count, as_mapping, as_sequence, as_text, kinds_of
from ensemble_ray.facts.runs import NO_REASON
from ensemble_ray.record.failure import NextStep, RunFailure
from ensemble_ray.record.head import HEAD_KINDS, RunHead
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.map_reduce_fold import fails_on_item
from ensemble_ray.record.open_reviews import END_KINDS, GATE_KINDS, Gate, ends_of, fold_gates, obstacle_at
from ensemble_ray.record.stores import RecordedRun, resume_advice
from ensemble_ray.record.totals import PAID, UsageTally
from ensemble_ray.recovery.resuming import check_resumable
from ensemble_ray.studio import schemas
from ensemble_ray.studio.views.steps import StepsView, as_millis, cost_of, cost_schema, exit_text, title_of, wire_status
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.ids import delegating_call, node_key
from ensemble_ray.values.outputs import RunState

_UNITS = Decimal(10**8)  # recorded costs are whole numbers of the 8th decimal place
_SHOWN = 4000  # characters of the texts of a review; the inbox has the full texts
_LINE = 400  # characters of one line of a row
#: The error of a run in another state concerns some of its tasks.
_WITH_FAILURE = frozenset({RunState.FAILED, RunState.INTERRUPTED, RunState.BUDGET_EXHAUSTED})
OF_PROGRAM = (
    "A program started this run, and only that program has its team. What to do: call ensemble_ray.{0} in the program"
)


def subject_of(header: runs.PlanRecorded) -> str:
    """Return what a run is about, in one line: its inputs, or else its items, or its first task."""
    if header.inputs:
        return " · ".join(f"{name}: {title_of(str(value))}" for name, value in header.inputs.items())[:_LINE]
    if header.items is not None:
        count, path = header.items.get("count"), as_text(header.items.get("path"))
        items = f"{count:,} items" if isinstance(count, int) else "items"
        return f"{items} of {PurePath(path).name}" if path else items if count else ""
    nodes = as_sequence((header.plan or {}).get("nodes"))
    return title_of(as_text(as_mapping(nodes[0]).get("description"))) if nodes else ""


def review_of(
    gate: Gate, *, ensemble: str, subject: str, at: float, is_owned: bool, can_decide: bool
) -> schemas.ReviewSchema:
    review, decided = gate.review(), gate.decided
    is_free = gate.is_open and obstacle_at(gate, at=at, is_owned=is_owned) is None
    return schemas.ReviewSchema(
        run_id=review.run_id,
        gate_id=review.gate_id,
        ensemble=ensemble,
        subject=subject,
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
        decided_role=None if decided is None else decided.data.role,
        decided_at=None if decided is None else as_millis(decided.at),
        decidable=can_decide and is_free,
    )


TOTAL_KINDS = tuple(
    dict.fromkeys((*HEAD_KINDS, *GATE_KINDS, *kinds_of(*PAID, runs.OutputRecorded, runs.FailureRecorded)))
)


class RunTotals:
    """The totals of a run.

    Attributes:
        head: How it began and ended.
        budget: Its budget.
        usage: Its usage.
        cost: Sum of the known costs of its tasks.
        last_at: Unix time of its newest fact, s.
        cursor: Position of that fact.
    """

    def __init__(self, history: RunHistory | None = None) -> None:
        """A history of the run has its head and usage."""
        self.head = RunHead() if history is None else history.head
        self.budget: runs.RecordedBudget | None = None
        self.usage = UsageTally() if history is None else history.totals
        self.cost: Decimal | None = None
        self.unpriced_calls = 0
        self.currency = ""
        self.last_at = 0.0
        self.cursor = 0
        self._first_failure = ""
        self._planned = 0
        self._ended = 0
        self._reviewers: set[str] = set()  # tasks that review a phase: their answer is a decision
        self._result = ""
        self._gate_facts: list[Fact] = []
        self._closing: set[str] = set()

    def apply(self, fact: Fact) -> None:
        """Apply the next fact, if there is no history."""
        self.usage.apply(fact)
        self.head.apply(fact)
        self.add(fact, fact.data.read() if isinstance(fact.data, runs.OutputRecorded) else None)

    def add(self, fact: Fact, output: runs.RecordedOutput | None) -> None:
        """Apply the next fact, except to the head and the usage. Its output is already read."""
        self.last_at, self.cursor = max(self.last_at, fact.at), fact.seq
        match fact.data:
            case _ if output is not None:
                self._add_end(fact, output.metrics)
                if delegating_call(fact.name) is None and node_key(fact.name) not in self._reviewers:
                    self._result = title_of(output.raw[:2000])
            case runs.PlanRecorded() as header:
                self.budget = header.budget
                nodes, units = (
                    [*map(as_mapping, as_sequence((header.plan or {}).get(key)))] for key in ("nodes", "units")
                )
                self._reviewers = {as_text(unit.get("review")) for unit in units}
                self._planned = len(nodes)
            case runs.RunResumed(is_restart=False, budget=budget) if budget is not None:
                self.budget = budget
            case runs.ReviewRequested():
                self._gate_facts.append(fact)
                self._closing.update(name for _, name in ends_of(fact.name))
            case runs.ReviewDecided():
                self._gate_facts.append(fact)
            case runs.FailureRecorded(trace=trace, error_type=kind, message=message):
                self._add_end(fact, as_mapping(as_mapping(trace).get("metrics")))
                self._first_failure = self._first_failure or _failure_line(kind, message)
            case _:
                pass
        if fact.name in self._closing and fact.kind in END_KINDS:
            self._gate_facts.append(fact)

    def _add_end(self, fact: Fact, metrics: Mapping[str, object]) -> None:
        self._ended += delegating_call(fact.name) is None
        if (cost := cost_of(metrics)) is not None:
            self.cost, self.currency = (self.cost or Decimal(0)) + cost[0], cost[1]
        self.unpriced_calls += as_count(metrics.get("unpriced_calls"))

    @property
    def gates(self) -> Sequence[Gate]:
        """Its review gates, oldest first."""
        return fold_gates(self._gate_facts) if self._gate_facts else ()

    @property
    def tokens(self) -> int | None:
        """Tokens of all executions (S-MET-38); None: no model was called, or a provider did not count (S-MET-22)."""
        return self.usage.tokens if self.usage.model_calls and self.usage.tokens >= 0 else None

    @property
    def subject(self) -> str:
        return subject_of(self.head.header)

    def failure(self, state: RunState) -> str:
        """Return the error of a run in this state, in one line; empty if it has none."""
        if state not in _WITH_FAILURE:
            return ""
        if errors := self.head.errors:
            error = errors[0]
            if error.error_type == AgentExecutionError.__name__ and error.causes:  # its cause tells runs apart
                return _failure_line(error.causes[0].error_type, error.causes[0].message)
            return _failure_line(error.error_type, error.message)
        return self._first_failure if state is RunState.FAILED else ""

    def state(self, summary: RecordedRun) -> RunState:
        """An end in the record overrides the summary."""
        return summary.state if self.head.end is None else self.head.state

    def resume_obstacle(self, summary: RecordedRun) -> str | None:
        """Return why Studio cannot resume the run."""
        place, state = self.head.source.place, self.state(summary)
        try:
            check_resumable(summary, self.head)
        except EnsembleError as error:
            return message_of(error)
        if state is RunState.COMPLETED:
            return f"Run '{summary.run_id}' is completed"
        if not place:
            return OF_PROGRAM.format("resume")
        if state is RunState.BUDGET_EXHAUSTED:
            return f"It needs a larger budget: {resume_advice(summary.run_id, place, field='max_tokens=N')}"
        return None

    def row(self, summary: RecordedRun) -> schemas.RunRow:
        state = self.state(summary)
        created = round(summary.created_at.timestamp() * 1000)
        is_over = not state.is_active
        ended = as_millis(self.last_at) if is_over and self.cursor else None
        fork = self.head.forked_from
        return schemas.RunRow(
            run_id=summary.run_id,
            ensemble=self.head.name,
            status=wire_status(state),  # type: ignore[arg-type]  # the words are the endpoint's
            summary=self._result or self.subject,
            subject=self.subject,
            failure=self.failure(state),
            created_at=created,
            ended_at=ended,
            duration_ms=None if ended is None else max(0, ended - as_millis(self.head.started_at)),
            tokens=self.tokens,
            estimated_tokens=(self.usage.spent_tokens or None) if self.tokens is None else None,
            reused_calls=self.usage.reused_calls,
            reused_tokens=self.usage.reused_tokens if self.usage.reused_tokens >= 0 else None,
            attempts=self.head.beginnings + 1,
            can_resume=self.resume_obstacle(summary) is None,
            cost=cost_schema(None if self.cost is None else (self.cost, self.currency), self.unpriced_calls),
            tags=dict(self.head.tags),
            open_reviews=0 if state.is_final else sum(gate.is_open for gate in self.gates),
            origin_run=None if fork is None else fork.run,
            place=summary.location,
            workflow=self.head.header.workflow or "",
            tasks=self._planned or self._ended,
        )


_MAP_COMMAND = "ensemble_ray.cli.map_team:recorded_map"  # place of the runs that `ensemble-ray map` starts
_OF_ITEMS = frozenset({"items", "limit", "delimiter", "encoding", "retry_dead", "dead_letters", "output"})
_FORK = "ensemble_ray.fork({!r}, {!r}, ensemble)"
_NEW_RUN = """items = [items[index] for index in INDICES]
ensemble.replace(items=items, results=None, dead_letters=None).run()"""


def _map_command(options: Mapping[str, str]) -> str:
    """Return the command that maps the dead letters of a run of `ensemble-ray map`; empty: it wrote none."""
    if "dead_letters" not in options:
        return ""
    words = ["ensemble-ray", "map", "--retry-dead", options["dead_letters"]]
    for name, value in options.items():
        if name not in _OF_ITEMS:
            words += [f"--{name.replace('_', '-')}", *([] if value == "True" else [value])]
    if "output" in options:
        rows = PurePath(options["output"])
        words += ["--output", str(rows.with_stem(f"{rows.stem}-retried"))]
    return shlex.join(words)


def _failure_line(kind: str, message: str) -> str:
    text = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return str(one_line(f"{kind}: {text}" if kind else text, None))[:_LINE]


def _error_of(failure: RunFailure, first_failed: str | None, shown: int | None) -> schemas.RunError | None:
    error = failure.error
    if error is NO_REASON:  # its process died
        return None
    return schemas.RunError(
        class_=error.error_type or "Exception",
        message=error.message,
        causes=[f"{each.error_type}: {each.message}" for each in error.causes],
        place=error.place,
        first_failed_step=first_failed,
        what=failure.what,
        lines=list(failure.lines()),
        step=failure.step or None,
        fork_from=failure.fork_from or None,
        others=failure.others,
        answer=None if failure.answer is None else failure.answer[:shown],
        refusal=failure.refusal,
        attempts=[
            schemas.FailedAttemptSchema(
                started_at=as_millis(each.started_at),
                ended_at=as_millis(each.ended_at),
                waited_ms=as_millis(each.waited_s),
            )
            for each in failure.attempts
        ],
        requests=failure.requests,
        remedy=failure.remedy,
    )


class RunView:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.steps = StepsView()
        self.totals = RunTotals(self.steps.history)

    @property
    def cursor(self) -> int:
        return self.totals.cursor

    def apply(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            output = None
            try:
                output = self.steps.apply(fact)
            finally:  # the reader continues after a damaged fact
                self.totals.add(fact, output)

    def settle(self, summary: RecordedRun) -> None:
        """Mark open steps as interrupted if the run has no owner and no end."""
        if self.totals.state(summary) is RunState.INTERRUPTED:
            self.steps.history.interrupt(self.totals.last_at)

    def reviews(self, summary: RecordedRun, *, at: float, can_decide: bool) -> list[schemas.ReviewSchema]:
        """Return its review gates with their full texts, oldest first."""
        name, subject, is_owned = self.totals.head.name, self.totals.subject, bool(summary.owner)
        can_decide = can_decide and not self.totals.state(summary).is_final
        return [
            review_of(each, ensemble=name, subject=subject, at=at, is_owned=is_owned, can_decide=can_decide)
            for each in self.totals.gates
        ]

    def detail(
        self,
        summary: RecordedRun,
        *,
        at: float,
        can_decide: bool,
        forks: Sequence[str] = (),
        problem: str | None = None,
        failure: RunFailure | None = None,
        next_step: NextStep | None = None,
        offers: Sequence[schemas.Action] = (),
        has_texts: bool = True,
    ) -> schemas.RunDetailSchema:
        totals, state = self.totals, self.totals.state(summary)
        head = totals.head
        header, fork = head.header, head.forked_from
        reason = None
        if not state.is_active and state is not RunState.INTERRUPTED:
            reason = state.exit_reason if head.end is None else head.end.reason
        failed = self.steps.first_failed()
        if left_out := self.steps.history.left_out:
            problem = problem or f"{left_out:,} more steps are not shown"
        reviews = self.reviews(summary, at=at, can_decide=can_decide)
        if not has_texts:
            cuts = [
                {"task_output": each.task_output[:_SHOWN], "prompt": (each.prompt or "")[:_SHOWN]} for each in reviews
            ]
            reviews = [each.model_copy(update=cut) for each, cut in zip(reviews, cuts, strict=True)]
        shown = None if has_texts else _SHOWN
        return schemas.RunDetailSchema(
            **dict(totals.row(summary)),
            inputs={name: str(value)[:shown] for name, value in (header.inputs or {}).items()},
            exit_reason=None if reason is None else reason.value,
            exit_reason_text=exit_text(reason, state),
            error=None if failure is None else _error_of(failure, failed.id if failed else None, shown),
            first_error_step=None if failed is None else failed.id,
            counts=self.steps.counts(),
            reviews=reviews,
            budget=self._budget(exit_text(reason, state)),
            forked_from=None if fork is None else schemas.ForkOrigin(run_id=fork.run, step=fork.task),
            forks=list(forks),
            cursor=self.cursor,
            is_live=state.is_active or state is RunState.WAITING,
            problem=problem,
            resume_advice=resume_advice(summary.run_id, head.source.place) if state is RunState.INTERRUPTED else None,
            batches=[
                schemas.BatchSchema(
                    batch=each.batch,
                    state=each.state,
                    status=each.status,
                    total=each.total,
                    answered=each.answered,
                    failed=each.failed,
                    provider_batch=each.provider_batch,
                )
                for each in self.steps.history.batches
            ],
            item_retry=None if state.is_active else self._item_retry(summary.run_id),
            next_step=None if next_step is None else schemas.NextStepSchema(**next_step._asdict()),
            offers=list(offers),
        )

    def _item_retry(self, run_id: str) -> schemas.ItemRetry | None:
        """A resume repeats failed items only if the first one ends the run; items that were left out stay so (S-MR-163)."""
        states = self.steps.history.executions.values()
        failed = next((state.id for state in states if state.kind == "map" and state.status == "failed"), None)
        if failed is None:
            return None
        head = self.totals.head
        place, key = head.source.place, node_key(failed)
        if not head.is_dynamic:
            command = f"ensemble-ray fork {run_id} --from {shlex.quote(key)}" if place else _FORK.format(run_id, key)
            return schemas.ItemRetry(action="fork", step=key, command=command, is_shell=bool(place))
        if fails_on_item(head.header):
            command = resume_advice(run_id, place)
            return schemas.ItemRetry(action="resume", command=command, is_shell=bool(place))
        if place == _MAP_COMMAND:
            command = _map_command(head.source.overrides)
            return schemas.ItemRetry(action="run", command=command, is_shell=True) if command else None
        if place.lower().endswith((".yaml", ".yml")):
            command = shlex.join(["ensemble-ray", "map", "--retry-dead", "DEAD_LETTERS", "--ensemble", place])
            return schemas.ItemRetry(action="run", command=command, is_shell=True)
        return schemas.ItemRetry(action="run", command=_NEW_RUN, is_shell=False)

    def _budget(self, end_reason: str | None) -> schemas.BudgetSchema:
        totals, limits = self.totals, self.totals.budget
        agents: dict[str, list[int | None]] = {}
        costs: dict[str, Decimal] = {}
        for state in self.steps.history.executions.values():
            if state.is_unit or not (state.agent and state.started_at is not None):
                continue
            shown = self.steps.show(state)
            agents.setdefault(state.agent, []).append(shown.total_tokens)
            if shown.cost is not None:
                costs[state.agent] = costs.get(state.agent, Decimal(0)) + shown.cost[0]
        by_agent = [
            schemas.AgentBudget(
                agent=agent,
                tokens=None if None in counts else sum(each or 0 for each in counts),
                cost=f"{costs[agent]:f}" if agent in costs else None,
                steps=len(counts),
            )
            for agent, counts in agents.items()
        ]
        max_tokens, max_cost = (None, None) if limits is None else (limits.max_tokens, limits.max_cost)
        return schemas.BudgetSchema(
            tokens=schemas.SpentTokens(spent=totals.usage.spent_tokens, allowed=max_tokens),
            cost=schemas.SpentCost(
                spent=None if totals.cost is None else f"{totals.cost:f}",
                allowed=None if max_cost is None else f"{Decimal(max_cost) / _UNITS:f}",
                currency=totals.currency or None,
            ),
            by_agent=by_agent,
            end_reason=end_reason,
        )
