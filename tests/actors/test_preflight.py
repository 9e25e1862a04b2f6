"""Preflight: what cannot travel is named with its path; what would arrive broken is refused; all else passes."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ensemble_ray import Agent, ChatResponse, OpenAIChatModel, Task, ValidationError, tool
from ensemble_ray.actors.driver.packing import dump
from ensemble_ray.testing import ScriptedModel

#: A global that cannot travel, for functions that are pickled by value.
GUARD = threading.Lock()


def by_value(function: Any) -> Any:
    """The function as a script's own: pickled with what it uses, not by its name."""
    function.__module__ = "__main__"
    return function


def refusal(value: object, path: str = "Agent 'Writer'") -> str:
    """What the user reads."""
    with pytest.raises(ValidationError) as caught:
        dump(value, path)
    return str(caught.value)


class RefCountedCache:
    """A tool with a state; `lock` decides whether it can travel."""

    def __init__(self, lock: object = None) -> None:
        self.books = ["one"]
        self.lock = lock

    @tool
    def count(self) -> int:
        """Count the books."""
        return len(self.books)


def closure(held: object) -> Callable[[], object]:
    """A function that holds something in its closure, as handlers do."""

    def handler() -> object:
        return held

    return handler


def test_closure_variable_is_named() -> None:
    """S-CONV-34: the path of the specification, the reason, the way out."""
    lock = threading.Lock()

    def handler(_: object) -> str:
        with lock:
            return "x"

    text = refusal(handler, "Task 'draft' -> handler")
    assert text.startswith("Task 'draft' -> handler -> closure variable 'lock' cannot travel to a worker process: ")
    assert "lock" in text.partition("process: ")[2]
    assert text.endswith(
        "Make it in a factory or a module-level function that runs in the worker, or use runtime='inline'"
    )


def test_global_is_named() -> None:
    """S-CONV-34: a function of the user's script carries the globals it names."""

    @by_value
    def handler(_: object) -> str:
        with GUARD:
            return "x"

    assert refusal(handler, "Task 'draft' -> handler").startswith(
        "Task 'draft' -> handler -> global 'GUARD' cannot travel"
    )


def test_global_is_named_when_only_a_nested_function_uses_it() -> None:
    """S-CONV-34: what an inner function names travels with the outer one."""

    @by_value
    def handler(_: object) -> object:
        return [GUARD for _ in "x"]

    assert "global 'GUARD'" in refusal(handler)


def test_global_is_not_blamed_when_only_an_attribute_has_its_name() -> None:
    """S-CONV-34: the culprit, not a namesake of it."""
    held = threading.Lock()

    @by_value
    def handler(of: Any) -> object:
        return of.GUARD

    handler.__defaults__ = (held,)
    assert refusal(handler).startswith("Agent 'Writer' -> default of 'of' cannot travel")


def test_default_is_named() -> None:
    """S-CONV-34."""

    def handler(_: object, lock: Any = threading.Lock()) -> object:  # noqa: B008  that is the mistake
        return lock

    assert refusal(handler).startswith("Agent 'Writer' -> default of 'lock' cannot travel")


def test_closure_is_named_when_another_variable_of_it_is_still_empty() -> None:
    """S-CONV-34: looking for the culprit must not fail itself."""
    lock = threading.Lock()

    def handler(_: object) -> object:
        return (defined_later, lock)

    assert refusal(handler).startswith("Agent 'Writer' -> closure variable 'lock' cannot travel")
    defined_later = 1


def test_state_of_a_bound_method_is_named() -> None:
    """S-CONV-34: agent, tools, which of them, its object, its field."""
    writer = Agent(
        role="Writer", goal="write", llm=ScriptedModel(), tools=[RefCountedCache().count, RefCountedCache(GUARD).count]
    )
    assert refusal(writer).startswith("Agent 'Writer' -> tools -> [1] -> its object -> lock cannot travel")


def test_part_of_a_partial_is_named() -> None:
    """S-CONV-34: a common way to make handlers."""
    assert refusal(functools.partial(closure(GUARD))).startswith(
        "Agent 'Writer' -> its function -> closure variable 'held' cannot travel"
    )
    assert "-> its arguments -> [0] cannot travel" in refusal(functools.partial(print, GUARD))
    assert "-> its keywords -> ['end'] cannot travel" in refusal(functools.partial(print, end=GUARD))


def test_model_is_named() -> None:
    """S-CONV-34: a model with a client of its own."""

    class Model:
        def __init__(self) -> None:
            self.clients = {"eu": threading.local()}

        def chat(self, messages: object, tools: object = ()) -> ChatResponse:
            return ChatResponse(text="x")

    writer = Agent(role="Writer", goal="write", llm=Model())
    assert refusal(writer).startswith("Agent 'Writer' -> llm -> clients -> ['eu'] cannot travel")


def test_class_attribute_is_named() -> None:
    """S-CONV-34: a class of the user's script travels with its members."""

    class Handler:
        lock = threading.Lock()

        def __call__(self, _: object) -> str:
            return "x"

    assert refusal(Handler, "Task 'draft' -> handler").startswith(
        "Task 'draft' -> handler -> class attribute 'lock' cannot travel"
    )


def test_class_passes_though_the_function_around_it_has_what_cannot_travel() -> None:
    """S-CONV-34: pydantic keeps the variables around a class; the class does not need them any more."""
    lock, locks, gate = threading.Lock(), [threading.Lock()], asyncio.Event()

    class City(BaseModel):
        name: str

    class Tour(BaseModel):
        cities: list[City]

    assert all((lock, locks, gate))
    found = pickle.loads(dump(Tour, "Task 'draft' -> output_type"))  # noqa: S301  our own
    assert found.model_validate({"cities": [{"name": "Graz"}]}).cities[0].name == "Graz"
    assert Tour.__pydantic_parent_namespace__ is not None


@pytest.mark.parametrize(
    "make",
    [asyncio.Lock, asyncio.Event, asyncio.Condition, lambda: asyncio.Semaphore(2), asyncio.Queue],
    ids=["Lock", "Event", "Condition", "Semaphore", "Queue"],
)
async def test_asyncio_objects_are_refused_though_they_pickle(make: Callable[[], object]) -> None:
    """S-SET-38: they belong to one process's loop."""
    made = make()
    text = refusal(closure([made]), "Task 'draft' -> handler")
    assert text.startswith("Task 'draft' -> handler -> closure variable 'held' -> [0] cannot travel")
    assert f"{type(made).__name__} would not work in another process" in text


@pytest.mark.parametrize("mode", ["r", "w", "rb", "ab"])
def test_open_files_are_refused_though_some_pickle(tmp_path: Path, mode: str) -> None:
    """S-SET-38: the other side would read a copy, or write nowhere."""
    path = tmp_path / "file"
    path.write_text("text", encoding="utf-8")
    with path.open(mode) as file:
        text = refusal(closure({"out": file}))
    assert text.startswith("Agent 'Writer' -> closure variable 'held' -> ['out'] cannot travel")
    assert "would not work in another process" in text


@pytest.mark.parametrize(
    "value",
    [
        closure({"a": [1, 2.0, None, b"x"], "b": {3}}),
        by_value(lambda text: len(text)),  # noqa: PLW0108  a lambda is the point
        by_value(lambda: Path("x").name + str(logging.INFO)),
        functools.partial(closure, 3),
        RefCountedCache().count,
        logging.getLogger("ensemble_ray.tool.x"),
        io.StringIO("text"),
        io.BytesIO(b"text"),
        ValueError("x"),
        Path("x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_pickles_and_works_there_passes(value: object) -> None:
    """S-CONV-34, S-SET-38: closures, lambdas, partials, bound methods, loggers, files that are only memory."""
    found = pickle.loads(dump(value, "x"))  # noqa: S301  our own
    assert type(found) is type(value)


def test_standard_streams_pass() -> None:
    """S-SET-38: they are found anew in each process, so a handler may print to one."""
    handler = closure([sys.__stdout__, sys.__stderr__])
    stdout, stderr = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        body = dump(handler, "Task 'draft' -> handler")
        assert pickle.loads(body)() == [sys.__stdout__, sys.__stderr__]  # noqa: S301  our own
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def test_recursive_function_passes() -> None:
    """S-CONV-34: it holds itself in its closure."""

    def count(n: int) -> int:
        return 0 if n == 0 else 1 + count(n - 1)

    assert pickle.loads(dump(count, "x"))(3) == 3  # noqa: S301  our own


def test_definitions_pass_with_their_models() -> None:
    """S-CONV-30, S-SET-38: agents, tasks, the library's models and doubles travel."""
    scripted = ScriptedModel("x")
    writer = Agent(role="Writer", goal="g", llm=scripted, tools=[RefCountedCache().count])
    task = Task(description="d", expected_output="e", agent=writer, handler=None)
    found = pickle.loads(dump(task, "Task 'd'"))  # noqa: S301  our own
    assert found == task
    assert found.agent.llm is scripted
    dump(Agent(role="R", goal="g", llm=OpenAIChatModel("m", api_key="sk-none")), "Agent 'R'")
