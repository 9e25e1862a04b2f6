"""Calls of tools that were put down at gates: which are made again, and which have an outcome that nobody knows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ensemble_ray import AbstractAgentTool, ReviewDecision, ToolResult
from ensemble_ray.facts.effects import ToolIntended
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import ReviewDecided, ReviewRequested
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.reviews import ReviewAnswer
from tests.ensemble_ray.execute.review.gating import CONTEXT
from tests.ensemble_ray.execute.running import Bench, call, writer

CALL, GATE = "draft#0/0/call-0", "draft#0/0/call-0-review-0"
DETACHED = replace(CONTEXT, is_detached=True)
APPROVED = ReviewDecided.of(ReviewAnswer(decision=ReviewDecision.continue_execution(), by="ann"), outside=True)
INTENT = ToolIntended(tool_name="pay", arguments='{"input": "5"}', effect="once")


class Payment(AbstractAgentTool):
    """Asks, and pays once."""

    name = "pay"
    description = "Pays."
    effect = "once"

    def __init__(self) -> None:
        self.paid: list[str] = []

    def do_execute(self, text: str, /) -> ToolResult:
        """Ask and pay."""
        self.request_approval(f"Pay {text}", timeout=0)
        self.paid.append(text)
        return ToolResult.success("paid")


def bench_of(tool: AbstractAgentTool, known: list[Fact]) -> Bench:
    """A task whose agent pays, then answers."""
    model = ScriptedModel("done") if known else ScriptedModel(call("pay", '{"input": "5"}'))
    return Bench(agents={"draft": writer(model, tools=[tool])}, known=known, context=DETACHED)


def fact(name: str, data: object) -> Fact:
    """A fact of the run."""
    return Fact(run="run", name=name, at=10.0, data=data)  # type: ignore[arg-type]  any fact's


async def _put_down() -> list[Fact]:
    """What a task recorded that was put down at its tool's gate."""
    bench = bench_of(Payment(), [])
    result = await bench.run("draft")
    assert (result.status, [each.task_description for each in result.open_reviews]) == ("waiting", ["Pay 5"])
    return bench.journal.facts()


async def test_a_call_that_was_put_down_is_put_down_again_while_nobody_decided() -> None:
    """S-REV-115, S-REV-117: whatever its effect; its outcome is not unknown."""
    tool = Payment()
    result = await bench_of(tool, await _put_down()).run("draft", is_resubmission=True)
    assert (result.status, tool.paid) == ("waiting", [])


async def test_a_call_is_made_again_when_somebody_decided() -> None:
    """S-REV-117."""
    tool = Payment()
    result = await bench_of(tool, [*(await _put_down()), fact(GATE, APPROVED)]).run("draft", is_resubmission=True)
    assert (result.status, tool.paid) == ("completed", ["5"])


@pytest.mark.parametrize("decided", [APPROVED, replace(APPROVED, outside=False)])
async def test_an_outcome_is_unknown_when_the_call_was_behind_its_gate(decided: ReviewDecided) -> None:
    """S-REV-117, S-DUR-24: made again after the decision, or decided in its own process: it may have paid."""
    tool = Payment()
    again = [fact(CALL, INTENT)] if decided.outside else []
    result = await bench_of(tool, [*(await _put_down()), fact(GATE, decided), *again]).run(
        "draft", is_resubmission=True
    )
    assert (result.status, tool.paid) == ("completed", [])


async def test_an_outcome_is_unknown_when_the_decision_came_while_the_call_was_made_again() -> None:
    """S-REV-117: its task noted that it went past the gate, since the decision stands behind its last beginning."""
    facts = await _put_down()
    asked = next(each for each in facts if isinstance(each.data, ReviewRequested))
    past = replace(asked, data=replace(asked.data, detached=False))
    tool = Payment()
    await bench_of(tool, [*facts, fact(CALL, INTENT), fact(GATE, APPROVED), past]).run("draft", is_resubmission=True)
    assert tool.paid == []
