"""What goes wrong with reflections, what is counted of them, what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    ChatResponse,
    InMemoryReflectionStore,
    ReflectionConfig,
    ReflectionStore,
    TaskReflection,
    TokenUsage,
)
from ensemble_ray.facts.effects import ReflectionRecorded, ReflectionStored
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.values.metrics import RunBudget
from tests.ensemble_ray.execute.reflecting import ANSWER, KEY, NAMES, REFLECTED, Broken, bench, done, events, notes
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, writer

# What goes wrong.


def _raise(error: BaseException) -> Callable[[object], object]:
    def raising(_: object) -> object:
        raise error

    return raising


@pytest.mark.parametrize("answer", [_raise(RuntimeError("provider down")), "", "  \n"])
async def test_a_model_that_fails_leaves_the_tasks_own_texts(answer: object) -> None:
    """S-REFL-13: with one observation that says why; the count grows."""
    store = InMemoryReflectionStore()
    store.store(KEY, notes("Before", 4))
    made = bench("Text", answer, store=store)
    assert await done(made) == "Text"
    found = store.retrieve(KEY)
    assert found is not None
    assert (found.refined_description, found.refined_expected_output) == ("Do draft", "Prose")
    (observation,) = found.observations
    assert observation.startswith("Reflection could not be completed: ")
    assert (found.suggestions, found.run_count) == ((), 5)
    assert len(events(made)) == 1


async def test_what_an_answer_lacks_is_the_tasks_own() -> None:
    """S-REFL-12."""
    store = InMemoryReflectionStore()
    await done(bench("Text", "OBSERVATIONS:\n- fine", store=store))
    found = store.retrieve(KEY)
    assert found is not None
    assert (found.refined_description, found.refined_expected_output) == ("Do draft", "Prose")
    assert (found.observations, found.suggestions) == (("fine",), ())


@pytest.mark.parametrize(
    ("store", "line"),
    [
        (Broken("retrieve", "store"), "its notes of earlier runs cannot be read, and it runs without them: gone"),
        (Broken("store"), "what was learned of its output cannot be stored: no room"),
    ],
)
async def test_a_store_that_raises_is_a_warning(
    store: ReflectionStore, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-REFL-14, S-REFL-15: task and run succeed, no event tells of it."""
    made = bench(store=store)
    assert await done(made) == "Text"
    assert f"Task 'draft': {line}" in caplog.messages
    assert events(made) == []


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        (_raise(RuntimeError("broken")), "broken"),
        (_raise(SystemExit("stop")), "stop"),
        (_raise(asyncio.CancelledError()), "CancelledError"),
        (lambda _: "text", "the strategy returned str instead of a TaskReflection"),
    ],
)
async def test_a_strategy_that_raises_is_a_warning(
    strategy: Callable[[object], object], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-REFL-14, S-REFL-38: whatever it raises or returns; nothing is stored."""
    store = InMemoryReflectionStore()
    made = bench("Text", store=store)
    config = ReflectionConfig(strategy=strategy)  # type: ignore[arg-type]  what is refused
    assert await done(made, REFLECTED.replace(reflection_config=config)) == "Text"
    assert f"Task 'draft': it is not reflected on: {line}" in caplog.messages
    assert store.retrieve(KEY) is None
    assert events(made) == []


async def test_a_run_without_a_store_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """S-REFL-36: as tasks that a map-reduce makes, where none was given."""
    made = Bench(agents={"draft": writer(ScriptedModel("Text"))})
    assert await done(made) == "Text"
    assert "Task 'draft' is not reflected on: its run has no reflection_store" in caplog.messages


async def test_a_cancelled_task_is_cancelled() -> None:
    """S-REFL-34: also while it is reflected on."""
    started = asyncio.Event()

    async def strategy(_: object) -> TaskReflection:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    made = bench("Text")
    task = REFLECTED.replace(reflection_config=ReflectionConfig(strategy=strategy))
    running = asyncio.get_running_loop().create_task(made.run(task=task, is_stopped=True))
    await started.wait()
    running.cancel()
    assert (await running).status == "cancelled"


# What is counted.


async def test_reflections_are_no_part_of_the_task() -> None:
    """S-REFL-18, S-REFL-2: neither in metrics nor in the trace, whatever the requests took."""
    usage = TokenUsage(100, 50)
    made = bench(ChatResponse(text="Text", usage=TokenUsage(3, 2)), ChatResponse(text=ANSWER, usage=usage))
    result = await made.run(task=REFLECTED)
    assert result.output is not None
    metrics = result.output.metrics
    assert (metrics.input_tokens, metrics.output_tokens, metrics.llm_call_count) == (3, 2, 1)
    assert result.output.trace is not None
    assert len(result.output.trace.llm_interactions) == 1
    assert result.total_tokens == 5
    (fact,) = [fact.data for fact in made.journal.facts() if isinstance(fact.data, ReflectionRecorded)]
    assert (fact.input_tokens, fact.output_tokens, fact.is_first) == (100, 50, True)


async def test_a_budget_pays_for_reflections() -> None:
    """S-REFL-35: they are charged, also where the provider counts nothing."""
    budget = RunBudget(max_tokens=100_000)
    made = bench(
        ChatResponse(text="Text", usage=TokenUsage(30, 20)),
        ChatResponse(text=ANSWER, usage=TokenUsage(300, 200)),
        context=replace(RUN_CONTEXT, budget=budget),
    )
    await done(made)
    spending = made.runner.ports.spending
    assert spending is not None
    account = spending.account
    assert account.spent.tokens == 550  # type: ignore[attr-defined]  of a local account


async def test_a_budget_that_is_spent_fails_no_task(caplog: pytest.LogCaptureFixture) -> None:
    """S-REFL-35: the task is done; whatever asks next is told."""
    store = InMemoryReflectionStore()
    made = bench(
        ChatResponse(text="Text", usage=TokenUsage(900, 95)),
        ANSWER,
        store=store,
        context=replace(RUN_CONTEXT, budget=RunBudget(max_tokens=1000)),
    )
    assert await done(made) == "Text"
    assert store.retrieve(KEY) is None
    assert [line for line in caplog.messages if line.startswith("Task 'draft': it is not reflected on: ")]


# What is recorded.


@pytest.mark.parametrize("kept", [3, 4])
async def test_nothing_is_learned_twice(kept: int) -> None:
    """S-REFL-33: a task that is done again on its record asks nobody, and stores again only what may not be stored."""
    first = bench()
    await done(first)
    known = first.journal.facts()[:kept]  # its process died behind that fact
    store = InMemoryReflectionStore()
    made = bench("never", store=store, known=known)
    assert await done(made, epoch=1) == "Text"
    assert made.named == NAMES
    assert (store.retrieve(KEY) is not None) is (kept == 3)
    assert len(events(made)) == 1


async def test_what_was_read_is_recorded() -> None:
    """S-REFL-32: a task that is done again sees what it saw, whatever the store has by now."""
    store = InMemoryReflectionStore()
    store.store(KEY, notes("Before"))
    first = bench(store=store)
    await done(first)
    prompts: list[str] = []

    def answer(call: ScriptedCall) -> str:
        prompts.append(call.messages[-1].content or "")
        return "Text"

    known = [fact for fact in first.journal.facts() if fact.kind == "reflection_recalled"]
    await done(bench(answer, ANSWER, store=store, known=known), epoch=1)
    assert "### Refined Instructions\nBefore" in prompts[0]


async def test_an_accepted_output_is_reflected_on_behind_its_task() -> None:
    """S-REFL-19, S-REFL-34: one order does the task, another one reflects; the event names the task's execution."""
    store = InMemoryReflectionStore()
    made = bench(store=store)
    instance = "phase:draft#1/draft#0"
    result = await made.run(task=REFLECTED, instance=instance, is_reflected_later=True)
    assert store.retrieve(KEY) is None
    later = "phase:draft#1/reflect:draft#0"
    ended = await made.run(task=REFLECTED, instance=later, reflects_on=result.output)
    assert (ended.status, ended.output) == ("completed", None)
    assert store.retrieve(KEY) is not None
    (event,) = events(made)
    assert event.instance == instance
    stored = [fact.name for fact in made.journal.facts() if isinstance(fact.data, ReflectionStored)]
    assert stored == [f"{later}/0/reflection"]
