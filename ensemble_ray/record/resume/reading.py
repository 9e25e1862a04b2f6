"""Reading what is recorded of a run that goes on: page by page, whatever its tasks are made of.

In: a store. Out: pages, for everything that is made of them. Never: more than one page in memory; a body kept elsewhere than
in a file without a name, until somebody asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from ensemble_ray.execute.effects import answers_before
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.ends import FailureRecorded, OutputRecorded
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.items.spool import Spool
from ensemble_ray.record.rendering import plain_data

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore

#: Takes the next facts of a run.
TakePage = Callable[[Sequence[Fact]], None]
#: Takes what a task gave, under the name that its run has for the task.
KeepOutput = Callable[[str, OutputRecorded], None]
#: Takes how a task failed, under that name.
KeepFailure = Callable[[str, Fact[FailureRecorded]], None]
K = TypeVar("K", bound=Hashable)


async def read_pages(store: RunStore, run_id: str, kinds: Collection[str] | None, *take: TakePage) -> None:
    """Give the recorded facts of some kinds to all of these, page by page.

    Raises:
        RecordError: the record is damaged, of a newer format, or was removed meanwhile.
    """
    async for page in store.read(run_id, kinds=kinds):
        for each in take:
            each(page)


async def read_answers(store: RunStore, run_id: str) -> Mapping[str, Sequence[Fact[ModelAnswered]]]:
    """Return the answers to calls that made agents before the run began, by effect name, in order (S-SET-46).

    Raises:
        RecordError: the record is damaged.
    """
    answers: dict[str, list[Fact[ModelAnswered]]] = {}

    def take(page: Sequence[Fact]) -> None:
        for name, found in answers_before(page).items():
            answers.setdefault(name, []).extend(found)

    await read_pages(store, run_id, kinds_of(ModelAnswered), take)
    return answers


class RecordedFailures(Generic[K]):
    """Recorded failures, with what their tasks had done until then, in a file until one is asked for."""

    def __init__(self) -> None:
        self._bodies = Spool()
        #: the fact of each, without its data
        self._facts: dict[K, tuple[Fact[FailureRecorded], int]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._facts

    def __iter__(self) -> Iterator[K]:
        return iter(self._facts)

    def put(self, key: K, fact: Fact[FailureRecorded]) -> None:
        """Keep the newest failure of a task."""
        slot = self._bodies.put(json.dumps(plain_data(fact.data.to_data())).encode())
        self._facts[key] = replace(fact, data=_NO_DATA), slot

    def get(self, key: K) -> Fact[FailureRecorded] | None:
        """Return the failure of a task; None where it has none."""
        found = self._facts.get(key)
        if found is None:
            return None
        fact, slot = found
        return replace(fact, data=FailureRecorded.from_data(json.loads(self._bodies.get(slot)), fact.at))


_NO_DATA = FailureRecorded(error_type="", message="")
