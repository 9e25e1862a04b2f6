"""Questions of an agent's tools: gates of its task, recorded, asked once."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    AbstractAgentTool,
    AgentExecutionError,
    Effect,
    ExitEarlyError,
    ExitReason,
    HumanInputTool,
    ProcessAgentTool,
    ReviewDecision,
    ReviewHandler,
    ReviewRequest,
    ReviewTiming,
    Task,
    ToolConfigurationError,
    ToolResult,
    tool,
)
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.execute.review.gates import ToolReviews
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import ReviewDecided, ReviewRequested
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.review.gating import CONTEXT, Deciding, facts_until
from tests.ensemble_ray.execute.running import Bench, call, writer

GATE = "draft#0/0/call-0-review-0"


class Payment(AbstractAgentTool):
    """Pays once, when somebody approved; in a thread, and with little time."""

    name = "pay"
    description = "Pays."
    timeout = 300.0

    def __init__(self, effect: Effect = "once", *, require_approval: bool = True) -> None:
        self.effect = effect
        self.require_approval = require_approval
        self.paid: list[str] = []

    def do_execute(self, text: str, /) -> ToolResult:
        """Ask and pay."""
        decision = self.request_approval(f"Pay {text}")
        if isinstance(decision, ReviewDecision.ExitEarly):
            return ToolResult.failure(f"Rejected by reviewer: {text}")
        self.paid.append(text)
        return ToolResult.success("paid")


def bench_of(tool: AbstractAgentTool, handler: object, *entries: object, known: list[Fact] | None = None) -> Bench:
    """A task whose agent calls the tool once, then answers."""
    model = ScriptedModel(*(entries or (call(tool.name, '{"input": "5"}'), "done")))  # type: ignore[arg-type]  entries
    reviewer = None if handler is None else LocalReviewer(handler)
    agents = {"draft": writer(model, tools=[tool])}
    return Bench(agents=agents, known=known or (), context=CONTEXT, reviewer=reviewer)


async def test_an_approval_is_a_gate_of_the_task() -> None:
    """S-REV-60, S-REV-82, S-REV-49: recorded before the tool does anything; the call's result comes behind it."""
    tool = Payment()
    bench = bench_of(tool, Deciding(ReviewDecision.continue_execution()))
    result = await bench.run()
    assert (result.status, tool.paid) == ("completed", ["5"])
    assert bench.named == [
        ("model", "draft#0/0/model"),
        ("tool_intent", "draft#0/0/call-0"),
        ("review", GATE),
        ("review_decision", GATE),
        ("tool_result", "draft#0/0/call-0"),
        ("model", "draft#0/1/model"),
        ("output", "draft#0"),
    ]
    assert result.output is not None
    assert result.output.trace is not None
    (entry,) = result.output.trace.metadata["reviews"]
    assert (entry["question"], entry["verdict"], entry["timing"]) == ("Pay 5", "approve", "during_execution")


async def test_a_refused_call_is_a_failure_for_the_model() -> None:
    """S-REV-65: the agent goes on, and so does the run."""
    tool = Payment()
    bench = bench_of(tool, Deciding(ReviewDecision.exit_early()))
    result = await bench.run()
    assert (result.status, tool.paid) == ("completed", [])
    assert result.output is not None
    assert result.output.trace is not None
    (made,) = result.output.trace.llm_interactions[0].tool_calls
    assert (made.outcome, made.result) == ("failure", "Error: Rejected by reviewer: 5")


async def test_a_refused_call_does_not_end_the_gates_of_the_run() -> None:
    """S-REV-65, S-REV-17: only an exit that ends the run does."""
    handler = Deciding(ReviewDecision.exit_early(), ReviewDecision.continue_execution())
    entries = (call("pay", '{"input": "5"}'), call("pay", '{"input": "6"}'), "done")
    tool = Payment()
    await bench_of(tool, handler, *entries).run()
    assert (tool.paid, len(handler.asked)) == (["6"], 2)


@pytest.mark.parametrize("timed_out", [False, True])
async def test_a_question_can_end_the_run(*, timed_out: bool) -> None:
    """S-REV-33, S-REV-52, S-REV-66, S-ENG-17: without the output of the task."""
    bench = bench_of(HumanInputTool(), Deciding(ReviewDecision.ExitEarly(timed_out=timed_out)))
    result = await bench.run()
    reason = ExitReason.TIMEOUT if timed_out else ExitReason.USER_EXIT_EARLY
    assert (result.status, result.exit_reason, result.output) == ("exited", reason, None)
    assert isinstance(result.failure and result.failure.error, ExitEarlyError)


@pytest.mark.parametrize("on_timeout", ["continue", "fail"])
async def test_a_question_that_nobody_can_answer_is_an_error_for_the_model(on_timeout: str) -> None:
    """S-REV-46, S-REV-52: it is told that there is no answer, and the task goes on."""
    tool = HumanInputTool(on_timeout=on_timeout)
    bench = bench_of(tool, ReviewHandler.console(io.StringIO(), io.StringIO()))
    result = await bench.run()
    assert result.output is not None
    assert result.output.trace is not None
    (made,) = result.output.trace.llm_interactions[0].tool_calls
    assert (result.status, made.outcome) == ("completed", "failure")
    assert "Review gate has no answer: the input of the console has ended" in str(made.result)


async def test_required_approval_without_a_handler_fails_the_task() -> None:
    """S-REV-64, S-TOOL-63: as the cause of an agent's failure."""
    tool = ProcessAgentTool("pay", "Pays.", ["true"], require_approval=True)
    model = ScriptedModel(call("pay", '{"input": "5"}'), "done")
    bench = Bench(agents={"draft": writer(model, tools=[tool])}, context=replace(CONTEXT, review_policy=None))
    result = await bench.run()
    assert result.failure is not None
    assert isinstance(result.failure.error, AgentExecutionError)
    assert isinstance(result.failure.error.__cause__, ToolConfigurationError)


@pytest.mark.parametrize("decision", [ReviewDecision.edit("blue"), ReviewDecision.continue_execution()])
async def test_a_person_is_asked_once(decision: ReviewDecision) -> None:
    """S-REV-89: the process died behind the answer; the call is made again, and finds it."""
    first = bench_of(HumanInputTool(), Deciding(decision))
    before = await first.run()
    again = bench_of(HumanInputTool(), Deciding(), "done", known=facts_until(first, ReviewDecided))
    result = await again.run(epoch=1)
    assert result.status == "completed"
    assert before.output is not None
    assert result.output is not None
    assert before.output.trace is not None
    assert result.output.trace is not None
    texts = [each.trace.llm_interactions[0].tool_calls[0].result for each in (before.output, result.output)]  # type: ignore[union-attr]
    assert texts[0] == texts[1]


async def test_a_call_that_waited_for_its_approval_is_made_again() -> None:
    """S-REV-89: whatever its effect; it had done nothing. The gate is the same."""
    first = bench_of(Payment(), Deciding(RuntimeError("power")))
    await first.run()
    tool, handler = Payment(), Deciding(ReviewDecision.continue_execution())
    again = bench_of(tool, handler, "done", known=facts_until(first, ReviewRequested))
    result = await again.run(epoch=1)
    assert (result.status, tool.paid) == ("completed", ["5"])
    (asked,) = handler.asked
    (recorded,) = [fact.data for fact in again.journal.facts() if isinstance(fact.data, ReviewRequested)]
    assert asked.review_id == recorded.review_id


@pytest.mark.parametrize("require_approval", [True, False])
async def test_a_call_that_may_have_done_something_is_not_repeated(*, require_approval: bool) -> None:
    """S-REV-89, S-DUR-23: behind its approval, or where it says nothing of asking first."""
    first = bench_of(Payment(require_approval=require_approval), Deciding(ReviewDecision.continue_execution()))
    await first.run()
    known = facts_until(first, ReviewDecided if require_approval else ReviewRequested)
    tool = Payment(require_approval=require_approval)
    again = bench_of(tool, Deciding(), "done", known=known)
    result = await again.run(epoch=1)
    assert (result.status, tool.paid) == ("completed", [])


# Functions.


def bench_of_function(
    handler: object, *entries: object, known: list[Fact] | None = None, context: RunContext = CONTEXT
) -> tuple[Bench, list[int]]:
    """A task whose agent calls a function that needs an approval; what was paid."""
    paid: list[int] = []

    @tool(name="pay", approval=True)
    def pay(amount: int) -> str:
        """Pay an amount."""
        paid.append(amount)
        return "paid"

    model = ScriptedModel(*(entries or (call("pay", '{"amount": 5}'), "done")))  # type: ignore[arg-type]  entries
    reviewer = None if handler is None else LocalReviewer(handler)
    agents = {"draft": writer(model, tools=[pay])}
    return Bench(agents=agents, known=known or (), context=context, reviewer=reviewer), paid


@pytest.mark.parametrize(
    ("decision", "expected", "result"),
    [
        (ReviewDecision.continue_execution(), [5], "paid"),
        (ReviewDecision.edit('{"amount": 3}'), [3], "paid"),
        (ReviewDecision.exit_early(), [], 'Error: Rejected by reviewer: {"amount": 5}'),
        (ReviewDecision.edit("three"), [], "Tool error: "),
    ],
)
async def test_a_function_with_approval_is_called_as_a_person_decides(
    decision: ReviewDecision, expected: list[int], result: str
) -> None:
    """S-TOOL-96, S-TOOL-97: asked with its arguments, which an edit replaces; an edit that does not fit calls nothing."""
    handler = Deciding(decision)
    bench, paid = bench_of_function(handler)
    ended = await bench.run()
    assert (ended.status, paid) == ("completed", expected)
    assert [each.task_description for each in handler.asked] == ["""Tool 'pay': {"amount": 5}"""]
    assert bench.named[2:4] == [("review", GATE), ("review_decision", GATE)]
    assert ended.output is not None
    assert ended.output.trace is not None
    (made,) = ended.output.trace.llm_interactions[0].tool_calls
    assert str(made.result).startswith(result)


async def test_nobody_is_asked_about_arguments_that_do_not_fit() -> None:
    """S-TOOL-96: the model gets the error."""
    handler = Deciding()
    bench, paid = bench_of_function(handler, call("pay", '{"amount": "much"}'), "done")
    assert ((await bench.run()).status, paid, handler.asked) == ("completed", [], [])


async def test_function_with_approval_needs_a_handler() -> None:
    """S-TOOL-96, S-REV-64: as built-in tools do."""
    bench, paid = bench_of_function(None, context=replace(CONTEXT, review_policy=None))
    result = await bench.run()
    assert result.failure is not None
    assert isinstance(result.failure.error, AgentExecutionError)
    assert isinstance(result.failure.error.__cause__, ToolConfigurationError)
    assert paid == []


async def test_function_that_waited_for_its_approval_is_called_again() -> None:
    """S-REV-89: it had done nothing."""
    first, _ = bench_of_function(Deciding(RuntimeError("power")))
    await first.run()
    handler = Deciding(ReviewDecision.continue_execution())
    again, paid = bench_of_function(handler, "done", known=facts_until(first, ReviewRequested))
    assert ((await again.run(epoch=1)).status, paid) == ("completed", [5])


async def stop_while_asked() -> None:
    """A call that is stopped while its thread waits for a person, who never answers; ends when the question is given up."""
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def never(_request: ReviewRequest) -> ReviewDecision:
        asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            given_up.set()

    running = asyncio.ensure_future(bench_of(Payment(), never).run(is_stopped=True))
    async with asyncio.timeout(60):
        await asked.wait()
        running.cancel()
        assert (await running).status == "cancelled"
        await given_up.wait()


async def test_a_stopped_call_lets_its_thread_go() -> None:
    """S-REV-87: a tool that waits in a thread is not left behind in it."""
    await stop_while_asked()


async def test_a_call_that_is_stopped_while_it_asks_lets_its_thread_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-REV-87: its question is on its way before its thread has noted that it waits for it."""
    is_closed = threading.Event()
    send, close = asyncio.run_coroutine_threadsafe, ToolReviews.close

    def send_slowly(work: Coroutine[Any, Any, ReviewDecision], loop: asyncio.AbstractEventLoop) -> object:
        asking = send(work, loop)
        is_closed.wait(0.2)  # by a call that is stopped meanwhile, where nothing keeps that waiting
        return asking

    def close_and_say_so(reviews: ToolReviews) -> None:
        close(reviews)
        is_closed.set()

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", send_slowly)
    monkeypatch.setattr(ToolReviews, "close", close_and_say_so)
    await stop_while_asked()


async def test_nothing_is_asked_for_a_call_that_is_over() -> None:
    """S-REV-87: by a thread that was left behind."""
    reviews = ToolReviews(cast("TaskScope", None), "call", ())
    reviews.close()
    with pytest.raises(CancelledError):
        reviews.review_from_thread(ReviewRequest(task_description="Pay", timing=ReviewTiming.DURING_EXECUTION))


async def test_a_handler_of_a_task_may_ask() -> None:
    """S-REV-54, S-DET-2: a tool that does a task is asked for by its own gate."""
    handler = Deciding(ReviewDecision.edit("blue"))
    bench = Bench(handlers={}, context=CONTEXT, reviewer=LocalReviewer(handler))
    bench.tasks["draft"] = Task(description="Which colour?", expected_output="A colour", handler=HumanInputTool())
    result = await bench.run()
    assert result.output is not None
    assert result.output.raw == "blue"
    assert [each.task_description for each in handler.asked] == ["Which colour?"]
    assert ("review_decision", "draft#0/0/handler-review-0") in bench.named
