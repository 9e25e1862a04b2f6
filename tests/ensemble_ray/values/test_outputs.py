"""What tasks and runs give back."""

import json
import math
import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Annotated, Any, Literal, NewType, cast

import pytest
from pydantic import AfterValidator, BaseModel, Field
from typing_extensions import TypeAliasType

from ensemble_ray import (
    EnsembleOutput,
    ExecutionMetrics,
    ExecutionTrace,
    ExitReason,
    IllegalStateError,
    RunState,
    TaskMetrics,
    TaskOutput,
    ValidationError,
)
from ensemble_ray.values.value import utc_of


class Report(BaseModel):
    """A parsed output."""

    title: str


class Named:
    """Anything with a hidden id."""

    def __init__(self, object_id: str) -> None:
        self.object_id = object_id


REQUIRED = {
    "raw": "text",
    "task_description": "Write about Ray",
    "agent_role": "Writer",
    "completed_at": utc_of(100),
    "duration": timedelta(seconds=2),
}
OUTPUT = TaskOutput(**REQUIRED)
OTHER = TaskOutput(**{**REQUIRED, "raw": "more"})


@pytest.mark.parametrize("name", REQUIRED)
def test_output_is_refused_when_a_required_field_is_none(name: str) -> None:
    """S-DOM-40: raw, description, role, time and duration are never None, and never missing."""
    with pytest.raises(ValidationError, match=f"TaskOutput: '{name}'"):
        TaskOutput(**{**REQUIRED, name: None})
    with pytest.raises(ValidationError, match=f"TaskOutput: '{name}'"):
        TaskOutput(**{key: value for key, value in REQUIRED.items() if key != name})


def test_output_without_a_type_has_neither_type_nor_parsed_output() -> None:
    """S-DOM-43, S-DOM-41, S-MET-2: and its metrics are there."""
    assert (OUTPUT.parsed_output, OUTPUT.output_type) == (None, None)
    assert OUTPUT.task_description == "Write about Ray"
    assert OUTPUT.metrics is TaskMetrics.EMPTY


def test_instant_is_in_utc_when_given_elsewhere() -> None:
    """S-CONV-8: any zone is accepted, none is not."""
    berlin = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=1)))
    output = TaskOutput(**{**REQUIRED, "completed_at": berlin})
    assert (output.completed_at, output.completed_at.tzinfo) == (berlin, UTC)
    with pytest.raises(ValidationError, match="timezone"):
        TaskOutput(**{**REQUIRED, "completed_at": datetime(2026, 1, 1)})  # noqa: DTZ001  that is the point


def test_parsed_output_is_given_when_it_is_of_the_type() -> None:
    """S-DOM-42, S-DOM-75: the object itself."""
    report = Report(title="Ray")
    output = TaskOutput(**REQUIRED, parsed_output=report, output_type=Report)
    assert output.get_parsed_output(Report) is report
    assert output.get_parsed_output(BaseModel) is report
    assert output.parsed is report


def test_parsed_output_is_none_when_the_type_takes_it() -> None:
    """S-LLM-55, S-DOM-75."""
    output = TaskOutput(**REQUIRED, parsed_output=None, output_type=Report | None)
    assert output.parsed is None
    assert output.get_parsed_output(cast("type[object]", Report | None)) is None
    with pytest.raises(IllegalStateError, match=r"^No parsed output available\."):
        output.get_parsed_output(Report)


Maybe = TypeAliasType("Maybe", int | None)


@pytest.mark.parametrize(
    "output_type",
    [Annotated[int | None, Field(gt=5)], Any, object, Maybe, Literal["a"] | None, NewType("Page", Maybe)],  # type: ignore[valid-newtype]
)
def test_parsed_output_is_none_when_a_type_of_another_form_takes_it(output_type: object) -> None:
    """S-LLM-55."""
    assert TaskOutput(**REQUIRED, output_type=output_type).parsed is None


@pytest.mark.parametrize("output_type", [dict[str, None], list[None], Report, Annotated[int, Field(gt=5)], Named])
def test_parsed_output_is_refused_when_none_is_no_value_of_the_type(output_type: object) -> None:
    """S-LLM-55, S-DOM-75."""
    with pytest.raises(IllegalStateError, match=r"^No parsed output available\."):
        assert TaskOutput(**REQUIRED, output_type=output_type).parsed is None


@pytest.mark.parametrize(
    "output_type", [Annotated[int, Field(gt=5)], list[Annotated[int, Field(gt=5)]], Annotated[int, AfterValidator(int)]]
)
def test_parsed_output_is_given_when_the_type_comes_of_another_process(output_type: type[object]) -> None:
    """S-DOM-42, S-LLM-55."""
    output = TaskOutput(**REQUIRED, parsed_output=7, output_type=pickle.loads(pickle.dumps(output_type)))  # noqa: S301
    assert output.get_parsed_output(output_type) == 7


def test_type_has_one_name_when_it_holds_a_function() -> None:
    """S-LLM-55: no address is in it."""
    kind = Annotated[int, AfterValidator(lambda value: value)]
    assert " at 0x" not in str(TaskOutput(**REQUIRED, output_type=kind).model_dump(mode="json")["output_type"])


@pytest.mark.parametrize("value", [["\ud83d"], {"\ud83d": 1}, "\ud83d"])
def test_output_has_json_when_its_value_holds_half_of_a_pair(value: object) -> None:
    """S-TRC-52."""
    assert "\ufffd" in TaskOutput(**REQUIRED, parsed_output=value).model_dump_json()


@pytest.mark.parametrize(
    ("value", "data"), [(math.inf, "Infinity"), ([-math.inf], ["-Infinity"]), ({"a": math.nan}, {"a": "NaN"})]
)
def test_number_that_json_does_not_know_is_a_text(value: object, data: object) -> None:
    """S-TRC-52: the record keeps it; a float is read of it again."""
    output = TaskOutput(**REQUIRED, parsed_output=value)
    assert output.model_dump(mode="json")["parsed_output"] == data
    assert json.loads(output.model_dump_json())["parsed_output"] == data


def test_types_that_are_no_classes_are_named_as_they_are_written() -> None:
    """S-LLM-55, S-DOM-42."""
    output = TaskOutput(**REQUIRED, parsed_output=[1], output_type=list[int])
    assert output.get_parsed_output(list[int]) == [1]
    assert output.get_parsed_output(list) == [1]
    assert output.model_dump(mode="json")["output_type"] == "list[int]"
    with pytest.raises(IllegalStateError, match=r"requested type list\[str\] does not match"):
        output.get_parsed_output(list[str])


def test_parsed_output_is_refused_when_there_is_none() -> None:
    """S-DOM-42, S-DOM-75, S-ERR-23."""
    with pytest.raises(IllegalStateError, match=r"^No parsed output available\."):
        assert TaskOutput(**REQUIRED).parsed is None
    with pytest.raises(IllegalStateError, match=r"^No parsed output available\."):
        OUTPUT.get_parsed_output(Report)


def test_parsed_output_is_refused_when_it_is_of_another_type() -> None:
    """S-DOM-42: both names in full."""
    output = TaskOutput(**REQUIRED, parsed_output={"title": "Ray"}, output_type=dict)
    with pytest.raises(IllegalStateError) as caught:
        output.get_parsed_output(Report)
    assert str(caught.value) == (
        f"Parsed output is of type builtins.dict but requested type {Report.__module__}.Report does not match."
    )


def test_raw_is_empty_when_there_are_no_outputs() -> None:
    """S-DOM-50, S-DOM-53: and there is no last one."""
    empty = EnsembleOutput()
    assert (empty.raw, empty.task_outputs, empty.last_completed_output) == ("", (), None)
    assert empty.metrics == ExecutionMetrics.EMPTY


def test_outputs_are_immutable_when_the_callers_list_changes() -> None:
    """S-DOM-51, S-CONV-5: copied, and a tuple."""
    given = [OUTPUT]
    output = EnsembleOutput(task_outputs=given)
    given.append(OTHER)
    assert output.task_outputs == (OUTPUT,)
    assert isinstance(output.task_outputs, tuple)


@pytest.mark.parametrize("reason", [None, "completed", ExitReason.COMPLETED])
def test_run_is_complete_only_when_completed(reason: ExitReason | str | None) -> None:
    """S-DOM-52: the default, also for None; plain strings are accepted."""
    output = EnsembleOutput(exit_reason=reason)
    assert output.exit_reason is ExitReason.COMPLETED
    assert output.is_complete
    assert not EnsembleOutput(exit_reason="timeout").is_complete


def test_exit_reasons_and_run_states() -> None:
    """S-DOM-52, S-SET-14, S-CONV-6, S-BUD-4: their values."""
    assert [reason.value for reason in ExitReason] == [
        "completed",
        "user_exit_early",
        "timeout",
        "error",
        "cancelled",
        "budget_exhausted",
        "waiting",
    ]
    assert {state.value for state in RunState} == {
        "pending",
        "running",
        "waiting",
        "completed",
        "failed",
        "cancelled",
        "interrupted",
        "budget_exhausted",
    }
    with pytest.raises(ValidationError):
        EnsembleOutput(exit_reason="finished")


@pytest.mark.parametrize("state", RunState)
def test_state_is_final_when_nothing_follows(state: RunState) -> None:
    """S-SET-14, S-SET-39, S-BUD-4: an interrupted run can go on, and so can those that run."""
    ended = {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.BUDGET_EXHAUSTED}
    assert state.is_final == (state in ended)


def test_completed_tasks_are_the_outputs() -> None:
    """S-DOM-53."""
    output = EnsembleOutput(task_outputs=[OUTPUT, OTHER])
    assert output.completed_tasks == output.task_outputs
    assert output.last_completed_output is OTHER


def test_output_of_a_task_is_found_by_its_id() -> None:
    """S-DOM-54, S-PAR-14: by identity; None for a task that is unknown or did not run, and for None."""
    output = EnsembleOutput(task_outputs=[OUTPUT, OTHER]).with_positions({"a": 1, "b": 0})
    assert output.get_output(Named("a")) is OTHER
    assert output.get_output(Named("b")) is OUTPUT
    assert output.get_output(Named("c")) is None
    assert output.get_output(None) is None


def test_output_of_a_task_is_found_when_the_output_travelled_or_was_copied() -> None:
    """S-DOM-54, S-CONV-3: pickling and `replace` keep it; other outputs have other places."""
    output = EnsembleOutput(task_outputs=[OUTPUT]).with_positions({"a": 0})
    copy = pickle.loads(pickle.dumps(output))  # noqa: S301  our own bytes
    assert copy.get_output(Named("a")) == OUTPUT
    assert output.replace(raw="x").get_output(Named("a")) is OUTPUT
    assert output.replace(task_outputs=[OTHER]).get_output(Named("a")) is None


@pytest.mark.parametrize("duration", [2.5, timedelta(seconds=2.5)])
def test_output_made_by_hand(duration: timedelta | float) -> None:
    """S-DOM-55, S-CONV-8: completed; None outputs are none."""
    output = EnsembleOutput.of("text", None, duration, 3)
    assert (output.raw, output.task_outputs, output.total_duration, output.total_tool_calls) == (
        "text",
        (),
        timedelta(seconds=2.5),
        3,
    )
    assert output.exit_reason is ExitReason.COMPLETED


@pytest.mark.parametrize("value", [OUTPUT, EnsembleOutput()])
def test_output_refuses_assignment_and_unknown_fields(value: TaskOutput | EnsembleOutput) -> None:
    """S-CONV-3, S-CONV-4: frozen, and no field that is not there."""
    with pytest.raises(ValueError, match="frozen"):
        value.raw = "x"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="unknown field 'text'"):
        value.replace(text="x")


def test_output_is_json_when_its_type_is_a_class() -> None:
    """The record holds data: a class is its full name, an object its JSON form."""
    output = TaskOutput(**REQUIRED, parsed_output=Report(title="Ray"), output_type=Report)
    data = output.model_dump(mode="json")
    assert data["output_type"] == f"{Report.__module__}.Report"
    assert data["parsed_output"] == {"title": "Ray"}


def test_output_of_a_task_is_found_by_index_or_refused() -> None:
    """S-DOM-74: the error names the task by its name, else by its description."""
    output = EnsembleOutput(task_outputs=[OUTPUT]).with_positions({"b": 0})
    assert output[Named("b")] is OUTPUT
    missing = Named("c")
    for field, told, shown in (("description", "Write  it", "Write it"), ("name", "facts", "facts")):
        setattr(missing, field, told)
        with pytest.raises(IllegalStateError) as caught:
            output[missing]
        text = f"Task '{shown}' has no output in this run: it did not complete, or is another object"
        assert str(caught.value) == text


def test_output_is_found_by_name_and_position() -> None:
    """S-OUT-54, S-OUT-55: also in a copy and after pickling; the error lists the names."""
    first, second = OUTPUT, OUTPUT.replace(raw="second")
    made = EnsembleOutput(task_outputs=[first, second]).with_positions({}, names={"facts": 0, "a_b~2": 1})
    for output in (made, made.replace(raw="x"), pickle.loads(pickle.dumps(made))):  # noqa: S301  our own bytes
        assert (output["facts"], output["a/b~2"]) == (first, second)
        assert (output[0], output[-1]) == (first, second)
    for key, told in (
        ("fact", "No task named 'fact' has an output in this run. Those with one: [facts, a_b~2]"),
        (2, "Output 2 does not exist: this run has 2 outputs"),
        (-3, "Output -3 does not exist: this run has 2 outputs"),
    ):
        with pytest.raises(IllegalStateError) as caught:
            made[key]
        assert str(caught.value) == told


def test_trace_is_never_none() -> None:
    """S-MET-2: made by hand, given as None, and read back."""
    for output in (EnsembleOutput(), EnsembleOutput(trace=None), EnsembleOutput.of("x", None, 1, 0)):  # type: ignore[arg-type]
        assert output.trace == ExecutionTrace.EMPTY
        assert (output.trace.task_traces, output.trace.ensemble_id) == ((), "")
        assert EnsembleOutput.model_validate_json(output.model_dump_json()).trace == ExecutionTrace.EMPTY


def test_output_prints_its_text_and_one_line_of_figures() -> None:
    """S-SET-52: `print`, a notebook's last line and an error of a test show no fields; equality and dumps are as before."""
    metrics = TaskMetrics(llm_call_count=2, total_tokens=1234)
    task = TaskOutput(**{**REQUIRED, "raw": "first\nsecond", "metrics": metrics})
    assert str(task) == "first\nsecond\n[2 model calls, 1,234 tokens, 2.0 s]"
    output = EnsembleOutput(
        raw="long " * 2000,
        task_outputs=[task],
        total_duration=61.25,
        metrics=ExecutionMetrics(total_llm_call_count=1, total_tokens=-1),
    )
    assert str(output) == f"{'long ' * 2000}\n[1 task, 1 model call, 61.2 s]"
    assert len(repr(output)) < 120
    assert "\n" not in repr(task)
    assert repr(task).startswith("<TaskOutput 'first\\nsecond': 2 model calls")
    early = output.replace(exit_reason=ExitReason.TIMEOUT, raw="")
    assert str(early) == "[1 task, 1 model call, 61.2 s, ended early: timeout]"
    assert pickle.loads(pickle.dumps(output)) == output  # noqa: S301  our own bytes
    assert output.model_dump()["raw"] == output.raw


def test_notebook_shows_what_print_shows() -> None:
    """S-SET-52: IPython asks for `_repr_pretty_`."""
    shown: list[str] = []

    class Printer:
        def text(self, text: str) -> None:
            shown.append(text)

    OUTPUT._repr_pretty_(Printer(), cycle=False)
    assert shown == [str(OUTPUT)]


def test_output_is_refused_by_name_when_the_key_is_of_another_type() -> None:
    """S-OUT-54: a slice is no position."""
    with pytest.raises(IllegalStateError, match="by its task, the task's name or a position, got: slice"):
        EnsembleOutput()[slice(0, 1)]  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_output_says_whether_it_has_a_task() -> None:
    """S-OUT-54: by name or by the task object."""
    done = TaskOutput(
        raw="x", task_description="d", agent_role="r", completed_at=datetime.now(UTC), duration=timedelta()
    )
    output = EnsembleOutput(task_outputs=[done]).with_positions({"id": 0}, names={"facts": 0})
    assert "facts" in output
    assert "other" not in output
