"""Tools by which agents use memory themselves."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import cloudpickle
import pytest

from ensemble_ray import EntityMemoryTool, IllegalStateError, InMemoryEntityMemory, MemoryEntry, MemoryStore, MemoryTool
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.memory import tools as held
from ensemble_ray.memory.tools import HELD_SERVICE, HeldObject, answer_held, has_held_objects
from ensemble_ray.ports import Services, use_services
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import Bench, call, writer
from tests.ensemble_ray.tools.doubles import PoolHere


async def used(tools: object, *calls: tuple[str, str]) -> list[str]:
    """What the model is told of its calls, one turn each."""
    model = ScriptedModel(*(call(name, arguments, number=n) for n, (name, arguments) in enumerate(calls)), "done")
    result = await Bench(agents={"draft": writer(model, tools=[tools])}).run()
    assert result.status == "completed", result.error
    return [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]


@pytest.mark.parametrize("scope", ["", " ", None])
def test_a_tool_needs_a_scope_and_a_store(scope: str) -> None:
    """S-MEM-90: the texts."""
    with pytest.raises(ValueError, match=r"^MemoryTool scope must not be None or blank$"):
        MemoryTool.of(scope, MemoryStore.in_memory())
    with pytest.raises(ValueError, match=r"^MemoryTool memory_store must not be None$"):
        MemoryTool.of("notes", None)  # type: ignore[arg-type]  what is refused


async def test_what_is_stored_can_be_retrieved() -> None:
    """S-MEM-91, S-MEM-92, S-MEM-93: two tools, their texts, the entry and its metadata."""
    store = MemoryStore.in_memory()
    told = await used(
        MemoryTool.of("notes", store),
        ("retrieve_memory", '{"query": "tea"}'),
        ("store_memory", '{"key": "drink", "value": "tea"}'),
        ("store_memory", '{"key": "food", "value": "soup"}'),
        ("retrieve_memory", '{"query": "tea"}'),
    )
    assert told == [
        "No relevant memories found for: tea",
        "Stored: drink",
        "Stored: food",
        "Retrieved memories:\n- drink: tea\n- food: soup",
    ]
    first, _ = store.retrieve("notes", "", 9)
    assert (first.content, first.metadata) == ("drink: tea", {"key": "drink", "source": "MemoryTool"})
    assert first.entry_id


async def test_blank_arguments_are_told_of() -> None:
    """S-MEM-92, S-MEM-93: nothing is stored or looked for."""
    store = MemoryStore.in_memory()
    told = await used(
        MemoryTool.of("notes", store),
        ("store_memory", '{"key": " ", "value": "tea"}'),
        ("store_memory", '{"key": "drink", "value": ""}'),
        ("retrieve_memory", '{"query": " "}'),
    )
    assert told == ["Error: key must not be blank", "Error: value must not be blank", "No query provided"]
    assert list(store.retrieve("notes", "", 9)) == []


async def test_at_most_five_memories_are_told() -> None:
    """S-MEM-93, S-MEM-94: also what tasks stored."""
    store = MemoryStore.in_memory()
    for number in range(7):
        store.store("notes", MemoryEntry(content=str(number)))
    (told,) = await used(MemoryTool.of("notes", store), ("retrieve_memory", '{"query": "x"}'))
    assert told == "Retrieved memories:\n- 2\n- 3\n- 4\n- 5\n- 6"


async def test_facts_can_be_looked_up() -> None:
    """S-MEM-44: the fact, or that nothing is known."""
    memory = InMemoryEntityMemory()
    memory.put("Acme", "a firm")
    told = await used(
        EntityMemoryTool(memory), ("lookup_entity", '{"input": " Acme"}'), ("lookup_entity", '{"input": "Bolt"}')
    )
    assert told == ["a firm", "No known facts about: Bolt"]


# From another process.


def test_a_tool_that_is_pickled_at_home_is_the_same() -> None:
    """S-MEM-114: never a copy."""
    thing = HeldObject(MemoryStore.in_memory())
    assert pickle.loads(pickle.dumps(thing)) is thing  # noqa: S301  our own
    assert has_held_objects()


async def test_a_tool_of_another_process_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MEM-69, S-MEM-94, S-MEM-114: the store that was passed has the data."""
    store = MemoryStore.in_memory()
    tool = MemoryTool.of("notes", store)
    body, owner = cloudpickle.dumps(tool), held.os.getpid()

    class AtHome:
        async def ask(self, name: str, payload: Mapping[str, object]) -> object:
            assert name == HELD_SERVICE
            with monkeypatch.context() as here:
                here.setattr(held.os, "getpid", lambda: owner)
                return await answer_held(payload)

        def notify(self, name: str, payload: Mapping[str, object]) -> None:
            raise AssertionError(name)

    monkeypatch.setattr(held.os, "getpid", lambda: owner + 1)
    away = pickle.loads(body)  # noqa: S301  our own
    with pytest.raises(IllegalStateError, match="cannot be reached outside its run"):
        await away.retrieve_memory("x")
    with use_services(Services(limiter=process_limiter(), cpu=PoolHere(), driver=AtHome())):
        await away._store.call("store", "notes", MemoryEntry(content="tea"))
        assert await away.retrieve_memory("x") == "Retrieved memories:\n- tea"
    assert [entry.content for entry in store.retrieve("notes", "", 9)] == ["tea"]


async def test_a_driver_answers_for_what_it_has_alone() -> None:
    """S-MEM-114: an object that is gone, and methods that no tool needs."""
    thing = HeldObject(MemoryStore.in_memory())
    payload = {"id": thing._id, "method": "clear", "body": pickle.dumps(("notes",))}
    for asked in (payload, {**payload, "method": "get", "id": "gone"}):
        with pytest.raises(IllegalStateError, match="its owner has let go of it"):
            await answer_held(asked)
