"""Facts as they are written and read."""

import json
from collections.abc import Mapping
from datetime import timedelta

import pytest

from ensemble_ray import (
    ExitReason,
    LlmInteraction,
    RecordError,
    RunState,
    TaskMetrics,
    TaskOutput,
    TaskTrace,
    ToolCall,
    ValidationError,
)
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import Fact, FactData, find_fact, require_usable
from ensemble_ray.facts.reading import KINDS, KINDS_OF_RUN, read_fact
from ensemble_ray.facts.runs import (
    AgentsJoined,
    ExitRecorded,
    FailureRecorded,
    GroupRecorded,
    ItemsRecorded,
    LossAccepted,
    OutputRecorded,
    PlanRecorded,
    RecordedCause,
    RecordedError,
    RunEnded,
    RunResumed,
    StimulusRecorded,
)
from ensemble_ray.schedule.stimuli import Completed, Exited, decode_stimulus, encode_stimulus
from ensemble_ray.values.value import utc_of

CALL = {"id": "c", "name": "search", "arguments": "{}"}
ANSWER = {
    "request_digest": "d", "started_at": 5.0, "latency_s": 1.0, "text": None, "tool_calls": [CALL], "input_tokens": 3,
    "output_tokens": -1,
}  # fmt: skip
PLAN = {
    "plan": {"nodes": []}, "definition": {"agents": {}}, "workflow": "parallel", "inputs": {"topic": "Ray"},
    "agents": [{"role": "R"}], "digest": "d", "ensemble_id": "r", "options": {},
    "budget": {"max_tokens": 5, "max_cost": None}, "origin": "", "overrides": {}, "runtime": "inline",
    "capture_mode": "off", "started_at": 100.0, "forked_from": {"run": "q", "task": "t"},
}  # fmt: skip
REFLECTION = {
    "refined_description": "d", "refined_expected_output": "e", "observations": ["o"], "suggestions": [],
    "reflected_at": "2026-01-02T03:04:05Z", "run_count": 2,
}  # fmt: skip
#: Data of every kind as it is in records, with its keys in their order.
RECORDED: list[tuple[str, Mapping[str, object]]] = [
    ("plan", PLAN),
    ("plan", {"plan": {}, "definition": {}, "workflow": "map", "inputs": {}, "items": {}, "digest": "d"}),
    ("resume", {"is_restart": True}),
    ("resume", {"is_restart": False, "options": {"max_tokens": 5}, "budget": {"max_tokens": 5, "max_cost": None}}),
    ("end", {"state": "completed", "exit_reason": "completed", "errors": []}),
    (
        "end",
        {
            "state": "failed",
            "exit_reason": "error",
            "failure": "",
            "errors": [{"key": "", "error_type": "E", "message": ""}],
        },
    ),
    (
        "end",
        {
            "state": "failed",
            "exit_reason": "error",
            "errors": [
                {
                    "key": "",
                    "error_type": "E",
                    "message": "m",
                    "place": 'File "t.py", line 3, in f',
                    "causes": [{"error_type": "C", "message": "c"}],
                }
            ],
        },
    ),
    ("stimulus", {"type": "TaskCompleted", "at": 1.0, "key": "a", "delegated_roles": ["R"], "more": 2}),
    ("loss", {"last": 3, "expected": None, "gap": 0, "texts": 1, "has_effect": True, "reason": "gone", "kept": None}),
    ("loss", {"last": 3, "expected": 5, "gap": 0, "texts": 0, "has_effect": False, "reason": "gone"}),
    ("model", ANSWER),
    (
        "model",
        {**ANSWER, "finish_reason": "length", "estimated_tokens": [3, 4], "retries": 1, "attempts_failed": ["E"]},
    ),
    ("model", {**ANSWER, "waits": [["retry", "HTTP 429", 1.5, 0.5], ["breaker", "open", 2.0, 1.0]], "max_attempts": 5}),
    ("tool_intent", {"tool_name": "search", "arguments": "{}", "effect": "none"}),
    (
        "tool_result",
        {"outcome": "success", "text": "t", "structured_output": None, "started_at": 1.0, "duration_s": 0.5},
    ),
    (
        "tool_result",
        {
            "outcome": "error",
            "text": "t",
            "structured_output": None,
            "started_at": 1.0,
            "duration_s": 0.5,
            "repairs": ["tags: JSON in a string"],
            "log": ["one line", "3 more lines"],
        },
    ),
    ("decision", {"answer": "done"}),
    ("delegation", {"request": {"agent_role": "R"}, "worker": "r", "charged": None, "started_at": 1.0}),
    (
        "delegation",
        {
            "request": {},
            "worker": None,
            "charged": "R",
            "started_at": 1.0,
            "refusal": {"reason": "no", "hint": ""},
            "is_error": False,
        },
    ),
    ("output", {"output": {"raw": "text"}}),
    (
        "task_failed",
        {"error_type": "E", "message": "m", "stack_trace": "s", "trace": None, "error": None, "attempts": 2},
    ),
    ("task_exited", {"reason": "timeout"}),
    ("items", {"first": 5, "digests": ["a", "b"]}),
    ("items", {"indices": [9, 2], "digests": ["a", "b"], "are_all": True}),
    ("group", {"level": 1, "number": 0, "inputs": ["map-1"], "is_final": True}),
    ("agents", {"agents": [{"role": "R"}]}),
    (
        "batch",
        {
            "batch": "4f2a",
            "state": "planned",
            "items": [[0, 9, 0]],
            "total": 10,
            "model": "m",
            "endpoint": "http://m/v1",
        },
    ),
    ("batch", {"batch": "4f2a", "state": "submitted", "answered": 4, "provider_batch": "b-1", "status": "in_progress"}),
    ("item_output", {"outputs": ["map-0#0/loop:refine#1/slogan#0"]}),
    (
        "review",
        {
            "review_id": "g",
            "timing": "before_execution",
            "task_description": "d",
            "on_timeout": "fail",
            "ends_run": True,
        },
    ),
    (
        "review",
        {
            "review_id": "g",
            "timing": "after_execution",
            "task_description": "d",
            "task_output": "o",
            "prompt": "p",
            "timeout_s": 3.0,
            "on_timeout": "continue",
            "required_role": "editor",
            "ends_run": False,
        },
    ),
    ("review_decision", {"verdict": "edit", "text": "", "by": "Ann", "comment": "c"}),
    ("review_decision", {"verdict": "exit", "timed_out": True, "by": "Ann"}),
    (
        "memory_recalled",
        {
            "scopes": [["notes", ["a", "b"]], ["drafts", []]],
            "short_term": [["Writer", "Write", "text"]],
            "long_term": ["c"],
            "entities": [["Acme", "a firm"]],
            "retrieval_s": 0.5,
            "lookup_s": 0.0,
        },
    ),
    ("memory_recalled", {}),
    (
        "memory_recalled",
        {"short_term": json.dumps([["Writer", "Write", f"é {number}"] for number in range(16)], ensure_ascii=False)},
    ),
    ("memory_stored", {"scopes": ["notes"], "taken_by": ["short_term"]}),
    ("redacted", {"token": "t"}),
    ("reflection_recalled", {"key": "k", "reflection": REFLECTION}),
    ("reflection_recalled", {"key": "k"}),
    (
        "reflection_made",
        {"key": "k", "reflection": REFLECTION, "input_tokens": 3, "output_tokens": 4, "is_first": True},
    ),
    ("reflection_made", {"key": "k", "reflection": REFLECTION}),
    ("reflection_stored", {"key": "k"}),
    (
        "sampling",
        {
            "request_digest": "d",
            "started_at": 1.5,
            "latency_s": 0.5,
            "text": "x",
            "input_tokens": 3,
            "output_tokens": 4,
        },
    ),
    (
        "sampling",
        {
            "request_digest": "d",
            "started_at": 1.5,
            "latency_s": 0.5,
            "text": None,
            "input_tokens": -1,
            "output_tokens": -1,
            "finish_reason": "length",
            "estimated_tokens": [3, 4],
        },
    ),
    ("directive", {"text": "In French", "expires_at": 60.5, "given_by": "Ann"}),
    ("directive", {"text": "In French"}),
    ("model_switched", {"model": "large"}),
    ("model_switched", {"model": None, "agent": "Writer", "given_by": "Ann"}),
    ("directives_shown", {"texts": ["In French"]}),
    ("interruption", {"key": "a", "error_type": "E", "message": "m"}),
    (
        "interruption",
        {"key": "", "error_type": "E", "message": "m", "place": "p", "causes": [{"error_type": "C", "message": "c"}]},
    ),
    ("approval", {"by": "Ann"}),
]


def read(kind: str, data: Mapping[str, object]) -> FactData:
    """What a store's row tells."""
    return read_fact(run="r", kind=kind, name="a#0/0/model", at=7.0, data=data).data


@pytest.mark.parametrize(("kind", "data"), RECORDED)
def test_what_is_read_is_written_again_as_it_was(kind: str, data: Mapping[str, object]) -> None:
    """S-DUR-30: the same keys, in the same order, with the same values."""
    found = read(kind, data)
    assert found.kind == kind
    assert json.dumps(found.to_data()) == json.dumps(data)


@pytest.mark.parametrize(("kind", "data"), RECORDED)
def test_earlier_and_later_records_are_written_again_as_they_were(kind: str, data: Mapping[str, object]) -> None:
    """Keys that are missing stay missing, keys that are not known stay there."""
    for name in data:
        partial = {key: value for key, value in data.items() if key != name}
        assert json.dumps(read(kind, partial).to_data()) == json.dumps(partial)
    later = {**data, "later": {"a": 1}}
    assert json.dumps(read(kind, later).to_data(), sort_keys=True) == json.dumps(later, sort_keys=True)


def test_every_kind_is_registered() -> None:
    """A kind that is not would be passed over by every reader."""
    assert set(KINDS) == {kind for kind, _ in RECORDED if kind != "approval"}
    assert {"plan", "items", "resume", "end", "directive", "model_switched", "interruption", "batch"} == KINDS_OF_RUN


def test_fields_are_values() -> None:
    """What readers get of the data."""
    plan, answer = read("plan", PLAN), read("model", ANSWER)
    assert isinstance(plan, PlanRecorded)
    assert (plan.budget, plan.forked_from, plan.is_dynamic, plan.is_empty) == ((5, None), ("q", "t"), False, False)
    assert isinstance(answer, ModelAnswered)
    assert (answer.tool_calls, answer.finish_reason, answer.is_copied) == (
        (ToolCall("c", "search", "{}"),),
        None,
        False,
    )
    end = read("end", {"state": "failed", "exit_reason": "error", "errors": [{"key": "a", "error_type": "E"}]})
    assert end == RunEnded(state=RunState.FAILED, exit_reason=ExitReason.ERROR, errors=(RecordedError("a", "E", ""),))
    exited = read("task_exited", {"is_timeout": True})
    assert isinstance(exited, ExitRecorded)
    assert (exited.reason, exited.call, exited.text) == (ExitReason.TIMEOUT, "", "")
    by_tool = {"reason": "user_exit_early", "call": "a#0/0/call-1", "text": "enough"}
    exited = read("task_exited", by_tool)
    assert isinstance(exited, ExitRecorded)
    assert (exited.call, exited.text, exited.to_data()) == ("a#0/0/call-1", "enough", by_tool)


def test_an_error_is_recorded_with_bounds() -> None:
    """S-ERR-67: of its text, and of the texts and number of its causes."""
    error = last = ValueError("e" * 30_000)
    for number in range(20):
        last.__cause__ = last = ValueError(f"{number} " + "c" * 2000)
    found = RecordedError.of(error, key="a")
    assert (found.key, found.error_type, len(found.message)) == ("a", "ValueError", 20_003)
    assert len(found.causes) == 16
    assert all(len(each.message) == 1503 for each in found.causes)


def test_causes_are_recorded_of_the_first_errors() -> None:
    """S-ERR-67: a run with 10,000 failed items and chains of causes has a short end."""
    errors = [RecordedError("a", "E", "m", causes=(RecordedCause("C", "c"),))] * 30
    end = RunEnded(state=RunState.FAILED, exit_reason=ExitReason.ERROR, errors=errors)
    found = RunEnded.from_data(end.to_data(), 0)
    assert [len(each.causes) for each in found.errors] == [1] * 20 + [0] * 10


def test_an_error_is_recorded_with_what_was_handled_and_the_members_of_its_groups() -> None:
    """S-ERR-70: nearest first, with bounds."""
    group = ExceptionGroup("all", [OSError(str(number)) for number in range(9)])
    group.__context__ = KeyError("handled")
    error = ValueError("last")
    error.__cause__ = group
    causes = RecordedError.of(error).causes
    assert [each.error_type for each in causes] == ["ExceptionGroup", "KeyError", *["OSError"] * 5]
    group.__suppress_context__ = True
    assert "KeyError" not in [each.error_type for each in RecordedError.of(error).causes]


def test_the_record_tells_errors_of_this_package_from_their_namesakes() -> None:
    """S-SRV-230: by their class; an earlier record does not say."""
    own, foreign = ValidationError("of a customer"), type("ValidationError", (ValueError,), {})("of a customer")
    own.__cause__, foreign.__cause__ = foreign, own
    errors = [RecordedError.of(own), RecordedError.of(foreign)]
    end = RunEnded(state=RunState.FAILED, exit_reason=ExitReason.ERROR, errors=errors)
    found = RunEnded.from_data(end.to_data(), 0)
    assert found.errors == tuple(errors)
    assert [(each.is_own, [cause.is_own for cause in each.causes]) for each in found.errors] == [
        (True, [False]),
        (False, [True]),
    ]
    earlier = read(
        "end", {"state": "failed", "exit_reason": "error", "errors": [{"key": "", "error_type": "ValidationError"}]}
    )
    assert isinstance(earlier, RunEnded)
    assert not earlier.errors[0].is_own


def test_damaged_causes_are_left_out() -> None:
    """Readers go on without them."""
    error = {
        "key": "",
        "error_type": "E",
        "message": "m",
        "causes": ["c", {"error_type": 1, "message": "c"}],
        "place": 3,
    }
    end = read("end", {"state": "failed", "exit_reason": "error", "errors": [error]})
    assert isinstance(end, RunEnded)
    assert end.errors == (RecordedError("", "E", "m", causes=(RecordedCause("", "c"),)),)


def test_what_is_missing_has_a_default() -> None:
    """Readers of broken records go on without it; what has no time of its own has its fact's."""
    assert read("model", {}) == ModelAnswered.from_data({}, 7.0)
    answer, result = ModelAnswered.from_data({}, 7.0), ToolReturned.from_data({}, 7.0)
    assert (answer.started_at, answer.text, answer.input_tokens, answer.tool_calls) == (7.0, None, -1, ())
    assert (result.started_at, result.outcome, result.is_unknown) == (7.0, "error", False)
    assert ToolIntended.from_data({}, 7.0).effect == "once"
    assert LossAccepted.from_data({}, 7.0).reason == "it is not known what"
    assert PlanRecorded.from_data({}, 7.0).is_empty


def test_stimulus_is_recorded_with_its_fields() -> None:
    """S-DUR-30: roles only of managers, and how many of its group follow."""
    encoded = encode_stimulus(Completed(at=1.0, instance="a#0"), more=1)
    assert encoded.is_completion
    assert encoded.to_data() == {
        "type": "TaskCompleted", "at": 1.0, "key": "a", "duration_s": 0.0, "total_tokens": -1, "tool_call_count": 0,
        "more": 1,
    }  # fmt: skip
    exited = read("stimulus", {"type": "TaskExited", "key": "a", "is_timeout": True})
    assert isinstance(exited, StimulusRecorded)
    again = decode_stimulus(Fact(run="r", name="a#2", at=1.0, data=exited))
    assert again == Exited(at=1.0, instance="a#2", reason=ExitReason.TIMEOUT)


def test_instance_and_fence_follow_from_the_kind() -> None:
    """S-DUR-16: effects belong to their instance, stimuli to the run, losses to themselves."""

    def where(kind: str, name: str) -> tuple[str, str]:
        fact = read_fact(run="r", kind=kind, name=name, at=1.0, data={})
        return fact.instance, fact.fence

    assert where("tool_result", "a#0/0/call-1") == ("a#0", "a#0")
    assert where("output", "a#0") == ("a#0", "a#0")
    assert where("stimulus", "a#0") == ("a#0", "run")
    assert where("loss", "run") == ("run", "loss")


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("model", {"text": 3}, "its text is not a text"),
        ("model", {"tool_calls": [3]}, "its tool_calls is not a list of which each is an object"),
        ("tool_intent", {"effect": "twice"}, "its effect is not one of none, idempotent, once"),
        ("plan", {"forked_from": {"run": "r"}}, "its forked_from is not an object whose task is a text"),
        ("stimulus", {"type": "TaskFailed", "at": 1e300}, "its at is not an instant"),
        ("items", {"first": True}, "its first is not a whole number"),
        ("batch", {"items": [[1, 2]]}, "its items is not a list of which each is a list of 3 values of their types"),
        ("memory_recalled", {"short_term": "[[1, 2, 3]]"}, "its short_term is not a list"),
        ("memory_recalled", {"short_term": "["}, "its short_term is not JSON text of a list"),
    ],
)
def test_damaged_fact_is_refused(kind: str, data: Mapping[str, object], text: str) -> None:
    """S-DUR-9: it says which field, and what it should be."""
    with pytest.raises(ValueError, match=text):
        read(kind, data)


def test_effect_is_not_used_when_something_of_it_is_missing() -> None:
    """S-DUR-9: it would be told to the model, or to the next task."""
    partial = {**ANSWER, "tool_calls": [{"id": "c"}]}
    del partial["text"], partial["request_digest"]
    fact = read_fact(run="r", kind="model", name="a#0/0/model", at=1.0, data=partial, seq=4)
    with pytest.raises(RecordError, match=r"fact 4 of run 'r' .* has no text, tool_calls.name, tool_calls.arguments$"):
        require_usable(fact)
    whole = read_fact(run="r", kind="model", name="a#0/0/model", at=1.0, data=ANSWER)
    assert require_usable(whole) is whole
    known = {(whole.name, whole.kind): whole}
    assert find_fact(known, whole.name, ModelAnswered) is whole
    assert find_fact(known, whole.name, ToolReturned) is None


def test_goes_on_with_the_options_of_now() -> None:
    """S-BUD-6: a replaced scheduler changes nothing."""
    header = PlanRecorded(options={"max_tokens": 9}, budget=None)
    assert RunResumed.of(header, is_restart=False).to_data() == {"is_restart": False, "options": {"max_tokens": 9}}
    assert RunResumed.of(header, is_restart=True).to_data() == {"is_restart": True}
    assert RunResumed.of(PlanRecorded(options={}), is_restart=False).to_data() == {"is_restart": False}


def test_items_are_as_many_as_their_hashes() -> None:
    """S-MR-162: else it is not known which is which."""
    assert list(ItemsRecorded.of([5, 6], ["a", "b"]).places()) == [5, 6]
    assert list(ItemsRecorded.of([9, 2], ["a", "b"]).places()) == [9, 2]
    for broken in (ItemsRecorded(digests=["a"]), ItemsRecorded(indices=[1], digests=["a", "b"])):
        with pytest.raises(RecordError, match="others than it has hashes of"):
            broken.places()


def test_kinds_are_classes_of_their_own() -> None:
    """Readers tell them apart by class."""
    assert {KINDS[name] for name in ("decision", "delegation", "group", "agents", "output", "task_failed")} == {
        OutcomeDecided, DelegationDecided, GroupRecorded, AgentsJoined, OutputRecorded, FailureRecorded,
    }  # fmt: skip


@pytest.mark.parametrize("has_trace", [True, False])
@pytest.mark.parametrize(
    "change", [{}, {"raw": "y", "agent_role": "Q", "metrics": TaskMetrics()}, {"parsed_output": [1]}]
)
def test_recorded_output_repeats_nothing_and_is_read_whole(*, change: Mapping[str, object], has_trace: bool) -> None:
    """S-DUR-4: format 3. Fields that its trace has too are recorded once, unless they differ; data of format 2 stays as it is."""
    metrics = TaskMetrics(input_tokens=3, llm_call_count=1)
    common = {"task_description": "d", "agent_role": "R", "completed_at": utc_of(2), "duration": timedelta(seconds=1)}
    call = LlmInteraction(
        iteration_index=0, started_at=utc_of(1), completed_at=utc_of(2), latency=timedelta(seconds=1),
        response_type="final_answer", response_text="x",
    )  # fmt: skip
    trace = TaskTrace(
        expected_output="e", started_at=utc_of(1), llm_interactions=(call,), final_output="x", metrics=metrics, **common
    )
    output = TaskOutput(raw="x", metrics=metrics, trace=trace if has_trace else None, **common).replace(**change)
    whole = output.model_dump(mode="json")
    written = json.loads(json.dumps(OutputRecorded(output=output).to_data()))
    read = OutputRecorded.from_data(written, 0.0)
    assert read.output_data() == whole
    assert read.to_data() == written
    assert OutputRecorded(output=whole).output_data() == whole
    if has_trace and not change:
        assert json.dumps(written).count('"R"') == json.dumps(written).count('"x"') == 1
