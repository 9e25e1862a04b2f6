"""Parts of the map-reduces that scenarios run: tasks that name their items, a model that says what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ensemble_ray import (
    ChatResponse,
    EnsembleOutput,
    ExecutionTrace,
    ExitReason,
    MapEnsemble,
    MapReduceEnsemble,
    Task,
    TaskCompleteEvent,
    TokenUsage,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.scenarios.teams import PATIENCE_S, task_of, until, wait_for

#: Output tokens of every answer of `answer`; with a budget of 30 three of them make a group.
TOKENS = 10


def map_task(item: object) -> Task:
    """The task of an item."""
    return Task.of(f"map {item}")


def reduce_task(chunk: list[Task]) -> Task:
    """The task over a group; it names what it brings together."""
    said = "+".join(each.description for each in chunk)
    return Task(description=f"reduce {said}", expected_output="a text", context=chunk)


def answer(asked: ScriptedCall) -> ChatResponse:
    """Short names of what was asked: `0` for `map 0`, `(0+1)` for a reduce of both."""
    kind, _, rest = task_of(asked).partition(" ")
    return ChatResponse(rest if kind == "map" else f"({rest})", usage=TokenUsage(3, TOKENS))


async def answered(asked: ScriptedCall) -> ChatResponse:
    """The same on the loop."""
    return answer(asked)


def model() -> ScriptedModel:
    """A model that answers so."""
    return ScriptedModel(otherwise=answered)


def failing(*tasks: str, error: object = ValueError) -> ScriptedModel:
    """A model that fails for tasks whose descriptions begin so."""

    async def entry(asked: ScriptedCall) -> object:
        return error if f"{task_of(asked)} ".startswith(tasks) else answer(asked)

    return ScriptedModel(otherwise=entry)


def team(count: int = 6, **fields: Any) -> MapReduceEnsemble:
    """A map-reduce in groups of three answers."""
    given: dict[str, Any] = {"items": range(count), "map_task": map_task, "reduce_task": reduce_task}
    if "chunk_size" not in fields and "context_window_size" not in fields:
        given["target_token_budget"] = 3 * TOKENS
    if "llm" not in fields:
        given["llm"] = model()
    return MapReduceEnsemble(**{**given, **fields})


def mapping(items: object = range(6), **fields: Any) -> MapEnsemble:
    """A map without reducing."""
    given: dict[str, Any] = {"items": items, "map_task": map_task}
    if "llm" not in fields:
        given["llm"] = model()
    return MapEnsemble(**{**given, **fields})


def trace_of(output: EnsembleOutput) -> ExecutionTrace:
    """The trace, which every run has."""
    assert output.trace is not None
    return output.trace


def raws(output: EnsembleOutput) -> list[str]:
    """What all tasks said."""
    return [each.raw for each in output.task_outputs]


def counts(output: EnsembleOutput) -> list[int]:
    """How many tasks each level had."""
    return [each.task_count for each in trace_of(output).map_reduce_levels]


def asked_of(llm: ScriptedModel) -> list[str]:
    """Descriptions of the tasks that a model was asked about."""
    return [task_of(each) for each in llm.calls]


class Held:
    """A model that hangs at some tasks until it is let go; so a run can be cut there."""

    def __init__(self, *tasks: str) -> None:
        self._tasks = tasks
        self._reached = threading.Event()
        self._let_go = threading.Event()
        self.llm = ScriptedModel(otherwise=self.answer)
        self._before = 0

    def answer(self, asked: ScriptedCall) -> ChatResponse:
        """What its model says."""
        if f"{task_of(asked)} ".startswith(self._tasks) and not self._let_go.is_set():
            self._reached.set()
            wait_for(self._let_go)
        return answer(asked)

    def cut(self, ensemble: MapReduceEnsemble | MapEnsemble, run_id: str, done: int) -> EnsembleOutput:
        """Run until one of those tasks is asked and so many others are done, then cancel; the model hangs no more."""
        run = ensemble.start(run_id=run_id, runtime="inline")
        until(lambda: self._reached.is_set() or run.state.is_final, "the task that it hangs at")
        if not self._reached.is_set():
            run.result(PATIENCE_S)  # says why
            raise AssertionError(f"run '{run_id}' ended before it could be cut")
        completed = (each for each in run.events() if isinstance(each, TaskCompleteEvent))
        for _ in range(done):
            next(completed)
        run.cancel()
        output = run.result(PATIENCE_S)
        assert output.exit_reason is ExitReason.CANCELLED
        self.let_go()
        self._before = len(self.llm.calls)
        return output

    def let_go(self) -> None:
        """The model hangs no more; nor does the thread that did."""
        self._let_go.set()

    @property
    def asked_since(self) -> list[str]:
        """What was asked after the cut."""
        return asked_of(self.llm)[self._before :]


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises that."""

    def factory(*_: object) -> object:
        raise error

    return factory


class Calls:
    """Wraps a function, and keeps what it was called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.arguments: list[Sequence[Any]] = []
        self.threads: set[str] = set()

    def __call__(self, *arguments: Any) -> Any:
        self.arguments.append(arguments)
        self.threads.add(threading.current_thread().name)
        return self._function(*arguments)

    def __len__(self) -> int:
        return len(self.arguments)
