"""Agents that ask each other: the tool, its guards in order, depth, events, traces, log fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    AgentTool,
    DelegationStatus,
    Ensemble,
    ExecutionTrace,
    ExitEarlyError,
    ExitReason,
    GuardrailResult,
    IllegalStateError,
    Runtime,
    Task,
    TaskExecutionError,
    TaskInputEvent,
    TaskStartEvent,
    TokenEvent,
    ToolCallEvent,
    ToolResult,
    ValidationError,
    tool,
)
from ensemble_ray.process.context import current_log_context
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.delegating import ask, asked_of, run_of, told, worker
from tests.scenarios.teams import Watcher
from tests.scenarios.test_tool_loop import Misconfigured, add


def last(asked: ScriptedCall) -> str:
    """As an answer: the last thing that the model was told."""
    return asked.text


def of(*tasks: Task, **fields: object) -> Ensemble:
    """A sequential team."""
    return Ensemble(tasks=list(tasks), **fields)  # type: ignore[arg-type]  fields of an ensemble


def test_colleague_does_a_part_and_its_text_is_the_result(runtime: Runtime) -> None:
    """S-DEL-1, S-DEL-2, S-DEL-3, S-DEL-6, S-DEL-7, S-DEL-46: only the caller's output is one of the run's."""
    writer = worker("Writer", ask(" digger\n", "dig for gold"), last, allow_delegation=True)
    digger = worker("Digger", call("add", '{"a": 1, "b": 2}'), "gold", tools=[add])
    output = run_of(of(task("write", writer), agents=[writer, digger]), runtime).given
    assert [(each.agent_role, each.raw, each.tool_call_count) for each in output.task_outputs] == [
        ("Writer", "gold", 1)
    ]
    assert output.total_tool_calls == 1
    assert asked_of(digger) == ["dig for gold"]
    assert "Context" not in (digger.llm.calls[0].messages[1].content or "")  # type: ignore[attr-defined]
    trace = output.trace.task_traces[0].delegations[0].worker_trace  # type: ignore[union-attr]
    assert trace is not None
    assert trace.expected_output in (digger.llm.calls[0].messages[1].content or "")  # type: ignore[attr-defined]


def test_tool_is_there_only_for_those_who_may(inline_runtime: Runtime) -> None:
    """S-DEL-1, S-TOOL-30, S-EVT-17: before the agent's own tools; alone it makes the agent use the tool loop."""
    free = worker("Free", call("add", '{"a": 1, "b": 2}'), "done", allow_delegation=True, tools=[add])
    alone = worker("Alone", ask("Bound"), "done", allow_delegation=True)
    bound = worker("Bound", tools=[add])
    ran = run_of(of(task("a", free), task("b", alone), task("c", bound)), inline_runtime)
    names = [event.tool_names for event in ran.watcher.of(TaskInputEvent)]
    assert names == [("delegate", "add"), ("delegate",), ("add",), ("add",)]
    spec = free.llm.calls[0].tools[0]  # type: ignore[attr-defined]
    assert list(spec.parameters["properties"]) == spec.parameters["required"] == ["agent_role", "task"]
    assert spec.parameters["properties"]["agent_role"]["enum"] == ["Alone", "Bound"]
    assert [summary.allow_delegation for summary in ran.trace.agents] == [True, True, False]


def test_parallel_tasks_may_delegate_too(runtime: Runtime) -> None:
    """S-DEL-1, S-DEL-12: A asks B while B asks A, each with one place; nobody waits for ever."""
    model = {role: ScriptedModel(otherwise=_once(other)) for role, other in (("A", "B"), ("B", "A"))}
    agents = [agent(model[role], role, allow_delegation=True, max_concurrency=1) for role in "AB"]
    tasks = [task(f"ask {each.role}", each) for each in agents]
    output = run_of(of(*tasks, workflow="parallel"), runtime).given
    assert sorted(each.raw for each in output.task_outputs) == ["helped by A", "helped by B"]
    assert output.metrics.total_delegations == 2


def _once(other: str) -> object:
    """Asks a colleague in a task of the plan; answers a colleague's question itself."""

    def entry(asked: ScriptedCall) -> object:
        if asked.messages[-1].role == "tool":
            return asked.text
        own = "AB".replace(other, "")
        return ask(other) if f"ask {own}" in asked.text else f"helped by {own}"

    return entry


def test_chain_of_two_with_one_place_each_comes_to_its_end(inline_runtime: Runtime) -> None:
    """S-DEL-11, S-DEL-12: A asks B asks A asks B, and the depth ends it."""
    agents = [
        agent(
            ScriptedModel(
                otherwise=lambda asked, other=other: last(asked) if asked.messages[-1].role == "tool" else ask(other)
            ),
            role,
            allow_delegation=True,
            max_concurrency=1,
        )
        for role, other in (("A", "B"), ("B", "A"))
    ]
    ran = run_of(of(task("go", agents[0]), agents=agents), inline_runtime)
    assert ran.delegations == [
        "started B",
        "started A",
        "started B",
        "failed A",
        *("completed B", "completed A", "completed B"),
    ]
    assert [event.delegation_depth for event in ran.started] == [1, 2, 3]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_depth_is_limited(inline_runtime: Runtime, limit: int) -> None:
    """S-DEL-4, S-DEL-11, S-DEL-73, S-DEL-53, S-TRC-40, S-TRC-41: with 1, B asks nobody; with 2, C is the last."""
    roles = "ABCDE"
    agents = [worker(role, ask(other), last, allow_delegation=True) for role, other in pairwise(roles)]
    ran = run_of(of(task("go", agents[0]), agents=[*agents, worker("E")], max_delegation_depth=limit), inline_runtime)
    text = f"Delegation depth limit reached (max: {limit}, current: {limit}). Complete this task yourself without further delegation."
    assert ran.given.raw == text
    assert [(event.worker_role, event.delegation_depth) for event in ran.started] == [
        (role, depth) for depth, role in enumerate(roles[1 : limit + 1], start=1)
    ]
    (refused,) = ran.failed
    assert (refused.failure_reason, refused.cause, refused.response.status) == (text, None, DelegationStatus.FAILURE)
    assert (refused.delegating_agent_role, refused.worker_role) == (roles[limit], roles[limit + 1])
    trace, depths = ran.trace.task_traces[0], []
    while trace.delegations:
        (attempt,) = trace.delegations
        depths.append(attempt.depth)
        if attempt.worker_trace is None:
            assert (attempt.succeeded, attempt.result) == (False, text)
            break
        trace = attempt.worker_trace
    assert depths == list(range(limit + 1))
    assert ran.given.metrics.total_delegations == limit
    assert ExecutionTrace.model_validate_json(ran.trace.to_json()) == ran.trace


GUARDED: list[tuple[str, str, str | None]] = [
    ('{"agent_role": " ", "task": ""}', "Error: agent_role must not be None or blank. ", None),
    ('{"task": "x"}', "Error: agent_role must not be None or blank. ", None),
    ('{"agent_role": "Digger", "task": "\\n"}', "Error: task_description must not be None or blank. ", None),
    ('{"agent_role": "Digger"}', "Error: task_description must not be None or blank. ", None),
    ('{"agent_role": 5, "task": "x"}', "Error: agent_role must be a string", None),
    ("{", "Error: the arguments are no valid JSON", None),
    (
        '{"agent_role": " WRITER", "task": "x"}',
        "Cannot delegate to yourself (role: 'Writer'). Choose a different agent.",
        "Writer",
    ),
    (
        '{"agent_role": "Nobody", "task": "x"}',
        "Agent not found with role 'Nobody'. Available roles: [Writer, Digger]",
        "Nobody",
    ),
]


def test_guards_refuse_before_any_policy_is_asked(inline_runtime: Runtime) -> None:
    """S-DEL-71, S-DEL-72, S-DEL-74, S-DEL-75, S-DEL-10, S-DEL-21, S-DEL-31, S-DEL-51, S-DEL-30, S-DEL-61, S-EVT-42."""

    def forbid(_request: object, _context: object) -> object:
        raise AssertionError("a policy was asked")

    calls = [call("delegate", text, number=n) for n, (text, _, _) in enumerate(GUARDED)]
    writer = worker("Writer", calls, "done", allow_delegation=True)
    digger = worker("Digger")
    ran = run_of(of(task("go", writer), agents=[writer, digger], delegation_policies=[forbid]), inline_runtime)
    assert all(text.startswith(start) for text, (_, start, _) in zip(told(writer.llm), GUARDED, strict=True))  # type: ignore[arg-type]
    refused = [(start, role) for _, start, role in GUARDED if role is not None]
    assert [(event.failure_reason, event.worker_role) for event in ran.failed] == refused
    assert ran.started == []
    for event, attempt, (text, role) in zip(ran.failed, ran.attempts("Writer"), refused, strict=True):
        assert (event.cause, event.response.errors, event.response.raw_output) == (None, (text,), None)
        assert event.response.parsed_output is None
        assert (
            event.delegation_id == event.response.task_id == attempt.request["task_id"] == attempt.response["task_id"]
        )
        assert (attempt.worker_role, attempt.result, attempt.succeeded, attempt.worker_trace) == (
            role,
            text,
            False,
            None,
        )
    assert asked_of(digger) == []
    assert ran.given.metrics.total_delegations == 0
    assert ran.given.task_outputs[0].tool_call_count == len(GUARDED)


def test_first_of_two_with_the_same_role_is_asked(inline_runtime: Runtime) -> None:
    """S-DEL-2."""
    writer = worker("Writer", ask("digger"), last, allow_delegation=True)
    twins = [worker("Digger", "first"), worker("DIGGER", "second")]
    assert run_of(of(task("go", writer), agents=[writer, *twins]), inline_runtime).given.raw == "first"


def test_failed_colleague_is_told_and_the_task_goes_on(runtime: Runtime) -> None:
    """S-DEL-5, S-DEL-52, S-DEL-50, S-TRC-42, S-TRC-43: text, event, cause, trace; what it used is counted once."""
    digger = worker(
        "Digger", answer("", 100, 100, calls=[call("add", '{"a": 1, "b": 1}')]), LookupError("no spade"), tools=[add]
    )
    writer = agent(
        ScriptedModel(answer("", 1, 1, calls=[ask("Digger")]), answer("alone", 10, 10)), "Writer", allow_delegation=True
    )
    ran = run_of(of(task("go", writer), agents=[writer, digger]), runtime)
    assert ran.given.raw == "alone"
    text = "Agent 'Digger': no spade (LookupError)"
    assert told(writer.llm) == [f"Error: {text}"]  # type: ignore[arg-type]
    (started,), (failed,) = ran.started, ran.failed
    assert (failed.delegation_id, failed.failure_reason) == (started.delegation_id, text)
    assert isinstance(failed.cause, AgentExecutionError)
    assert isinstance(failed.cause.__cause__, LookupError)
    (attempt,) = ran.attempts("Writer")
    assert (attempt.succeeded, attempt.result) == (False, f"Error: {text}")
    assert attempt.worker_trace is not None
    assert (attempt.worker_trace.agent_role, len(attempt.worker_trace.llm_interactions)) == ("Digger", 1)
    assert ran.given.metrics.total_input_tokens == 111
    outcomes = [(event.agent_role, event.outcome, event.task_index) for event in ran.watcher.of(ToolCallEvent)]
    assert outcomes == [("Digger", "success", 0), ("Writer", "failure", 1)]


def test_work_of_a_colleague_is_nested_and_counted_once(runtime: Runtime) -> None:
    """S-TRC-40, S-TRC-41, S-TRC-43, S-MET-20, S-DEL-6, S-EVT-40, S-EVT-41, S-EVT-15: one trace per task of the plan."""
    digger = worker("Digger", answer("gold", 100, 200))
    writer = agent(
        ScriptedModel(answer("", 1, 2, calls=[ask("Digger"), ask("Digger", number=1)]), answer("done", 10, 20)),
        "Writer",
        allow_delegation=True,
    )
    digger = digger.replace(llm=ScriptedModel(otherwise=answer("gold", 100, 200)))
    ran = run_of(of(task("go", writer), agents=[writer, digger]), runtime)
    (trace,) = ran.trace.task_traces
    assert (trace.metrics.delegation_count, trace.metrics.input_tokens) == (2, 11)
    totals = ran.given.metrics
    assert (totals.total_input_tokens, totals.total_output_tokens, totals.total_delegations) == (211, 422, 2)
    assert totals.total_llm_call_count == 4
    assert [each.worker_trace.final_output for each in trace.delegations] == ["gold", "gold"]  # type: ignore[union-attr]
    for event in (*ran.started, *ran.completed):
        assert (event.delegating_agent_role, event.worker_role) == ("Writer", "Digger")
    assert [event.instance for event in ran.started] == ["task-1#0", "task-1#0"]
    assert ran.completed[0].response.raw_output == "gold"
    assert len(ran.watcher.of(TaskStartEvent)) == 1


@tool
def fields() -> str:
    """Give the log fields."""
    return json.dumps(dict(current_log_context()))


def test_log_fields_of_nested_chains_are_restored(runtime: Runtime) -> None:
    """S-DEL-60, S-ENG-27, S-ENG-20: each level has its own, and the caller its old ones after the colleague returned."""
    first = worker(
        "A",
        call("fields"),
        ask("B"),
        call("fields"),
        lambda asked: "\n".join(told_in(asked)),
        allow_delegation=True,
        tools=[fields],
    )
    second = worker(
        "B",
        call("fields"),
        ask("C"),
        call("fields"),
        lambda asked: "\n".join(told_in(asked)),
        allow_delegation=True,
        tools=[fields],
    )
    third = worker("C", call("fields"), last, tools=[fields])
    ran = run_of(of(task("go", first), agents=[first, second, third]), runtime)
    a, b, c, b_again, a_again = [
        {key: value for key, value in json.loads(line).items() if key != "ensemble.id"}
        for line in ran.given.raw.splitlines()
    ]
    ids = [event.delegation_id for event in ran.started]
    assert a == a_again == {"agent.role": "A", "task.index": "1/1", "task.description": "go"}
    expected = {"agent.role": "B", "delegation.id": ids[0], "delegation.depth": "1", "delegation.parent": "A"}
    assert b == b_again == expected
    assert c == {"agent.role": "C", "delegation.id": ids[1], "delegation.depth": "2", "delegation.parent": "B"}
    assert dict(current_log_context()) == {}


def told_in(asked: ScriptedCall) -> list[str]:
    """Tool results of a call, in order."""
    return [message.content or "" for message in asked.messages if message.role == "tool"]


@tool
def leave() -> str:
    """End the run."""
    raise ExitEarlyError("enough")


def test_early_exit_of_a_colleague_ends_the_run(inline_runtime: Runtime) -> None:
    """S-DEL-5: it is not turned into text."""
    writer = worker("Writer", ask("Leaver"), "never", allow_delegation=True)
    leaver = worker("Leaver", call("leave"), tools=[leave])
    digger = worker("Digger")
    ran = run_of(of(task("before", digger), task("go", writer), agents=[digger, writer, leaver]), inline_runtime)
    assert ran.given.exit_reason is ExitReason.USER_EXIT_EARLY
    assert [each.raw for each in ran.given.task_outputs] == ["by Digger"]
    assert ran.delegations == ["started Leaver"]


def test_colleague_that_is_set_up_wrongly_fails_the_task(inline_runtime: Runtime) -> None:
    """S-DEL-5, S-ENG-58: through two levels."""
    first = worker("A", ask("B"), "never", allow_delegation=True)
    second = worker("B", ask("C"), "never", allow_delegation=True)
    third = worker("C", call("misconfigured"), tools=[Misconfigured()])
    ran = run_of(of(task("go", first), agents=[first, second, third]), inline_runtime)
    assert type(ran.error) is TaskExecutionError
    assert (ran.error.agent_role, str(ran.error)) == (
        "A",
        "Task 'go' failed: Agent 'A': set it up first (ToolConfigurationError)",
    )
    assert isinstance(ran.error.__cause__, AgentExecutionError)
    assert isinstance(ran.error.__cause__.__cause__, IllegalStateError)
    assert ran.delegations == ["started B", "started C", "failed C", "failed B"]


class Delegate(AgentTool):
    """A user's tool that has the name of ours."""

    name = "delegate"
    description = "Mine."

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text)


def test_users_tool_of_that_name_is_refused(inline_runtime: Runtime) -> None:
    """S-TOOL-34, S-ENG-60: only on an agent that may delegate; before any model call."""
    writer = worker("Writer", tools=[Delegate()], allow_delegation=True)
    with pytest.raises(ValidationError) as caught:
        of(task("go", writer)).run(runtime=inline_runtime)
    assert str(caught.value) == "Duplicate tool name: 'delegate'"
    assert writer.llm.calls == ()  # type: ignore[attr-defined]
    mine = worker("Writer", call("delegate", '{"input": "x"}'), last, tools=[Delegate()])
    assert of(task("go", mine)).run(runtime=inline_runtime).raw == "x"


class Fact(BaseModel):
    text: str


def test_delegation_goes_with_output_types_guardrails_and_streams(inline_runtime: Runtime) -> None:
    """S-GRD-15, S-DEL-3: those of the task hold for the task, and not for the colleague's part."""
    checked: list[str] = []

    def check(given: object) -> GuardrailResult:
        checked.append(type(given).__name__)
        return GuardrailResult.success()

    writer = worker("Writer", ask("Digger"), '{"text": "gold"}', allow_delegation=True)
    digger = worker("Digger", "no JSON", stream=True)
    fields: Mapping[str, object] = {"output_type": Fact, "input_guardrails": [check], "output_guardrails": [check]}
    watcher = Watcher()
    output = of(task("go", writer, **fields), agents=[writer, digger], listeners=[watcher]).run(runtime=inline_runtime)
    assert output.task_outputs[0].parsed_output == Fact(text="gold")
    assert len(checked) == 2
    assert told(writer.llm) == ["no JSON"]  # type: ignore[arg-type]
    assert [(event.agent_role, event.token) for event in watcher.of(TokenEvent)] == [
        ("Digger", "no "),
        ("Digger", "JSON"),
    ]


def test_agent_made_for_a_task_can_be_asked(inline_runtime: Runtime) -> None:
    """S-DEL-2: the ensemble's agents include those that are made."""
    writer = worker(
        "Writer",
        lambda asked: ask(asked.tools[0].parameters["properties"]["agent_role"]["enum"][0]),
        last,
        allow_delegation=True,
    )  # type: ignore[index]
    output = of(task("write", writer), task("Research gold"), llm=ScriptedModel(otherwise="found")).run(
        runtime=inline_runtime
    )
    assert output.task_outputs[0].raw == "found"
