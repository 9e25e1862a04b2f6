"""What travels to Ray's processes and what does not, as the user of a team meets it."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from ensemble_ray import Ensemble, GuardrailResult, InlineRuntime, Task, ValidationError, tool
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task

if TYPE_CHECKING:
    from ensemble_ray import Runtime

WAY_OUT = "Make it in a factory or a module-level function that runs in the worker, or use runtime='inline'"


class Counter:
    """Tools with a lock of their own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @tool
    def count(self) -> str:
        """Count under the lock."""
        with self.lock:
            return "1"


def handled(handler: Callable[..., object], **fields: object) -> Task:
    """A task without a model."""
    return Task(description="draft", expected_output="a text", name="draft", handler=handler, **fields)  # type: ignore[arg-type]


def of_handler(model: ScriptedModel, held: Any) -> Task:
    """The held thing is in a handler's closure."""
    return handled(lambda _: str(held is not None))


def of_guardrail(model: ScriptedModel, held: Any) -> Task:
    """The held thing is in a guardrail's closure."""

    def passes(_: object) -> GuardrailResult:
        return GuardrailResult.failure("no") if held is None else GuardrailResult.success()

    return task("draft", agent(model), name="draft", output_guardrails=[passes])


def of_tool(model: ScriptedModel, held: Any) -> Task:
    """The held thing is in the closure of an agent's tool."""

    @tool
    def look() -> str:
        """Look at it."""
        return str(held is not None)

    return task("draft", agent(model, tools=[look]), name="draft")


def of_bound_method(model: ScriptedModel, held: Any) -> Task:
    """A tool is a method of an object that has it."""
    counter = Counter()
    counter.lock = held
    return task("draft", agent(model, tools=[counter.count]), name="draft")


def of_model(model: ScriptedModel, held: Any) -> Task:
    """The agent's model has it."""

    class Own:
        def __init__(self) -> None:
            self.held = held

        async def chat(self, messages: Any, tools: Any = ()) -> Any:
            return await model.chat(messages, tools)

    return task("draft", agent(Own()), name="draft")


@contextmanager
def open_file(folder: Path) -> Iterator[object]:
    """A file that can be read."""
    path = folder / "notes"
    path.write_text("notes", encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        yield file


@pytest.mark.parametrize(
    ("of", "path"),
    [
        (of_handler, "Task 'draft' -> handler -> closure variable 'held'"),
        (of_guardrail, "Task 'draft' -> output_guardrails -> [0] -> closure variable 'held'"),
        (of_tool, "Agent 'Writer' -> tools -> [0] -> closure variable 'held'"),
        (of_bound_method, "Agent 'Writer' -> tools -> [0] -> its object -> lock"),
        (of_model, "Agent 'Writer' -> llm -> held"),
    ],
)
@pytest.mark.parametrize("kind", ["lock", "asyncio lock", "open file"])
def test_run_is_refused_before_any_model_call_when_something_cannot_travel(  # noqa: PLR0917  fixtures and cases
    ray_runtime: Runtime,
    inline_runtime: InlineRuntime,
    tmp_path: Path,
    of: Callable[[ScriptedModel, object], Task],
    path: str,
    kind: str,
) -> None:
    """S-CONV-34, S-SET-38: path, culprit and way out; no task of the team begins; inline the same team just works."""
    with open_file(tmp_path) as file:
        held = {"lock": threading.Lock(), "asyncio lock": asyncio.Lock(), "open file": file}[kind]
        model = ScriptedModel(otherwise="done")
        first = task("first", agent(model, "Reader"))
        team = Ensemble(tasks=[first, of(model, held)])
        begun: list[object] = []
        with pytest.raises(ValidationError) as caught:
            team.replace(on_task_start=begun.append).run(runtime=ray_runtime)
        text = str(caught.value)
        assert text.startswith(f"{path} cannot travel to a worker process: ")
        assert text.endswith(WAY_OUT)
        assert not model.calls
        assert not begun
        assert team.run(runtime=inline_runtime).is_complete
        assert model.calls


def test_run_id_is_free_when_its_run_was_refused(ray_runtime: Runtime) -> None:
    """S-CONV-34, S-SET-39: a refused run never began, so the repaired team may have its id."""
    with pytest.raises(ValidationError):
        Ensemble(tasks=[of_handler(ScriptedModel(), threading.Lock())]).run(runtime=ray_runtime, run_id="refused")
    repaired = Ensemble(tasks=[of_handler(ScriptedModel(), "a text")])
    assert repaired.run(runtime=ray_runtime, run_id="refused").raw == "True"


def test_what_scripts_are_made_of_travels(runtime: Runtime) -> None:
    """S-CONV-34: local classes, lambdas, closures, partials, bound methods, output types, doubles; on Ray elsewhere."""

    class Place(BaseModel):
        name: str

    class RefCountedCache:
        def __init__(self, books: list[str]) -> None:
            self.books = books

        @tool
        def first_book(self) -> str:
            """The first book."""
            return f"{self.books[0]} {os.getpid()}"

    limit = 100

    def is_short(asked: Any, least: int) -> GuardrailResult:
        return GuardrailResult.success() if least <= len(asked.raw_response) < limit else GuardrailResult.failure("no")

    def reply(asked: ScriptedCall) -> str:
        name, _, process = asked.text.partition(" ")
        processes.append(int(process))
        return f'{{"name": "{name}"}}'

    processes: list[int] = []
    model = ScriptedModel(call("first_book"), reply)
    writer = agent(model, tools=[RefCountedCache(["Dune"]).first_book])
    typed = task("typed", writer, output_type=Place, output_guardrails=[functools.partial(is_short, least=1)])
    prefix = "seen:"
    last = Task(
        description="last",
        expected_output="a text",
        context=[typed],
        handler=lambda given: prefix + given.context_outputs[0].raw,
    )
    output = Ensemble(tasks=[typed, last]).run(runtime=runtime)
    assert output.raw == 'seen:{"name": "Dune"}'
    place = output.task_outputs[0].parsed_output
    assert isinstance(place, Place)
    assert place.name == "Dune"
    assert len(model.calls) == 2
    assert (processes == [os.getpid()]) == isinstance(runtime, InlineRuntime)


def test_script_is_one_when_several_agents_share_a_model(runtime: Runtime) -> None:
    """S-SET-38: agents in different processes draw from the same script, in the order in which they ask."""
    model = ScriptedModel("one", "two", "three")
    tasks = [task(name, agent(model, name)) for name in ("a", "b", "c")]
    output = Ensemble(tasks=tasks).run(runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["one", "two", "three"]
    assert (len(model.calls), model.remaining) == (3, 0)
