"""A manager under constraints, whatever its model writes: caps, stages, what it is told, when it is ended."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ensemble_ray import (
    ConstraintViolationError,
    HierarchicalConstraints,
    ManagerStalledError,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskFailedEvent,
    ToolCall,
    ToolCallEvent,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import call
from tests.scenarios.delegating import Ran, asked_of, hand, run_of, team, told, worker
from tests.scenarios.teams import prompt_of


def under(
    manager: ScriptedModel, runtime: Runtime, *roles: str, fields: Mapping[str, object] | None = None, **rules: object
) -> Ran:
    """A run of workers of these roles under these rules."""
    constraints = HierarchicalConstraints(**rules)  # type: ignore[arg-type]  its fields
    return run_of(
        team(manager, [worker(role) for role in roles], hierarchical_constraints=constraints, **(fields or {})), runtime
    )


def test_fifty_delegations_in_one_turn_pass_a_cap_of_three_thrice(runtime: Runtime) -> None:
    """S-HIER-26, S-HIER-72, S-HIER-41, S-HIER-61, S-SET-45: exactly the first three; nothing else is asked of anybody."""
    manager = ScriptedModel([hand("Writer", f"part {n}", number=n) for n in range(50)], "done")
    writer = worker("Writer")
    rules = HierarchicalConstraints(max_calls_per_worker={"Writer": 3})
    ran = run_of(team(manager, [writer], hierarchical_constraints=rules, manager_max_iterations=100), runtime)
    assert sorted(asked_of(writer)) == ["part 0", "part 1", "part 2"]
    assert told(manager)[:3] == ["by Writer"] * 3
    reason = "Delegation rejected by policy: Agent 'Writer' has reached its delegation cap of 3"
    assert [text.partition("\n")[0] for text in told(manager)[3:]] == [reason] * 47
    assert [event.failure_reason for event in ran.failed] == [reason] * 47
    assert {event.cause for event in ran.failed} == {None}
    assert (len(ran.started), len(ran.completed)) == (3, 3)
    assert [each.succeeded for each in ran.attempts("Manager")] == [True] * 3 + [False] * 47
    assert (ran.given.total_tool_calls, ran.given.metrics.total_delegations) == (50, 3)


MALFORMED = [
    '{"agent_role": "Writer", "task_description": ',
    "",
    "[]",
    "null",
    '"Writer"',
    "{}",
    '{"agent_role": "Writer"}',
    '{"task_description": "write"}',
    json.dumps({"agent_role": " \n", "task_description": "write"}),
    json.dumps({"agent_role": "Writer", "task_description": "\t"}),
    json.dumps({"agent_role": None, "task_description": "write"}),
    json.dumps({"agent_role": 5, "task_description": "write"}),
    json.dumps({"agent_role": "Writer", "task_description": 7}),
    json.dumps({"agent_role": ["Writer"], "task_description": "write"}),
]


def test_malformed_requests_cost_nothing(inline_runtime: Runtime) -> None:
    """S-HIER-21, S-HIER-80, S-EVT-14: an error text each; no request, no event, no count against the caps."""
    calls = [call("delegate_task", text, number=n) for n, text in enumerate(MALFORMED)]
    manager = ScriptedModel([*calls, hand("Writer", "write", number=99)], "done")
    ran = under(manager, inline_runtime, "Writer", global_max_delegations=1)
    texts = told(manager)
    assert all(text.startswith("Error: ") for text in texts[:-1])
    assert texts[8] == "Error: agent_role must not be None or blank."
    assert texts[9] == "Error: task_description must not be None or blank."
    assert texts[6] == texts[9]
    assert texts[-1] == "by Writer"
    assert ran.delegations == ["started Writer", "completed Writer"]
    assert len(ran.attempts("Manager")) == 1
    outcomes = [event.outcome for event in ran.watcher.of(ToolCallEvent)]
    assert outcomes == ["failure"] * len(MALFORMED) + ["success"]


@pytest.mark.parametrize("spelling", ["writer", " WRITER ", "wRiTeR\n", "Writer"])
def test_other_spellings_mean_the_same_worker(inline_runtime: Runtime, spelling: str) -> None:
    """S-HIER-21, S-HIER-45: trimmed and whatever the case; the cap is the worker's own."""
    manager = ScriptedModel([hand(spelling), hand("Writer", "more", number=1)], "done")
    ran = under(manager, inline_runtime, "Writer", max_calls_per_worker={"Writer": 1}, allowed_workers={"Writer"})
    assert ran.delegations[-1] == "completed Writer"
    assert told(manager)[0] == "by Writer"
    assert told(manager)[1].startswith("Delegation rejected by policy: Agent 'Writer' has reached")


def test_roles_that_nobody_has_are_answered_with_those_that_are_there(inline_runtime: Runtime) -> None:
    """S-HIER-21, S-HIER-22, S-EVT-14: an answer, and no failure of the tool; other tools are unknown ones."""
    manager = ScriptedModel([hand("Nobody"), hand("Wri ter", number=1), call("delegate", number=2)], "done")
    ran = under(manager, inline_runtime, "Writer", "Digger")
    assert told(manager) == [
        "No agent found with role 'Nobody'. Available roles: [Writer, Digger]",
        "No agent found with role 'Wri ter'. Available roles: [Writer, Digger]",
        "Error: Unknown tool 'delegate'",
    ]
    assert ran.delegations == ["failed Nobody", "failed Wri ter"]
    assert [event.outcome for event in ran.watcher.of(ToolCallEvent)] == ["success", "success"]


def test_refusals_name_what_is_possible_now(inline_runtime: Runtime) -> None:
    """S-HIER-71, S-HIER-74, S-HIER-25, S-HIER-81, S-HIER-61: the model is told more than events and responses hold."""
    manager = ScriptedModel(
        [hand("Two"), hand("Three", number=1)], [hand("One", number=2)], [hand("Two", number=3)], "done"
    )
    ran = under(
        manager,
        inline_runtime,
        *("One", "Two", "Three"),
        allowed_workers={"One", "Two"},
        required_workers=["Two"],
        required_stages=[["One"], ["Two"]],
    )
    early, forbidden, *rest = told(manager)
    reasons = [
        "Delegation rejected by policy: Cannot delegate to 'Two': stage 1 is not yet complete",
        "Delegation rejected by policy: Agent 'Three' is not in the allowed_workers list",
    ]
    assert [early.partition("\n")[0], forbidden.partition("\n")[0]] == reasons
    hint = early.partition("\n")[2]
    assert "'One'" in hint.partition(".")[0]
    assert "'Two'" not in hint.partition(".")[0]
    assert "'Two'" in hint  # it is still missing
    assert rest == ["by One", "by Two"]
    assert [event.failure_reason for event in ran.failed] == reasons
    assert [event.response.errors for event in ran.failed] == [(reason,) for reason in reasons]
    assert [each.result for each in ran.attempts("Manager")] == told(manager)
    (spec,) = manager.calls[0].tools
    assert spec.parameters["properties"]["agent_role"]["enum"] == ["One", "Two"]  # type: ignore[index]
    assert "stage 1" in spec.description


def test_stage_is_open_after_its_workers_succeeded(inline_runtime: Runtime) -> None:
    """S-SET-45, S-HIER-42, S-HIER-43: a stage-2 call beside its stage-1 call is refused; a failed worker opens nothing."""
    manager = ScriptedModel(
        [hand("One"), hand("Two", number=1)],
        hand("Two", number=2),
        hand("One", "again", number=3),
        hand("Two", number=4),
        "done",
    )
    first = worker("One", ValueError("no"), "by One")
    rules = HierarchicalConstraints(required_stages=[["One"], ["Two"]])
    ran = run_of(team(manager, [first, worker("Two")], hierarchical_constraints=rules), inline_runtime)
    assert ran.delegations == [
        *("started One", "failed Two", "failed One"),
        "failed Two",
        *("started One", "completed One"),
        *("started Two", "completed Two"),
    ]
    refused = "Delegation rejected by policy: Cannot delegate to 'Two': stage 1 is not yet complete"
    assert [text.partition("\n")[0] for text in told(manager)][1:3] == [refused, refused]
    assert told(manager)[3:] == ["by One", "by Two"]


# The whole loop, at random.

ROLES = ("One", "Two", "Three")
requests = st.tuples(st.sampled_from([*ROLES, "one ", "Nobody", ""]), st.sampled_from(["a", "b", " "]))
rules_of = st.fixed_dictionaries({
    "allowed_workers": st.sets(st.sampled_from(ROLES)),
    "max_calls_per_worker": st.dictionaries(st.sampled_from(ROLES), st.integers(1, 2)),
    "global_max_delegations": st.integers(0, 4),
    "required_stages": st.sampled_from([[], [["One"], ["Two"]], [["Two", "One"], ["Three"]], [["One"], ["Two"], ["Three"]]]),
})  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.lists(requests, min_size=1, max_size=5), max_size=5),
    rules=rules_of,
    broken=st.sets(st.sampled_from(["a", "b"]), max_size=1),
)
def test_no_turn_gets_past_the_rules(
    inline_runtime: Runtime, turns: Sequence[Sequence[tuple[str, str]]], rules: Mapping[str, object], broken: set[str]
) -> None:
    """S-HIER-26, S-HIER-40, S-HIER-41, S-HIER-42, S-HIER-43, S-HIER-71 to S-HIER-74, S-SET-45, S-DEL-32: caps and stages are exact."""

    def answer_of(role: str) -> object:
        async def work(asked: ScriptedCall) -> str:
            text = prompt_of(asked)
            await asyncio.sleep(0)
            if any(f"## Task\n{bad}" in text for bad in broken):
                raise ValueError(role)
            return role

        return work

    script: list[list[ToolCall]] = [
        [hand(role, text, number=10 * turn + n) for n, (role, text) in enumerate(calls)]
        for turn, calls in enumerate(turns)
    ]
    workers = [worker(role) for role in ROLES]
    workers = [each.replace(llm=ScriptedModel(otherwise=answer_of(each.role))) for each in workers]  # type: ignore[arg-type]
    ensemble = team(
        ScriptedModel(*script, otherwise="done"),
        workers,
        hierarchical_constraints=HierarchicalConstraints(**rules),  # type: ignore[arg-type]
        manager_stall_turns=0,
        manager_max_iterations=1000,
        durability="off",  # the rules are the same, and a record of each example takes longer than all else
    )
    ran = run_of(ensemble, inline_runtime)
    expected = list(_modelled(turns, rules, broken))
    assert {each.response["status"] for each in ran.attempts("Manager")} <= {"success", "failure"}
    refusals = ("Delegation rejected by policy: ", "No agent found with role ")
    performed = [each.worker_role for each in ran.attempts("Manager") if not each.result.startswith(refusals)]
    assert performed == [role for role, _ in expected]
    assert Counter(event.worker_role for event in ran.started) == Counter(role for role, _ in expected)
    assert Counter(output.agent_role for output in ran.given.task_outputs[:-1]) == Counter(
        r for r, ok in expected if ok
    )


def _modelled(
    turns: Sequence[Sequence[tuple[str, str]]], rules: Mapping[str, object], broken: set[str]
) -> Sequence[tuple[str, bool]]:
    """What the specification lets through, written down as plainly as possible."""
    asked: list[tuple[str, bool]] = []
    completed: set[str] = set()
    for calls in turns:
        gained: set[str] = set()
        for written, text in calls:
            role = {each.casefold(): each for each in ROLES}.get(written.strip().casefold())
            if role is None or not text.strip():
                continue
            counts = Counter(each for each, _ in asked)
            allowed, caps = rules["allowed_workers"], rules["max_calls_per_worker"]
            total, stages = rules["global_max_delegations"], rules["required_stages"]
            assert isinstance(allowed, set)
            assert isinstance(caps, dict)
            assert isinstance(total, int)
            assert isinstance(stages, list)
            place = next((n for n, stage in enumerate(stages) if role in stage), 0)
            is_open = all(set(stage) <= completed for stage in stages[:place])
            if (
                (allowed and role not in allowed)
                or 0 < total <= len(asked)
                or counts[role] >= caps.get(role, 99)
                or not is_open
            ):
                continue
            asked.append((role, text not in broken))
            if text not in broken:
                gained.add(role)
        completed |= gained  # nobody of a turn is done before all of it is decided
    return asked


# Required workers.


def test_missing_worker_is_told_once_and_then_stands(inline_runtime: Runtime) -> None:
    """S-HIER-82, S-HIER-50, S-HIER-52, S-HIER-62: the second answer is taken; the error is not wrapped."""
    manager = ScriptedModel(hand("Digger"), "finished", "finished all the same")
    ran = under(manager, inline_runtime, "Writer", "Digger", "Spare", required_workers=["Spare", "Digger", "Writer"])
    assert type(ran.error) is ConstraintViolationError
    assert ran.error.violations == (
        "Required worker 'Spare' was not delegated to during this run.",
        "Required worker 'Writer' was not delegated to during this run.",
    )
    assert [output.agent_role for output in ran.error.completed_task_outputs] == ["Digger"]
    assert len(manager.calls) == 3
    before, reminder = manager.calls[-1].messages[-2:]
    assert (before.role, before.content, reminder.role) == ("assistant", "finished", "user")
    assert "'Spare', 'Writer'" in (reminder.content or "")
    assert "'Digger'" not in (reminder.content or "")


def test_violation_is_raised_after_the_manager_completed(runtime: Runtime) -> None:
    """S-HIER-50, S-HIER-62: TaskComplete, no TaskFailed; the trace holds the manager's work."""
    ran = under(
        ScriptedModel("done"), runtime, "Writer", required_workers={"Writer"}, fields={"enforce_required": "fail"}
    )
    assert type(ran.error) is ConstraintViolationError
    assert (
        str(ran.error)
        == "Hierarchical constraint violated: Required worker 'Writer' was not delegated to during this run."
    )
    (complete,) = ran.watcher.of(TaskCompleteEvent)
    assert (complete.agent_role, complete.task_output.raw) == ("Manager", "done")
    assert ran.watcher.of(TaskFailedEvent) == []
    assert [trace.agent_role for trace in ran.trace.task_traces] == ["Manager"]


def test_reminded_manager_may_still_do_it(inline_runtime: Runtime) -> None:
    """S-HIER-82: and a worker that failed counts as missing (S-HIER-42)."""
    manager = ScriptedModel(hand("Writer"), "finished", hand("Writer", "again"), "now really")
    rules = HierarchicalConstraints(required_workers=["Writer"])
    writer = worker("Writer", ValueError("no"), "text")
    assert run_of(team(manager, [writer], hierarchical_constraints=rules), inline_runtime).given.raw == "now really"


@pytest.mark.parametrize(
    ("rules", "fields"),
    [
        ({"required_workers": ["Writer"]}, {"enforce_required": "fail"}),
        ({"required_workers": ["Writer"], "global_max_delegations": 1}, {}),
    ],
)
def test_nobody_is_reminded_in_vain(
    inline_runtime: Runtime, rules: Mapping[str, object], fields: Mapping[str, object]
) -> None:
    """S-HIER-82: not where it is switched off, nor of what the caps do not allow any more."""
    manager = ScriptedModel(hand("Digger"), "finished")
    ran = under(manager, inline_runtime, "Writer", "Digger", fields=fields, **rules)
    assert type(ran.error) is ConstraintViolationError
    assert len(manager.calls) == 2


def test_required_workers_are_not_asked_for_when_the_manager_failed(inline_runtime: Runtime) -> None:
    """S-HIER-51, S-HIER-60."""
    ran = under(ScriptedModel(OSError("no line")), inline_runtime, "Writer", required_workers=["Writer"])
    assert type(ran.error) is TaskExecutionError


# Managers that go round in circles.


def test_repeated_delegation_is_carried_out_with_a_notice(inline_runtime: Runtime) -> None:
    """S-HIER-83: the result with a notice behind it; the worker's own output is as it was; other texts get none."""
    manager = ScriptedModel(
        hand("Writer", "write it"), hand("writer", " write  it\n"), hand("Writer", "write more"), "done"
    )
    ran = under(manager, inline_runtime, "Writer", max_calls_per_worker={"Writer": 3})
    first, second, third = told(manager)
    assert (first, third) == ("by Writer", "by Writer")
    assert second.startswith("by Writer\n\nNotice: 'Writer' was given this same task before")
    assert [event.response.raw_output for event in ran.completed] == ["by Writer"] * 3
    assert [each.raw for each in ran.given.task_outputs[:3]] == ["by Writer"] * 3


def test_stalled_manager_is_ended_with_what_was_done(inline_runtime: Runtime) -> None:
    """S-HIER-84, S-HIER-60: five turns without progress; repetitions, refusals and failures are none."""
    manager = ScriptedModel(hand("Writer"), otherwise=hand("Writer"))
    ran = under(manager, inline_runtime, "Writer")
    assert isinstance(ran.error, TaskExecutionError)
    stalled = ran.error.__cause__
    assert isinstance(stalled, ManagerStalledError)
    assert (stalled.turns, len(stalled.last_results), stalled.agent_role) == (5, 5, "Manager")
    assert str(ran.error).startswith("Hierarchical workflow manager failed: The manager made no progress in 5 turns")
    assert [output.raw for output in ran.error.completed_task_outputs] == ["by Writer"] * 6
    assert len(manager.calls) == 6
    (failed,) = ran.watcher.of(TaskFailedEvent)
    assert (failed.agent_role, type(failed.cause)) == ("Manager", ManagerStalledError)


def test_progress_starts_the_count_anew(inline_runtime: Runtime) -> None:
    """S-HIER-84: any new success of a turn is progress, also beside refusals; unknown roles and malformed calls are none."""
    nothing = [hand("Nobody"), call("delegate_task", "{}", number=1)]
    script = [nothing, [*nothing, hand("Writer", "a", number=2)], nothing, hand("Writer", "b"), nothing, "done"]
    fields = {"manager_stall_turns": 2, "manager_max_iterations": 100}
    assert under(ScriptedModel(*script), inline_runtime, "Writer", fields=fields).given.raw == "done"
    again = under(ScriptedModel(*script[:3], nothing, "never"), inline_runtime, "Writer", fields=fields)
    assert isinstance(again.error, TaskExecutionError)
    assert isinstance(again.error.__cause__, ManagerStalledError)


def test_manager_is_never_ended_when_stalls_are_switched_off(inline_runtime: Runtime) -> None:
    """S-HIER-84: 0 turns."""
    manager = ScriptedModel(*[hand("Nobody")] * 9, "done")
    assert under(manager, inline_runtime, "Writer", fields={"manager_stall_turns": 0}).given.raw == "done"
