"""What a task is told of earlier executions, and what is learned of its output: facts, order, warnings."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ensemble_ray import (
    GuardrailResult,
    InMemoryReflectionStore,
    MemoryStore,
    ReflectionConfig,
    ReflectionInput,
    ReflectionStore,
    Review,
    ReviewDecision,
    Task,
    TaskReflectedEvent,
    TaskReflection,
    TaskStartEvent,
)
from ensemble_ray.events import TaskCompleteEvent
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.execute.reflection.local import LocalRunReflections
from ensemble_ray.execute.reflection.reflecting import reflection_key
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reflection import ReflectionMade, ReflectionStored
from ensemble_ray.memory.run_memory import LocalRunMemory, rules_of
from ensemble_ray.reviews.reviewer import LocalReviewer
from ensemble_ray.testing import RecordingSink, ScriptedCall, ScriptedModel
from ensemble_ray.values.amounts import RunBudget
from ensemble_ray.values.messages import ChatResponse, TokenUsage
from ensemble_ray.values.reviews import ReviewPolicy
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, WatchedJournal, writer

ANSWER = "REFINED_DESCRIPTION:\nBetter\nREFINED_EXPECTED_OUTPUT:\nGood\nOBSERVATIONS:\n- dull\nSUGGESTIONS:\n- cut"
REFLECTED = Task(description="Do draft", expected_output="Prose", reflection_config=True)
KEY = hashlib.sha256(b"Do draft").hexdigest()
NAMES = [
    ("reflection_recalled", "draft#0/0/reflection"),
    ("model", "draft#0/0/model"),
    ("reflection_made", "draft#0/0/reflection"),
    ("reflection_stored", "draft#0/0/reflection"),
    ("output", "draft#0"),
]


class Broken:
    """A store that cannot be used."""

    def __init__(self, *methods: str) -> None:
        self._methods = methods

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Refuse, where it should."""
        if "store" in self._methods:
            raise OSError("no room")

    def retrieve(self, key: str) -> TaskReflection | None:
        """Refuse, where it should."""
        if "retrieve" in self._methods:
            raise OSError("gone")
        return None


def notes(text: str = "Better", run_count: int = 1) -> TaskReflection:
    """A reflection."""
    return TaskReflection(refined_description=text, refined_expected_output="x", run_count=run_count)


def bench(
    *answers: object,
    store: ReflectionStore | None = None,
    known: Sequence[Fact] = (),
    sink: RecordingSink | None = None,
    context: RunContext = RUN_CONTEXT,
    journal: WatchedJournal | None = None,
) -> Bench:
    """A runner of one task that is reflected on by the model that does it."""
    return Bench(
        agents={"draft": writer(ScriptedModel(*(answers or ("Text", ANSWER))))},  # type: ignore[arg-type]  entries
        context=replace(context, has_reflections=True),
        reflections=LocalRunReflections(InMemoryReflectionStore() if store is None else store),
        known=known,
        sink=sink,
        journal=journal,
    )


async def done(made: Bench, task: Task = REFLECTED, **changes: object) -> str:
    """Do the task; its text."""
    result = await made.run(task=task, **changes)
    assert result.status == "completed", result.error
    assert result.output is not None
    return result.output.raw


def events(made: Bench) -> list[TaskReflectedEvent]:
    """Those about reflections."""
    return [event for event in made.sink.events if isinstance(event, TaskReflectedEvent)]


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
    """S-REFL-9: the config's, else the task's, else the agent's."""
    own, of_task = (
        ScriptedModel("REFINED_DESCRIPTION:\nby the config"),
        ScriptedModel("REFINED_DESCRIPTION:\nby the task"),
    )
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
    (fact,) = [fact.data for fact in made.journal.facts() if isinstance(fact.data, ReflectionMade)]
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
    account = spending._account
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
