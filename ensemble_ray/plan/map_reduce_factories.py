"""Calls of the factories of a map-reduce, checks of their results, and estimates of tokens.

The agent factory is called first, then the task factory, each once (S-MR-2). Their errors are raised unchanged (S-MR-106).
`make_..._in_run` uses a worker thread and accepts async factories (S-MR-143).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Struct

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import braced_texts
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition, takes_agent_first
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.task import Task, UnitOutput
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.concurrency import threads
from ensemble_ray.text.foreign_text import estimate_tokens as length_tokens
from ensemble_ray.values.metrics import add_tokens
from ensemble_ray.values.task_output import TaskOutput

MAP, REDUCE, FINAL, DIRECT = "map", "reduce", "final-reduce", "direct"
_SHOWN = 100

#: None: the run makes an agent, or the task has a handler.
TaskAndAgent: TypeAlias = tuple[Task, Agent | None]


class FactoryFailure(Struct, frozen=True):
    error: Exception


class ItemLoop(Struct, frozen=True):
    """A loop that a factory made in place of a task (S-MR-190)."""

    loop: Loop
    #: id of the body task with the item's output; "": the last task
    chosen: str = ""


Made: TypeAlias = TaskAndAgent | ItemLoop | FactoryFailure
_Making: TypeAlias = Generator["_Call", object, "TaskAndAgent | ItemLoop"]


def make_map(definition: MapDefinition, item: object) -> TaskAndAgent:
    made = _drive(_map(definition, item))
    if isinstance(made, ItemLoop):
        raise ValidationError(
            f"map_task returned the loop '{made.loop.name}', and over a list in static mode all tasks are made at "
            "construction. Give items that are no list, such as iter(items), or set on_item_error"
        )
    return made


def make_reduce(definition: MapReduceDefinition, chunk_tasks: Sequence[Task]) -> TaskAndAgent:
    return cast("TaskAndAgent", _drive(_reduce(definition, chunk_tasks)))


async def make_maps_in_run(definition: MapDefinition, items: Iterable[object]) -> list[Made]:
    """A factory that raises fails its own item, unless `item_policy` is "fail"."""
    makings = [_map(definition, item) for item in items]
    return await _drive_in_run(makings, keeps_failures=definition.item_policy != "fail")


async def make_reduce_in_run(definition: MapReduceDefinition, chunk_tasks: Sequence[Task]) -> TaskAndAgent:
    return cast("TaskAndAgent", (await _drive_in_run([_reduce(definition, chunk_tasks)]))[0])


async def make_direct_in_run(definition: MapReduceDefinition, items: Sequence[object]) -> TaskAndAgent:
    factory, all_items = cast("Callable[..., object]", definition.direct_task), list(items)
    if definition.direct_agent is None:
        making = _make(definition, None, lambda _: _Call("direct_task", factory, all_items))
    else:
        call = _Call("direct_agent", definition.direct_agent)
        making = _make(definition, call, lambda agent: _with_agent("direct_task", factory, all_items, agent))
    return cast("TaskAndAgent", (await _drive_in_run([making]))[0])


def apply_process_settings(definition: MapDefinition, agent: Agent) -> Agent:
    """Apply the definition's settings for the processes of every agent (S-MR-141)."""
    wanted = {"replicas": definition.replicas, "max_concurrency": definition.max_concurrency}
    chosen = {name: value for name, value in wanted.items() if value is not None}
    return agent.rewritten(**chosen) if chosen else agent


class StaticTree(Struct):
    #: in the order of levels, items and groups
    tasks: list[Task] = msgspec.field(default_factory=list[Task])
    node_types: dict[Task, str] = msgspec.field(default_factory=dict[Task, str])
    levels: dict[Task, int] = msgspec.field(default_factory=dict[Task, int])
    #: texts with names in braces in the items below a task
    texts: dict[Task, Sequence[str]] = msgspec.field(default_factory=dict[Task, Sequence[str]])

    def add(self, task: Task, node_type: str, level: int, texts: Sequence[str]) -> Task:
        if task in self.levels:
            factory = "map_task" if node_type == MAP else "reduce_task"
            raise ValidationError(
                f"{factory} must make a new Task in every call, got the same one again: '{task.description}'"
            )
        self.tasks.append(task)
        self.node_types[task] = node_type
        self.levels[task] = level
        if texts:
            self.texts[task] = texts
        return task

    def below(self, group: Sequence[Task]) -> Sequence[str]:
        return tuple(text for task in group for text in self.texts.get(task, ()))


def static_tree(definition: MapReduceDefinition) -> StaticTree:
    tree, level = StaticTree(), 0
    current = [
        tree.add(make_map(definition, item)[0], MAP, 0, braced_texts(item)) for item in definition.item_source.items
    ]
    while True:
        level += 1
        size = definition.effective_chunk_size  # the last group may be smaller (S-MR-32, S-MR-33)
        groups = [current[begin : begin + size] for begin in range(0, len(current), size)]
        node_type = FINAL if len(groups) == 1 else REDUCE
        current = [tree.add(make_reduce(definition, group)[0], node_type, level, tree.below(group)) for group in groups]
        if node_type == FINAL:
            return tree


def counted_tokens(output: TaskOutput) -> int:
    """Return the output tokens that providers counted, with those of reused answers; -1: unknown."""
    return add_tokens((output.metrics.output_tokens, output.metrics.reused_output_tokens))


def estimate_tokens(output: TaskOutput, definition: MapReduceDefinition) -> tuple[int, str | None]:
    """Return the tokens of an output (S-MR-60), and a warning if they are estimated from its length."""
    counted = counted_tokens(output)
    if counted >= 0:
        return counted, None
    if definition.token_estimator is not None:
        estimated: object = definition.token_estimator(output.raw)
        if estimated is not None:
            if isinstance(estimated, bool) or not isinstance(estimated, int) or estimated < 0:
                raise ValidationError(f"token_estimator must return a number >= 0, or None, got: {estimated!r}")
            return estimated, None
    guessed = length_tokens(len(output.raw))
    reason = "there is no token_estimator" if definition.token_estimator is None else "token_estimator returned None"
    return guessed, (
        f"Output of '{output.agent_role}' is estimated at {guessed} tokens from its length: its provider reported no count, and "
        f"{reason}"
    )


def input_tokens(definition: MapReduceDefinition, item: object) -> int:
    """Return the tokens of one item, rounded down (S-MR-80, S-MR-84)."""
    text: object = definition.input_estimator(item)
    if not isinstance(text, str):
        raise ValidationError(f"input_estimator must return a str, got: {type(text).__name__}")
    return length_tokens(len(text))


def _map(definition: MapDefinition, item: object) -> _Making:
    if definition.map_agent is None:
        return _make(definition, None, lambda _: _Call("map_task", definition.map_task, item), takes_loop=True)
    agent_call = _Call("map_agent", definition.map_agent, item)
    return _make(
        definition, agent_call, lambda agent: _Call("map_task", definition.map_task, item, agent), takes_loop=True
    )


def _reduce(definition: MapReduceDefinition, chunk_tasks: Sequence[Task]) -> _Making:
    chunk = list(chunk_tasks)
    if definition.reduce_agent is None:
        making = _make(definition, None, lambda _: _Call("reduce_task", definition.reduce_task, chunk))
    else:
        agent_call = _Call("reduce_agent", definition.reduce_agent)
        making = _make(
            definition, agent_call, lambda agent: _with_agent("reduce_task", definition.reduce_task, chunk, agent)
        )
    task, agent = cast("TaskAndAgent", (yield from making))
    # A reduce task without a part of its group in its context would lose that part silently (S-MR-24).
    inside = {entry.object_id for entry in task.context}
    missing = [entry.description for entry in chunk if entry.object_id not in inside]
    if missing:
        shown = missing[0] if len(missing[0]) <= _SHOWN else missing[0][:_SHOWN] + "..."
        raise ValidationError(
            f"Reduce task '{task.description}' lacks {len(missing)} of the {len(chunk)} tasks of its group in its context, "
            f"the first is '{shown}'. Give it context=chunk_tasks"
        )
    return task, agent


def _with_agent(name: str, factory: Callable[..., object], many: list[Any], agent: Agent | None) -> _Call:
    """Arguments follow the order of the factory's parameters (S-MR-226, S-MR-227)."""
    return _Call(name, factory, *((agent, many) if takes_agent_first(factory) else (many, agent)))


def _make(
    definition: MapDefinition,
    agent_call: _Call | None,
    task_call: Callable[[Agent | None], _Call],
    *,
    takes_loop: bool = False,
) -> _Making:
    agent = None if agent_call is None else _check_type(Agent, (yield agent_call), agent_call.name)
    call = task_call(agent)
    value: object = yield call
    if takes_loop and (made := _as_loop(value, call.name)) is not None:
        tasks: dict[str, Task] = {}
        for body_task in made.loop.body:  # tasks that name no agent get the one of the item
            worker = body_task.agent or (agent if body_task.handler is None else None)
            worker = None if worker is None else apply_process_settings(definition, worker)
            tasks[body_task.object_id] = body_task if worker is body_task.agent else body_task.rewritten(agent=worker)
        return ItemLoop(made.loop.with_tasks_of(tasks), made.chosen)
    task = _check_type(Task, value, call.name)
    if task.agent is None and agent is not None and task.handler is None:
        task = task.rewritten(agent=agent)
    agent = None if task.agent is None else apply_process_settings(definition, task.agent)
    return (task if agent is task.agent else task.rewritten(agent=agent)), agent


def _as_loop(value: object, name: str) -> ItemLoop | None:
    """Other units are refused (S-MR-191)."""
    if isinstance(value, Loop):
        return ItemLoop(value)
    if isinstance(value, UnitOutput) and isinstance(value.loop, Loop):
        return ItemLoop(value.loop, value.task_id)
    if isinstance(value, Phase | Graph | UnitOutput):
        raise ValidationError(
            f"{name} must return a Task, a Loop or the output_of(task) of a Loop, got: {type(value).__name__}"
        )
    return None


def _check_type(cls: type[Any], value: object, name: str) -> Any:
    if isinstance(value, cls):
        return value
    expected = f"{'an' if cls is Agent else 'a'} {cls.__name__}"
    raise ValidationError(f"{name} must return {expected}, got: {'None' if value is None else type(value).__name__}")


class _Call:
    def __init__(self, name: str, factory: Callable[..., object], *arguments: object) -> None:
        self.name = name
        self.call = partial(factory, *arguments)


class _Waiting:
    def __init__(self, call: _Call, awaitable: Awaitable[object]) -> None:
        self.call = call
        self.awaitable = awaitable

    def __del__(self) -> None:
        if inspect.iscoroutine(self.awaitable):
            self.awaitable.close()  # avoids a warning if the run ends before it is awaited


def _drive(making: _Making) -> TaskAndAgent | ItemLoop:
    outcome = _advance([making], [])
    if isinstance(outcome, _Waiting):
        if inspect.iscoroutine(outcome.awaitable):
            outcome.awaitable.close()  # avoids a warning
        raise ValidationError(
            f"{outcome.call.name} is async, and over a list in static mode it is called at construction, without an "
            "event loop. Give a plain function, or items that are no list, such as iter(items)"
        )
    return cast("TaskAndAgent | ItemLoop", outcome[0])


async def _drive_in_run(makings: list[_Making], *, keeps_failures: bool = False) -> list[Made]:
    """Call all factories in one worker thread, one after the other, and await results here."""
    done: list[Made] = []
    result: object = None
    is_cancelled = threading.Event()
    while True:
        try:
            outcome = await threads.run(
                _advance, makings, done, result, is_cancelled.is_set, keeps_failures=keeps_failures
            )
        except asyncio.CancelledError:
            is_cancelled.set()  # the thread finishes its present call, and calls no other factory
            raise
        if not isinstance(outcome, _Waiting):
            return outcome
        try:
            result = await outcome.awaitable
        except Exception as error:
            if not keeps_failures:
                raise
            done.append(FactoryFailure(error))
            result = None


def _advance(
    makings: list[_Making],
    done: list[Made],
    result: object = None,
    is_cancelled: Callable[[], bool] = lambda: False,
    *,
    keeps_failures: bool = False,
) -> list[Made] | _Waiting:
    """Continue until all results are in `done`, or one has to be awaited.

    `result` answers the call of the current generator. With `keeps_failures`, an error replaces its task in `done`.
    """
    while len(done) < len(makings) and not is_cancelled():
        try:
            call = makings[len(done)].send(result)
        except StopIteration as ended:
            done.append(cast("TaskAndAgent | ItemLoop", ended.value))
            result = None
            continue
        try:  # a separate `try`: a StopIteration of the user is an error like others
            result = call.call()
        except Exception as error:
            if not keeps_failures:
                raise
            done.append(FactoryFailure(error))
            result = None
            continue
        if inspect.isawaitable(result):
            return _Waiting(call, result)
    return done
