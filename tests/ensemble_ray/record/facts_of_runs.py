"""Facts as runs record them; for the tests of folds, of re-runs and of the tree."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

from msgspec.structs import replace

from ensemble_ray import (
    CostConfiguration,
    CostEstimate,
    LlmInteraction,
    TaskMetrics,
    TaskOutput,
    TaskPrompts,
    TaskTrace,
    ToolCallTrace,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.identity.definition import digest_of
from ensemble_ray.record.totals import UsageTally
from ensemble_ray.values.metrics import Amount
from ensemble_ray.values.value import utc_of

RUN = "run-1"
COST = CostEstimate(input_cost="0.1", output_cost="0.2", total_cost="0.3")


def fact(kind: str, name: str, at: float, /, **data: object) -> Fact:
    """One fact of the run."""
    return read_fact(run=RUN, kind=kind, name=name, at=at, data=data)


def altered(told: Fact, **data: object) -> Fact:
    """The fact with other values recorded under these keys."""
    return replace(told, data=told.data.from_data({**told.data.to_data(), **data}, told.at))


def spent_of(facts: Iterable[Fact], costs: CostConfiguration | None) -> Amount:
    """What a budget counts of them."""
    tally = UsageTally(costs)
    tally.apply_all(facts)
    return tally.spent


def node(key: str, description: str, role: str = "Reader", **more: object) -> dict[str, object]:
    """A task's place in the plan, as `Plan.to_dict` gives it."""
    return {
        "key": key,
        "index": 1,
        "object_id": f"hidden-{key}",
        "description": description,
        "expected_output": "Five lines",
        "agent_role": role,
        "agent_key": role,
        "context": [],
        **more,
    }


def header(*nodes: dict[str, object], **changes: object) -> PlanRecorded:
    """A run's first fact."""
    plan = {"workflow": "parallel", "nodes": list(nodes), "agents": [], "inputs": {"topic": "Ray"}}
    data = {
        "plan": plan,
        "ensemble_id": RUN,
        "workflow": "parallel",
        "inputs": {"topic": "Ray"},
        "agents": [
            {"role": "Reader", "goal": "Read", "background": None, "tool_names": ["search"], "allow_delegation": False}
        ],
        "digest": digest_of(plan),
        "origin": "team.yaml",
        "capture_mode": "full",
        "started_at": 100.0,
        **changes,
    }
    return PlanRecorded.from_data(data, 100.0)


def begun(*nodes: dict[str, object], **changes: object) -> list[Fact]:
    """A run that began."""
    return [
        fact("plan", "run", 100.0, **header(*nodes, **changes).to_data()),
        fact("stimulus", "run", 100.0, type="RunStarted", at=100.0),
    ]


def model(instance: str, turn: int, at: float, *, text: str | None = "ok", calls: Sequence[str] = ()) -> Fact:
    """An answered model call that took a second."""
    return fact(
        "model",
        f"{instance}/{turn}/model",
        at,
        request_digest="d",
        started_at=at - 1.0,
        latency_s=1.0,
        text=text,
        tool_calls=[{"id": f"c{n}", "name": name, "arguments": '{"q": 1}'} for n, name in enumerate(calls)],
        input_tokens=100,
        output_tokens=20,
    )


def intent(instance: str, turn: int, call: int, at: float, name: str = "search") -> Fact:
    """A tool call that begins."""
    return fact("tool_intent", f"{instance}/{turn}/call-{call}", at, tool_name=name, arguments='{"q": 1}')


def result(instance: str, turn: int, call: int, at: float, outcome: str = "success") -> Fact:
    """A tool call that took half a second."""
    return fact(
        "tool_result",
        f"{instance}/{turn}/call-{call}",
        at,
        outcome=outcome,
        text="3 hits",
        structured_output={"hits": 3},
        started_at=at - 0.5,
        duration_s=0.5,
    )


def task_trace(description: str, text: str, *, parsed: object = None, role: str = "Reader") -> TaskTrace:
    """What a runner folds of a task."""
    return TaskTrace(
        task_description=description,
        expected_output="Five lines",
        agent_role=role,
        started_at=utc_of(101),
        completed_at=utc_of(105),
        duration=timedelta(seconds=4),
        prompts=TaskPrompts(system_prompt="s", user_prompt="u"),
        llm_interactions=[
            LlmInteraction(
                iteration_index=0,
                started_at=utc_of(101),
                completed_at=utc_of(102),
                latency=timedelta(seconds=1),
                input_tokens=100,
                output_tokens=20,
                response_type="tool_calls",
                tool_calls=[
                    ToolCallTrace(
                        tool_name="search",
                        arguments='{"q": 1}',
                        result="3 hits",
                        started_at=utc_of(102),
                        completed_at=utc_of(103),
                        duration=timedelta(seconds=1),
                        outcome="success",
                    )
                ],
            )
        ],
        final_output=text,
        parsed_output=parsed,
        metrics=TaskMetrics(
            input_tokens=100,
            output_tokens=20,
            total_tokens=120,
            llm_call_count=1,
            tool_call_count=1,
            cost_estimate=COST,
        ),
    )


def output(description: str, text: str, *, parsed: object = None, kind: type[object] | None = None) -> TaskOutput:
    """What a task gave."""
    trace = task_trace(description, text, parsed=parsed)
    return TaskOutput(
        raw=text,
        task_description=description,
        agent_role="Reader",
        completed_at=trace.completed_at,
        duration=trace.duration,
        tool_call_count=1,
        parsed_output=parsed,
        output_type=kind,
        metrics=trace.metrics,
        trace=trace,
    )


def completed(key: str, given: TaskOutput, at: float) -> list[Fact]:
    """A task that completed."""
    return [
        fact("output", f"{key}#0", at, output=given),
        fact("stimulus", f"{key}#0", at, type="TaskCompleted", key=key, at=at),
    ]


def failed(key: str, at: float, *, trace: TaskTrace | None = None) -> list[Fact]:
    """A task that failed."""
    error = {"error_type": "AgentExecutionError", "message": "LLM failed"}
    return [
        fact("task_failed", f"{key}#0", at, **error, stack_trace="Traceback", trace=trace),
        fact("stimulus", f"{key}#0", at, type="TaskFailed", key=key, at=at, **error),
    ]


def ended(at: float, state: str = "completed", reason: str = "completed", errors: Sequence[object] = ()) -> Fact:
    """The end of the run."""
    return fact("end", "run", at, state=state, exit_reason=reason, errors=list(errors))
