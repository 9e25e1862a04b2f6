"""Read the recorded facts of a run to be resumed, one page at a time, and what runs again.

Large bodies are stored in an unnamed file until they are needed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, assert_never, cast

from msgspec.structs import replace

from ensemble_ray.definition.run_options import RunOptions, tags_in
from ensemble_ray.errors import RecordError, RunExistsError, ValidationError, message_of
from ensemble_ray.execute.effects import answers_before, typed_output
from ensemble_ray.facts.effects import MemoryStored, ModelAnswered, ReflectionRecalled
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import (
    DirectiveFact,
    DirectiveRecorded,
    FailureRecorded,
    ModelSwitched,
    OutputRecorded,
    PlanRecorded,
    RecordedBudget,
    RunResumed,
)
from ensemble_ray.items.line_file import Spool
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.identity.definition import differences
from ensemble_ray.record.journal import plain_data
from ensemble_ray.record.stores import RunStore, fork_advice, resume_advice
from ensemble_ray.record.trace import output_of
from ensemble_ray.record.view.tree import directives_in
from ensemble_ray.values.memory import TaskReflection
from ensemble_ray.values.metrics import Amount, RunBudget
from ensemble_ray.values.outputs import EnsembleOutput, RunState
from ensemble_ray.values.reviews import ModelSwitch, add_switch
from ensemble_ray.values.task_output import OutputType, TaskOutput

TakePage = Callable[[Sequence[Fact]], None]
KeepOutput = Callable[[str, OutputRecorded], None]
KeepFailure = Callable[[str, Fact[FailureRecorded]], None]
K = TypeVar("K", bound=Hashable)


async def read_pages(store: RunStore, run_id: str, kinds: Collection[str] | None, *take: TakePage) -> None:
    async for page in store.read(run_id, kinds=kinds):
        for each in take:
            each(page)


async def read_answers(store: RunStore, run_id: str) -> Mapping[str, Sequence[Fact[ModelAnswered]]]:
    """Return the answers to calls that made agents before the run began, by effect name, in order (S-SET-46)."""
    answers: dict[str, list[Fact[ModelAnswered]]] = {}

    def take(page: Sequence[Fact]) -> None:
        for name, found in answers_before(page).items():
            answers.setdefault(name, []).extend(found)

    await read_pages(store, run_id, kinds_of(ModelAnswered), take)
    return answers


class RecordedFailures(Generic[K]):
    """Recorded failures with the traces of their tasks, in a file until they are read."""

    def __init__(self) -> None:
        self._bodies = Spool()
        self._facts: dict[K, tuple[Fact[FailureRecorded], int]] = {}  # without their data

    def __contains__(self, key: object) -> bool:
        return key in self._facts

    def __iter__(self) -> Iterator[K]:
        return iter(self._facts)

    def put(self, key: K, fact: Fact[FailureRecorded]) -> None:
        slot = self._bodies.put(json.dumps(plain_data(fact.data.to_data())).encode())
        self._facts[key] = replace(fact, data=_NO_DATA), slot

    def get(self, key: K) -> Fact[FailureRecorded] | None:
        found = self._facts.get(key)
        if found is None:
            return None
        fact, slot = found
        return replace(fact, data=FailureRecorded.from_data(json.loads(self._bodies.get(slot)), fact.at))


_NO_DATA = FailureRecorded(error_type="", message="")


def budget_of(budget: RunBudget | None) -> RecordedBudget | None:
    return None if budget is None else RecordedBudget(budget.max_tokens, budget.max_cost)


def recorded_budget(facts: Iterable[Fact]) -> RunBudget | None:
    last = _newest(facts)
    if last is None or last.budget is None or last.budget == (None, None):
        return None
    return RunBudget(max_tokens=last.budget.max_tokens, max_cost=last.budget.max_cost)


def options_again(facts: Iterable[Fact], chosen: RunOptions | None) -> RunOptions:
    """Return the last options of a run, from the facts of its head, updated by `chosen`."""
    last = _newest(facts)
    recorded = recorded_options(last)
    if chosen is None:
        return recorded
    now = chosen.model_dump(exclude_none=True)
    return RunOptions(**{**_options(last), **now, "deps": chosen.deps})  # deps are never recorded


def recorded_options(header: PlanRecorded | RunResumed | None) -> RunOptions:
    try:
        return RunOptions(**_options(header))
    except (TypeError, ValidationError) as error:
        raise RecordError(
            f"The record is damaged: the options of the run cannot be read: {message_of(error)}"
        ) from error


def options_of_fork(header: PlanRecorded, chosen: RunOptions | None) -> Mapping[str, object] | None:
    """Return the options of a run without its tags and its user, updated by `chosen` (S-DUR-142)."""
    own = {} if chosen is None else chosen.model_dump(mode="json", exclude_none=True)
    if header.options is None:
        return own or None
    return {**{name: value for name, value in header.options.items() if name not in {"tags", "user"}}, **own}


def check_larger(run_id: str, origin: str, before: RunBudget | None, now: RunBudget | None, spent: Amount) -> None:
    """Refuse to resume a run that spent its budget, unless the budget is larger now (S-BUD-6)."""
    if now is None or before is None or (now.allows_more(before) and now.covers(spent)):
        return
    raise ValidationError(
        f"Run '{run_id}' spent its budget ({before.describe_limits()}): {before.describe(spent)} are spent. Go on with a larger "
        f"one: {resume_advice(run_id, origin, field='max_tokens=N')} (max_cost=, --max-cost for money)"
    )


def _newest(facts: Iterable[Fact]) -> PlanRecorded | RunResumed | None:
    last: PlanRecorded | RunResumed | None = None
    for fact in facts:
        match fact.data:
            case PlanRecorded() as first:
                last = first
            case RunResumed(options=options, budget=budget) as again if options is not None or budget is not None:
                last = again
            case _:
                pass
    return last


def _options(header: PlanRecorded | RunResumed | None) -> Mapping[str, Any]:
    if header is None or not header.options:
        return {}
    options = cast("Mapping[str, Any]", header.options)
    return {**options, "tags": tags_in(options)} if "tags" in options else options


async def read_recalled(store: RunStore, run_id: str) -> AsyncIterator[tuple[str, TaskReflection | None]]:
    async for page in store.read(run_id, kinds=kinds_of(ReflectionRecalled)):
        for fact in page:
            if isinstance(fact.data, ReflectionRecalled):
                yield fact.data.key, fact.data.recalled


async def read_stored(store: RunStore, run_id: str) -> AsyncIterator[tuple[str, TaskOutput]]:
    """Yield the outputs that were stored in memory, by instance, in their order."""
    noted: set[str] = set()
    async for page in store.read(run_id, kinds=kinds_of(MemoryStored, OutputRecorded)):
        for fact in page:
            if isinstance(fact.data, MemoryStored):
                noted.add(fact.instance)
            elif isinstance(fact.data, OutputRecorded) and fact.instance in noted:
                yield fact.instance, typed_output(fact.data.output_data())


class GivenDirectives:
    """The directives of one run; `switches` are models for tasks that start now, if not the models of their agents."""

    def __init__(self, given: Iterable[DirectiveFact] = ()) -> None:
        self.switches: tuple[ModelSwitch, ...] = ()
        #: by text: a repeated directive replaces the earlier one, so that requests can be repeated safely
        self._texts: dict[str, DirectiveRecorded] = {}
        for each in given:
            self.apply(each)

    def apply(self, given: DirectiveFact) -> None:
        match given:
            case DirectiveRecorded(text=text):
                self._texts[text] = given
            case ModelSwitched(model=model, agent=agent):
                self.switches = add_switch(self.switches, ModelSwitch(model=model, agent=agent))
            case _:
                assert_never(given)

    @property
    def has_texts(self) -> bool:
        return bool(self._texts)

    def active(self, at: float) -> tuple[str, ...]:
        """Return the texts that are active at a time, Unix time, s, in the order of their directives."""
        return tuple([each.text for each in self._texts.values() if each.is_active(at)])


async def read_switches(store: RunStore, run_id: str) -> tuple[ModelSwitch, ...]:
    given = GivenDirectives()
    async for page in store.read(run_id, kinds=kinds_of(ModelSwitched)):
        for each in directives_in(page):
            given.apply(each)
    return given.switches


_NAMED = 20


def recorded_output(
    run_id: str,
    state: RunState,
    facts: Iterable[Fact],
    header: PlanRecorded | None,
    *,
    output_types: Mapping[str, OutputType] | None = None,
    object_ids: Mapping[str, str] | None = None,
) -> EnsembleOutput | None:
    """Return the output of an earlier run of that id; None if it has no facts, so that the run can begin.

    `header` is the first fact that this run would record; None: the caller has compared it. See `fold_output` for
    `output_types` and `object_ids`, and `is_answered` for the errors.
    """
    facts = list(facts)
    history = RunHistory(facts, has_details=True)
    head = history.head
    fork = fork_advice(run_id, head.header.origin or "", facts, unit=head.failed_unit)
    if not is_answered(run_id, state, recorded_state=head.state, recorded=head.header, header=header, fork=fork):
        return None
    return output_of(history, output_types, object_ids)


def is_answered(
    run_id: str,
    state: RunState,
    *,
    recorded_state: RunState,
    recorded: PlanRecorded,
    header: PlanRecorded | None,
    fork: str = "",
) -> bool:
    """Whether a run of that id has completed; False: it can begin.

    Args:
        run_id: The requested id.
        state: By the store.
        recorded_state: By the run's facts, which take precedence.
        recorded: The first fact; an empty one if there is none.
        header: The first fact that this run would record; None: the caller has compared it.
        fork: How a new run can reuse the outputs of a failed one; empty: it cannot.

    Raises:
        RunExistsError: a run of that id is running.
        ValidationError: the record has no answer: interrupted, cancelled, failed, or another definition.
    """
    if state.is_active:
        raise RunExistsError(f"Run '{run_id}' is running: wait for its end, or choose another run_id")
    if recorded.is_empty:
        return False  # it never began
    if recorded_state is not RunState.INTERRUPTED:
        state = recorded_state  # its process may have died before it stored the state
    if recorded_state is RunState.COMPLETED:
        if header is not None:
            check_same(run_id, recorded, header, doing="run")
        return True
    field = "max_tokens=N" if state is RunState.BUDGET_EXHAUSTED else ""
    resume = f"{resume_advice(run_id, recorded.origin or '', field=field)}; or choose another run_id"
    if state is RunState.FAILED and recorded.is_dynamic:
        msg = f"Run '{run_id}' has failed and is not begun again under its id. Resume it, which tries again what failed: {resume}"
    elif state is RunState.FAILED:
        msg = f"Run '{run_id}' has failed and is not run again under its id: choose another run_id"
        msg += f", or begin a new run with what it did: {fork}" if fork else ""
    elif state is RunState.BUDGET_EXHAUSTED:
        msg = f"Run '{run_id}' has spent its budget and is not begun again under its id. Resume it with a larger one: {resume}"
    elif state is RunState.WAITING:
        msg = f"Run '{run_id}' waits for reviews and is not begun again under its id. Decide them, and resume it: {resume}"
    else:
        ended = "cancelled" if state is RunState.CANCELLED else "interrupted"
        msg = f"Run '{run_id}' was {ended} and is not begun again under its id. Resume it: {resume}"
    raise ValidationError(msg)


def check_same(run_id: str, recorded: PlanRecorded, current: PlanRecorded, *, doing: Literal["run", "resume"]) -> None:
    """Refuse a definition that is not the recorded one, and list the differences (S-DUR-36, S-SET-39)."""
    found = what_differs(recorded, current)
    if not found:
        return
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    differing = "; ".join(found[:_NAMED]) + more
    if doing == "run":
        msg = f"Run '{run_id}' is finished, and was of another definition or other inputs: {differing}. Choose another run_id"
    else:
        msg = (
            f"Run '{run_id}' was of another definition: {differing}. Resume it with its original definition, or allow the "
            "changes (allow_changes=True, --allow-changes): then recorded outputs are used unchanged"
        )
    raise ValidationError(msg)


def what_differs(recorded: PlanRecorded, current: PlanRecorded) -> list[str]:
    plans = (
        {name: each for name, each in (header.plan or {}).items() if name != "inputs"} for header in (recorded, current)
    )
    return [
        *(f"inputs.{difference}" for difference in differences(recorded.inputs or {}, current.inputs or {})),
        *(f"plan.{difference}" for difference in differences(*plans)),  # the inputs are listed above
        *(
            f"definition.{difference}"
            for difference in differences(recorded.definition or {}, current.definition or {})
        ),
    ]
