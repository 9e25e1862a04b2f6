"""A task's guardrails, asked in order through the process that holds them."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    GuardrailViolationError,
    Task,
)
from ensemble_ray.execute.callables import LocalCallables, check_guardrails
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.testing import ScriptedModel

Guardrail = Callable[[Any], object]
FINE = GuardrailResult.success()


def ordered(
    *, inputs: tuple[Guardrail, ...] = (), outputs: tuple[Guardrail, ...] = (), description: str = "Write"
) -> tuple[TaskOrder, LocalCallables]:
    """A task with these guardrails, and where they are asked."""
    agent = Agent(role="Writer", goal="Write", llm=ScriptedModel())
    task = Task(
        description=description,
        expected_output="Prose",
        agent=agent,
        input_guardrails=inputs,
        output_guardrails=outputs,
    )
    order = TaskOrder(
        run_id="run",
        key="draft",
        instance="draft#0",
        epoch=0,
        index=1,
        task=task,
        agent_key="Writer",
        agent_role="Writer",
        input_guardrails=len(inputs),
        output_guardrails=len(outputs),
    )
    return order, LocalCallables({"draft": task})


async def test_guardrails_see_what_their_side_is_about() -> None:
    """S-GRD-1, S-GRD-2, S-GRD-5: sync or async; inputs see the task, outputs the answer and the object."""
    seen: list[object] = []

    def sync_one(subject: object) -> GuardrailResult:
        seen.append(subject)
        return FINE

    async def async_one(subject: object) -> GuardrailResult:
        seen.append(subject)
        return FINE

    order, callables = ordered(inputs=(sync_one,), outputs=(async_one,))
    await check_guardrails(order, callables, stage="input")
    await check_guardrails(order, callables, stage="output", text="[1]", parsed=[1])
    assert seen == [
        GuardrailInput(task_description="Write", expected_output="Prose", agent_role="Writer"),
        GuardrailOutput(raw_response="[1]", parsed_output=[1], task_description="Write", agent_role="Writer"),
    ]


async def test_later_guardrails_are_not_asked_when_one_says_no(caplog: pytest.LogCaptureFixture) -> None:
    """S-GRD-6, S-GRD-7, S-GRD-12: in list order, up to the first failure; one line, the description cut to 80."""
    asked: list[str] = []

    def saying(name: str, verdict: GuardrailResult) -> Guardrail:
        def guardrail(_: object) -> GuardrailResult:
            asked.append(name)
            return verdict

        return guardrail

    order, callables = ordered(
        inputs=(
            saying("first", FINE),
            saying("second", GuardrailResult.failure("no names")),
            saying("third", GuardrailResult.failure("never asked")),
        ),
        description="x" * 100,
    )
    with caplog.at_level(logging.INFO), pytest.raises(GuardrailViolationError) as violated:
        await check_guardrails(order, callables, stage="input")
    assert asked == ["first", "second"]
    assert violated.value.violation_message == "no names"
    assert violated.value.guardrail_type == "input"
    (line,) = caplog.records
    assert line.levelno == logging.INFO  # it is raised, and told there (S-ERR-46)
    assert "no names" in line.getMessage()
    assert "x" * 80 in line.getMessage()
    assert "x" * 81 not in line.getMessage()


async def test_nothing_happens_when_there_are_no_guardrails() -> None:
    """S-GRD-12: empty lists have no effect; those of the other side are not asked."""
    order, callables = ordered(outputs=(lambda _: GuardrailResult.failure("wrong side"),))
    await check_guardrails(order, callables, stage="input")


async def test_task_fails_closed_when_a_guardrail_raises() -> None:
    """S-GRD-11: as an agent's failure, with the cause."""

    def broken(_: object) -> GuardrailResult:
        raise LookupError("no list of names")

    order, callables = ordered(outputs=(broken,))
    with pytest.raises(AgentExecutionError) as failed:
        await check_guardrails(order, callables, stage="output", text="answer")
    assert str(failed.value) == "Agent 'Writer': guardrail 'broken' raised LookupError: no list of names"
    assert isinstance(failed.value.__cause__, LookupError)
    assert failed.value.is_of_callable


@pytest.mark.parametrize("returned", [None, True, "fine"])
async def test_task_fails_closed_when_a_guardrail_gives_no_verdict(returned: object) -> None:
    """S-GRD-11: the text names the guardrail."""
    order, callables = ordered(inputs=(lambda _: FINE, lambda _: returned))
    with pytest.raises(AgentExecutionError, match="Agent 'Writer': Guardrail '<lambda>' returned"):
        await check_guardrails(order, callables, stage="input")


async def test_guardrail_may_be_asked_again_while_it_is_busy() -> None:
    """S-GRD-14: parallel tasks ask the same guardrail at the same time."""
    both = asyncio.Barrier(2)

    async def patient(_: object) -> GuardrailResult:
        await both.wait()
        return FINE

    order, callables = ordered(inputs=(patient,))
    await asyncio.gather(*(check_guardrails(order, callables, stage="input") for _ in range(2)))
