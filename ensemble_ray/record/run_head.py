"""How a run began and how it stands, of a few facts of the run as a whole. Room: record. Pure.

In: the facts `plan`, `resume` and `end`, which cost the same to read however much the run has done. Out: what decides
whether and with what it goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from ensemble_ray.definition.origin import Origin
from ensemble_ray.errors import RecordError
from ensemble_ray.record.map_reduce_data import is_fed
from ensemble_ray.record.task_fold import as_mapping, as_number, as_text
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.values.messages import Fact

__all__ = ["HEAD_KINDS", "RunHead", "head_facts", "located", "origin_in", "read_head"]

#: Kinds of facts that a head is made of.
HEAD_KINDS = ("plan", "resume", "end")


class RunHead:
    """What is known of a run as a whole.

    Attributes:
        header: Data of the record's first fact; empty when the run recorded nothing.
        end: Data of its end; empty when it has not ended, or went on after it.
    """

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        """Take the facts, in order; others than those of `HEAD_KINDS` are passed over."""
        self.header: Mapping[str, object] = {}
        self.end: Mapping[str, object] = {}
        self._recorded_at = 0.0
        for fact in facts:
            self.take(fact)

    def take(self, fact: Fact) -> None:
        """Take the next fact."""
        match fact.kind:
            case "plan":
                self.header, self._recorded_at = fact.data, fact.at
            case "resume":
                self.end = {}  # it goes on: a cancelled run ended, and has not ended any more
            case "end":
                self.end = fact.data
            case _:
                pass

    @property
    def state(self) -> RunState:
        """How the run ended; without an end it was interrupted."""
        try:
            return RunState(as_text(self.end.get("state")))
        except ValueError:
            return RunState.INTERRUPTED

    @property
    def started_at(self) -> float:
        """When the run began first, Unix time, s."""
        return as_number(self.header.get("started_at"), self._recorded_at)

    @property
    def source(self) -> Origin:
        """Where the definition came from, and what was chosen in place of what stands there."""
        return origin_in(self.header)

    @property
    def forked_from(self) -> Mapping[str, str] | None:
        """Run and task of the fork that it is; None: it is none."""
        found = as_mapping(self.header.get("forked_from"))
        return {name: as_text(found.get(name)) for name in ("run", "task")} if found else None

    @property
    def is_fed(self) -> bool:
        """Whether its tasks are made while it runs."""
        return is_fed(self.header)


def origin_in(header: Mapping[str, object]) -> Origin:
    """Where a definition came from, as the data of a run's first fact tells it."""
    overrides = as_mapping(header.get("overrides"))
    return Origin(
        place=as_text(header.get("origin")), overrides={name: str(value) for name, value in overrides.items()}
    )


async def read_head(store: RunStore, run_id: str, *, is_partial: bool = False) -> RunHead:
    """The head of a recorded run; that of a run that recorded nothing where there is none.

    Args:
        store: Where it is.
        run_id: The run's id.
        is_partial: Whether what is left of a record that has lost something is enough.

    Raises:
        RecordError: the record is damaged, or of a newer format.
    """
    return RunHead(await head_facts(store, run_id, is_partial=is_partial))


@contextlib.contextmanager
def located(place: str) -> Generator[None]:
    """Name the place of the record in what goes wrong inside with what was read of it.

    Raises:
        RecordError: as raised inside, with the place where it names none.
    """
    try:
        yield
    except RecordError as error:
        if error.path:
            raise
        raise RecordError(f"{error} (in {place})", place) from error


async def head_facts(store: RunStore, run_id: str, *, is_partial: bool = False) -> list[Fact]:
    """The facts that the head of a run is made of.

    Raises:
        RecordError: the record is damaged, or of a newer format.
    """
    return [fact async for page in store.read(run_id, kinds=HEAD_KINDS, is_partial=is_partial) for fact in page]
