"""Teams whose runs wait for decisions in their records, and what their outputs say."""

from __future__ import annotations

from pathlib import Path

from ensemble_ray import (
    Ensemble,
    EnsembleOutput,
    Task,
    TaskHandlerContext,
)
from tests.scenarios.teams import Marks


def gates_of(output: EnsembleOutput) -> dict[str, str]:
    """Ids of the open gates, by what they ask about."""
    return {each.task_description: each.gate_id for each in output.open_reviews}


class Given:
    """Notes on the disk which tasks were done; the handlers of a team."""

    def __init__(self, path: Path) -> None:
        self._marks = Marks(path)

    def __call__(self, context: TaskHandlerContext) -> str:
        """Say what it was given."""
        self._marks.add(context.description)
        return "+".join([context.description, *(each.raw for each in context.context_outputs)])

    @property
    def done(self) -> list[str]:
        """Descriptions of the tasks that were done, in order."""
        return self._marks.lines


def team(*tasks: Task, **fields: object) -> Ensemble:
    """A detached team."""
    return Ensemble(tasks=tasks, review_wait="detach", **fields)  # type: ignore[arg-type]


def raws(output: EnsembleOutput) -> list[str]:
    """The texts of an output."""
    return [each.raw for each in output.task_outputs]
