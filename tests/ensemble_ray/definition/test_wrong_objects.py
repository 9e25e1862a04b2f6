"""Objects of another kind in place of hooks, models and options: the error says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import openai
import pytest

import ensemble_ray
from ensemble_ray import (
    Agent,
    DateTimeTool,
    EmbeddingStoreLongTermMemory,
    Ensemble,
    InlineRuntime,
    InMemoryEmbeddingStore,
    MapEnsemble,
    MapReduceEnsemble,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    ReflectionConfig,
    RunOptions,
    SynthesisContext,
    Task,
    ValidationError,
    WebScraperTool,
    fork,
    resume,
)
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.testing import ScriptedModel

TASK, MODEL = Task("Do it"), ScriptedModel(otherwise="done")
CLIENT: Any = openai.OpenAI(api_key="x")
WRONG: Any = 3


def told_by(make: Callable[[], object]) -> str:
    """Return what the error says."""
    with pytest.raises(ValidationError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("hook", EVENT_TYPES)
def test_callback_that_cannot_be_called_is_refused(hook: str) -> None:
    """S-ERR-61: alone or in a list."""
    assert told_by(lambda: Ensemble(**{hook: 3})) == (
        f"Ensemble: '{hook}.0' must be callable, such as a function, got: int"
    )
    assert f"'{hook}.1' must be callable" in told_by(lambda: Ensemble(**{hook: [print, "f"]}))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Task("x", input_guardrails=WRONG), "Task: 'input_guardrails.0' must be callable, such as a function, got: int"),
        (lambda: Task("x", output_guardrails=WRONG), "Task: 'output_guardrails.0' must be callable"),
        (lambda: Ensemble(on_unknown=WRONG), "Ensemble on_unknown must be a callable or one of [tell_model, fail, ask], got: int"),
        (lambda: DateTimeTool(clock=WRONG), "DateTimeTool clock must be callable, got: int"),
        (lambda: WebScraperTool(fetcher=WRONG), "WebScraperTool fetcher must be callable, got: int"),
        (lambda: Task("x", review=True), "Task: 'review' must be a Review, such as Review.required(), got: bool"),  # type: ignore[arg-type]
        (lambda: Task("x", agent="Writer"), "Task: 'agent' must be an Agent"),  # type: ignore[arg-type]
        (lambda: Ensemble("Write"), "Ensemble: 'tasks.0' must be a Task, such as Task(\"Do it\"), got: str"),  # type: ignore[arg-type]
        (lambda: Ensemble(rate_limit=60), "Ensemble: 'rate_limit' must be a RateLimit, such as RateLimit.per_minute(60), got: int"),  # type: ignore[arg-type]
        (lambda: Ensemble(memory=True), "Ensemble: 'memory' must be an EnsembleMemory, such as EnsembleMemory("),  # type: ignore[arg-type]
        (
            lambda: EmbeddingStoreLongTermMemory(embedding_store=InMemoryEmbeddingStore(), embedding_model=CLIENT),
            "embedding_model (OpenAI) has no method 'embed'",
        ),
        (
            lambda: EmbeddingStoreLongTermMemory(embedding_store=WRONG, embedding_model=WRONG),
            "embedding_model (int) has no method 'embed'",
        ),
    ],
)  # fmt: skip
def test_object_of_another_kind_is_refused_with_what_to_write(make: Callable[[], object], told: str) -> None:
    """S-ERR-61, S-ERR-62."""
    assert told_by(make).startswith(told)


TAKES_A_MODEL: list[Callable[[Any], object]] = [
    lambda model: Agent("a", "b", llm=model),
    lambda model: Task("a", llm=model),
    lambda model: Ensemble(TASK, llm=model),
    lambda model: Ensemble(TASK, manager_llm=model),
    lambda model: Ensemble(TASK, models={"large": model}),
    lambda model: MapEnsemble([1], Task, llm=model),
    lambda model: MapReduceEnsemble.of(model, ["a"], "b", "c", runtime="inline"),
    lambda model: ReflectionConfig(model=model),
    lambda model: RateLimitedChatModel(model, RateLimit.per_minute(60)),
    lambda model: RateLimitedChatModel.of(model, RateLimit.per_minute(60)),
    lambda model: SynthesisContext(model=model),
    lambda model: ensemble_ray.run(model, TASK, runtime="inline"),
]


@pytest.mark.parametrize("make", TAKES_A_MODEL)
def test_client_of_a_provider_is_no_model(make: Callable[[Any], object]) -> None:
    """S-ERR-62: its `chat` is an object, which cannot be called."""
    told = told_by(lambda: make(CLIENT))
    assert (
        "got: OpenAI of the package 'openai', which has no method chat(messages, tools). Write llm='openai:MODEL'"
        in told
    )
    assert "llm=OpenAIChatModel('MODEL', base_url=..., api_key=...)" in told
    assert "got: the class OpenAIChatModel. Make a model of it: OpenAIChatModel(...)" in told_by(
        lambda: make(OpenAIChatModel)
    )


@pytest.mark.parametrize(
    "team", [Ensemble(TASK, llm=MODEL), MapEnsemble(["a"], Task, llm=MODEL), Agent("a", "b", llm=MODEL)]
)
def test_options_of_another_kind_are_refused(team: Any) -> None:
    """S-ERR-64."""
    ask = (lambda **fields: team.run("x", **fields)) if isinstance(team, Agent) else team.run
    assert told_by(lambda: ask(options={"max_tokens": 3, "tags": {}}, runtime="inline")) == (
        "options must be RunOptions, got: dict. Write options=RunOptions(max_tokens=..., tags=...)"
    )
    told = told_by(lambda: resume("run", team, options=WRONG))
    assert told == told_by(lambda: fork("run", "a", team, options=WRONG))
    assert told == "options must be RunOptions, got: int. Write options=RunOptions(max_tokens=...)"
    assert told_by(lambda: ask(options=RunOptions, runtime="inline")).endswith(
        "Write options=RunOptions(max_tokens=...)"
    )
    assert told_by(lambda: ask(runtime="inlin")) == (
        "Unknown runtime 'inlin'. Did you mean 'inline'? Known: [inline, ray], or a Runtime object"
    )
    assert re.search("runtime must be .* got: the class InlineRuntime", told_by(lambda: ask(runtime=InlineRuntime)))
    assert told_by(lambda: ask(runtime=3)) == "runtime must be 'inline', 'ray' or a Runtime object, got: int"
