"""Estimates and claims of requests, and what a task does that may spend no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    ChatMessage,
    ChatResponse,
    ExitReason,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    RetryPolicy,
    TaskFailedEvent,
    TokenUsage,
    ToolCall,
    ToolSpec,
)
from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.execute.scope import Spending, output_limit, spending_here
from ensemble_ray.facts.fact import Fact
from ensemble_ray.llm.limits.accounts import LocalAccount
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.metrics import Amount, RunBudget
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, writer

ASKED = (ChatMessage("user", "x" * 400),)


class Brief:
    """A model whose answers are limited."""

    max_output_tokens = 30


def spending_of(max_tokens: int) -> tuple[Spending, LocalAccount]:
    """What may be spent, and the account."""
    account = LocalAccount(RunBudget(max_tokens=max_tokens))
    return Spending(account, None), account


def answer(text: str = "fine", *, usage: TokenUsage | None = None) -> ChatResponse:
    """An answer."""
    return ChatResponse(text=text, usage=usage)


def test_input_is_estimated_of_messages_and_tool_descriptions() -> None:
    """S-BUD-2: a token for four characters, calls of earlier turns included."""
    asked = ChatMessage("assistant", None, tool_calls=(ToolCall(id="1", name="find", arguments='{"q": 1}'),))
    tool = ToolSpec("find", "Finds things", {"type": "object"})
    characters = 400 + len('find{"q": 1}') + len("findFinds things") + len(json.dumps({"type": "object"}))
    assert estimated_input([*ASKED, asked], [tool]) == characters // 4
    assert estimated_input([], []) == 0


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Brief(), 30),
        (RateLimitedChatModel.of(OpenAIChatModel("m", api_key="k", max_tokens=64), RateLimit.per_minute(1)), 64),
        (OpenAIChatModel("m", api_key="k", max_completion_tokens=32), 32),
        (OpenAIChatModel("m", api_key="k"), None),
        (ScriptedModel(), None),
    ],
)
def test_models_own_limit_is_what_an_answer_may_cost(model: object, expected: int | None) -> None:
    """S-BUD-2: as its option or its attribute says, also behind a rate limit."""
    assert output_limit(model) == expected


async def test_answers_so_far_tell_what_the_next_one_costs() -> None:
    """S-BUD-2: 256 before the first; those of another kind of agent tell nothing."""
    spending, _ = spending_of(100 + 256)

    async def send() -> ChatResponse:
        return answer(usage=TokenUsage(0, 9))

    for _ in range(2):
        await spending.request("writer", None, ASKED).send(send)
    await spending.request("writer", None, (ChatMessage("user", "x" * 4 * (356 - 18 - 9)),)).send(send)
    with pytest.raises(BudgetExhaustedError, match="27 tokens are spent, and the next request would need 356"):
        await spending.request("editor", None, ASKED).send(send)


async def test_providers_count_takes_the_place_of_the_estimate() -> None:
    """S-BUD-2: where it counted nothing, the estimate of the request and the length of the answer do."""
    spending, account = spending_of(1000)
    request = spending.request("writer", Brief(), ASKED)

    async def counted() -> ChatResponse:
        return answer(usage=TokenUsage(7, 5))

    async def uncounted() -> ChatResponse:
        return answer("y" * 40)

    await request.send(counted)
    assert (account.spent, request.estimated) == (Amount(12), None)
    again = spending.request("writer", Brief(), ASKED)
    await again.send(uncounted)
    assert (account.spent, again.estimated) == (Amount(12 + 100 + 10), (100, 10))


async def test_failed_or_cancelled_request_gives_its_reservation_back() -> None:
    """S-BUD-2: and the next attempt claims anew."""
    spending, account = spending_of(130)

    async def fail() -> ChatResponse:
        raise ConnectionError("down")

    async def hang() -> ChatResponse:
        await asyncio.Event().wait()
        raise AssertionError

    request = spending.request("writer", Brief(), ASKED)
    with pytest.raises(ConnectionError):
        await request.send(fail)
    hanging = asyncio.create_task(spending.request("writer", Brief(), ASKED).send(hang))
    await asyncio.sleep(0)
    hanging.cancel()
    await asyncio.wait([hanging])
    await request.send(lambda: _ready(answer(usage=TokenUsage(100, 30))))
    assert account.spent == Amount(130)


async def _ready(response: ChatResponse) -> ChatResponse:
    return response


def bench_of(model: ScriptedModel, max_tokens: int, known: Sequence[Fact] = ()) -> Bench:
    """A task under a budget."""
    context = replace(RUN_CONTEXT, budget=RunBudget(max_tokens=max_tokens), retry=RetryPolicy(first_delay=timedelta()))
    return Bench(agents={"draft": writer(model)}, context=context, known=known)


async def test_task_ends_the_run_when_its_request_does_not_fit() -> None:
    """S-BUD-4: it asked nobody, gave nothing and did not fail; why is on record."""
    model = ScriptedModel("never")
    bench = bench_of(model, 100)
    result = await bench.run()
    assert (result.status, result.exit_reason, result.output) == ("exited", ExitReason.BUDGET_EXHAUSTED, None)
    assert str(result.error).startswith("Budget exhausted: the limit is max_tokens 100, 0 tokens are spent")
    assert [(fact.kind, fact.data.to_data()) for fact in bench.journal.facts()] == [
        ("task_exited", {"reason": "budget_exhausted"})
    ]
    assert not model.calls
    assert not bench.sink.of(TaskFailedEvent)


async def test_request_that_is_made_again_claims_again() -> None:
    """S-BUD-2: its first attempt cost nothing."""
    model = ScriptedModel(ConnectionError("down"), "fine")
    result = await bench_of(model, 600).run()
    assert (result.status, len(model.calls)) == ("completed", 2)


async def test_what_nobody_counted_is_on_record_as_it_was_estimated() -> None:
    """S-BUD-2, S-BUD-6: a run that goes on counts the same."""
    bench = bench_of(ScriptedModel("y" * 40), 1000)
    await bench.run()
    first = bench.journal.facts()[0]
    assert (first.data.to_data()["input_tokens"], first.data.to_data()["output_tokens"]) == (-1, -1)
    estimated = first.data.to_data()["estimated_tokens"]
    assert isinstance(estimated, list)
    assert (estimated[0] > 0, estimated[1]) == (True, 10)


async def test_recorded_answers_need_no_budget() -> None:
    """S-BUD-9: they cost nothing again."""
    first = bench_of(ScriptedModel("fine"), 1000)
    await first.run()
    known = [fact for fact in first.journal.facts() if fact.kind == "model"]
    result = await bench_of(ScriptedModel(), 1, known=known).run(epoch=1)
    assert result.status == "completed"


async def test_task_goes_on_when_its_recorded_end_was_a_spent_budget() -> None:
    """S-BUD-6: with a larger one there is more to do."""
    first = bench_of(ScriptedModel(), 100)
    await first.run()
    result = await bench_of(ScriptedModel("fine"), 1000, known=first.journal.facts()).run(epoch=1)
    assert (result.status, result.output and result.output.raw) == ("completed", "fine")


def test_run_without_a_budget_has_no_spending() -> None:
    """S-BUD-1: nothing is counted, nothing is asked."""
    assert spending_here(None, None) is None
