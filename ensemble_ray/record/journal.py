"""MemoryJournal, and what every journal shares: who may write, and what is known. Room: record.

In: facts of one run. Out: the recorded effect of a name. Never: a write of a writer that a newer one replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray.errors import IllegalStateError, StaleEpochError
from ensemble_ray.messages import Fact
from ensemble_ray.record.rendering import in_json_form

__all__ = ["RUN", "EpochGate", "MemoryJournal", "instance_of_fact"]

#: Kinds whose names are `instance/turn/call`.
_EFFECTS = frozenset({"model", "tool_intent", "tool_result"})
#: The name of facts of the run as a whole.
RUN = "run"


def instance_of_fact(fact: Fact) -> str:
    """The instance that a fact belongs to; `run` for facts of the run itself."""
    return fact.name.rsplit("/", 2)[0] if fact.kind in _EFFECTS else fact.name


class EpochGate:
    """Knows the newest epoch of a run and of each of its instances; refuses older ones."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._newest: dict[str, int] = {}

    def know(self, fact: Fact) -> None:
        """Take note of a fact that is in the record already."""
        if fact.epoch:
            instance = instance_of_fact(fact)
            self._newest[instance] = max(fact.epoch, self._newest.get(instance, 0))

    def admit(self, facts: Sequence[Fact], epoch: int) -> None:
        """Let these facts pass, all or none.

        Raises:
            StaleEpochError: a newer epoch of the run or of an instance has been seen.
        """
        if not epoch and not self._newest:
            return  # the hot path: nothing was ever dispatched twice
        instances = {instance_of_fact(fact) for fact in facts}
        of_run = self._newest.get(RUN, 0)
        for instance in instances:
            newest = max(of_run, self._newest.get(instance, 0))
            if epoch < newest:
                raise StaleEpochError(self._run_id, instance, epoch, newest)
        for instance in instances:
            self._newest[instance] = epoch


class MemoryJournal:
    """One run's facts in memory, gone with the process."""

    def __init__(self, run_id: str, known: Sequence[Fact] = ()) -> None:
        """Begin with facts that are known already."""
        self.run_id = run_id
        self._facts: list[Fact] = []
        self._epochs: list[int] = []
        self._gate = EpochGate(run_id)
        self._index: dict[tuple[str, str], int] = {}
        self._is_closed = False
        for fact in known:
            self._gate.know(fact)
            self._keep(fact, fact.epoch)

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0) -> None:
        """Add facts in order; their data must not change afterwards.

        Raises:
            StaleEpochError: a newer epoch has been seen.
            IllegalStateError: the journal is closed.
        """
        if self._is_closed:
            msg = f"The journal of run '{self.run_id}' is closed"
            raise IllegalStateError(msg)
        self._gate.admit(facts, epoch)
        for fact in facts:
            self._keep(fact, epoch)

    def _keep(self, fact: Fact, epoch: int) -> None:
        if fact.kind != "stimulus":  # an instance has many
            self._index[fact.name, fact.kind] = len(self._facts)
        self._facts.append(fact)
        self._epochs.append(epoch)

    def recorded(self, name: str, kind: str) -> Fact | None:
        """The effect recorded under that name, its data as JSON data; None when there is none."""
        position = self._index.get((name, kind))
        return None if position is None else self._read(position)

    def facts(self) -> list[Fact]:
        """All facts in order, as a reader of a file would get them."""
        return [self._read(position) for position in range(len(self._facts))]

    async def flush(self) -> None:
        """Nothing to wait for."""

    async def close(self) -> None:
        """Take no more facts; they stay readable."""
        self._is_closed = True

    def _read(self, position: int) -> Fact:
        return in_json_form(self._facts[position], epoch=self._epochs[position], seq=position + 1)
