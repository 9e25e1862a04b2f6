"""What events are: immutable, picklable, JSON-able, one per listener method."""

import dataclasses
import json
import pickle
from datetime import timedelta

import pytest

from ensemble_ray import (
    AgentExecutionError,
    BatchProgressEvent,
    ChatMessage,
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationRequest,
    DelegationResponse,
    DelegationStartedEvent,
    DelegationStatus,
    EnsembleCompletedEvent,
    EnsembleStartedEvent,
    Event,
    ExitReason,
    FileChangedEvent,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskInputEvent,
    TaskOutput,
    TaskReflectedEvent,
    TaskReflection,
    TaskStartEvent,
    TokenEvent,
    ToolCall,
    ToolCallEvent,
    ToolCallRequest,
)
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.values.value import utc_of

SECOND = timedelta(seconds=1)
TASK = {"task_description": "Write", "agent_role": "Writer", "task_index": 1, "total_tasks": 2}
WHERE = {"run_id": "run-1", "instance": "write#0"}
OUTPUT = TaskOutput(raw="text", task_description="Write", agent_role="Writer", completed_at=utc_of(1), duration=1)
REQUEST = DelegationRequest(task_id="d-1", agent_role="Writer", task_description="Write")

EVERY: list[Event] = [
    EnsembleStartedEvent(run_id="run-1", ensemble_id="run-1", workflow="parallel", total_tasks=2),
    EnsembleCompletedEvent(
        run_id="run-1", ensemble_id="run-1", total_duration=SECOND, exit_reason=ExitReason.COMPLETED
    ),
    TaskStartEvent(**WHERE, **TASK),  # type: ignore[arg-type]
    TaskCompleteEvent(**WHERE, **TASK, task_output=OUTPUT, duration=SECOND),  # type: ignore[arg-type]
    TaskFailedEvent(**WHERE, **TASK, cause=AgentExecutionError("LLM failed"), duration=SECOND),  # type: ignore[arg-type]
    ToolCallEvent(
        **WHERE,
        tool_name="search",
        tool_arguments='{"q": 1}',
        tool_result="3 hits",
        structured_result={"hits": 3},
        agent_role="Writer",
        duration=SECOND,
        task_index=1,
        outcome="success",
    ),
    TaskInputEvent(
        **WHERE,
        task_index=1,
        task_description="Write",
        expected_output="Text",
        agent_role="Writer",
        agent_goal="Write",
        agent_background=None,
        tool_names=("search",),
        assembled_context="",
        context_cuts=("Writer cut by 1,200 of 2,000 tokens",),
    ),
    LlmIterationStartedEvent(
        **WHERE,
        agent_role="Writer",
        task_description="Write",
        iteration_index=0,
        messages=(ChatMessage(role="user", content="u"),),
    ),
    LlmIterationCompletedEvent(
        **WHERE,
        agent_role="Writer",
        task_description="Write",
        iteration_index=0,
        response_type="tool_calls",
        response_text=None,
        tool_requests=(ToolCallRequest(id="1", name="search", arguments="{}"),),
        input_tokens=0,
        output_tokens=0,
        latency=SECOND,
    ),
    TokenEvent(**WHERE, token="Hel", agent_role="Writer", task_description="Write", iteration=3),  # noqa: S106  no password
    DelegationStartedEvent(
        **WHERE,
        delegation_id="d-1",
        delegating_agent_role="Manager",
        worker_role="Writer",
        task_description="Write",
        delegation_depth=1,
        request=REQUEST,
    ),
    DelegationCompletedEvent(
        **WHERE,
        delegation_id="d-1",
        delegating_agent_role="Manager",
        worker_role="Writer",
        response=DelegationResponse(
            task_id="d-1", status=DelegationStatus.SUCCESS, worker_role="Writer", raw_output="text"
        ),
        duration=SECOND,
    ),
    DelegationFailedEvent(
        **WHERE,
        delegation_id="d-1",
        delegating_agent_role="Manager",
        worker_role="Writer",
        failure_reason="no",
        cause=AgentExecutionError("no"),
        response=DelegationResponse(
            task_id="d-1", status=DelegationStatus.FAILURE, worker_role="Writer", errors=["no"]
        ),
        duration=SECOND,
    ),
    FileChangedEvent(
        **WHERE,
        agent_role="Writer",
        file_path="a.txt",
        change_type="created",
        lines_added=3,
        lines_removed=0,
        timestamp=utc_of(1),
    ),
    LoopIterationCompletedEvent(
        run_id="run-1",
        instance="loop:refine#1",
        loop_name="refine",
        iteration_number=2,
        max_iterations=5,
        iteration_outputs={"write": OUTPUT},
        iteration_duration=SECOND,
    ),
    GraphStateCompletedEvent(
        run_id="run-1",
        instance="graph:triage#0",
        graph_name="triage",
        state_name="write",
        step_number=1,
        max_steps=50,
        output=OUTPUT,
        next_state="__END__",
        step_duration=SECOND,
    ),
    TaskReflectedEvent(
        run_id="run-1",
        instance="write#0",
        task_description="Write",
        reflection=TaskReflection(refined_description="Better", refined_expected_output="Good"),
        is_first_reflection=True,
    ),
    BatchProgressEvent(
        run_id="run-1",
        batch="4f2a",
        state="submitted",
        status="in_progress",
        total=3,
        answered=1,
        failed=0,
        provider_batch="batch_1",
    ),
]


def _name(event: Event) -> str:
    return type(event).__name__


def test_every_event_type_is_registered_in_table_order() -> None:
    """S-EVT-2, S-EVT-30 to S-EVT-44: one listener method each, in the order of the table."""
    assert [type(event) for event in EVERY] == list(EVENT_TYPES.values())
    assert list(EVENT_TYPES) == [
        "on_ensemble_started",
        "on_ensemble_completed",
        "on_task_start",
        "on_task_complete",
        "on_task_failed",
        "on_tool_call",
        "on_task_input",
        "on_llm_iteration_started",
        "on_llm_iteration_completed",
        "on_token",
        "on_delegation_started",
        "on_delegation_completed",
        "on_delegation_failed",
        "on_file_changed",
        "on_loop_iteration_completed",
        "on_graph_state_completed",
        "on_task_reflected",
        "on_batch_progress",
    ]


@pytest.mark.parametrize("event", EVERY, ids=_name)
def test_event_refuses_changes(event: Event) -> None:
    """S-EVT-5: events are immutable."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.run_id = "other"  # type: ignore[misc]


@pytest.mark.parametrize("event", EVERY, ids=_name)
def test_event_arrives_unchanged_when_pickled(event: Event) -> None:
    """S-CONV-33: events come from other processes; a failure's cause keeps class and text."""
    copy = pickle.loads(pickle.dumps(event))  # noqa: S301  our own bytes
    assert type(copy) is type(event)
    assert repr(copy) == repr(event)


@pytest.mark.parametrize("event", EVERY, ids=_name)
def test_event_is_json_when_asked(event: Event) -> None:
    """The form that streams and files get: the method's name, then all fields."""
    data = json.loads(json.dumps(event.to_dict()))
    assert data["event"] == event.method.removeprefix("on_")
    assert set(data) == {"event", *(field.name for field in dataclasses.fields(event))}


def test_token_tells_its_turn() -> None:
    """S-STR-2, S-EVT-39: `iteration` tells the turns of a tool loop apart."""
    token = EVERY[9]
    assert isinstance(token, TokenEvent)
    assert token.to_dict() == {
        "event": "token",
        "run_id": "run-1",
        "instance": "write#0",
        "token": "Hel",
        "agent_role": "Writer",
        "task_description": "Write",
        "iteration": 3,
        "is_reasoning": False,
    }


def test_durations_are_timedeltas_and_texts_in_json() -> None:
    """S-CONV-8, S-EVT-31: outputs are `timedelta`; JSON has ISO 8601."""
    completed = EVERY[1]
    assert isinstance(completed, EnsembleCompletedEvent)
    assert completed.total_duration == SECOND
    assert completed.to_dict()["total_duration"] == "PT1S"
    assert completed.to_dict()["exit_reason"] == "completed"


def test_failure_is_its_text_in_json() -> None:
    """S-EVT-34: JSON has no exceptions."""
    assert EVERY[4].to_dict()["cause"] == "LLM failed"


def test_tool_requests_are_the_models_own() -> None:
    """S-EVT-38: raw arguments, as the model wrote them."""
    assert ToolCallRequest is ToolCall


def test_end_of_an_iteration_and_of_a_step_say_where_and_what() -> None:
    """S-LOOP-108, S-GRAPH-75: in JSON too."""
    iteration, step = EVERY[-4].to_dict(), EVERY[-3].to_dict()
    assert list(iteration) == [
        *("event", "run_id", "instance", "loop_name", "iteration_number", "max_iterations"),
        *("iteration_outputs", "iteration_duration"),
    ]
    assert iteration["event"] == "loop_iteration_completed"
    assert iteration["iteration_outputs"]["write"]["raw"] == "text"  # type: ignore[index]
    assert (iteration["iteration_number"], iteration["max_iterations"]) == (2, 5)
    assert list(step) == [
        *("event", "run_id", "instance", "graph_name", "state_name", "step_number", "max_steps"),
        *("output", "next_state", "step_duration"),
    ]
    assert (step["event"], step["next_state"], step["step_duration"]) == ("graph_state_completed", "__END__", "PT1S")
