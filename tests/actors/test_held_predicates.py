"""Predicates in the process of their run: asked with the task before, or by the scheduler, and never twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ensemble_ray import GraphRoutingContext
from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.packing import pack_output
from ensemble_ray.actors.worker import agent
from ensemble_ray.actors.worker import callable_host as predicates
from ensemble_ray.actors.worker.callable_host import CallableHost, PredicateEvaluator
from ensemble_ray.execute.orders import EvaluationFailed, FollowingQuestions, HistoryPart
from ensemble_ray.llm.limits.endpoints import process_endpoints
from ensemble_ray.process.concurrency import DaemonThreads
from ensemble_ray.runs.unit_evaluations import LocalPredicates
from ensemble_ray.schedule.instructions import EdgeMatches
from tests.actors.test_wire import output_of
from tests.scenarios.teams import PATIENCE_S

UNIT = "graph:g"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report waits for its answers, also where the machine is busy with other things."""
    monkeypatch.setattr(predicates, "_WAIT_S", PATIENCE_S)


def edge(number: int, step: int = 1) -> EdgeMatches:
    """A question about a step."""
    return EdgeMatches(unit=UNIT, step=step, edge=number)


def asking(*questions: EdgeMatches, sent_count: int = 0) -> FollowingQuestions[bytes]:
    """What follows a task of the state `a`."""
    return FollowingQuestions(questions=questions, sent_count=sent_count, new=(HistoryPart(names=("a",), outputs=()),))


def held(*conditions: Callable[[GraphRoutingContext], object]) -> PredicateEvaluator:
    """The conditions of a graph's edges."""
    return PredicateEvaluator(LocalPredicates({f"{UNIT}/edge/{n}": each for n, each in enumerate(conditions)}))


OUTPUT = pack_output(output_of("draft"))


async def test_conditions_are_asked_in_order_until_one_holds() -> None:
    """S-LOOP-189, S-GRAPH-42: with the output of the task, and none behind the one that holds."""
    asked: list[str] = []

    def condition(name: str, *, holds: bool) -> Callable[[GraphRoutingContext], bool]:
        def ask(context: GraphRoutingContext) -> bool:
            asked.append(f"{name} {context.last_output.raw} {len(context.state_history['a'])}")
            return holds

        return ask

    conditions = held(condition("0", holds=False), condition("1", holds=True), condition("2", holds=True))
    assert await conditions.ask_after(asking(edge(0), edge(1), edge(2)), OUTPUT) == (False, True)
    assert asked == ["0 draft 1", "1 draft 1"]
    assert await conditions.ask_after(asking(edge(0, 2), sent_count=1), OUTPUT) == (False,)
    assert asked[2:] == ["0 draft 2"]


async def test_what_a_condition_raised_comes_with_the_task() -> None:
    """S-LOOP-189, S-GRAPH-46: as bytes, and nothing is asked behind it."""

    def fail(context: GraphRoutingContext) -> bool:
        raise LookupError(context.current_state)

    (failed,) = await held(fail, bool).ask_after(asking(edge(0), edge(1)), OUTPUT)
    assert isinstance(failed, EvaluationFailed)
    assert (failed.error_type, failed.message, type(failed.error)) == ("LookupError", "a", bytes)


async def test_nothing_is_asked_when_what_was_sent_before_is_not_here() -> None:
    """S-LOOP-189, S-LOOP-54: the scheduler asks, with the whole history."""
    never = held(lambda _: pytest.fail("nobody has what it is asked about"))
    assert await never.ask_after(asking(edge(0), sent_count=3), OUTPUT) == ()
    assert await never.holds(edge(0), sent_count=3, new=[]) is None


async def test_condition_that_takes_longer_than_a_report_waits_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-LOOP-189: the report leaves without its answer, for which the scheduler's question waits."""
    monkeypatch.setattr(predicates, "_WAIT_S", 0.0)
    may_answer = asyncio.Event()
    asked: list[int] = []

    async def slow(context: GraphRoutingContext) -> bool:
        asked.append(context.step_number)
        await may_answer.wait()
        return True

    conditions = held(slow)
    assert await conditions.ask_after(asking(edge(0)), OUTPUT) == ()
    waiting = asyncio.create_task(
        conditions.holds(edge(0), sent_count=0, new=[HistoryPart(names=("a",), outputs=(OUTPUT,))])
    )
    may_answer.set()
    assert await waiting is True
    assert asked == [1]


async def test_process_of_a_predicate_that_has_not_answered_is_not_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-72, S-LOOP-189: its run was cancelled meanwhile; it gets no more runs, and one whose predicates have answered does."""
    monkeypatch.setattr(spawn, "existing", lambda _: None)
    monkeypatch.setattr(spawn, "cpu_call", lambda: None)
    monkeypatch.setattr(agent, "freeze_modules", lambda: None)
    monkeypatch.setattr(agent, "threads", DaemonThreads("of a test"))  # those of other tests may be busy still
    monkeypatch.setattr(process_endpoints(), "share", process_endpoints().share)  # set by it, and set back
    has_begun, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(_: GraphRoutingContext) -> bool:
        has_begun.set()
        await may_answer.wait()
        return True

    host = CallableHost("process-1")
    for run_id in ("stuck", "answered"):
        host._predicates[run_id] = held(slow)
    report = asyncio.create_task(host._predicates["stuck"].ask_after(asking(edge(0)), OUTPUT))
    await has_begun.wait()
    assert await host.release("answered")
    assert not await host.release("stuck")
    may_answer.set()
    await report
