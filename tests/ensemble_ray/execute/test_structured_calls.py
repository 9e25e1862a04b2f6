"""Which of a model's methods a task's calls go to, and that the record does not care."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import pytest
from pydantic import BaseModel

from ensemble_ray import ChatMessage, ChatResponse, JsonSchema, StructuredChatModel, Task, ToolSpec, tool
from ensemble_ray.execute.agent.answer_schema import answer_schema
from ensemble_ray.facts.fact import Fact
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import Bench, call, writer


class City(BaseModel):
    """A typed answer."""

    name: str


class Mood(Enum):
    """One whose JSON is no object."""

    GOOD = "good"


GOOD = '{"name": "Bern"}'


class Held:
    """A model that can be held to a schema, in a synchronous way too; it answers by its double's script."""

    def __init__(self, *script: object) -> None:
        self.double = ScriptedModel(*script)  # type: ignore[arg-type]  entries of a script
        self.schemas: list[JsonSchema | None] = []

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        self.schemas.append(None)
        return await self.double.chat(messages, tools)

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        self.schemas.append(schema)
        return await self.double.chat(messages)


class Blocking:
    """A model whose methods are no coroutines."""

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        raise AssertionError(messages)

    def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        return ChatResponse(text=f'{{"name": "{schema.name}"}}')


@tool
def look() -> str:
    """Look."""
    return "seen"


def typed(kind: type[object] | None) -> Task:
    """A task with that type."""
    return Task(description="Do it", expected_output="Prose", output_type=kind)


async def test_typed_answers_are_held_to_a_schema_when_the_model_can() -> None:
    """S-OUT-40, S-OUT-41: the answer and its corrections."""
    model = Held("no JSON", GOOD)
    assert isinstance(model, StructuredChatModel)
    result = await Bench(agents={"draft": writer(model)}).run(task=typed(City))
    assert result.output is not None
    assert result.output.parsed_output == City(name="Bern")
    assert model.schemas == [answer_schema(City)] * 2


async def test_a_synchronous_model_is_held_too() -> None:
    """S-OUT-40: as with `chat`."""
    result = await Bench(agents={"draft": writer(Blocking())}).run(task=typed(City))
    assert result.output is not None
    assert result.output.parsed_output == City(name="City")


async def test_only_corrections_are_held_when_there_are_tools() -> None:
    """S-OUT-41."""
    model = Held(call("look"), "no JSON", GOOD)
    await Bench(agents={"draft": writer(model, tools=[look])}).run(task=typed(City))
    assert model.schemas == [None, None, answer_schema(City)]


@pytest.mark.parametrize(("kind", "text"), [(None, "text"), (Mood, '"good"')])
async def test_other_answers_are_asked_for_as_ever(kind: type[object] | None, text: str) -> None:
    """S-OUT-40, S-OUT-46: without a type, and where its JSON is no object."""
    model = Held(text)
    result = await Bench(agents={"draft": writer(model)}).run(task=typed(kind))
    assert result.output is not None
    assert model.schemas == [None]


@pytest.mark.parametrize("first_is_held", [True, False])
async def test_a_recorded_answer_is_used_whichever_way_it_was_asked_for(*, first_is_held: bool) -> None:
    """S-OUT-53, S-OUT-40: the facts are the same, and both ways take them."""
    held, plain = Held("no JSON", GOOD), ScriptedModel("no JSON", GOOD)
    first, second = (held, plain) if first_is_held else (plain, held)
    before = Bench(agents={"draft": writer(first)})
    await before.run(task=typed(City))
    known: list[Fact] = [fact for fact in before.journal.facts() if fact.kind == "model"]
    assert len(known) == 2
    after = Bench(agents={"draft": writer(second)}, known=known)
    result = await after.run(task=typed(City), epoch=1)
    assert result.output is not None
    assert result.output.parsed_output == City(name="Bern")
    assert not (second.double.calls if isinstance(second, Held) else second.calls)
    again = Bench(agents={"draft": writer(second)})
    await again.run(task=typed(City))
    asked_again = [fact for fact in again.journal.facts() if fact.kind == "model"]
    assert [each.data.to_data()["request_digest"] for each in asked_again] == [
        each.data.to_data()["request_digest"] for each in known
    ]
