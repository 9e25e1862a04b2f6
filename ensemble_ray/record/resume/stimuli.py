"""What the source of a planned run was told, as its record has it. Package: record. Pure (S-DUR-30).

In: recorded stimuli in order. Out: the same stimuli in the groups in which the source was told them, without those that a
run makes up for that goes on. That a task was stopped stays: the source knows whether it still wants that, as a join of a
graph does, and is told only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError
from ensemble_ray.schedule.stimuli import (
    CancelRequested,
    Continued,
    Exited,
    Stimulus,
    Waiting,
    decode_stimulus,
)
from ensemble_ray.values.outputs import ExitReason

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import RunResumed, StimulusRecorded

__all__ = ["RecordedStimuli", "StimulusGroups"]


class StimulusGroups:
    """The stimuli of one run, in the groups in which the source was told them; the rest of the last one may be torn off."""

    def __init__(self) -> None:
        #: with the numbers of their facts
        self.numbered: list[list[tuple[int, Stimulus]]] = []
        #: whether more of the last group is to come
        self._is_open = False
        #: whether tasks wait at gates since the run went on last
        self._is_waiting = False

    def apply(self, fact: Fact[StimulusRecorded]) -> Stimulus | None:
        """Take the next stimulus, and return it; None: it is unknown, and left out.

        Raises:
            RecordError: it is damaged.
        """
        try:
            stimulus = decode_stimulus(fact)
        except TypeError as error:
            msg = f"The record is damaged: stimulus {fact.seq}: {error}"
            raise RecordError(msg) from error
        if not self._is_open:
            self.numbered.append([])
        self._is_open = bool(fact.data.more)
        if stimulus is not None:
            self.numbered[-1].append((fact.seq, stimulus))
        self._is_waiting = self._is_waiting or isinstance(stimulus, Waiting)
        return stimulus

    def resume(self, fact: Fact[RunResumed]) -> None:
        """Take notice that the run went on, which starts again what waited; forget what it makes up for."""
        if not fact.data.is_restart:
            self.forget_undone()
        if self._is_waiting:
            self.numbered.append([(fact.seq, Continued(at=fact.at))])
            self._is_open = self._is_waiting = False

    def forget_undone(self) -> None:
        """Forget what a run makes up for that somebody wants to go on: cancellations, a spent budget."""
        self.numbered = [[each for each in group if not _is_undone(each[1])] for group in self.numbered]

    @property
    def groups(self) -> tuple[tuple[Stimulus, ...], ...]:
        """The stimuli by group; no group is empty."""
        return tuple(tuple(each for _, each in group) for group in self.numbered if group)


class RecordedStimuli(StimulusGroups):
    """The stimuli of one run, and the early exits that tasks recorded, of which the source may not have been told."""

    def __init__(self) -> None:
        super().__init__()
        self._exits: dict[str, Exited] = {}

    def apply(self, fact: Fact[StimulusRecorded]) -> Stimulus:
        """Take the next stimulus, and return it.

        Raises:
            RecordError: it is damaged, or unknown.
        """
        stimulus = super().apply(fact)
        if stimulus is None:
            msg = f"The record is damaged: stimulus {fact.seq} is of the unknown type '{fact.data.type}'"
            raise RecordError(msg)
        return stimulus

    def apply_exit(self, exited: Exited) -> None:
        """Take what a task recorded that ended the run early."""
        self._exits[exited.instance] = exited

    def forget_undone(self) -> None:
        """Forget cancellations and a spent budget, also where a task alone recorded them."""
        super().forget_undone()
        self._exits = {instance: each for instance, each in self._exits.items() if not _is_undone(each)}

    @property
    def exits(self) -> Mapping[str, Exited]:
        """Tasks that ended the run early, by instance, whether or not the source was told."""
        told = {each.instance: each for group in self.groups for each in group if isinstance(each, Exited)}
        return {**self._exits, **told}


def _is_undone(stimulus: Stimulus) -> bool:
    """Whether a run that goes on makes up for it: it was cancelled, or had spent its budget (S-DUR-35, S-BUD-6)."""
    if isinstance(stimulus, Exited):
        return stimulus.reason is ExitReason.BUDGET_EXHAUSTED
    return isinstance(stimulus, CancelRequested)
