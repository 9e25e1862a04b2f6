"""What memory embeds at an endpoint is part of what its run costs."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    ExitReason,
    ModelPrice,
    OpenAIEmbeddingModel,
    Runtime,
    SqliteMemory,
    TokenUsage,
    ValidationError,
)
from ensemble_ray.testing import ModelServer, Reply, ScriptedModel
from tests.builders import agent, task


@pytest.fixture
def memory(tmp_path: Path, model_server: Callable[..., ModelServer]) -> SqliteMemory:
    """Memory whose endpoint counts a token for each word."""
    server = model_server()
    model = OpenAIEmbeddingModel("embed", base_url=server.base_url, api_key="sk-of-a-test")
    return SqliteMemory(tmp_path / "memory.db", embedding_model=model)


def test_embedded_tokens_are_in_the_metrics(runtime: Runtime, memory: SqliteMemory) -> None:
    """S-MEM-128: of tasks of agents and of handlers, wherever they run; the trace has the number."""
    model = ScriptedModel(Reply(text="a b c", usage=TokenUsage(10, 5)))
    team = Ensemble(
        tasks=[
            task("write it", agent(model), memory_scopes="notes"),
            task("count", handler=lambda _: "one two three four five six", memory_scopes="notes"),
            task("rest", handler=lambda _: "done"),
        ],
        memory_store=memory,
    )
    output = team.run(runtime=runtime)
    # The query and the answer; a handler's task reads nothing, and the last one uses no scope.
    assert [each.metrics.input_tokens for each in output.task_outputs] == [10 + 2 + 3, 6, 0]
    assert output.metrics.total_tokens == 15 + 2 + 3 + 6
    numbers = [each.metadata.get("embedding_tokens") for each in output.trace.task_traces]
    assert numbers == ["5", "6", None]


def test_embedded_tokens_have_a_price(runtime: Runtime, memory: SqliteMemory) -> None:
    """S-PRC-11: that of the embedding model, also for a handler's task; a budget of money needs it."""
    team = Ensemble(
        tasks=[task("count", handler=lambda _: "one two three four five six", memory_scopes="notes")],
        memory_store=memory,
        max_cost=1,
    )
    with pytest.raises(ValidationError, match="'embed' is unknown \\(memory_store\\)"):
        team.run(runtime=runtime)
    output = team.replace(prices={"embed": ModelPrice(input=1000)}).run(runtime=runtime)
    cost = output.metrics.total_cost_estimate
    assert cost is not None
    assert (cost.total_cost, output.metrics.total_unpriced_calls) == (Decimal("0.006"), 0)


def test_a_budget_pays_for_what_is_embedded(runtime: Runtime, memory: SqliteMemory) -> None:
    """S-MEM-129: the next request of a model is not sent."""
    model = ScriptedModel("never asked")
    output = Ensemble(
        tasks=[task("count", handler=lambda _: "word " * 3000, memory_scopes="notes"), task("write", agent(model))],
        memory_store=memory,
        max_tokens=2500,
    ).run(runtime=runtime)
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert [each.task_description for each in output.task_outputs] == ["count"]
    assert not model.calls
