"""What goes wrong under a manager: workers that fail, hang and recover, policies, errors that end more than one task."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ensemble_ray import (
    AgentExecutionError,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    ExitEarlyError,
    ExitReason,
    HierarchicalConstraints,
    IllegalStateError,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskFailedEvent,
    ToolCallEvent,
    tool,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import answer, call
from tests.scenarios.delegating import ask, asked_of, hand, run_of, team, told, worker
from tests.scenarios.test_tool_loop import Misconfigured

allow, reject, modify = DelegationPolicyResult.allow, DelegationPolicyResult.reject, DelegationPolicyResult.modify


def test_failed_worker_is_told_and_may_be_asked_again(runtime: Runtime) -> None:
    """S-HIER-24, S-DEL-52, S-HIER-41: the run goes on; the attempt counts against the cap all the same."""
    writer = worker("Writer", LookupError("no line"), "text")
    manager = ScriptedModel(hand("Writer", "a"), hand("Writer", "b"), hand("Writer", "c"), "done")
    rules = HierarchicalConstraints(max_calls_per_worker={"Writer": 2}, required_workers=["Writer"])
    ran = run_of(team(manager, [writer], hierarchical_constraints=rules), runtime)
    assert told(manager)[:2] == ["Error: Agent 'Writer': no line (LookupError)", "text"]
    assert told(manager)[2].startswith(
        "Delegation rejected by policy: Agent 'Writer' has reached its delegation cap of 2"
    )
    assert ran.delegations == ["started Writer", "failed Writer", "started Writer", "completed Writer", "failed Writer"]
    (failed, _) = ran.failed
    assert isinstance(failed.cause, AgentExecutionError)
    assert isinstance(failed.cause.__cause__, LookupError)
    assert [output.raw for output in ran.given.task_outputs] == ["text", "done"]
    assert ran.watcher.of(TaskFailedEvent) == []
    outcomes = [event.outcome for event in ran.watcher.of(ToolCallEvent)]
    assert outcomes == ["failure", "success", "success"]
    traced = [tool_call.outcome for each in ran.trace.task_traces[0].llm_interactions for tool_call in each.tool_calls]
    assert traced == ["error", "success", "success"]


def test_worker_beyond_its_limit_is_a_failed_delegation(inline_runtime: Runtime) -> None:
    """S-HIER-24: whatever ends a task ends the delegation; an error without a text is told by its class."""
    writer = worker("Writer", max_iterations=1, tools=[Misconfigured()]).replace(
        llm=ScriptedModel(otherwise=call("unknown"))
    )
    manager = ScriptedModel(hand("Writer"), hand("Mute"), "done")
    ran = run_of(team(manager, [writer, worker("Mute", ValueError())]), inline_runtime)
    assert told(manager)[0].startswith("Error: Agent 'Writer' exceeded maximum iterations (1).")
    assert told(manager)[1] == "Error: Agent 'Mute': ValueError"
    assert [event.worker_role for event in ran.failed] == ["Writer", "Mute"]


def test_worker_that_hangs_is_stopped(inline_runtime: Runtime) -> None:
    """S-HIER-85: the manager is told, and can ask the same worker again."""

    async def hang(asked: ScriptedCall) -> str:
        if asked.number == 0:
            await asyncio.Event().wait()
        return "text"

    def insist(asked: ScriptedCall) -> object:
        return "done" if asked.text == "text" else hand("Writer", f"try {asked.number}")

    manager = ScriptedModel(otherwise=insist)
    writer = worker("Writer").replace(llm=ScriptedModel(otherwise=hang))
    limits = {"delegation_timeout": timedelta(seconds=0.4), "manager_stall_turns": 0, "manager_max_iterations": 100}
    ran = run_of(team(manager, [writer], **limits), inline_runtime)
    text = "Agent 'Writer' was stopped, since it did not finish within 0.4 s"
    *stopped, last = told(manager)  # on a slow machine it may be stopped more than once
    assert last == "text"
    assert stopped == [f"Error: {text}"] * len(stopped)
    assert stopped
    assert [(each.failure_reason, type(each.cause)) for each in ran.failed] == [(text, AgentExecutionError)] * len(
        stopped
    )
    assert [output.agent_role for output in ran.given.task_outputs] == ["Writer", "Manager"]


def test_model_error_of_the_manager_carries_what_was_done(inline_runtime: Runtime) -> None:
    """S-HIER-60, S-HIER-51, S-EVT-13: role, outputs, cause; failed event before the error."""
    manager = ScriptedModel(hand("Writer"), OSError("no line"))
    rules = HierarchicalConstraints(required_workers=["Digger"])
    ran = run_of(team(manager, [worker("Writer"), worker("Digger")], hierarchical_constraints=rules), inline_runtime)
    assert type(ran.error) is TaskExecutionError
    assert str(ran.error) == "Hierarchical workflow manager failed: Agent 'Manager': no line (OSError)"
    assert (ran.error.agent_role, [each.raw for each in ran.error.completed_task_outputs]) == ("Manager", ["by Writer"])
    assert ran.error.task_description
    assert isinstance(ran.error.__cause__, AgentExecutionError)
    assert isinstance(ran.error.__cause__.__cause__, OSError)
    (failed,) = ran.watcher.of(TaskFailedEvent)
    assert (failed.agent_role, str(failed.cause)) == ("Manager", "Agent 'Manager': no line (OSError)")
    assert sorted(trace.agent_role for trace in ran.trace.task_traces) == ["Manager", "Writer"]


@tool
def leave() -> str:
    """End the run."""
    raise ExitEarlyError("enough")


def test_worker_may_end_the_run_early(runtime: Runtime) -> None:
    """S-DEL-5, S-ENG-17, S-TRC-43: outputs so far, no error, no text for the manager; its tokens are counted."""
    manager = ScriptedModel(answer("", 1, 1, calls=[hand("Writer")]), answer("", 1, 1, calls=[hand("Leaver")]), "never")
    leaver = worker("Leaver", answer("", 100, 100, calls=[call("leave")]), tools=[leave])
    ran = run_of(team(manager, [worker("Writer", answer("text", 10, 10)), leaver]), runtime)
    assert ran.given.exit_reason is ExitReason.USER_EXIT_EARLY
    assert [output.raw for output in ran.given.task_outputs] == ["text"]
    assert len(manager.calls) == 2
    assert ran.delegations == ["started Writer", "completed Writer", "started Leaver"]
    assert [each.succeeded for each in ran.attempts("Manager")] == [True, False]
    assert ran.given.metrics.total_input_tokens == 112
    assert ran.given.metrics.total_delegations == 2


def test_worker_that_is_set_up_wrongly_fails_the_run(runtime: Runtime) -> None:
    """S-DEL-5, S-DEL-52, S-ENG-58, S-HIER-60: no text for the manager; its own task fails by that error."""
    manager = ScriptedModel(hand("Writer"), "never")
    ran = run_of(team(manager, [worker("Writer", call("misconfigured"), tools=[Misconfigured()])]), runtime)
    assert type(ran.error) is TaskExecutionError
    assert isinstance(ran.error.__cause__, AgentExecutionError)
    assert ran.error.__cause__.agent_role == "Manager"
    assert isinstance(ran.error.__cause__.__cause__, IllegalStateError)
    assert len(manager.calls) == 1
    assert ran.delegations == ["started Writer", "failed Writer"]
    assert isinstance(ran.failed[0].cause, IllegalStateError)


# Policies of a manager.


def test_policies_are_asked_after_the_constraints(inline_runtime: Runtime) -> None:
    """S-HIER-21, S-DEL-44, S-HIER-25: in order, of what passed; they see `Manager`, depth 0 and the working request."""
    seen: list[tuple[DelegationRequest, DelegationPolicyContext]] = []

    def keep(request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        seen.append((request, context))
        return reject("not that") if "bad" in request.task_description else allow()

    manager = ScriptedModel(
        [hand("Digger"), hand("Nobody", number=1), hand("writer", "bad", number=2), hand("writer", number=3)], "done"
    )
    rules = HierarchicalConstraints(allowed_workers={"Writer"})
    fields = {"hierarchical_constraints": rules, "delegation_policies": [keep], "max_delegation_depth": 2}
    ran = run_of(team(manager, [worker("Writer"), worker("Digger")], **fields), inline_runtime)
    assert [request.task_description for request, _ in seen] == ["bad", "do it"]
    context = seen[0][1]
    assert (context.delegating_agent_role, context.current_depth, context.max_depth) == ("Manager", 0, 2)
    assert tuple(context.available_worker_roles) == ("Writer", "Digger")
    assert told(manager)[2:] == ["Delegation rejected by policy: not that", "by Writer"]
    assert [event.failure_reason for event in ran.failed][2] == "Delegation rejected by policy: not that"


def test_rejection_of_a_policy_uses_up_the_cap(inline_runtime: Runtime) -> None:
    """S-HIER-41: an approved attempt stays counted though a later policy rejects it."""
    answers = iter([reject("not now"), allow(), allow()])
    manager = ScriptedModel(*[hand("Writer", text) for text in "abc"], "done")
    rules = HierarchicalConstraints(max_calls_per_worker={"Writer": 2})
    run_of(
        team(
            manager,
            [worker("Writer")],
            hierarchical_constraints=rules,
            delegation_policies=[lambda _request, _context: next(answers)],
        ),
        inline_runtime,
    )
    assert [text.partition("\n")[0] for text in told(manager)] == [
        "Delegation rejected by policy: not now",
        "by Writer",
        "Delegation rejected by policy: Agent 'Writer' has reached its delegation cap of 2",
    ]


def to(role: str) -> object:
    """A policy that sends everything to that role."""
    return lambda request, _context: modify(request.replace(agent_role=role))


def test_changed_target_is_checked_and_charged(inline_runtime: Runtime) -> None:
    """S-HIER-46: its cap is used up, that of the worker that was asked for is not; then it is refused."""
    writer, digger = worker("Writer"), worker("Digger")
    manager = ScriptedModel([hand("Writer", "a"), hand("Writer", "b", number=1)], "done")
    rules = HierarchicalConstraints(max_calls_per_worker={"Digger": 1, "Writer": 2})
    fields = {"hierarchical_constraints": rules, "delegation_policies": [to(" digger")]}
    ran = run_of(team(manager, [writer, digger], **fields), inline_runtime)
    assert told(manager)[0] == "by Digger"
    reason = "Delegation rejected by policy: Agent 'Digger' has reached its delegation cap of 1"
    assert told(manager)[1].partition("\n")[0] == reason
    assert (asked_of(writer), asked_of(digger)) == ([], ["a"])
    assert [event.worker_role for event in ran.started] == ["Digger"]
    assert (ran.failed[0].worker_role, ran.failed[0].failure_reason) == ("Digger", reason)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"allowed_workers": {"Writer"}}, "Agent 'Digger' is not in the allowed_workers list"),
        ({"required_stages": [["Writer"], ["Digger"]]}, "Cannot delegate to 'Digger': stage 1 is not yet complete"),
    ],
)
def test_changed_target_is_held_to_the_rules(inline_runtime: Runtime, rules: dict[str, object], reason: str) -> None:
    """S-HIER-46, S-HIER-71, S-HIER-74."""
    manager = ScriptedModel(hand("Writer"), "done")
    constraints = HierarchicalConstraints(**rules)  # type: ignore[arg-type]  its fields
    fields = {"hierarchical_constraints": constraints, "delegation_policies": [to("Digger")]}
    ran = run_of(team(manager, [worker("Writer"), worker("Digger")], **fields), inline_runtime)
    assert told(manager)[0].partition("\n")[0] == f"Delegation rejected by policy: {reason}"
    assert ran.started == []


def test_changed_target_that_nobody_is(inline_runtime: Runtime) -> None:
    """S-HIER-21, S-HIER-22: a text, a failed event, no started one."""
    manager = ScriptedModel(hand("Writer"), "done")
    ran = run_of(team(manager, [worker("Writer")], delegation_policies=[to("Ghost")]), inline_runtime)
    assert told(manager)[0].startswith("A policy modified agent_role to 'Ghost' but no agent found with that role.")
    assert ran.delegations == ["failed Ghost"]


def test_policy_without_a_verdict_fails_the_manager(inline_runtime: Runtime) -> None:
    """S-DEL-43, S-ENG-58, S-HIER-60: named; no worker of the turn is asked."""

    def forgetful(request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult | None:
        return allow() if request.task_description == "do it" else None

    manager = ScriptedModel([hand("Writer"), hand("Writer", "else", number=1)], "never")
    writer = worker("Writer")
    ran = run_of(team(manager, [writer], delegation_policies=[forgetful]), inline_runtime)
    assert type(ran.error) is TaskExecutionError
    assert isinstance(ran.error.__cause__, AgentExecutionError)
    cause = ran.error.__cause__.__cause__
    assert isinstance(cause, IllegalStateError)
    assert "'forgetful' returned None" in str(cause)
    assert asked_of(writer) == []
    assert ran.watcher.of(TaskCompleteEvent) == []


def test_worker_of_a_manager_is_at_depth_one(inline_runtime: Runtime) -> None:
    """S-HIER-27, S-DEL-45, S-DEL-4: with a limit of 2 it may ask a colleague, who may ask nobody; with 1 it may not."""

    def run_with(depth: int) -> tuple[list[str], list[int]]:
        writer = worker("Writer", ask("Digger"), lambda asked: asked.text, allow_delegation=True)
        digger = worker("Digger", ask("Writer"), lambda asked: asked.text, allow_delegation=True)
        manager = ScriptedModel(hand("Writer"), "done")
        ran = run_of(team(manager, [writer, digger], max_delegation_depth=depth), inline_runtime)
        return told(manager), [event.delegation_depth for event in ran.started]

    refusal = "Delegation depth limit reached (max: {0}, current: {0}). Complete this task yourself without further delegation."
    assert run_with(1) == ([refusal.format(1)], [1])
    assert run_with(2) == ([refusal.format(2)], [1, 2])
