"""What a replayed run did in its loops, phases and graphs. Package: testing (S-DUR-121).

In: the recorded facts and today's plan, which is the recorded one. Out: what its source wanted, in that order: the tasks with
the context that they had, and the questions to the user's code with the histories that they were asked about.
Never: a task or a question that is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from ensemble_ray.coordinator.predicates import LocalPredicates, list_predicates
from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart
from ensemble_ray.record.source import FoldedSource, RecordedStimuli, path_of_question
from ensemble_ray.schedule.instructions import EdgeMatches, Start, UntilHolds
from ensemble_ray.schedule.stimuli import Completed, Evaluated
from ensemble_ray.testing.replay_ports import Difference
from ensemble_ray.values.ids import instance_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ensemble_ray.coordinator.start_orders import PrecedingOutputs
    from ensemble_ray.definition.graph import Graph
    from ensemble_ray.definition.loop import Loop
    from ensemble_ray.definition.phase import Phase
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.schedule.unit import HistoryEntry
    from ensemble_ray.values.task_output import TaskOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedQuestion:
    """A question to the user's code, as it is recorded."""

    question: UntilHolds | EdgeMatches
    answered: Evaluated
    #: what it was asked about
    history: Sequence[HistoryEntry]


Step = Union[Start, AskedQuestion]  # noqa: UP007  a name for the union, also at run time


def steps_of(plan: Plan, facts: Sequence[Fact], outputs: PrecedingOutputs[TaskOutput]) -> Iterator[Step]:
    """Return what a run did, in its order; of a plan without units its tasks, in the order of the plan.

    Args:
        plan: What ran.
        facts: All of the run.
        outputs: Those that are recorded.
    """
    if not plan.units:
        yield from (Start(instance=instance_of(node.key)) for node in plan.nodes)
        return
    source = FoldedSource(plan)
    for group in RecordedStimuli(facts).numbered_groups:
        stimuli = [stimulus for _, stimulus in group]
        for stimulus in stimuli:
            if isinstance(stimulus, Evaluated) and stimulus.question in source.questions:
                question = stimulus.question
                if isinstance(question, UntilHolds | EdgeMatches):
                    yield AskedQuestion(question=question, answered=stimulus, history=source.history_of(question))
        known = [each for each in stimuli if not isinstance(each, Completed) or each.instance in outputs]
        yield from (each for each in source.handle(known) if isinstance(each, Start))


class RepeatedPredicates:
    """The predicates and conditions of today's code, asked what those of the record were asked."""

    def __init__(self, units: Mapping[str, Loop | Phase | Graph], output_of: Callable[[str], TaskOutput]) -> None:
        """Make them.

        Args:
            units: As the user declared them, by key.
            output_of: Returns a recorded output by instance.
        """
        self._predicates = LocalPredicates(list_predicates(units))
        self._output_of = output_of
        #: by unit path: how many parts of its history were sent
        self._sent: dict[str, int] = {}

    async def difference(self, asked: AskedQuestion) -> Difference | None:
        """Return how today's answer differs from the recorded one."""
        question, sent = asked.question, self._sent.get(asked.question.unit, 0)
        parts = [
            HistoryPart(
                names=entry.names,
                outputs=tuple(map(self._output_of, entry.instances)),
                is_joined=entry.is_joined,
            )
            for entry in asked.history[sent:]
        ]
        self._sent[question.unit] = sent + len(parts)
        answer = await self._predicates.holds(question, sent_count=sent, new=parts)
        recorded, current = _describe_recorded(asked.answered), _describe(answer)
        if recorded == current:
            return None
        path = path_of_question(question)
        is_loop = isinstance(question, UntilHolds)
        return Difference(
            where=f"'{path}'" if isinstance(question, UntilHolds) else f"'{path}', edge {question.edge}",
            what=f"the answer of the {'predicate' if is_loop else 'condition'}",
            recorded=recorded,
            current=current,
        )


def _describe_recorded(answered: Evaluated) -> str:
    if answered.answer is None:
        return f"raised {answered.error_type}: {answered.message}"
    return str(answered.answer).lower()


def _describe(answer: bool | EvaluationFailed | None) -> str:  # noqa: FBT001  a verdict
    if isinstance(answer, EvaluationFailed):
        return f"raised {answer.error_type}: {answer.message}"
    return str(answer).lower()
