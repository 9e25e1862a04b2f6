"""Who may say no to a delegation between agents: policies in order, what they change, what they break."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    DelegationStatus,
    Ensemble,
    IllegalStateError,
    Runtime,
    TaskExecutionError,
    ToolCallEvent,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import task
from tests.scenarios.delegating import Ran, ask, asked_of, run_of, told, worker
from tests.scenarios.teams import Marks

allow, reject, modify = DelegationPolicyResult.allow, DelegationPolicyResult.reject, DelegationPolicyResult.modify


def team_of(*policies: object) -> tuple[Agent, Agent, Agent, Ensemble]:
    """A writer that asks a digger once; a third one is there too."""
    writer = worker("Writer", ask("Digger", "dig"), "done", allow_delegation=True)
    digger, painter = worker("Digger"), worker("Painter")
    return (
        writer,
        digger,
        painter,
        Ensemble(tasks=[task("go", writer)], agents=[writer, digger, painter], delegation_policies=policies),
    )  # type: ignore[arg-type]


def run_under(runtime: Runtime, *policies: object) -> tuple[Ran, str, Agent, Agent]:
    """The run, what the writer was told, the two colleagues."""
    writer, digger, painter, ensemble = team_of(*policies)
    ran = run_of(ensemble, runtime)
    model = writer.llm
    assert isinstance(model, ScriptedModel)
    texts = told(model)
    return ran, texts[0] if texts else "", digger, painter


class Noting:
    """An object with `evaluate`; keeps what it was asked."""

    def __init__(self, answer: DelegationPolicyResult) -> None:
        self.answer = answer
        self.asked: list[tuple[DelegationRequest, DelegationPolicyContext]] = []

    def evaluate(self, request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        self.asked.append((request, context))
        return self.answer


class Stamp:
    """An object with `evaluate` that writes what it was told into the request; it may work in any process."""

    def evaluate(self, request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        told_of = {
            "third saw": request.agent_role,
            "role": context.delegating_agent_role,
            "depths": [context.current_depth, context.max_depth],
            "roles": list(context.available_worker_roles),
        }
        return modify(request.replace(metadata={**request.metadata, **told_of}))


def test_policies_are_asked_in_order_with_the_working_request(runtime: Runtime) -> None:
    """S-DEL-40, S-DEL-41, S-DEL-44, S-DEL-46, S-HIER-21: functions, coroutines, objects; each sees what the last one made of it."""

    def first(request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        return modify(request.replace(task_description="dig deeper", metadata={"first saw": request.task_description}))

    async def second(request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        await asyncio.sleep(0)
        seen = {**request.metadata, "second saw": request.task_description}
        return modify(request.replace(agent_role="painter", metadata=seen))

    ran, text, digger, painter = run_under(runtime, first, second, Stamp())
    assert text == "by Painter"
    assert (asked_of(digger), asked_of(painter)) == ([], ["dig deeper"])
    metadata = {
        "first saw": "dig",
        "second saw": "dig deeper",
        "third saw": "painter",
        "role": "Writer",
        "depths": [0, 3],
        "roles": ["Digger", "Painter"],
    }
    (started,), (done,) = ran.started, ran.completed
    assert (started.worker_role, started.task_description, done.worker_role) == ("Painter", "dig deeper", "Painter")
    assert (started.request.metadata, started.request.agent_role) == (metadata, "painter")
    assert started.delegation_id == done.delegation_id == started.request.task_id == done.response.task_id
    (attempt,) = ran.attempts("Writer")
    assert attempt.request["metadata"] == metadata
    assert attempt.task_description == "dig deeper"


def test_rejection_stops_it(inline_runtime: Runtime) -> None:
    """S-DEL-41, S-DEL-76, S-DEL-51, S-DEL-30, S-EVT-14: later policies are not asked, nobody works; the tool answered."""
    later = Noting(allow())
    ran, text, digger, _ = run_under(inline_runtime, lambda _request, _context: reject("too costly"), later)
    assert text == "Delegation rejected by policy: too costly"
    assert later.asked == []
    assert asked_of(digger) == []
    assert ran.started == []
    (failed,) = ran.failed
    assert (failed.failure_reason, failed.cause, failed.response.errors) == (text, None, (text,))
    assert failed.response.status is DelegationStatus.FAILURE
    assert [event.outcome for event in ran.watcher.of(ToolCallEvent)] == ["success"]


def test_request_of_a_policy_keeps_its_own_id(inline_runtime: Runtime) -> None:
    """S-DEL-50, S-DEL-31, S-DEL-41: events, response and trace follow the working request; also when it is refused later."""

    def other(_request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        return modify(DelegationRequest(task_id="mine", agent_role="Painter", task_description="paint"))

    ran, _, _, _ = run_under(inline_runtime, other)
    assert ran.started[0].delegation_id == ran.completed[0].delegation_id == "mine"
    assert ran.completed[0].response.task_id == "mine"
    refused, _, _, _ = run_under(inline_runtime, other, lambda _request, _context: reject("no"))
    assert (refused.failed[0].delegation_id, refused.failed[0].worker_role) == ("mine", "Painter")


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("Ghost", "A policy modified agent_role to 'Ghost' but no agent found with that role."),
        (" writer", "A policy modified agent_role to ' writer' which results in self-delegation."),
    ],
)
def test_changed_target_is_looked_up_again(inline_runtime: Runtime, role: str, text: str) -> None:
    """S-DEL-77, S-DEL-78, S-DEL-51: unknown, and the caller itself; after all policies were asked."""
    later = Noting(allow())
    ran, answer, _, _ = run_under(inline_runtime, lambda request, _: modify(request.replace(agent_role=role)), later)
    assert answer.startswith(text)
    assert len(later.asked) == 1
    assert ran.started == []
    assert [(event.failure_reason, event.cause) for event in ran.failed] == [(answer, None)]


def test_policy_that_raises_is_an_error_of_the_tool(inline_runtime: Runtime) -> None:
    """S-DEL-43, S-EVT-14: its message, no worker, no later policy; the task goes on."""
    later = Noting(allow())

    def broken(_request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        raise LookupError("no register")

    ran, text, digger, _ = run_under(inline_runtime, broken, later)
    assert text == "Error: no register"
    assert (later.asked, asked_of(digger), ran.started) == ([], [], [])
    assert ran.given.raw == "done"
    assert [event.outcome for event in ran.watcher.of(ToolCallEvent)] == ["failure"]
    assert len(ran.failed) == 1


def test_log_has_the_traceback_of_a_policy(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-ERR-46: where it raised, and what: each in one line."""

    def broken(_request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        raise LookupError("no register")

    run_under(inline_runtime, broken)
    where, what = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert where.startswith(
        "Delegation policy 'broken' raised LookupError\nTraceback (most recent call last):\n  File "
    )
    assert "in broken" in where
    assert what.endswith("failed: Error: no register")


@pytest.mark.parametrize("answer", [None, True])
def test_policy_without_a_verdict_fails_the_task(inline_runtime: Runtime, answer: object) -> None:
    """S-DEL-43, S-ENG-58: it is named, and nobody works."""

    async def forgetful(_request: DelegationRequest, _context: DelegationPolicyContext) -> object:
        return answer

    ran, _, digger, _ = run_under(inline_runtime, forgetful)
    assert type(ran.error) is TaskExecutionError
    assert isinstance(ran.error.__cause__, AgentExecutionError)
    cause = ran.error.__cause__.__cause__
    assert isinstance(cause, IllegalStateError)
    assert str(cause).startswith(f"Delegation policy 'forgetful' returned {'None' if answer is None else 'bool'}")
    assert (asked_of(digger), ran.started) == ([], [])


def test_policies_hold_at_every_depth(inline_runtime: Runtime) -> None:
    """S-DEL-45, S-DEL-44, S-DEL-4: with the caller's role and depth, and the roles of all others."""
    seen: list[tuple[str, int, str]] = []

    def note(_request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        roles = "".join(context.available_worker_roles)
        seen.append((context.delegating_agent_role, context.current_depth, roles))
        return allow() if context.current_depth < 2 else reject("deep enough")

    def member(role: str, other: str) -> Agent:
        return worker(role, ask(other), lambda asked: asked.text, allow_delegation=True)

    agents = [member("A", "B"), member("B", "C"), member("C", "D"), worker("D")]
    ran = run_of(Ensemble(tasks=[task("go", agents[0])], agents=agents, delegation_policies=[note]), inline_runtime)
    assert seen == [("A", 0, "BCD"), ("B", 1, "ACD"), ("C", 2, "ABD")]
    assert ran.given.raw == "Delegation rejected by policy: deep enough"


def test_all_requests_of_a_turn_are_decided_before_anybody_works(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-DEL-62, S-SET-45, S-DEL-31, S-DEL-61: in request order; attempts stand in that order whoever is done first."""
    marks = Marks(tmp_path / "marks")

    def note(request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        marks.add(f"decide {request.task_description}")
        return reject("no") if request.task_description == "1" else allow()

    async def first(_asked: object) -> str:
        marks.add("work 0")
        await asyncio.to_thread(marks.wait, "work 2")
        return "first"

    def second(_asked: object) -> str:
        marks.add("work 2")
        return "second"

    roles = ("First", "Second", "Second")
    calls: Sequence[object] = [ask(role, str(number), number=number) for number, role in enumerate(roles)]
    writer = worker("Writer", calls, "done", allow_delegation=True)  # type: ignore[arg-type]
    agents = [writer, worker("First", first), worker("Second", second)]
    ran = run_of(Ensemble(tasks=[task("go", writer)], agents=agents, delegation_policies=[note]), inline_runtime)
    assert marks.lines[:3] == ["decide 0", "decide 1", "decide 2"]
    assert sorted(marks.lines[3:]) == ["work 0", "work 2"]
    assert [each.result for each in ran.attempts("Writer")] == ["first", "Delegation rejected by policy: no", "second"]
    assert sorted(event.worker_role for event in ran.completed) == ["First", "Second"]
