"""Tasks of handlers that answer from a list, for scenarios of loops, phases and graphs.

An answer that is an error is raised. A handler without answers joins what its context gave: `d[b,c]`.
"""

from __future__ import annotations

from ensemble_ray import Ensemble, EnsembleError, EnsembleOutput, Runtime, Task, TaskHandlerContext
from tests.builders import task
from tests.scenarios.teams import PATIENCE_S, Watcher

__all__ = ["Answers", "answering", "fail_of", "raws", "run_of"]


class Answers:
    """A handler that gives the next answer of a list, and the last one for ever."""

    def __init__(self, name: str, *answers: object) -> None:
        self._name = name
        self._answers = list(answers)

    def __call__(self, context: TaskHandlerContext) -> str:
        """Answer.

        Raises:
            BaseException: that is the answer.
        """
        if not self._answers:
            return f"{self._name}[{','.join(output.raw for output in context.context_outputs)}]"
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)


def answering(name: str, *answers: object, **fields: object) -> Task:
    """Return a task whose handler gives these answers."""
    return task(f"do {name}", name=name, handler=Answers(name, *answers), **fields)


def raws(output: EnsembleOutput) -> list[str]:
    """Return the texts of a run's outputs."""
    return [each.raw for each in output.task_outputs]


def run_of(ensemble: Ensemble, runtime: Runtime | str, watcher: Watcher | None = None) -> EnsembleOutput:
    """Run a team, one task at a time, so that there is one order."""
    chosen = [] if watcher is None else [watcher]
    team = ensemble.model_copy(update={"max_parallel_tasks": 1, "listeners": chosen})
    return team.start({"topic": "bees"}, runtime=runtime).result(timeout_s=PATIENCE_S)


def fail_of(ensemble: Ensemble, runtime: Runtime | str) -> EnsembleError:
    """Run a team that fails; return what it raises.

    Raises:
        AssertionError: it did not fail with an error of the library.
    """
    try:
        run_of(ensemble, runtime)
    except EnsembleError as error:
        return error
    raise AssertionError("it did not fail")
