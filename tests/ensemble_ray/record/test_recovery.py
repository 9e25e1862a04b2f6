"""What the facts of a run give to whoever goes on with it."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from ensemble_ray import AgentExecutionError, ExitReason, RecordError, RunState, TaskOutput
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.execute.orders import ResumePoint, TaskFailure
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import OutputRecorded
from ensemble_ray.record.head import RunHead
from ensemble_ray.record.journal import in_json_form, plain_data
from ensemble_ray.record.resume.planned import PlannedResumeReader
from ensemble_ray.record.trace import fold_output, fold_trace
from ensemble_ray.runs.outputs import InMemoryOutputs, recall_output
from ensemble_ray.schedule.stimuli import Begun, Cancelled, CancelRequested, Completed, Exited, Failed
from ensemble_ray.values.error_data import error_data
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.value import utc_of

from .facts_of_runs import altered, begun, completed, ended, fact, failed, intent, model, node, output, result

READ, EDIT = node("read", "Read Ray"), node("edit", "Edit")
CANCELLING = [
    fact("stimulus", "run", 106, type="CancelRequested", at=106.0),
    fact("stimulus", "edit#0", 107, type="TaskCancelled", at=107.0, key="edit"),
]


@dataclass
class Report:
    """What a task gives."""

    title: str


class Kept:
    """Recorded outputs as a run in the definition's process holds them; counts those that became objects."""

    def __init__(self, types: Mapping[str, type[object]] | None = None) -> None:
        self.loaded: list[str] = []
        self._types = types or {}
        self._outputs = InMemoryOutputs(self._load)

    def _load(self, instance: str, body: bytes) -> TaskOutput:
        self.loaded.append(instance)
        return typed_output(json.loads(body), self._types.get(node_key(instance)))

    def keep(self, instance: str, given: OutputRecorded) -> None:
        """Keep one as it passes by."""
        self._outputs.stage(instance, json.dumps(plain_data({"output": given.output_data()})["output"]).encode())

    def output(self, instance: str) -> TaskOutput:
        """Return one."""
        return recall_output(self._outputs, instance)

    def resumed(self, recovery: PlannedResumeReader) -> ResumePoint:
        """What its coordinator gets."""
        return recovery.resume(self.output, lambda failure: failure)


def resumed(recovery: PlannedResumeReader) -> ResumePoint:
    """What a coordinator gets where no output is kept."""
    return Kept().resumed(recovery)


def _as_read(facts: list[Fact]) -> list[Fact]:
    """The facts as a store gives them."""
    return [in_json_form(each) for each in facts]


def test_machine_is_told_again_what_it_was_told_when_the_run_goes_on() -> None:
    """S-DUR-30: recorded stimuli, in order."""
    facts = _as_read([*begun(READ, EDIT), *completed("read", output("Read Ray", "x"), 105)])
    assert PlannedResumeReader.of(facts).stimuli == ((Begun(at=100.0),), (Completed(at=105, instance="read#0"),))


def test_stimuli_stand_in_one_group_when_they_were_told_together() -> None:
    """S-DUR-30: a machine that is told two at once may start other tasks than one that is told them in turn."""
    pair = [
        fact("stimulus", "read#0", 105, type="TaskCompleted", at=105.0, key="read", more=1),
        fact("stimulus", "edit#0", 105, type="TaskFailed", at=105.0, key="edit", error_type="E", message="m"),
    ]
    told = PlannedResumeReader.of([*begun(READ, EDIT), *pair]).stimuli
    assert told[1] == (
        Completed(at=105, instance="read#0"),
        Failed(at=105, instance="edit#0", error_type="E", message="m"),
    )
    torn = PlannedResumeReader.of([*begun(READ, EDIT), pair[0]]).stimuli
    assert torn[1] == (Completed(at=105, instance="read#0"),)


def test_cancellation_is_forgotten_when_a_cancelled_run_is_resumed() -> None:
    """S-DUR-35: what was cancelled is done after all; what was done stays done."""
    facts = [*begun(READ, EDIT), *completed("read", output("Read Ray", "x"), 105), *CANCELLING]
    recovered = PlannedResumeReader.of([*facts, ended(108, "cancelled", "cancelled")])
    # The source is told only of stops that it wants itself, as a join of a graph does.
    stopped = Cancelled(at=107, instance="edit#0")
    assert recovered.stimuli == ((Begun(at=100.0),), (Completed(at=105, instance="read#0"),), (stopped,))


def test_cancellation_counts_when_only_the_scheduler_was_replaced() -> None:
    """S-DUR-32: nobody asked for the run to go on."""
    facts = [*begun(READ, EDIT), *CANCELLING]
    told = (Begun(at=100.0),), (CancelRequested(at=106.0),), (Cancelled(at=107.0, instance="edit#0"),)
    assert PlannedResumeReader.of(facts, is_resumed=False).stimuli == told


def test_earlier_cancellation_is_forgotten_when_the_scheduler_of_a_resumed_run_is_replaced() -> None:
    """S-DUR-32, S-DUR-35: the one from before the resumption was taken back then."""
    facts = [*begun(READ, EDIT), *CANCELLING, ended(108, "cancelled", "cancelled"), fact("resume", "run", 200)]
    stopped = (Cancelled(at=107.0, instance="edit#0"),)
    assert PlannedResumeReader.of(facts, is_resumed=False).stimuli == ((Begun(at=100.0),), stopped)
    again = fact("stimulus", "run", 201, type="CancelRequested", at=201.0)
    told = PlannedResumeReader.of([*facts, again], is_resumed=False).stimuli
    assert told == ((Begun(at=100.0),), stopped, (CancelRequested(at=201.0),))


def test_cancellation_counts_when_the_scheduler_was_replaced_twice() -> None:
    """S-DUR-32: the first replacement is noted too, and takes nothing back."""
    restarted = fact("resume", "run", 200, is_restart=True)
    told = (Begun(at=100.0),), (CancelRequested(at=106.0),), (Cancelled(at=107.0, instance="edit#0"),)
    assert PlannedResumeReader.of([*begun(READ, EDIT), *CANCELLING, restarted], is_resumed=False).stimuli == told
    between = [*begun(READ, EDIT), CANCELLING[0], restarted, *CANCELLING[1:]]
    assert PlannedResumeReader.of(between, is_resumed=False).stimuli == told


SPENT = [
    fact("task_exited", "edit#0", 106, reason="budget_exhausted"),
    fact("stimulus", "edit#0", 106, type="TaskExited", at=106.0, key="edit", reason="budget_exhausted"),
]


def test_spent_budget_is_forgotten_when_the_run_is_resumed() -> None:
    """S-BUD-6: what needed more is done after all; what was done stays done."""
    facts = [*begun(READ, EDIT), *completed("read", output("Read Ray", "x"), 105), *SPENT]
    recovered = PlannedResumeReader.of([*facts, ended(108, "budget_exhausted", "budget_exhausted")])
    assert recovered.stimuli == ((Begun(at=100.0),), (Completed(at=105, instance="read#0"),))
    assert resumed(recovered).results.keys() == {"read#0"}


def test_spent_budget_counts_when_only_the_scheduler_was_replaced() -> None:
    """S-BUD-4: nobody asked for the run to go on; and one of before a resumption was made up for then."""
    facts = [*begun(READ, EDIT), *SPENT]
    recovered = PlannedResumeReader.of(facts, is_resumed=False)
    assert recovered.stimuli[1:] == ((Exited(at=106.0, instance="edit#0", reason=ExitReason.BUDGET_EXHAUSTED),),)
    assert resumed(recovered).results["edit#0"].exit_reason is ExitReason.BUDGET_EXHAUSTED
    facts += [ended(108, "budget_exhausted", "budget_exhausted"), fact("resume", "run", 200)]
    recovered = PlannedResumeReader.of(facts, is_resumed=False)
    assert recovered.stimuli == ((Begun(at=100.0),),)
    assert not resumed(recovered).results


def test_early_end_of_an_earlier_record_has_its_reason() -> None:
    """S-DUR-30: they only said whether the time was up."""
    told = fact("stimulus", "edit#0", 106, type="TaskExited", at=106.0, key="edit", is_timeout=True)
    assert PlannedResumeReader.of([*begun(READ, EDIT), told]).stimuli[1] == (
        Exited(at=106.0, instance="edit#0", reason=ExitReason.TIMEOUT),
    )
    left = fact("task_exited", "edit#0", 106, is_timeout=False)
    report = resumed(PlannedResumeReader.of([*begun(READ, EDIT), left])).results["edit#0"]
    assert report.exit_reason is ExitReason.USER_EXIT_EARLY


def test_output_of_a_run_that_spent_its_budget_is_what_it_has() -> None:
    """S-BUD-11, S-BUD-4."""
    facts = [*begun(READ, EDIT), *completed("read", output("Read Ray", "x"), 105), *SPENT]
    given = fold_output([*facts, ended(108, "budget_exhausted", "budget_exhausted")])
    assert (given.raw, given.exit_reason, given.is_complete) == ("x", ExitReason.BUDGET_EXHAUSTED, False)


def test_outputs_are_objects_when_their_types_are_given() -> None:
    """S-DUR-30: whether or not the machine was told of them."""
    told = completed("read", output("Read Ray", "x", parsed=Report("Ray"), kind=Report), 105)
    untold = fact("output", "edit#0", 106, output=output("Edit", "y"))
    kept = Kept({"read": Report})
    again = kept.resumed(PlannedResumeReader.of(_as_read([*begun(READ, EDIT), *told, untold]), kept.keep))
    assert again.started_at == 100.0
    read = again.results["read#0"]
    assert kept.output("read#0") == output("Read Ray", "x", parsed=Report("Ray"), kind=Report)
    assert (read.status, read.at, read.duration_s, read.total_tokens, read.tool_call_count) == (
        "completed", 105.0, 4.0, 120, 1,
    )  # fmt: skip
    assert again.results["edit#0"].output is None
    assert kept.output("edit#0").raw == "y"


def test_newest_output_counts_when_there_are_two() -> None:
    """S-DUR-16: a writer that was replaced may have got its output in just before."""
    facts = [*begun(READ), *completed("read", output("Read Ray", "old"), 105)]
    facts += [fact("resume", "run", 200), *completed("read", output("Read Ray", "new"), 205)]
    kept = Kept()
    PlannedResumeReader.of(_as_read(facts), kept.keep)
    assert kept.output("read#0").raw == "new"


def test_failure_comes_back_with_class_fields_and_trace_when_the_run_goes_on() -> None:
    """S-DUR-39, S-DUR-38."""
    error = AgentExecutionError("Agent 'Reader' failed: no model", "Reader", "Read Ray")
    error.__cause__ = ConnectionError("no model")
    told = fact(
        "task_failed", "read#0", 105, error_type="AgentExecutionError", message=str(error), stack_trace="Traceback",
        error=error_data(error),
    )  # fmt: skip
    facts = _as_read([*begun(READ), model("read#0", 0, 102, calls=["search"]), told])
    again = resumed(PlannedResumeReader.of(facts))
    report = again.results["read#0"]
    assert isinstance(report.failure, TaskFailure)
    named = (report.status, report.failure.error_type, report.failure.message)
    assert named == ("failed", "AgentExecutionError", str(error))
    back = report.failure.error
    assert isinstance(back, AgentExecutionError)
    assert (str(back), back.agent_role) == (str(error), "Reader")
    assert type(back.__cause__).__name__ == "ConnectionError"
    assert report.failure.trace is not None
    assert report.failure.trace.task_description == "Read Ray"
    assert len(report.failure.trace.llm_interactions) == 1
    assert report.total_tokens == 120


def test_failure_is_told_by_name_and_text_when_nothing_more_is_recorded() -> None:
    """S-DUR-39: records of the first version."""
    found = PlannedResumeReader.of([*begun(READ), *failed("read", 105)]).failure("read#0")
    assert found is not None
    assert (type(found.error).__name__, str(found.error)) == ("AgentExecutionError", "LLM failed")


def test_early_exit_has_its_trace_when_the_run_died_before_its_end() -> None:
    """S-DUR-38: what the task did that asked for the end."""
    exited = fact("stimulus", "read#0", 104, type="TaskExited", at=104.0, key="read", reason="timeout")
    recovered = PlannedResumeReader.of([*begun(READ), model("read#0", 0, 102), exited])
    assert recovered.stimuli[1] == (Exited(at=104.0, instance="read#0", reason=ExitReason.TIMEOUT),)
    found = recovered.failure("read#0")
    assert found is not None
    assert (found.status, found.exit_reason) == ("exited", ExitReason.TIMEOUT)
    assert found.trace is not None
    assert len(found.trace.llm_interactions) == 1


def test_early_exit_is_told_when_its_house_died_before_it_could() -> None:
    """S-DUR-31: it is recorded, and not done again."""
    exited = fact("task_exited", "read#0", 104, reason="user_exit_early")
    report = resumed(PlannedResumeReader.of([*begun(READ), exited])).results["read#0"]
    assert (report.status, report.at, report.exit_reason) == ("exited", 104, ExitReason.USER_EXIT_EARLY)


def test_unfinished_task_has_no_report() -> None:
    """S-DUR-30: it is done again, with what is recorded of it."""
    recovered = PlannedResumeReader.of(
        [*begun(READ), model("read#0", 0, 102, calls=["search"]), intent("read#0", 0, 0, 103)]
    )
    assert resumed(recovered).results == {}
    assert recovered.failure("read#0") is None


@pytest.mark.parametrize("data", [{"type": "Unheard"}, {"type": "TaskCompleted", "at": 1.0}])
def test_damaged_stimulus_is_told(data: dict[str, object]) -> None:
    """S-DUR-9: never guessed at."""
    with pytest.raises(RecordError, match="The record is damaged: stimulus"):
        PlannedResumeReader.of([*begun(READ), fact("stimulus", "read#0", 105, **data)])


def test_output_is_parsed_from_its_text_when_its_data_does_not_fit_its_type() -> None:
    """S-DUR-36: after `allow_changes`, another class may fit the same answer."""
    data = output("Read Ray", '{"title": "Ray"}', parsed={"name": "old"}).model_dump(mode="json")
    given = typed_output(data, Report)
    assert given.get_parsed_output(Report) == Report("Ray")
    assert given.output_type is Report


def test_output_stays_data_with_a_warning_when_nothing_fits_its_type(caplog: pytest.LogCaptureFixture) -> None:
    """S-DUR-36: flagged, not guessed."""
    data = output("Read Ray", "x", parsed={"name": "old"}).model_dump(mode="json")
    with caplog.at_level(logging.WARNING, logger="ensemble_ray"):
        given = typed_output(data, Report)
    assert given.parsed_output == {"name": "old"}
    assert "The recorded output of task 'Read Ray' no longer fits Report" in caplog.text


def test_output_that_is_none_is_damage() -> None:
    """S-DUR-9."""
    with pytest.raises(RecordError, match="The record is damaged: output of task"):
        typed_output({"raw": 3})


def test_end_is_forgotten_when_the_run_goes_on() -> None:
    """S-DUR-38: the run is as it stands now."""
    cancelled = [*begun(READ), *CANCELLING, ended(108, "cancelled", "cancelled")]
    assert RunHead(cancelled).state is RunState.CANCELLED
    resumed = [*cancelled, fact("resume", "run", 200)]
    assert RunHead(resumed).state is RunState.INTERRUPTED
    done = [*resumed, *completed("read", output("Read Ray", "x"), 205), ended(206)]
    assert RunHead(done).state is RunState.COMPLETED
    given = fold_output(done)
    assert isinstance(given.task_outputs[0], TaskOutput)
    assert given.total_duration.total_seconds() == 106.0


def test_trace_is_of_the_whole_run_when_a_task_was_partly_done_before_a_crash() -> None:
    """S-DUR-38: effects of before and after are one task."""
    facts = [*begun(READ), model("read#0", 0, 102, calls=["search"]), result("read#0", 0, 0, 103)]
    facts += [fact("resume", "run", 200), model("read#0", 1, 202)]
    (trace,) = fold_trace(facts).task_traces
    assert [len(each.tool_calls) for each in trace.llm_interactions] == [1, 0]
    assert trace.started_at.timestamp() == 101.0
    assert trace.metrics.total_tokens == 240


# Work that was handed on.

MANAGED = {"hierarchy": {"required_workers": ["Editor"]}}


def _managed(*more: Fact) -> list[Fact]:
    """A manager that asked three: the last to be done was asked first, and one failed."""
    plan = begun(node("manager", "Lead", "Manager"))
    facts = [altered(plan[0], plan={**dict(plan[0].data.to_data()["plan"]), **MANAGED}), plan[1]]  # type: ignore[call-overload]
    for number, (key, at) in enumerate([("editor", 108.0), ("reader", 104.0), ("breaker", 103.0)]):
        name = f"manager#0/0/call-{number}"
        asked = {"task_id": "i", "agent_role": key, "task_description": f"do {key}"}
        facts.append(fact("delegation", name, 101, request=asked, worker=key, charged=key, started_at=101.0))
        if key == "breaker":
            failed_at = f"{name}/delegate#0"
            facts += [model(failed_at, 0, 102), fact("task_failed", failed_at, at, error_type="E", message="m")]
            facts.append(fact("tool_result", name, at, outcome="error", text="Error: m"))
            continue
        given = output(f"do {key}", key).replace(agent_role=key.title(), completed_at=utc_of(at))
        facts.append(fact("output", f"{name}/delegate#0", at, output=given))
        facts.append(fact("tool_result", name, at, outcome="success", text=key))
    return _as_read([*facts, *more])


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (fact("output", "manager#0", 110, output=output("Lead", "led")), "completed"),
        (fact("task_failed", "manager#0", 110, error_type="E", message="m"), "failed"),
        (fact("task_exited", "manager#0", 110, reason="timeout"), "exited"),
    ],
)
def test_report_of_a_manager_has_what_its_workers_gave(end: Fact, status: str) -> None:
    """S-DUR-72, S-DUR-74, S-HIER-6, S-TRC-43: in the order in which they were done, and what was done for nothing."""
    kept = Kept()
    results = kept.resumed(PlannedResumeReader.of(_managed(end), kept.keep)).results
    assert set(results) == {"manager#0"}
    report = results["manager#0"]
    assert report.status == status
    assert [(role, given.raw) for role, given in report.delegated] == [("Reader", "reader"), ("Editor", "editor")]
    assert [trace.task_description for trace in report.failed_delegations] == ["do breaker"]


def test_worker_that_gave_its_result_to_nobody_is_not_reported() -> None:
    """S-DUR-72: its asker was told that it was stopped."""
    facts = [each for each in _managed() if not (each.kind == "tool_result" and each.name == "manager#0/0/call-0")]
    told = in_json_form(fact("tool_result", "manager#0/0/call-0", 109, outcome="error", text="Error: stopped"))
    ended_with = in_json_form(fact("output", "manager#0", 110, output=output("Lead", "led")))
    kept = Kept()
    report = kept.resumed(PlannedResumeReader.of([*facts, told, ended_with], kept.keep)).results["manager#0"]
    assert [role for role, _ in report.delegated] == ["Reader"]


def test_ends_of_workers_are_no_ends_of_tasks() -> None:
    """S-DUR-74: neither an output nor a failure nor an early exit of theirs."""
    exited = in_json_form(fact("task_exited", "manager#0/0/call-3/delegate#0", 109, reason="user_exit_early"))
    recovered = PlannedResumeReader.of(_managed(exited))
    assert resumed(recovered).results == {}


def test_roles_of_workers_come_back_to_the_machine() -> None:
    """S-DUR-30, S-HIER-50: it decides by them whether a required worker is missing."""
    told = fact("stimulus", "manager#0", 111, type="TaskCompleted", at=111.0, key="manager", delegated_roles=["Editor"])
    (_, (stimulus,)) = PlannedResumeReader.of(_managed(in_json_form(told))).stimuli
    assert isinstance(stimulus, Completed)
    assert stimulus == Completed(at=111.0, instance="manager#0", delegated_roles=("Editor",))


def test_damaged_decision_is_told() -> None:
    """S-DUR-9: with the call's name."""
    facts = [*begun(READ), fact("delegation", "read#0/0/call-0", 101, request={"agent_role": ""}, worker=None)]
    with pytest.raises(RecordError, match="delegation 'read#0/0/call-0'"):
        fold_trace(facts)
