"""Factories are called here, and what they give is checked.

In: a definition, and the items or the tasks of a group. Out: the task, and the agent that will do it, None where one will
be made for it. Rules: the agent factory first, then the task factory, each once (S-MR-2); what they raise goes on
unchanged (S-MR-106). `make_...` calls them in this thread and knows only plain functions; `make_..._in_run` calls them in
a thread of ours and awaits what is awaitable (S-MR-143).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import braced_texts
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition, takes_agent_first
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.task import Task, UnitOutput
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.forks import threads
from ensemble_ray.text.foreign_text import estimate_tokens as length_tokens
from ensemble_ray.values.task_output import TaskOutput

#: A task, and the agent that will do it.
TaskAndAgent: TypeAlias = tuple[Task, Agent | None]


@dataclass(frozen=True, slots=True)
class FactoryFailure:
    """What a factory raised in place of making the task of an item (S-MR-154)."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ItemLoop:
    """What a factory made of an item in place of one task (S-MR-190)."""

    loop: Loop
    #: id of the body task whose output is that of the item; "": the last one that the loop shows
    chosen: str = ""


#: What a factory made, or why it could not.
Made: TypeAlias = TaskAndAgent | ItemLoop | FactoryFailure
#: Asks for the results of calls, one after the other.
_Making: TypeAlias = Generator["_Call", object, "TaskAndAgent | ItemLoop"]


def make_map(definition: MapDefinition, item: object) -> TaskAndAgent:
    """Make the task of an item.

    Raises:
        ValidationError: a factory gave something else than it should, or is async.
    """
    made = _drive(_map(definition, item))
    if isinstance(made, ItemLoop):
        raise ValidationError(
            f"map_task returned the loop '{made.loop.name}', and over a list in static mode all tasks are made at "
            "construction. Give items that are no list, such as iter(items), or set on_item_error"
        )
    return made


def make_reduce(definition: MapReduceDefinition, chunk_tasks: Sequence[Task]) -> TaskAndAgent:
    """Make the task over a group.

    Raises:
        ValidationError: as `make_map`; or its context lacks a task of the group (S-MR-24).
    """
    return cast("TaskAndAgent", _drive(_reduce(definition, chunk_tasks)))


def make_direct(definition: MapReduceDefinition, items: Sequence[object]) -> TaskAndAgent:
    """Make the one task over all items (S-MR-81); the definition has a `direct_task`.

    Raises:
        ValidationError: as `make_map`.
    """
    return cast("TaskAndAgent", _drive(_direct(definition, items)))


async def make_maps_in_run(definition: MapDefinition, items: Iterable[object]) -> list[Made]:
    """Make the tasks of several items, in their order, during a run; factories may be async.

    A factory that raises fails its own item, unless a failed item ends the run: then the error goes on unchanged.
    What a factory returns is checked all the same.

    Raises:
        ValidationError: as `make_map`.
        Exception: what a factory raised, where `item_policy` is `"fail"` (S-MR-106).
    """
    makings = [_map(definition, item) for item in items]
    return await _drive_in_run(makings, keeps_failures=definition.item_policy != "fail")


async def make_reduce_in_run(definition: MapReduceDefinition, chunk_tasks: Sequence[Task]) -> TaskAndAgent:
    """Call `make_reduce` during a run; factories may be async."""
    return await _one_in_run(_reduce(definition, chunk_tasks))


async def make_direct_in_run(definition: MapReduceDefinition, items: Sequence[object]) -> TaskAndAgent:
    """Call `make_direct` during a run; factories may be async."""
    return await _one_in_run(_direct(definition, items))


class _Call:
    """A factory that is to be called."""

    def __init__(self, name: str, factory: Callable[..., object], *arguments: object) -> None:
        self.name = name
        self.make = partial(factory, *arguments)


def _map(definition: MapDefinition, item: object) -> _Making:
    if definition.map_agent is None:
        return _make(definition, None, lambda _: _Call("map_task", definition.map_task, item), takes_loop=True)
    asked = _Call("map_agent", definition.map_agent, item)
    return _make(definition, asked, lambda agent: _Call("map_task", definition.map_task, item, agent), takes_loop=True)


def _reduce(definition: MapReduceDefinition, chunk_tasks: Sequence[Task]) -> _Making:
    chunk = list(chunk_tasks)
    if definition.reduce_agent is None:
        making = _make(definition, None, lambda _: _Call("reduce_task", definition.reduce_task, chunk))
    else:
        asked = _Call("reduce_agent", definition.reduce_agent)
        making = _make(
            definition, asked, lambda agent: _with_agent("reduce_task", definition.reduce_task, chunk, agent)
        )
    task, agent = cast("TaskAndAgent", (yield from making))
    _check_context(task, chunk)
    return task, agent


def _direct(definition: MapReduceDefinition, items: Sequence[object]) -> _Making:
    factory, all_items = cast("Callable[..., object]", definition.direct_task), list(items)
    if definition.direct_agent is None:
        return _make(definition, None, lambda _: _Call("direct_task", factory, all_items))
    asked = _Call("direct_agent", definition.direct_agent)
    return _make(definition, asked, lambda agent: _with_agent("direct_task", factory, all_items, agent))


def _with_agent(name: str, factory: Callable[..., object], many: list[Any], agent: Agent | None) -> _Call:
    """Return the call of a factory with an agent, in the order that it takes (S-MR-226, S-MR-227)."""
    return _Call(name, factory, *((agent, many) if takes_agent_first(factory) else (many, agent)))


def _make(
    definition: MapDefinition, asked: _Call | None, then: Callable[[Agent | None], _Call], *, takes_loop: bool = False
) -> _Making:
    agent = None if asked is None else _check_type(Agent, (yield asked), asked.name)
    call = then(agent)
    value: object = yield call
    if takes_loop and (made := _as_loop(value, call.name)) is not None:
        return _held_loop(definition, made, agent)
    task = _check_type(Task, value, call.name)
    if task.agent is None and agent is not None and task.handler is None:
        task = task.rewritten(agent=agent)
    agent = None if task.agent is None else apply_process_settings(definition, task.agent)
    return (task if agent is task.agent else task.rewritten(agent=agent)), agent


def apply_process_settings(definition: MapDefinition, agent: Agent) -> Agent:
    """Return the agent with the processes and slots that the definition gives to every agent (S-MR-141)."""
    wanted = {"replicas": definition.replicas, "max_concurrency": definition.max_concurrency}
    chosen = {name: value for name, value in wanted.items() if value is not None}
    return agent.rewritten(**chosen) if chosen else agent


def _as_loop(value: object, name: str) -> ItemLoop | None:
    """Return the loop that a factory gave in place of a task; None where it gave none.

    Raises:
        ValidationError: it gave what is neither, and has tasks of its own (S-MR-191).
    """
    if isinstance(value, Loop):
        return ItemLoop(value)
    if isinstance(value, UnitOutput) and isinstance(value.loop, Loop):
        return ItemLoop(value.loop, value.task_id)
    if isinstance(value, Phase | Graph | UnitOutput):
        raise ValidationError(
            f"{name} must return a Task, a Loop or the output_of(task) of a Loop, got: {type(value).__name__}"
        )
    return None


def _held_loop(definition: MapDefinition, made: ItemLoop, agent: Agent | None) -> ItemLoop:
    """Return the loop whose tasks have their agents; those that name none get the one that was made for the item."""
    tasks: dict[str, Task] = {}
    for task in made.loop.body:
        worker = task.agent or (agent if task.handler is None else None)
        worker = None if worker is None else apply_process_settings(definition, worker)
        tasks[task.object_id] = task if worker is task.agent else task.rewritten(agent=worker)
    return ItemLoop(made.loop.with_tasks_of(tasks), made.chosen)


def _check_type(cls: type[Any], value: object, name: str) -> Any:
    if isinstance(value, cls):
        return value
    expected = f"{'an' if cls is Agent else 'a'} {cls.__name__}"
    raise ValidationError(f"{name} must return {expected}, got: {'None' if value is None else type(value).__name__}")


def _check_context(task: Task, chunk: Sequence[Task]) -> None:
    """Check that a reduce sees all of its group: it would lose a part in silence (S-MR-24)."""
    inside = {entry.object_id for entry in task.context}
    missing = [entry.description for entry in chunk if entry.object_id not in inside]
    if missing:
        shown = missing[0] if len(missing[0]) <= _SHOWN else missing[0][:_SHOWN] + "..."
        raise ValidationError(
            f"Reduce task '{task.description}' lacks {len(missing)} of the {len(chunk)} tasks of its group in its context, "
            f"the first is '{shown}'. Give it context=chunk_tasks"
        )


#: How much of a task's description a message shows.
_SHOWN = 100


# Driving. A making says what to call; who drives it decides where.


def _drive(making: _Making) -> TaskAndAgent | ItemLoop:
    """Drive a making in this thread."""
    outcome = _advance([making], [])
    if isinstance(outcome, _Waiting):
        if inspect.iscoroutine(outcome.awaitable):
            outcome.awaitable.close()  # nobody will await it
        raise ValidationError(
            f"{outcome.call.name} is async, and over a list in static mode it is called at construction, where nothing can "
            "be awaited. Give a plain function, or items that are no list, such as iter(items)"
        )
    return cast("TaskAndAgent | ItemLoop", outcome[0])


async def _one_in_run(making: _Making) -> TaskAndAgent:
    """Drive a making whose failure ends the run."""
    return cast("TaskAndAgent", (await _drive_in_run([making]))[0])


async def _drive_in_run(makings: list[_Making], *, keeps_failures: bool = False) -> list[Made]:
    """Drive all of them in one thread, one call at a time; back here for what is awaitable.

    Args:
        makings: What is to be made.
        keeps_failures: Whether what a factory raises stands in the place of its task; else it is raised.
    """
    done: list[Made] = []
    result: object = None
    is_left = threading.Event()
    while True:
        try:
            outcome = await threads.run(_advance, makings, done, result, is_left.is_set, keeps_failures=keeps_failures)
        except asyncio.CancelledError:
            is_left.set()  # the thread goes on, and calls nothing more
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


class _Waiting:
    """A call that gave an awaitable."""

    def __init__(self, call: _Call, awaitable: Awaitable[object]) -> None:
        self.call = call
        self.awaitable = awaitable

    def __del__(self) -> None:
        if inspect.iscoroutine(self.awaitable):
            self.awaitable.close()  # nobody awaits it where the run has ended meanwhile


def _advance(
    makings: list[_Making],
    done: list[Made],
    result: object = None,
    is_left: Callable[[], bool] = lambda: False,
    *,
    keeps_failures: bool = False,
) -> list[Made] | _Waiting:
    """Go on where it stands until all is made, or something has to be awaited.

    Args:
        makings: What is to be made; `len(done)` is the position of the one at work.
        done: What was made.
        result: That of the call that the one at work waits for; None where it has not begun.
        is_left: Whether nobody waits any more.
        keeps_failures: Whether what a factory raises stands in the place of its task; else it is raised.
    """
    while len(done) < len(makings) and not is_left():
        try:
            call = makings[len(done)].send(result)
        except StopIteration as ended:
            done.append(cast("TaskAndAgent | ItemLoop", ended.value))
            result = None
            continue
        try:  # another `try` than above: a StopIteration of the user's is an error like others
            result = call.make()
        except Exception as error:
            if not keeps_failures:
                raise
            done.append(FactoryFailure(error))
            result = None
            continue
        if inspect.isawaitable(result):
            return _Waiting(call, result)
    return done


#: Node types.
MAP, REDUCE, FINAL, DIRECT = "map", "reduce", "final-reduce", "direct"


@dataclass(frozen=True, slots=True)
class StaticTree:
    """All tasks of a static map-reduce."""

    #: level by level, within a level in the order of items or groups
    tasks: Sequence[Task]
    #: `map`, `reduce` or `final-reduce` of each
    node_types: Mapping[Task, str]
    #: from 0, the level of the items
    levels: Mapping[Task, int]
    #: texts with names in braces, of the items below each; tasks without such items are left out
    texts: Mapping[Task, Sequence[str]]


@dataclass(slots=True)
class _Growing:
    """A tree that is being made."""

    tasks: list[Task] = field(default_factory=list[Task])
    node_types: dict[Task, str] = field(default_factory=dict[Task, str])
    levels: dict[Task, int] = field(default_factory=dict[Task, int])
    texts: dict[Task, Sequence[str]] = field(default_factory=dict[Task, Sequence[str]])

    def add(self, task: Task, node_type: str, level: int, texts: Sequence[str]) -> Task:
        if task in self.levels:
            factory = "map_task" if node_type == MAP else "reduce_task"
            raise ValidationError(
                f"{factory} must make a new Task at each call, got the same one again: '{task.description}'"
            )
        self.tasks.append(task)
        self.node_types[task] = node_type
        self.levels[task] = level
        if texts:
            self.texts[task] = texts
        return task

    def below(self, group: Sequence[Task]) -> Sequence[str]:
        """Return the texts of a group: its descriptions show them, and so may the text of its reduce."""
        return tuple(text for task in group for text in self.texts.get(task, ()))


def static_tree(definition: MapReduceDefinition) -> StaticTree:
    """Call the factories and link what they give.

    Raises:
        ValidationError: a factory gave something else than it should (S-MR-24, S-SET-38). What factories raise goes on
            unchanged (S-MR-106).
    """
    tree, level = _Growing(), 0
    current = [
        tree.add(make_map(definition, item)[0], MAP, 0, braced_texts(item)) for item in definition.item_source.items
    ]
    while True:
        level += 1
        groups = list(chunks_of(current, definition.effective_chunk_size))
        node_type = FINAL if len(groups) == 1 else REDUCE
        current = [tree.add(make_reduce(definition, group)[0], node_type, level, tree.below(group)) for group in groups]
        if node_type == FINAL:
            return StaticTree(tree.tasks, tree.node_types, tree.levels, tree.texts)


def chunks_of(tasks: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
    """Return groups of that size, in order; the last one may be smaller (S-MR-32, S-MR-33)."""
    for begin in range(0, len(tasks), size):
        yield tasks[begin : begin + size]


def estimate_tokens(output: TaskOutput, definition: MapReduceDefinition) -> tuple[int, str | None]:
    """Return the tokens of an output (S-MR-60), and a warning where they are only guessed from its length.

    Raises:
        ValidationError: `token_estimator` gave something that is no count; what it raises goes on unchanged.
    """
    if output.metrics.output_tokens >= 0:
        return output.metrics.output_tokens, None
    if definition.token_estimator is not None:
        estimated: object = definition.token_estimator(output.raw)
        if estimated is not None:
            if isinstance(estimated, bool) or not isinstance(estimated, int) or estimated < 0:
                raise ValidationError(f"token_estimator must return a number >= 0, or None, got: {estimated!r}")
            return estimated, None
    guessed = length_tokens(len(output.raw))
    reason = "there is no token_estimator" if definition.token_estimator is None else "token_estimator could not tell"
    return guessed, (
        f"Output of '{output.agent_role}' is taken to have {guessed} tokens, by its length: its provider counted none, and "
        f"{reason}"
    )


def input_tokens(definition: MapReduceDefinition, item: object) -> int:
    """Return the tokens of one item, for the short-circuit check only (S-MR-80, S-MR-84).

    Raises:
        ValidationError: `input_estimator` gave no text; what it raises goes on unchanged.
    """
    text: object = definition.input_estimator(item)
    if not isinstance(text, str):
        raise ValidationError(f"input_estimator must return a str, got: {type(text).__name__}")
    return length_tokens(len(text))


def input_estimate(definition: MapReduceDefinition, items: Iterable[object]) -> int:
    """Return the tokens of all items together: the sum of what each has, rounded down (S-MR-80)."""
    return sum(input_tokens(definition, item) for item in items)
