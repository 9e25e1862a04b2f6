"""A manager and its workers: set-up, the tool, what is told of the run, on both runtimes where that matters."""

from __future__ import annotations

import threading
import uuid
from itertools import accumulate

import pytest

from ensemble_ray import (
    CostConfiguration,
    DelegationStatus,
    Ensemble,
    HierarchicalConstraints,
    ManagerPromptContext,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskFailedEvent,
    TaskInputEvent,
    TaskOutput,
    TaskStartEvent,
    TokenEvent,
    ToolCallEvent,
    ValidationError,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.delegating import asked_of, hand, run_of, team, told, worker
from tests.scenarios.teams import PATIENCE_S
from tests.scenarios.test_log_context import record_fields, seen_by


def test_manager_decides_and_its_text_is_the_output(runtime: Runtime) -> None:
    """S-HIER-1, S-HIER-6, S-HIER-20, S-HIER-23, S-DEL-6, S-DEL-7: workers first, then the manager, which is no worker's peer."""
    writer = worker("Writer", call("nothing"), "a text", tools=[record_fields])
    digger = worker("Digger", "gold")
    manager = ScriptedModel([hand("Digger", "dig here"), hand("Nobody", number=1)], hand("Writer", "write"), "all done")
    output = run_of(team(manager, [writer, digger]), runtime).given
    assert output.raw == "all done"
    assert [(each.agent_role, each.raw) for each in output.task_outputs] == [
        ("Digger", "gold"),
        ("Writer", "a text"),
        ("Manager", "all done"),
    ]
    assert [each.tool_call_count for each in output.task_outputs] == [0, 1, 3]
    assert output.total_tool_calls == 4
    assert (asked_of(digger), asked_of(writer)) == (["dig here"], ["write"])  # not what the tasks say
    assert told(manager)[2] == "a text"
    assert output.exit_reason.value == "completed"


def test_worker_is_told_the_text_and_nothing_else(inline_runtime: Runtime) -> None:
    """S-HIER-23, S-DEL-46, S-GRD-15: a fixed expected output, no context, no guardrails of the plan's tasks."""

    def refuse(_given: object) -> object:
        raise AssertionError("a guardrail of a task that nobody executes")

    writer = worker("Writer", "text", "text")
    first = task("first", writer, input_guardrails=[refuse], output_guardrails=[refuse])
    second = task("second", writer, context=[first])
    manager = ScriptedModel(hand("Writer", "one"), hand("Writer", "two"), "done")
    output = run_of(Ensemble(tasks=[first, second], workflow="hierarchical", manager_llm=manager), inline_runtime).given
    one, two = (each.messages[1].content or "" for each in writer.llm.calls)  # type: ignore[attr-defined]
    assert one.replace("one", "two") == two
    assert "Context" not in one
    assert "first" not in one + two
    expected = [trace.expected_output for trace in output.trace.task_traces if trace.agent_role == "Writer"]  # type: ignore[union-attr]
    assert len(set(expected)) == 1
    assert expected[0] in one


def test_workers_are_the_given_agents_or_those_of_the_tasks(inline_runtime: Runtime) -> None:
    """S-HIER-1, S-DEL-44: once each, in order; one that serves two tasks is no duplicate (S-HIER-4)."""
    writer, digger, spare = worker("Writer"), worker("Digger"), worker("Spare")
    for given, roles in ((None, ["Writer", "Digger"]), ([spare, digger], ["Spare", "Digger"])):
        manager = ScriptedModel("nothing to do")
        tasks = [task("a", writer), task("b", digger), task("c", writer)]
        if given is not None:
            tasks = [task("a", digger)]
        Ensemble(tasks=tasks, agents=given, workflow="hierarchical", manager_llm=manager).run(runtime=inline_runtime)
        (spec,) = manager.calls[0].tools
        assert spec.name == "delegate_task"
        assert spec.parameters["properties"]["agent_role"]["enum"] == roles  # type: ignore[index]


def test_model_of_the_manager_is_the_nearest(inline_runtime: Runtime) -> None:
    """S-HIER-2: its own, else the first agent's, else the ensemble's."""
    own, first, second, common = (ScriptedModel(otherwise=name) for name in ("own", "first", "second", "common"))
    agents = [agent(first, "One"), agent(second, "Two")]
    tasks = [task("a", agents[0]), task("b", agents[1])]
    fields = {"tasks": tasks, "workflow": "hierarchical", "llm": common}
    assert Ensemble(**fields, manager_llm=own).run(runtime=inline_runtime).raw == "own"
    assert Ensemble(**fields).run(runtime=inline_runtime).raw == "first"
    made = Ensemble(tasks=[task("a"), task("b")], workflow="hierarchical", llm=common)
    assert made.run(runtime=inline_runtime).raw == "common"


def test_manager_has_its_role_its_limit_and_one_tool(inline_runtime: Runtime) -> None:
    """S-HIER-3, S-HIER-7, S-HIER-60, S-EVT-17: 20 requests and three stop messages end it."""
    manager = ScriptedModel(otherwise=hand("Writer"))
    ran = run_of(team(manager, [worker("Writer")], manager_stall_turns=0), inline_runtime)
    assert isinstance(ran.error, TaskExecutionError)
    assert str(ran.error).startswith(
        "Hierarchical workflow manager failed: Agent 'Manager' exceeded maximum iterations (20). Tool calls made: 23."
    )
    assert type(ran.error.__cause__).__name__ == "MaxIterationsExceededError"
    assert (len(manager.calls), len(ran.started)) == (23, 20)
    assert [output.agent_role for output in ran.error.completed_task_outputs] == ["Writer"] * 20
    assert ran.watcher.of(TaskInputEvent)[0].tool_names == ("delegate_task",)
    short = ScriptedModel(otherwise=hand("Writer"))
    fails = run_of(team(short, [worker("Writer")], manager_max_iterations=2), inline_runtime)
    assert len(fails.started) == 2


def test_task_events_are_the_managers_alone(inline_runtime: Runtime) -> None:
    """S-HIER-7, S-EVT-14, S-EVT-15, S-EVT-17: worker runs fire delegation, input and tool events, the last with index 0."""
    manager = ScriptedModel(hand("Writer", "write"), "done")
    writer = worker("Writer", call("record_fields"), "text", tools=[record_fields])
    watcher = run_of(team(manager, [writer]), inline_runtime).watcher
    prompt = manager.calls[0].messages[1].content or ""
    (start,) = watcher.of(TaskStartEvent)
    (complete,) = watcher.of(TaskCompleteEvent)
    for event in (start, complete):
        assert (event.task_index, event.total_tasks, event.agent_role) == (1, 1, "Manager")
        assert event.task_description in prompt
        assert "Task 1: task of Writer" in event.task_description
    inputs = [(event.agent_role, event.tool_names, event.task_index) for event in watcher.of(TaskInputEvent)]
    assert inputs == [("Manager", ("delegate_task",), 1), ("Writer", ("record_fields",), 0)]
    tools = [(e.agent_role, e.tool_name, e.task_index, e.outcome) for e in watcher.of(ToolCallEvent)]
    assert tools == [("Writer", "record_fields", 0, "success"), ("Manager", "delegate_task", 1, "success")]


def test_events_of_a_delegation_belong_together(runtime: Runtime) -> None:
    """S-EVT-40, S-EVT-41, S-EVT-42, S-DEL-50, S-DEL-53, S-DEL-31, S-DEL-30, S-DEL-54, S-HIER-22, S-TRC-40: one id each."""
    manager = ScriptedModel([hand("writer "), hand("Nobody", "find", number=1)], hand("Writer", "fail"), "done")
    ran = run_of(team(manager, [worker("Writer", "text", ValueError("no ink"))]), runtime)
    assert sorted(ran.delegations[:3]) == ["completed Writer", "failed Nobody", "started Writer"]
    assert ran.delegations[3:] == ["started Writer", "failed Writer"]
    first, second = ran.started
    (done,) = ran.completed
    unknown, failed = ran.failed
    assert (first.delegation_id, second.delegation_id) == (done.delegation_id, failed.delegation_id)
    assert len({first.delegation_id, second.delegation_id, unknown.delegation_id}) == 3
    assert all(uuid.UUID(event.delegation_id).version for event in (first, second, unknown))
    assert (first.delegating_agent_role, first.delegation_depth, first.task_description) == ("Manager", 1, "do it")
    assert (first.request.agent_role, first.request.task_id) == ("writer ", first.delegation_id)
    assert (done.response.status, done.response.raw_output, done.response.errors) == ("success", "text", ())
    assert done.duration == done.response.duration
    text = "No agent found with role 'Nobody'. Available roles: [Writer]"
    assert (unknown.failure_reason, unknown.cause, unknown.response.errors) == (text, None, (text,))
    assert (unknown.response.status, unknown.response.raw_output) == (DelegationStatus.FAILURE, None)
    assert type(failed.cause).__name__ == "AgentExecutionError"
    assert failed.failure_reason == "Agent 'Writer': no ink (ValueError)"
    attempts = ran.attempts("Manager")
    events = [done, unknown, failed]
    assert [each.response["task_id"] for each in attempts] == [event.delegation_id for event in events]
    assert [each.request["task_id"] for each in attempts] == [event.delegation_id for event in events]
    assert [(each.delegator_role, each.worker_role, each.depth, each.succeeded) for each in attempts] == [
        ("Manager", "Writer", 0, True),
        ("Manager", "Nobody", 0, False),
        ("Manager", "Writer", 0, False),
    ]
    assert [each.result for each in attempts] == told(manager)  # S-TRC-42
    assert told(manager)[2] == "Error: Agent 'Writer': no ink (ValueError)"
    for each, event in zip(attempts, events, strict=True):
        assert each.duration == each.completed_at - each.started_at == event.duration


def test_traces_and_tokens_of_workers_count_once(runtime: Runtime) -> None:
    """S-TRC-41, S-TRC-43, S-HIER-6, S-MET-20, S-MET-24: beside the manager's; of workers that failed too."""
    manager = ScriptedModel(
        answer("", 1, 1, calls=[hand("Writer"), hand("Digger", number=1), hand("Nobody", number=2)]),
        answer("done", 10, 10),
    )
    digger = worker(
        "Digger", answer("", 1000, 1000, calls=[call("record_fields")]), OSError("hard"), tools=[record_fields]
    )
    cost = CostConfiguration(input_token_rate=0.01, output_token_rate=0.01)
    output = run_of(
        team(manager, [worker("Writer", answer("text", 100, 100)), digger], cost_configuration=cost), runtime
    ).given
    assert output.trace is not None
    assert sorted(trace.agent_role for trace in output.trace.task_traces) == ["Digger", "Manager", "Writer"]
    assert output.trace.task_traces[0].agent_role == "Manager"
    assert [each.worker_trace for each in output.trace.task_traces[0].delegations] == [None] * 3
    assert (output.metrics.total_input_tokens, output.metrics.total_output_tokens) == (1111, 1111)
    assert output.metrics.total_delegations == output.task_outputs[-1].metrics.delegation_count == 2
    assert str(output.metrics.total_cost_estimate.total_cost) == "22.22000000"  # type: ignore[union-attr]
    assert [each.role for each in output.trace.agents] == ["Writer", "Digger"]


def test_log_fields_of_a_worker_are_its_delegations(runtime: Runtime) -> None:
    """S-ENG-26, S-ENG-27, S-DEL-60: the id, and neither depth nor parent; the manager has none of them."""
    writer = worker("Writer", call("record_fields"), lambda asked: asked.text, tools=[record_fields])
    ran = run_of(team(ScriptedModel(hand("Writer"), "done"), [writer]), runtime)
    seen = seen_by(writer.llm)  # type: ignore[arg-type]  a scripted model
    assert seen == f"agent.role=Writer; delegation.id={ran.started[0].delegation_id}; ensemble.id={ran.given.run_id}"


def test_calls_of_one_turn_run_at_the_same_time(runtime: Runtime) -> None:
    """S-HIER-26, S-DEL-31: two workers meet; texts, attempts and events keep the order of the requests."""
    meeting = threading.Barrier(2)

    def meet(asked: ScriptedCall) -> str:
        meeting.wait(PATIENCE_S)
        return f"met {asked.messages[1].content!r}"[:3]

    manager = ScriptedModel([hand("One", number=1), hand("Two", number=2)], "done")
    ran = run_of(team(manager, [worker("One", meet), worker("Two", meet)]), runtime)
    assert told(manager) == ["met", "met"]
    assert [each.worker_role for each in ran.attempts("Manager")] == ["One", "Two"]
    assert {each.agent_role for each in ran.given.task_outputs[:2]} == {"One", "Two"}


def test_workers_at_work_at_the_same_time_are_capped(inline_runtime: Runtime) -> None:
    """S-HIER-89: two at a time work, the others wait in request order; what workers delegate needs no place."""
    meeting = threading.Barrier(2)

    def meet(_asked: ScriptedCall) -> str:
        meeting.wait(PATIENCE_S)
        return "met"

    workers = [worker(f"W{n}", call("delegate", '{"agent_role": "Helper", "task": "x"}'), meet) for n in range(4)]
    workers = [each.replace(allow_delegation=True) for each in workers]
    manager = ScriptedModel([hand(each.role, number=n) for n, each in enumerate(workers)], "done")
    ran = run_of(team(manager, [*workers, worker("Helper")], max_parallel_tasks=2), inline_runtime)
    assert told(manager) == ["met"] * 4
    of_manager = [each for each in ran.delegations if not each.endswith("Helper")]
    balance = list(accumulate(1 if each.startswith("started") else -1 for each in of_manager))
    assert max(balance) == 2
    assert [each for each in of_manager if each.startswith("started")] == [f"started W{n}" for n in range(4)]


class Strategy:
    """Says what it is told to, and keeps what it was asked with."""

    def __init__(self, system: str | None = "You lead.", user: str = "Do it all.") -> None:
        self.texts = (system, user)
        self.contexts: list[ManagerPromptContext] = []

    def build_system_prompt(self, context: ManagerPromptContext) -> str | None:
        self.contexts.append(context)
        return self.texts[0]

    def build_user_prompt(self, context: ManagerPromptContext) -> str:
        self.contexts.append(context)
        return self.texts[1]


def test_strategy_writes_what_the_manager_is_told(inline_runtime: Runtime) -> None:
    """S-HIER-10: asked with workers and resolved tasks; a blank user text is replaced, None becomes nothing."""
    strategy, manager = Strategy(), ScriptedModel("done")
    ensemble = team(manager, [worker("Writer")], manager_prompt_strategy=strategy)
    ensemble = ensemble.replace(tasks=[task("about {topic}", worker("Writer"))], inputs={"topic": "gold"})
    ran = run_of(ensemble, inline_runtime)
    system, user = (message.content or "" for message in manager.calls[0].messages)
    assert "You lead." in system
    assert "## Task\nDo it all." in user
    assert ran.watcher.of(TaskStartEvent)[0].task_description == "Do it all."
    context = strategy.contexts[0]
    assert [each.role for each in context.agents] == ["Writer"]
    assert [each.description for each in context.tasks] == ["about gold"]
    silent = ScriptedModel("done")
    blank = run_of(
        team(silent, [worker("Writer")], manager_prompt_strategy=Strategy(system=None, user=" \n")), inline_runtime
    )
    (start,) = blank.watcher.of(TaskStartEvent)
    assert start.task_description.strip()
    assert "None" not in (silent.calls[0].messages[0].content or "")


class Broken:
    """Fails in one of its two methods."""

    def build_system_prompt(self, _context: ManagerPromptContext) -> str:
        return "system"

    def build_user_prompt(self, _context: ManagerPromptContext) -> str:
        raise KeyError("no such template")


def test_strategy_that_raises_fails_the_manager(inline_runtime: Runtime) -> None:
    """S-HIER-13, S-HIER-60: start and failed, no model asked; the cause is what it raised."""
    manager = ScriptedModel("never")
    ran = run_of(team(manager, [worker("Writer")], manager_prompt_strategy=Broken()), inline_runtime)
    assert isinstance(ran.error, TaskExecutionError)
    assert str(ran.error) == "Hierarchical workflow manager failed: 'no such template' (KeyError)"
    assert (ran.error.agent_role, ran.error.completed_task_outputs) == ("Manager", ())
    assert type(ran.error.__cause__) is KeyError
    assert ran.watcher.methods == ["on_task_start", "on_task_failed"]  # the run itself never began
    (failed,) = ran.watcher.of(TaskFailedEvent)
    assert (failed.agent_role, type(failed.cause)) == ("Manager", KeyError)
    assert manager.calls == ()


def test_made_agents_are_workers_with_roles_of_their_own(inline_runtime: Runtime) -> None:
    """S-DET-26, S-HIER-1: equal roles get a number."""
    roles: list[object] = []

    def manage(asked: ScriptedCall) -> object:
        if not roles:
            roles.extend(asked.tools[0].parameters["properties"]["agent_role"]["enum"])  # type: ignore[index]
            return [hand(role, number=n) for n, role in enumerate(roles)]
        return "done"

    tasks = [task("Research gold"), task("Research silver"), task("Research tin")]
    output = Ensemble(
        tasks=tasks,
        workflow="hierarchical",
        llm=ScriptedModel(otherwise="found"),
        manager_llm=ScriptedModel(otherwise=manage),
    ).run(runtime=inline_runtime)
    assert len(roles) == len({str(role).casefold() for role in roles}) == 3
    base = str(roles[0])
    assert roles == [base, f"{base} 2", f"{base} 3"]
    assert {each.agent_role for each in output.task_outputs[:3]} == set(roles)


def test_handler_tasks_are_refused(inline_runtime: Runtime) -> None:
    """S-DET-8, S-HIER-5: before any model call."""
    manager = ScriptedModel("never")
    tasks = [task("first", worker("Writer")), task("count words", handler=lambda _: "3")]
    with pytest.raises(ValidationError) as caught:
        Ensemble(tasks=tasks, workflow="hierarchical", manager_llm=manager).run(runtime=inline_runtime)
    assert str(caught.value).startswith(
        "Deterministic handler tasks are not supported in HIERARCHICAL workflow. "
        "Task 'count words' has a handler configured."
    )
    assert manager.calls == ()


@pytest.mark.parametrize("role", ["Manager", "MANAGER", "manager"])
def test_role_of_the_manager_is_taken(inline_runtime: Runtime, role: str) -> None:
    """S-HIER-4."""
    with pytest.raises(ValidationError, match=f"Choose a different role for agent '{role}'"):
        team(ScriptedModel(), [worker(role)]).run(runtime=inline_runtime)


def test_workers_stream_as_they_are_set_up_to(inline_runtime: Runtime) -> None:
    """S-HIER-47, S-DEL-3: an agent's own choice, else the ensemble's; constraints change nothing of it."""
    workers = [worker("Loud", "a b", stream=True), worker("Quiet", "c d", stream=False)]
    rules = HierarchicalConstraints(max_calls_per_worker={"Loud": 1})
    manager = ScriptedModel([hand("Loud"), hand("Quiet", number=1)], "done")
    ran = run_of(team(manager, workers, hierarchical_constraints=rules), inline_runtime)
    tokens = ran.watcher.of(TokenEvent)
    assert {event.agent_role for event in tokens} == {"Loud"}
    assert "".join(event.token for event in tokens) == "a b"


def test_manager_that_delegates_nothing_is_valid(inline_runtime: Runtime) -> None:
    """S-HIER-63: the output has only the manager."""
    output = run_of(team(ScriptedModel("alone"), [worker("Writer")]), inline_runtime).given
    assert [(each.agent_role, each.raw) for each in output.task_outputs] == [("Manager", "alone")]
    assert output.metrics.total_delegations == 0
    assert isinstance(output.task_outputs[0], TaskOutput)


def test_same_team_runs_twice_with_fresh_counters(inline_runtime: Runtime) -> None:
    """S-HIER-47."""
    rules = HierarchicalConstraints(global_max_delegations=1, required_workers=["Writer"])
    manager = ScriptedModel(*[hand("Writer"), "done"] * 2)
    ensemble = team(manager, [worker("Writer")], hierarchical_constraints=rules)
    assert [run_of(ensemble, inline_runtime).given.raw for _ in range(2)] == ["done", "done"]


def test_invalid_constraints_are_ignored_elsewhere(inline_runtime: Runtime) -> None:
    """06, HierarchicalConstraints: even invalid values raise nothing in other workflows."""
    rules = HierarchicalConstraints(required_workers=["Ghost"], global_max_delegations=-1)
    output = Ensemble(tasks=[task("go", worker("Writer"))], hierarchical_constraints=rules).run(runtime=inline_runtime)
    assert output.raw == "by Writer"
