"""The source of a recorded run, brought to where it was by its stimuli. Pure.

In: the plan and the recorded stimuli. Out: what the source wanted, task by task and question by question: the context that a
task had, the history that a predicate was asked about. Never: a decision about what of it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.facts.runs import RunResumed, StimulusRecorded
from ensemble_ray.record.source import RecordedStimuli, relevant
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import EdgeMatches, Evaluate, Question, ResetMemory, Start, UntilHolds
from ensemble_ray.schedule.stimuli import Evaluated, Stimulus

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.schedule.unit import HistoryEntry


def numbered_groups(facts: Iterable[Fact]) -> list[list[tuple[int, Stimulus]]]:
    """Return recorded stimuli with the positions of their facts, in the groups in which the source received them.

    Raises:
        RecordError: One of them is damaged.
    """
    stimuli = RecordedStimuli()
    stimuli.take(facts)
    return [group for group in stimuli.numbered if group]


class FoldedSource:
    """A source, and what it has wanted so far."""

    def __init__(self, plan: Plan) -> None:
        """Make one without a stimulus; no task of it waits for a slot, so that nothing depends on when others ended."""
        self.source = machine_for(replace(plan, max_parallel_tasks=None))
        #: by instance: what was wanted last
        self.starts: dict[str, Start] = {}
        #: open questions, each with how long the history of its unit was when it was asked
        self.questions: dict[Question, int] = {}

    def apply(self, stimuli: Sequence[Stimulus]) -> list[Start]:
        """Apply what came together, but for what means nothing to it; return the tasks that it wants started."""
        known = [
            stimulus
            for stimulus in relevant(self.source, stimuli)
            if not isinstance(stimulus, Evaluated) or stimulus.question in self.questions
        ]
        for stimulus in known:
            if isinstance(stimulus, Evaluated):
                del self.questions[stimulus.question]
        wanted: list[Start] = []
        for instruction in self.source.handle(*known) if known else ():
            match instruction:
                case Start():
                    self.starts[instruction.instance] = instruction
                    wanted.append(instruction)
                case Evaluate(question=question):
                    self.questions[question] = len(self.source.history_of(_unit_of(question)))
                case _:
                    pass
        return wanted

    def history_of(self, question: Question) -> Sequence[HistoryEntry]:
        """Return the history that an open question is about."""
        return self.source.history_of(_unit_of(question))[: self.questions[question]]


def _unit_of(question: Question) -> str:
    return question.unit if isinstance(question, UntilHolds | EdgeMatches | ResetMemory) else ""


def path_of_question(question: Question) -> str:
    """Return the execution that a question is about: an iteration, a step; of memory, the iteration to come.

    Examples:
        >>> path_of_question(UntilHolds(unit="loop:refine", iteration=1))
        'loop:refine#0'
    """
    match question:
        case UntilHolds() | ResetMemory():
            return f"{question.unit}#{question.iteration - 1}"
        case EdgeMatches():
            return f"{question.unit}#{question.step - 1}"
        case _:
            raise TypeError(f"{question} is of no unit")


async def read_wanted(store: RunStore, run_id: str, plan: Plan) -> frozenset[str]:
    """Return the tasks that the run would do when it goes on.

    Raises:
        RecordError: the record is damaged.
    """
    stimuli = RecordedStimuli()
    async for page in store.read(run_id, kinds=kinds_of(StimulusRecorded, RunResumed)):
        stimuli.take(page)
    stimuli.undo()
    source = FoldedSource(plan)
    for group in stimuli.groups:
        source.apply(group)
    return frozenset(source.source.running)
