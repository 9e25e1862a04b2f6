"""MemoryJournal, and what every journal shares: who may write, and what is known.

In: facts of one run. Out: what is recorded of an instance. Never: a write of a writer that a newer one replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ensemble_ray.errors import IllegalStateError, StaleEpochError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import LossAccepted, StimulusRecorded
from ensemble_ray.ports import Persistence
from ensemble_ray.record.rendering import in_json_form
from ensemble_ray.values.ids import RUN


class EpochFence:
    """Knows the newest epoch of a run and of each of its instances; refuses older ones."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._newest: dict[str, int] = {}

    def learn(self, instance: str, epoch: int) -> None:
        """From now on, facts of that instance (`run`: of all) need that epoch or a newer one."""
        if epoch > self._newest.get(instance, 0):
            self._newest[instance] = epoch

    def admit(self, facts: Sequence[Fact], epoch: int) -> None:
        """Let these facts pass, all or none.

        Raises:
            StaleEpochError: a newer epoch of the run or of an instance has been seen.
        """
        if epoch or self._newest:  # else the hot path: nothing was ever dispatched twice
            self.admit_instances({fact.fence for fact in facts}, epoch)

    def admit_instances(self, instances: Collection[str], epoch: int) -> None:
        """Let facts of these instances pass, all or none.

        Raises:
            StaleEpochError: a newer epoch of the run or of an instance has been seen.
        """
        of_run = self._newest.get(RUN, 0)
        for instance in instances:
            newest = max(of_run, self._newest.get(instance, 0))
            if epoch < newest:
                raise StaleEpochError(self._run_id, instance, epoch, newest)
        if epoch > of_run:
            for instance in instances:
                self._newest[instance] = epoch


class MemoryJournal:
    """One run's facts in memory, gone with the process."""

    def __init__(self, run_id: str, known: Sequence[Fact] = ()) -> None:
        """Begin with facts that are known already."""
        self.run_id = run_id
        self._facts: list[tuple[Fact, int]] = []
        self._fence = EpochFence(run_id)
        self._is_closed = False
        for fact in known:
            self._fence.learn(fact.fence, fact.epoch)
            self._facts.append((fact, fact.epoch))

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:  # noqa: ARG002  memory is as safe as it gets
        """Add facts in order; their data must not change afterwards.

        Raises:
            StaleEpochError: a newer epoch has been seen.
            IllegalStateError: the journal is closed.
        """
        if self._is_closed:
            msg = f"The journal of run '{self.run_id}' is closed"
            raise IllegalStateError(msg)
        self._fence.admit(facts, epoch)
        self._facts += [(fact, epoch) for fact in facts]

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """Return what is recorded of an instance: (name, kind) -> its newest fact, stimuli left out."""
        return {
            (fact.name, fact.kind): in_json_form(fact, epoch=epoch, seq=seq)
            for seq, (fact, epoch) in enumerate(self._facts, start=1)
            if not isinstance(fact.data, StimulusRecorded) and fact.fence in {instance, LossAccepted.FENCE}
        }

    def facts(self) -> list[Fact]:
        """All facts in order, as a reader of a file would get them."""
        return [in_json_form(fact, epoch=epoch, seq=seq) for seq, (fact, epoch) in enumerate(self._facts, start=1)]

    async def flush(self) -> None:
        """Nothing to wait for."""

    async def close(self) -> None:
        """Take no more facts; they stay readable."""
        self._is_closed = True


class ForgetfulJournal:
    """The journal of a run that is recorded nowhere and may have millions of facts: it refuses stale epochs, keeps nothing."""

    def __init__(self, run_id: str) -> None:
        self._fence = EpochFence(run_id)

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:  # noqa: ARG002  as safe as it gets
        """Let facts pass.

        Raises:
            StaleEpochError: a newer epoch has been seen.
        """
        self._fence.admit(facts, epoch)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:  # noqa: ARG002  nothing is known of any
        """Nothing."""
        return {}

    async def flush(self) -> None:
        """Nothing to wait for."""

    async def close(self) -> None:
        """Nothing is open."""
