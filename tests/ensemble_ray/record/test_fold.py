"""Facts of runs of all endings, as traces and outputs."""

import enum
from collections.abc import Callable
from datetime import date, timedelta

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    CaptureMode,
    ErrorTrace,
    ExecutionMetrics,
    ExecutionTrace,
    ExitReason,
    IllegalStateError,
    RecordError,
    RunState,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.journal import in_json_form
from ensemble_ray.record.trace import fold_output, fold_trace, trace_of
from ensemble_ray.values.value import utc_of

from .facts_of_runs import (
    COST,
    RUN,
    begun,
    completed,
    ended,
    fact,
    failed,
    intent,
    model,
    node,
    output,
    result,
    task_trace,
)

READ, EDIT = node("read", "Read Ray"), node("edit", "Edit Ray", "Editor")

#: As appended, with objects in them, and as read back, with JSON data.
Form = Callable[[list[Fact]], list[Fact]]


@pytest.fixture(params=["appended", "read"])
def form(request: pytest.FixtureRequest) -> Form:
    """Both forms of facts."""
    return list if request.param == "appended" else lambda facts: [in_json_form(each) for each in facts]


class Colour(enum.Enum):
    """Part of a parsed output."""

    RED = "red"


class Report(BaseModel):
    """A parsed output with values that JSON has no form for."""

    title: str
    on: date
    colours: tuple[Colour, ...]


class Named:
    """Anything with a hidden id."""

    def __init__(self, object_id: str) -> None:
        self.object_id = object_id


REPORT = Report(title="Ray", on=date(2026, 1, 2), colours=(Colour.RED,))


def test_trace_of_a_finished_run(form: Form) -> None:
    """S-MET-2, S-MET-27, S-TRC-1, S-TRC-2, S-TRC-3, S-CAP-16: every field comes from the facts."""
    read, edit = output("Read Ray", "facts"), output("Edit Ray", "digest")
    trace = fold_trace(
        form([*begun(READ, EDIT), *completed("read", read, 105), *completed("edit", edit, 110), ended(111.5)])
    )
    assert trace == ExecutionTrace(
        capture_mode=CaptureMode.FULL,
        ensemble_id=RUN,
        ensemble_name="team",
        workflow="parallel",
        started_at=utc_of(100),
        completed_at=utc_of(111.5),
        total_duration=timedelta(seconds=11.5),
        inputs={"topic": "Ray"},
        agents=[{"role": "Reader", "goal": "Read", "tool_names": ["search"]}],
        task_traces=[read.trace, edit.trace],
        metrics=ExecutionMetrics.from_outputs([read, edit], by_task={"read": read.metrics, "edit": edit.metrics}),
        total_cost_estimate=COST.add(COST),
    )


def test_totals_are_the_sums_of_all_tasks(form: Form) -> None:
    """S-MET-24, S-MET-20: failed tasks cost money too."""
    facts = [*begun(READ, EDIT), *completed("read", output("Read Ray", "x"), 105)]
    facts += [*failed("edit", 106, trace=task_trace("Edit Ray", "", role="Editor")), ended(107, "failed", "error")]
    metrics = fold_trace(form(facts)).metrics
    assert (metrics.total_tokens, metrics.total_llm_call_count, metrics.total_tool_calls) == (240, 2, 2)
    assert set(metrics.task_metrics) == {"Reader", "Editor"}


def test_tasks_stand_in_the_order_of_completion(form: Form) -> None:
    """S-PAR-14: as the scheduler was told, whatever the outputs' own times are."""
    first, second = output("Read Ray", "slow clock"), output("Edit Ray", "fast clock")
    facts = [
        *begun(READ, EDIT),
        fact("output", "edit#0", 104, output=second),
        fact("output", "read#0", 105, output=first),
        fact("stimulus", "read#0", 105, type="TaskCompleted", key="read"),
        fact("stimulus", "edit#0", 106, type="TaskCompleted", key="edit"),
        ended(107),
    ]
    assert [task.final_output for task in fold_trace(form(facts)).task_traces] == ["slow clock", "fast clock"]
    assert fold_output(form(facts)).raw == "fast clock"


def test_errors_of_failed_tasks_are_in_the_trace(form: Form) -> None:
    """S-TRC-61, S-SET-26: who, what, which error, when; the end's own list adds nothing that a task told."""
    trace = task_trace("Read Ray", "")
    told = {"key": "read", "error_type": "AgentExecutionError", "message": "LLM failed"}
    facts = [*begun(READ), *failed("read", 106, trace=trace), ended(107, "failed", "error", [told])]
    folded = fold_trace(form(facts))
    assert folded.errors == (
        ErrorTrace(
            agent_role="Reader",
            task_description="Read Ray",
            error_type="AgentExecutionError",
            message="LLM failed",
            stack_trace="Traceback",
            occurred_at=utc_of(106),
        ),
    )
    assert folded.task_traces == (trace,)
    assert folded.metadata == {"state": "failed"}


def test_errors_of_the_run_itself_are_in_the_trace(form: Form) -> None:
    """S-TRC-61: what no task told of."""
    facts = [*begun(READ), ended(107, "failed", "error", [{"error_type": "RuntimeError", "message": "house burnt"}])]
    assert [(e.error_type, e.message, e.task_description) for e in fold_trace(form(facts)).errors] == [
        ("RuntimeError", "house burnt", "")
    ]


def test_failed_task_is_described_by_the_plan_when_it_left_no_trace(form: Form) -> None:
    """S-TRC-61: it failed before it did anything."""
    trace = fold_trace(form([*begun(READ), *failed("read", 106), ended(107, "failed", "error")]))
    assert (trace.errors[0].agent_role, trace.errors[0].task_description) == ("Reader", "Read Ray")
    assert [task.task_description for task in trace.task_traces] == ["Read Ray"]


def test_torn_run_shows_what_its_tasks_did(form: Form) -> None:
    """S-TRC-20, S-TRC-21, S-TRC-30, S-TRC-12, S-MET-10: model and tool calls of a task without an end, in order."""
    facts = [
        *begun(READ),
        model("read#0", 0, 102, text=None, calls=["search", "search"]),
        intent("read#0", 0, 0, 102),
        intent("read#0", 0, 1, 102),
        result("read#0", 0, 1, 103, outcome="failure"),
        result("read#0", 0, 0, 104),
        model("read#0", 1, 106, text="almost"),
    ]
    trace = fold_trace(form(facts))
    assert trace.metadata == {"state": "interrupted"}
    assert (trace.started_at, trace.completed_at) == (utc_of(100), utc_of(106))
    (task,) = trace.task_traces
    assert (task.task_description, task.agent_role, task.expected_output) == ("Read Ray", "Reader", "Five lines")
    assert (task.started_at, task.completed_at, task.final_output) == (utc_of(101), utc_of(106), "")
    assert task.metadata == {"state": "interrupted"}
    first, second = task.llm_interactions
    assert (first.response_type, first.input_tokens, first.latency) == ("tool_calls", 100, timedelta(seconds=1))
    assert [(call.outcome, call.result, call.structured_output) for call in first.tool_calls] == [
        ("success", "3 hits", {"hits": 3}),
        ("failure", "3 hits", {"hits": 3}),
    ]
    assert first.tool_calls[0].parsed_input == {"q": 1}
    assert (second.iteration_index, second.response_type, second.response_text) == (1, "final_answer", "almost")
    assert (task.metrics.total_tokens, task.metrics.llm_call_count, task.metrics.tool_call_count) == (240, 2, 2)
    assert trace.metrics.total_tokens == 240


def test_tool_call_in_flight_is_shown_when_a_run_was_torn(form: Form) -> None:
    """S-TRC-31, S-DUR-26: it began, and nothing more is known."""
    facts = [*begun(READ), model("read#0", 0, 102, calls=["search"]), intent("read#0", 0, 0, 102)]
    (call,) = fold_trace(form(facts)).task_traces[0].llm_interactions[0].tool_calls
    told = (call.tool_name, call.arguments, call.outcome, call.duration)
    assert told == ("search", '{"q": 1}', "unknown", timedelta())
    assert call.result == "No result was recorded: the run ended during this call"


def test_cancelled_run_keeps_its_outputs_and_shows_the_rest(form: Form) -> None:
    """S-SET-27: completed outputs are kept; what was stopped is marked."""
    facts = [*begun(READ, EDIT), *completed("read", output("Read Ray", "facts"), 105)]
    facts += [model("edit#0", 0, 107), ended(108, "cancelled", "cancelled")]
    given = fold_output(form(facts))
    assert (given.exit_reason, given.raw, len(given.task_outputs)) == (ExitReason.CANCELLED, "facts", 1)
    trace = fold_trace(form(facts))
    assert [task.metadata for task in trace.task_traces] == [{}, {"state": "cancelled"}]
    assert trace.metadata == {"state": "cancelled"}


def test_task_that_never_began_is_not_shown(form: Form) -> None:
    """A skipped one left only stimuli."""
    facts = [*begun(READ, EDIT), fact("stimulus", "edit#0", 101, type="TaskCancelled", key="edit"), ended(102)]
    assert fold_trace(form(facts)).task_traces == ()


def test_trace_is_folded_when_the_plan_is_missing() -> None:
    """The segment with the plan was on a machine that is gone: less is known, nothing fails."""
    trace = fold_trace([model("read#0", 0, 102)])
    assert (trace.ensemble_id, trace.workflow, trace.capture_mode) == (RUN, "unknown", CaptureMode.OFF)
    assert trace.task_traces[0].task_description == "read"


def test_trace_shows_what_can_be_read_of_a_damaged_plan() -> None:
    """S-DUR-90: tasks without all of their keys, entries that are no tasks, agents without goals."""
    nodes = [{"key": "read", "description": "Read Ray", "agent_role": "Reader"}, 7, {"key": []}]
    damaged = {"nodes": nodes, "agents": [{"key": "Reader"}], "hierarchy": [], "units": "x"}
    (task,) = fold_trace([*begun(plan={**damaged, "units": []}), model("read#0", 0, 102)]).task_traces
    assert (task.task_description, task.expected_output, task.agent_role) == ("Read Ray", "", "Reader")
    with pytest.raises(RecordError, match="its plan cannot be read"):
        fold_trace([*begun(plan=damaged), model("read#0", 0, 102)])


def test_empty_record_is_refused() -> None:
    """There is nothing to say about it."""
    with pytest.raises(RecordError, match="the record is empty"):
        fold_trace([])


@pytest.mark.parametrize(
    "broken",
    [
        fact("output", "read#0", 105, output={"raw": 1}),
        fact("model", "read#0", 105, text="x"),
        fact("task_failed", "read#0", 105, error_type="E", message="m", trace={"agent_role": 1}),
    ],
)
def test_damaged_data_is_told(broken: Fact) -> None:
    """As an error of ours, with the task's name."""
    with pytest.raises(RecordError, match=r"The record is damaged: .*read"):
        fold_trace([*begun(READ), broken])


def test_unknown_words_are_passed_over(form: Form) -> None:
    """Kinds and fields of later versions of this format do not break its readers."""
    facts = [
        *begun(READ, new_field=1),
        fact("approval", "read#0/0/call-0", 102, by="Ann"),
        fact("end", "run", 103, how="parked"),
    ]
    history = RunHistory(form(facts), has_details=True)
    assert (history.head.state, trace_of(history).task_traces) == (RunState.INTERRUPTED, ())


# The output of a finished run.


def test_output_of_a_finished_run_is_the_recorded_one(form: Form) -> None:
    """S-SET-39, S-DOM-50, S-DOM-51: texts, order, sums, reason, trace."""
    read, edit = output("Read Ray", "facts"), output("Edit Ray", "digest")
    facts = form([*begun(READ, EDIT), *completed("read", read, 105), *completed("edit", edit, 110), ended(111.5)])
    given = fold_output(facts)
    assert given.task_outputs == (read, edit)
    assert (given.raw, given.total_tool_calls, given.run_id) == ("digest", 2, RUN)
    assert (given.exit_reason, given.total_duration) == (ExitReason.COMPLETED, timedelta(seconds=11.5))
    assert given.metrics == ExecutionMetrics.from_outputs(
        [read, edit], by_task={"read": read.metrics, "edit": edit.metrics}
    )
    assert given.trace == fold_trace(facts)


def test_outputs_are_found_by_task_when_ids_are_given(form: Form) -> None:
    """S-SET-39, S-DOM-54: the tasks of this process have ids of their own."""
    facts = [*begun(READ, EDIT), *completed("edit", output("Edit Ray", "b"), 105), ended(106)]
    given = fold_output(form(facts), object_ids={"read": "now-1", "edit": "now-2"})
    found = given.get_output(Named("now-2"))
    assert found is not None
    assert found.raw == "b"
    assert given.get_output(Named("now-1")) is None


def test_parsed_output_is_json_data_when_no_type_is_given() -> None:
    """S-SET-39: a record names no class that reading would import."""
    facts = [*begun(READ), *completed("read", output("Read Ray", "x", parsed=REPORT, kind=Report), 105), ended(106)]
    (given,) = fold_output([in_json_form(each) for each in facts]).task_outputs
    assert given.parsed_output == {"title": "Ray", "on": "2026-01-02", "colours": ["red"]}
    assert given.output_type is None


def test_parsed_output_is_an_object_again_when_its_type_is_given(form: Form) -> None:
    """S-SET-39, S-DOM-42: equal to the one that was recorded."""
    facts = [*begun(READ), *completed("read", output("Read Ray", "x", parsed=REPORT, kind=Report), 105), ended(106)]
    (given,) = fold_output(form(facts), output_types={"read": Report}).task_outputs
    assert given.get_parsed_output(Report) == REPORT
    assert given.output_type is Report


def test_call_that_made_an_agent_is_no_turn_of_its_task(form: Form) -> None:
    """S-SET-46: it is recorded, and was made before the task began."""
    made = fact("model", "read#0/0/synthesis", 90, started_at=89.0, text="{}")
    facts = [*begun(READ), made, *completed("read", output("Read Ray", "x"), 105), ended(106)]
    (trace,) = fold_trace(form(facts)).task_traces
    assert len(trace.llm_interactions) == 1
    torn = fold_trace(form([*begun(READ), made, model("read#0", 0, 102)]))
    assert torn.task_traces[0].started_at == utc_of(101)


def test_parsed_output_stays_data_when_it_does_not_fit_its_type(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-39, S-DUR-36: the class has changed since; told, not guessed."""
    facts = [*begun(READ), *completed("read", output("Read Ray", "x", parsed={"title": 1}), 105), ended(106)]
    with caplog.at_level("WARNING", logger="ensemble_ray"):
        (given,) = fold_output([in_json_form(each) for each in facts], output_types={"read": Report}).task_outputs
    assert given.parsed_output == {"title": 1}
    assert "The recorded output of task 'Read Ray' no longer fits Report" in caplog.text


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ([], "it has not ended"),
        (failed("read", 105), "it has not ended"),
        ([ended(106, "failed", "error")], "it is failed"),
    ],
)
def test_output_is_refused_when_there_is_none(facts: list[Fact], why: str) -> None:
    """S-SET-39: a failed or torn run has none."""
    with pytest.raises(IllegalStateError, match=f"Run 'run-1' has no output: {why}"):
        fold_output([*begun(READ), *facts])


def test_early_exit_is_a_finished_run(form: Form) -> None:
    """S-ENG-17, S-TRC-61: outputs so far, and the reason."""
    facts = [
        *begun(READ, EDIT),
        *completed("read", output("Read Ray", "a"), 105),
        ended(106, "completed", "user_exit_early"),
    ]
    given = fold_output(form(facts))
    assert (given.exit_reason, given.is_complete, given.raw) == (ExitReason.USER_EXIT_EARLY, False, "a")


def test_run_without_outputs_has_an_empty_text(form: Form) -> None:
    """S-PAR-50."""
    given = fold_output(form([*begun(), ended(100.0)]))
    assert (given.raw, given.task_outputs, given.total_duration) == ("", (), timedelta())


def test_decision_is_shown_when_a_call_has_no_result(form: Form) -> None:
    """S-DUR-24, S-DUR-26: what was decided, beside what is not known."""
    facts = [
        *begun(READ),
        model("read#0", 0, 102, calls=["search"]),
        intent("read#0", 0, 0, 102),
        fact("decision", "read#0/0/call-0", 103, answer="fail"),
    ]
    (call,) = fold_trace(form(facts)).task_traces[0].llm_interactions[0].tool_calls
    assert (call.outcome, call.result.endswith("; it was decided: fail")) == ("unknown", True)


def test_unknown_outcome_stays_unknown_when_its_text_was_recorded(form: Form) -> None:
    """S-DUR-26."""
    facts = [
        *begun(READ),
        model("read#0", 0, 102, calls=["search"]),
        intent("read#0", 0, 0, 102),
        result("read#0", 0, 0, 103, outcome="unknown"),
    ]
    (call,) = fold_trace(form(facts)).task_traces[0].llm_interactions[0].tool_calls
    assert (call.outcome, call.result) == ("unknown", "3 hits")


def test_handler_in_flight_is_shown_when_a_run_was_torn(form: Form) -> None:
    """S-DUR-25, S-DUR-26: it has no turns of a model; its outcome is on the task."""
    facts = [
        *begun(node("count", "Count", agent_key=None)),
        fact("tool_intent", "count#0/0/handler", 102, tool_name="handler", arguments="", effect="once"),
    ]
    (task,) = fold_trace(form(facts)).task_traces
    assert (task.llm_interactions, task.metrics.llm_call_count) == ((), 0)
    assert task.metadata == {"outcome": "unknown", "state": "interrupted"}


def test_handler_is_unfinished_when_its_result_is_recorded_and_its_output_is_not(form: Form) -> None:
    """S-DUR-25: what came of it is known."""
    facts = [
        *begun(node("count", "Count", agent_key=None)),
        fact("tool_intent", "count#0/0/handler", 102, tool_name="handler", arguments="", effect="once"),
        fact("tool_result", "count#0/0/handler", 103, outcome="success", text="3"),
    ]
    assert fold_trace(form(facts)).task_traces[0].metadata == {"state": "interrupted"}
