"""What a task is told of earlier executions, and what is learned of its output: facts, order, warnings."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    GuardrailResult,
    InMemoryReflectionStore,
    MemoryStore,
    ReflectionConfig,
    ReflectionInput,
    Review,
    ReviewDecision,
    ReviewPolicy,
    Task,
    TaskCompleteEvent,
    TaskReflectedEvent,
    TaskReflection,
    TaskStartEvent,
)
from ensemble_ray.execute.memory import LocalRunReflections, reflection_key
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.memory.tools import LocalRunMemory, rules_of
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.ensemble_ray.execute.reflecting import ANSWER, KEY, NAMES, REFLECTED, bench, done, events, notes
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, WatchedJournal, writer


async def test_an_output_is_reflected_on_before_it_is_recorded() -> None:
    """S-REFL-3, S-REFL-32 to S-REFL-34: notes are read first, what is learned is recorded before it is stored."""
    store, journal = InMemoryReflectionStore(), WatchedJournal()
    made = bench(store=store, journal=journal)
    assert await done(made) == "Text"
    assert made.named == NAMES
    assert [until.name for _, until in journal.degrees_of("reflection_made")] == ["COMMITTED"]
    found = store.retrieve(KEY)
    assert found == TaskReflection(
        refined_description="Better",
        refined_expected_output="Good",
        observations=["dull"],
        suggestions=["cut"],
        reflected_at=found.reflected_at if found else None,  # type: ignore[arg-type]  the clock's
    )


async def test_the_request_is_one_user_message() -> None:
    """S-REFL-11: one call, one message, no tools."""
    asked: list[ScriptedCall] = []

    def answer(call: ScriptedCall) -> str:
        asked.append(call)
        return ANSWER

    await done(bench("Text", answer))
    (call,) = asked
    assert [message.role for message in call.messages] == ["user"]
    assert not call.tools
    content = call.messages[0].content or ""
    assert "Do draft" in content
    assert "Text" in content


@pytest.mark.parametrize("description", ["Do draft", "Schreib über Käse", "a\nb"])
def test_the_key_is_a_digest_of_the_description(description: str) -> None:
    """S-REFL-4: SHA-256 in hex, of UTF-8."""
    assert reflection_key(description) == hashlib.sha256(description.encode("utf-8")).hexdigest()


async def test_the_next_run_is_told_what_was_learned() -> None:
    """S-REFL-8, S-REFL-7: notes in the prompt, the task unchanged behind them; the count grows."""
    store = InMemoryReflectionStore()
    prompts: list[str] = []

    def answer(call: ScriptedCall) -> str:
        prompts.append(call.messages[-1].content or "")
        return "Text"

    for number in (1, 2, 3):
        made = bench(answer, ANSWER, store=store)
        await done(made)
        found = store.retrieve(KEY)
        assert found is not None
        assert found.run_count == number
        (event,) = events(made)
        assert event.is_first_reflection is (number == 1)
        assert (event.task_description, event.reflection) == ("Do draft", found)
    assert prompts[0].startswith("## Task\nDo draft")
    assert prompts[1].startswith("## Task Improvement Notes (from prior executions)\n")
    assert "### Refined Instructions\nBetter" in prompts[1]
    assert prompts[1].endswith("## Task\nDo draft\n\n## Expected Output\nProse")


async def test_a_run_does_not_see_its_own_notes() -> None:
    """S-REFL-2, S-REFL-19: an iteration of a loop sees what earlier runs left, and builds on the iteration before."""
    store = InMemoryReflectionStore()
    store.store(KEY, notes("Before"))
    asked: list[str] = []

    def answer(call: ScriptedCall) -> str:
        asked.append(call.messages[-1].content or "")
        return "Text" if len(asked) % 2 else ANSWER

    made = bench(*[answer] * 4, store=store)
    await done(made, instance="loop:refine#0/draft#0")
    await done(made, instance="loop:refine#1/draft#0")
    first, learned_first, second, learned_second = asked
    assert first == second
    assert "### Refined Instructions\nBefore" in learned_first
    assert "### Refined Instructions\nBetter" in learned_second
    found = store.retrieve(KEY)
    assert found is not None
    assert found.run_count == 3


async def test_a_task_that_is_not_reflected_on_records_what_it_did_before() -> None:
    """S-REFL-1, S-REFL-39: no fact more, in a run with a store."""
    made = bench("Text")
    await done(made, Task(description="Do draft", expected_output="Prose"))
    assert [kind for kind, _ in made.named] == ["model", "output"]


async def test_failed_tasks_are_not_reflected_on() -> None:
    """S-REFL-3: nor is an output that a guardrail refused."""
    store = InMemoryReflectionStore()
    made = bench("Text", store=store)
    refusing = REFLECTED.replace(output_guardrails=[lambda _: GuardrailResult.failure("no")])
    made.tasks["draft"] = refusing
    result = await made.run(task=refusing, output_guardrails=1)
    assert result.status == "failed"
    assert store.retrieve(KEY) is None
    assert events(made) == []


@pytest.mark.parametrize(
    ("decision", "text", "status"),
    [
        (ReviewDecision.Continue(), "Text", "completed"),
        (ReviewDecision.Edit("Edited"), "Edited", "completed"),
        (ReviewDecision.ExitEarly(), "Text", "exited"),
    ],
)
async def test_reflection_comes_after_the_gate(decision: object, text: str, status: str) -> None:
    """S-REFL-3, S-REV-38: on the edited text; also where the gate ends the run; before the complete event."""
    store = InMemoryReflectionStore()
    asked: list[str] = []

    def answer(call: ScriptedCall) -> str:
        asked.append(call.messages[-1].content or "")
        return ANSWER

    made = Bench(
        agents={"draft": writer(ScriptedModel("Text", answer))},
        context=replace(RUN_CONTEXT, has_reflections=True, review_policy=ReviewPolicy.NEVER),
        reflections=LocalRunReflections(store),
        reviewer=LocalReviewer(lambda _: decision),
    )
    result = await made.run(task=REFLECTED.replace(review=Review.required()))
    assert result.status == status
    assert f"## Produced Output\n{text}" in asked[0]
    kinds = [kind for kind, _ in made.named]
    assert kinds.index("review_decision") < kinds.index("reflection_made") < kinds.index("output")
    order = [type(event) for event in made.sink.events]
    assert order[0] is TaskStartEvent
    assert order[-2:] == [TaskReflectedEvent, TaskCompleteEvent]


async def test_reflection_comes_after_memory() -> None:
    """S-REFL-3."""
    memory = MemoryStore.in_memory()
    made = Bench(
        agents={"draft": writer(ScriptedModel("Text", ANSWER))},
        context=replace(RUN_CONTEXT, has_reflections=True, memory=rules_of(None, memory)),
        reflections=LocalRunReflections(InMemoryReflectionStore()),
        memory=LocalRunMemory(None, memory),
    )
    await done(made, REFLECTED.replace(memory_scopes="notes"))
    kinds = [kind for kind, _ in made.named]
    assert kinds.index("memory_stored") < kinds.index("reflection_made")


# Who reflects.


async def test_the_models_in_their_order() -> None:
    """S-REFL-9, S-REFL-44: the config's, else the task's, which does the task, too; else the agent's."""
    own = ScriptedModel("REFINED_DESCRIPTION:\nby the config")
    of_task = ScriptedModel("Text", "Text", "REFINED_DESCRIPTION:\nby the task")
    for task, expected in (
        (REFLECTED.replace(llm=of_task, reflection_config=ReflectionConfig(model=own)), "by the config"),
        (REFLECTED.replace(llm=of_task), "by the task"),
        (REFLECTED, "Better"),
    ):
        store = InMemoryReflectionStore()
        await done(bench(store=store), task)
        found = store.retrieve(KEY)
        assert found is not None
        assert found.refined_description == expected


async def test_a_handler_without_a_model_is_not_reflected_on(caplog: pytest.LogCaptureFixture) -> None:
    """S-REFL-9, S-REFL-16: a warning, and that is all."""
    store = InMemoryReflectionStore()
    made = Bench(
        handlers={"draft": lambda _: "Text"},
        context=replace(RUN_CONTEXT, has_reflections=True),
        reflections=LocalRunReflections(store),
    )
    assert await done(made) == "Text"
    assert store.retrieve(KEY) is None
    assert [line for line in caplog.messages if "neither a model nor a strategy" in line]


async def test_a_handler_can_be_reflected_on_and_sees_no_notes() -> None:
    """S-REFL-16: with a model or a strategy of its own; nothing is read for it."""
    store = InMemoryReflectionStore()
    store.store(KEY, notes("Before"))
    seen: list[object] = []
    made = Bench(
        handlers={"draft": lambda context: seen.append(context) or "Text"},
        context=replace(RUN_CONTEXT, has_reflections=True),
        reflections=LocalRunReflections(store),
    )
    await done(made, REFLECTED.replace(reflection_config=ReflectionConfig(model=ScriptedModel(ANSWER))))
    assert [kind for kind, _ in made.named if kind.startswith("reflection")] == ["reflection_made", "reflection_stored"]
    assert "Before" not in repr(seen)
    found = store.retrieve(KEY)
    assert found is not None
    assert found.run_count == 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_strategy_takes_the_place_of_the_model(*, is_async: bool) -> None:
    """S-REFL-10, S-REFL-38: it is given task, output and prior notes; what it returns is stored as it is."""
    store = InMemoryReflectionStore()
    store.store(KEY, notes("Before", 4))
    asked: list[ReflectionInput] = []

    def strategy(given: ReflectionInput) -> TaskReflection:
        asked.append(given)
        return notes("Mine", 9)

    async def later(given: ReflectionInput) -> TaskReflection:
        await asyncio.sleep(0)
        return strategy(given)

    task = REFLECTED.replace(reflection_config=ReflectionConfig(strategy=later if is_async else strategy))
    made = bench("Text", store=store)
    await done(made, task)
    found = store.retrieve(KEY)
    assert found is not None
    assert (found.refined_description, found.run_count) == ("Mine", 9)
    (given,) = asked
    assert (given.task, given.task_output.raw) == (task, "Text")
    assert given.prior_reflection is not None
    assert given.prior_reflection.refined_description == "Before"
    (event,) = events(made)
    assert event.is_first_reflection is False
