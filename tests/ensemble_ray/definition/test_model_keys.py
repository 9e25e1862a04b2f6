"""Keys of models that are missing are noticed before a run, wherever the model stands."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble_ray import (
    Agent,
    EmbeddingStoreLongTermMemory,
    Ensemble,
    EnsembleMemory,
    InMemoryEmbeddingStore,
    MapEnsemble,
    MemoryStore,
    OpenAIChatModel,
    OpenAIEmbeddingModel,
    RateLimit,
    ReflectionConfig,
    Task,
    ValidationError,
)
from ensemble_ray.definition.validation import check_model_keys, check_team_keys
from ensemble_ray.teamfile.fields import ItemPrompt
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.ensemble_ray.definition.test_own_runner import Echo

KEYLESS = OpenAIChatModel("gpt-none")
READY = OpenAIChatModel("gpt-ready", api_key="sk-1")
OWN = OpenAIChatModel("own", base_url="http://localhost:1/v1")
EMBEDDINGS = OpenAIEmbeddingModel("embed-none")
WRITER = agent(ScriptedModel("text"))
RUNNER = Agent(role="Runner", goal="g", runner=Echo())


def of(**fields: Any) -> Agent:
    """An agent."""
    return Agent(role="Editor", goal="g", **fields)


def a_task(**fields: Any) -> Task:
    """A task that its model does."""
    return Task(name="edit", description="Edit", expected_output="x", **fields)


def memory() -> EnsembleMemory:
    """Long-term memory with a model without its key."""
    texts = InMemoryEmbeddingStore()
    return EnsembleMemory(long_term=EmbeddingStoreLongTermMemory(embedding_store=texts, embedding_model=EMBEDDINGS))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("place", "make"),
    [
        ("Agent 'Editor'", lambda: Ensemble(tasks=[a_task(agent=of(llm=KEYLESS))])),
        ("Agent 'Editor'", lambda: Ensemble(tasks=[a_task(agent=of(llm=KEYLESS, rate_limit=RateLimit.per_minute(9)))])),
        ("llm", lambda: Ensemble(tasks=[a_task(agent=of())], llm=KEYLESS)),
        ("llm", lambda: Ensemble(tasks=[a_task()], llm=KEYLESS)),
        ("llm", lambda: MapEnsemble(items=[1], map_task=ItemPrompt(a_task()), llm=KEYLESS)),
        ("Agent 'Editor'", lambda: MapEnsemble(items=[1], map_task=ItemPrompt(a_task(agent=of(llm=KEYLESS))))),
        ("Task 'edit'", lambda: Ensemble(tasks=[a_task(llm=KEYLESS)])),
        (
            "manager_llm",
            lambda: Ensemble(tasks=[task("a", WRITER)], workflow="hierarchical", agents=[WRITER], manager_llm=KEYLESS),
        ),
        (
            "Task 'edit' reflection_config",
            lambda: Ensemble(tasks=[a_task(agent=WRITER, reflection_config=ReflectionConfig(model=KEYLESS))]),
        ),
        ("memory", lambda: Ensemble(tasks=[task("a", WRITER)], memory=memory())),
        (
            "memory_store",
            lambda: Ensemble(
                tasks=[task("a", WRITER)],
                memory_store=MemoryStore.embeddings(
                    embedding_model=EMBEDDINGS, embedding_store=InMemoryEmbeddingStore()
                ),
            ),
        ),
    ],
)
def test_a_key_that_is_missing_is_named_with_its_place(place: str, make: Any) -> None:
    """S-SRV-217."""
    with pytest.raises(ValidationError, match=f"^{place}: OpenAI.*: no API key. Set OPENAI_API_KEY"):
        check_model_keys(make())


def test_all_teams_that_lack_keys_are_named() -> None:
    """S-SRV-217: where several are served."""
    ready = Ensemble(tasks=[task("a", WRITER)], models={"fast": READY})
    teams = {name: ready.replace(models={"fast": KEYLESS}) for name in ("first", "second")}
    with pytest.raises(ValidationError) as found:
        check_team_keys({"ready": ready, **teams})
    first, second = str(found.value).splitlines()
    assert first.startswith("Team 'first': fast: OpenAIChatModel('gpt-none'): no API key")
    assert second.startswith("Team 'second': fast: OpenAIChatModel('gpt-none'): no API key")


def test_all_missing_keys_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-217: one line for each model; the variable of the environment is a key."""
    agents = [of(llm=KEYLESS).replace(role=f"Editor {number}") for number in range(5)]
    team = Ensemble(tasks=[a_task(agent=each).replace(description=each.role) for each in agents], memory=memory())
    with pytest.raises(ValidationError) as found:
        check_model_keys(team)
    first, second = str(found.value).splitlines()
    assert first.startswith(
        "Agent 'Editor 0', Agent 'Editor 1', Agent 'Editor 2' and 2 more: OpenAIChatModel('gpt-none')"
    )
    assert second.startswith("memory: OpenAIEmbeddingModel('embed-none')")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-2")
    check_model_keys(team)


def test_models_that_are_not_asked_or_need_no_key_are_fine() -> None:
    """S-SRV-217: a team's llm that no agent uses, an endpoint of one's own, a task that a function does."""
    check_model_keys(Ensemble(tasks=[task("a", WRITER)], llm=KEYLESS))
    check_model_keys(Ensemble(tasks=[task("a", handler=lambda _: "x")], llm=KEYLESS))
    check_model_keys(Ensemble(tasks=[a_task(agent=of(llm=OWN)), task("b", agent(READY))]))
    check_model_keys(Ensemble(tasks=[task("a", WRITER)], models={"fast": KEYLESS}))
    check_model_keys(MapEnsemble(items=[1], map_task=lambda _: task("a", WRITER), llm=KEYLESS))
    check_model_keys(MapEnsemble(items=[1], map_task=ItemPrompt(task("a", WRITER)), llm=KEYLESS))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ensemble(tasks=[a_task(agent=of(llm=KEYLESS), llm=READY)]),
        lambda: Ensemble(tasks=[a_task(agent=of(), llm=READY)], llm=KEYLESS),
        lambda: Ensemble(tasks=[a_task(agent=RUNNER, llm=KEYLESS)]),
        lambda: Ensemble(tasks=[task("a", WRITER)], agents=[WRITER, of(llm=KEYLESS)]),
        lambda: Ensemble(tasks=[a_task(agent=of())], workflow="hierarchical", llm=READY),
        lambda: Ensemble(
            tasks=[a_task(agent=WRITER, llm=KEYLESS, reflection_config=ReflectionConfig(model=KEYLESS))],
            workflow="hierarchical",
        ),
        lambda: MapEnsemble(items=[1], map_task=ItemPrompt(a_task(agent=of(llm=KEYLESS), llm=READY))),
    ],
)
def test_models_that_no_task_resolves_to_need_no_key(make: Any) -> None:
    """S-SRV-217: a task's own model is asked in place of its agent's; none beside a runner, or for a task under a manager."""
    check_model_keys(make())


@pytest.mark.parametrize(
    ("place", "make"),
    [
        (
            "Agent 'Editor'",
            lambda: Ensemble(
                tasks=[a_task(agent=WRITER.replace(allow_delegation=True))], agents=[WRITER, of(llm=KEYLESS)]
            ),
        ),
        (
            "Agent 'Editor'",
            lambda: Ensemble(tasks=[a_task(agent=of(llm=KEYLESS, allow_delegation=True), llm=READY)]),
        ),
        ("Task 'edit'", lambda: Ensemble(tasks=[a_task(agent=WRITER, llm=KEYLESS)])),
        ("Task 'edit'", lambda: Ensemble(tasks=[a_task(llm=KEYLESS)], workflow="hierarchical", manager_llm=READY)),
        ("manager_llm", lambda: Ensemble(tasks=[a_task(agent=RUNNER)], workflow="hierarchical", llm=KEYLESS)),
        (
            "Task 'edit' reflection_config",
            lambda: Ensemble(tasks=[a_task(agent=RUNNER, llm=KEYLESS, reflection_config=True)]),
        ),
    ],
)
def test_models_that_delegation_a_manager_or_reflection_asks_need_their_keys(place: str, make: Any) -> None:
    """S-SRV-217."""
    with pytest.raises(ValidationError, match=f"^{place}: OpenAI"):
        check_model_keys(make())
