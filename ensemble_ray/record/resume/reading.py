"""Read the recorded facts of a run to be resumed, one page at a time.

Large bodies are stored in an unnamed file until they are needed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, assert_never, cast

from ensemble_ray.definition.run_options import RunOptions, tags_in
from ensemble_ray.errors import RecordError, ValidationError, message_of
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
from ensemble_ray.items.spool import Spool
from ensemble_ray.record.journal import plain_data
from ensemble_ray.record.stores import RunStore, resume_advice
from ensemble_ray.record.view.tree import directives_in
from ensemble_ray.values.memory import TaskReflection
from ensemble_ray.values.metrics import Amount, RunBudget
from ensemble_ray.values.reviews import ModelSwitch, add_switch
from ensemble_ray.values.task_output import TaskOutput

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
    now = {} if chosen is None else chosen.model_dump(exclude_none=True)
    return RunOptions(**{**_options(last), **now}) if now else recorded


def recorded_options(header: PlanRecorded | RunResumed | None) -> RunOptions:
    try:
        return RunOptions(**_options(header))
    except (TypeError, ValidationError) as error:
        raise RecordError(
            f"The record is damaged: the options of the run cannot be read: {message_of(error)}"
        ) from error


def options_of_fork(header: PlanRecorded, chosen: RunOptions | None) -> Mapping[str, object] | None:
    """Return the options of a run without its tags, updated by `chosen` (S-DUR-142)."""
    own = {} if chosen is None else chosen.model_dump(mode="json", exclude_none=True)
    if header.options is None:
        return own or None
    return {**{name: value for name, value in header.options.items() if name != "tags"}, **own}


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
