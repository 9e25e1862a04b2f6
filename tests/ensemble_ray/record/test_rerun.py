"""Running under an id that was used before, and whether two definitions are the same."""

import re

import pytest
from msgspec.structs import replace

from ensemble_ray import RunExistsError, RunState, ValidationError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import FailureRecorded, OutputRecorded, PlanRecorded
from ensemble_ray.record.resume.reading import check_same, is_answered, recorded_output, what_differs
from ensemble_ray.record.stores import fork_advice, resume_advice

from .facts_of_runs import RUN, begun, completed, ended, failed, header, node, output

READ = node("read", "Read Ray")
HEADER = header(READ)
DONE = [*begun(READ), *completed("read", output("Read Ray", "facts"), 105), ended(106)]


class Named:
    """Anything with a hidden id."""

    def __init__(self, object_id: str) -> None:
        self.object_id = object_id


def test_recorded_output_is_given_when_the_run_is_finished() -> None:
    """S-SET-39: same definition and inputs, whatever the hidden ids of this process are."""
    again = header({**READ, "object_id": "another"})
    given = recorded_output(RUN, RunState.COMPLETED, DONE, again, object_ids={"read": "another"})
    assert given is not None
    assert (given.raw, given.run_id) == ("facts", RUN)
    assert given.get_output(Named("another")) == given.task_outputs[0]


@pytest.mark.parametrize(
    ("current", "text"),
    [
        (header(node("read", "Read Dask")), "plan.nodes.0.description: 'Read Ray' -> 'Read Dask'"),
        (header(READ, inputs={"topic": "Dask"}), "inputs.topic: 'Ray' -> 'Dask'"),
        (header(READ, node("edit", "Edit")), "plan.nodes.1: absent -> "),
        (header(READ, definition={"agents": {"a": {"max_iterations": 3}}}), "definition.agents: absent -> "),
    ],
)
def test_answer_is_refused_when_definition_or_inputs_differ(current: dict[str, object], text: str) -> None:
    """S-SET-39, S-DUR-36: an error that says where."""
    with pytest.raises(ValidationError, match="Run 'run-1' is finished, and was of another definition") as caught:
        recorded_output(RUN, RunState.COMPLETED, DONE, current)
    assert text in str(caught.value)


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.RUNNING])
def test_run_exists_while_it_is_running(state: RunState) -> None:
    """S-SET-39: an EnsembleError of its own."""
    with pytest.raises(RunExistsError, match="Run 'run-1' is running"):
        recorded_output(RUN, state, begun(READ), HEADER)


def test_run_that_waits_is_not_begun_again() -> None:
    """S-REV-114: it goes on when its gates are decided."""
    facts = [*begun(READ), ended(9.0, "waiting")]
    with pytest.raises(ValidationError, match=r"waits for reviews .*\. Decide them, and resume it"):
        recorded_output(RUN, RunState.WAITING, facts, HEADER)


def test_resume_is_named_when_the_run_was_interrupted() -> None:
    """S-SET-39, S-DUR-34: its owner is gone without an end."""
    with pytest.raises(ValidationError, match=r"Run 'run-1' was interrupted .*\. Resume it: ensemble-ray resume run-1"):
        recorded_output(RUN, RunState.INTERRUPTED, begun(READ), HEADER)


def test_resume_is_named_when_the_run_was_cancelled() -> None:
    """S-SET-39, S-SET-27: a cancelled run can be resumed."""
    facts = [*begun(READ), ended(103, "cancelled", "cancelled")]
    with pytest.raises(ValidationError, match=r"Run 'run-1' was cancelled .*\. Resume it: ensemble-ray resume run-1"):
        recorded_output(RUN, RunState.CANCELLED, facts, HEADER)


def test_fork_is_named_when_the_run_has_failed() -> None:
    """S-SET-39, S-DUR-35, S-DUR-153: one id, one run; the fork begins with the task that failed."""
    edit = node("edit", "Edit")
    done = completed("read", output("Read Ray", "facts"), 105)
    facts = [*begun(READ, edit), *done, *failed("edit", 105), ended(106, "failed", "error")]
    with pytest.raises(ValidationError, match=r"Run 'run-1' has failed .*: ensemble-ray fork run-1 --from edit$"):
        recorded_output(RUN, RunState.FAILED, facts, header(READ, edit))


def test_no_fork_is_named_when_there_is_nothing_to_use() -> None:
    """S-DUR-153: the first task failed."""
    facts = [*begun(READ), *failed("read", 105), ended(106, "failed", "error")]
    with pytest.raises(ValidationError, match=r"is not run again under its id: choose another run_id$"):
        recorded_output(RUN, RunState.FAILED, facts, HEADER)


@pytest.mark.parametrize(
    ("failing", "origin", "advice"),
    [
        ("edit", "team.yaml", "ensemble-ray fork run-1 --from edit"),
        ("loop:refine#1/edit", "team.yaml", "ensemble-ray fork run-1 --from 'loop:refine#1/edit#0'"),
        ("edit", "", "ensemble_ray.fork('run-1', 'edit', ensemble), in the program that began it"),
        ("read#0/0/call-1/delegate", "team.yaml", ""),
    ],
)
def test_the_fork_that_is_named_can_be_made(failing: str, origin: str, advice: str) -> None:
    """S-DUR-153, S-DUR-154: with the task or the execution that failed; where the definition is in a program, by a call."""
    data = next(each.data for each in failed("edit", 106) if isinstance(each.data, FailureRecorded))
    failure = Fact(run=RUN, name=f"{failing}#0", at=106.0, data=data)
    assert fork_advice(RUN, origin, [*DONE, failure]) == advice


@pytest.mark.parametrize(
    ("unit", "outputs", "begins"),
    [
        ("loop:refine", ["loop:refine#0/edit#0", "loop:refine#1/edit#0"], "--from 'loop:refine#1'"),
        ("graph:desk#1", ["graph:desk#0/read#0", "graph:desk#1/edit#0"], "--from 'graph:desk#1'"),
        ("phase:a#0/loop:refine", ["read#0", "phase:a#0/loop:refine#2/edit#0"], "--from 'phase:a#0/loop:refine#2'"),
        ("loop:refine", ["loop:refine#0/edit#0"], ""),
        ("loop:refine", ["read#0"], ""),
    ],
)
def test_a_fork_begins_with_the_last_execution_of_the_unit_that_failed(
    unit: str, outputs: list[str], begins: str
) -> None:
    """S-DUR-153: of a loop at its cap, or a graph without an edge; none if only that execution has outputs."""
    data = next(each.data for each in DONE if isinstance(each.data, OutputRecorded))
    facts = [Fact(run=RUN, name=name, at=105.0, data=data) for name in outputs]
    assert fork_advice(RUN, "team.yaml", facts, unit=unit) == f"{begins and 'ensemble-ray fork run-1 '}{begins}"


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        ("team.yaml", "ensemble-ray resume run-1 --max-tokens N"),
        ("", "ensemble_ray.resume('run-1', ensemble, max_tokens=N), in the program that began it"),
        (
            None,
            "ensemble-ray resume run-1 --max-tokens N, or ensemble_ray.resume('run-1', ensemble, max_tokens=N), in the program that began it",
        ),
    ],
)
def test_the_resume_that_is_named_can_be_made(origin: str | None, advice: str) -> None:
    """S-DUR-154: where the definition is in a program, by a call; both ways where that is not known."""
    assert resume_advice(RUN, origin, field="max_tokens=N") == advice


@pytest.mark.parametrize(
    "state", [RunState.FAILED, RunState.BUDGET_EXHAUSTED, RunState.WAITING, RunState.CANCELLED, RunState.INTERRUPTED]
)
@pytest.mark.parametrize(
    ("origin", "advice"), [("", "ensemble_ray.resume('run-1', "), ("a.yaml", "ensemble-ray resume ")]
)
def test_a_run_that_is_not_over_names_a_resume_that_can_be_made(state: RunState, origin: str, advice: str) -> None:
    """S-DUR-154, S-SET-39."""
    recorded = PlanRecorded(items={}, plan={"workflow": "map"}, origin=origin)
    with pytest.raises(ValidationError, match=re.escape(f": {advice}")) as told:
        is_answered(RUN, state, recorded_state=state, recorded=recorded, header=recorded)
    assert ("ensemble_ray.resume" in str(told.value)) is (not origin)


def test_resume_is_named_when_a_dynamic_run_has_failed() -> None:
    """S-MR-163, S-SET-39: it tries again what failed; a finished one is answered by its record."""
    recorded = PlanRecorded(items={}, plan={"workflow": "map"})
    with pytest.raises(ValidationError, match=f"'{RUN}' has failed.*Resume it, which tries again what failed"):
        is_answered(RUN, RunState.FAILED, recorded_state=RunState.FAILED, recorded=recorded, header=recorded)
    done = RunState.COMPLETED
    assert is_answered(RUN, done, recorded_state=done, recorded=recorded, header=recorded)
    assert not is_answered(
        RUN, RunState.INTERRUPTED, recorded_state=RunState.INTERRUPTED, recorded=PlanRecorded(), header=recorded
    )


def test_facts_decide_when_the_process_died_before_it_wrote_the_state() -> None:
    """S-SET-39: the end is recorded, so the run is finished."""
    given = recorded_output(RUN, RunState.INTERRUPTED, DONE, HEADER)
    assert given is not None
    assert given.raw == "facts"


def test_run_begins_when_nothing_was_recorded() -> None:
    """S-SET-39: it was stopped before its first fact."""
    assert recorded_output(RUN, RunState.INTERRUPTED, [], HEADER) is None


def test_every_difference_is_named_when_a_changed_definition_would_go_on() -> None:
    """S-DUR-36: by its path, with what to do."""
    recorded = header(READ, definition={"agents": {"reader": {"llm": {"model": "small"}}}})
    current = header(
        node("read", "Read Dask"), definition={"agents": {"reader": {"llm": {"model": "large"}}}}, workflow="sequential"
    )
    with pytest.raises(ValidationError, match="Run 'run-1' was of another definition: ") as caught:
        check_same(RUN, recorded, current, doing="resume")
    text = str(caught.value)
    assert "plan.nodes.0.description: 'Read Ray' -> 'Read Dask'" in text
    assert "definition.agents.reader.llm.model: 'small' -> 'large'" in text
    assert "allow_changes=True" in text
    assert "--allow-changes" in text


def test_inputs_are_named_once_when_they_differ() -> None:
    """S-DUR-36: the plan repeats them."""
    current = header(READ, inputs={"topic": "Dask"})
    again = replace(current, plan={**(current.plan or {}), "inputs": {"topic": "Dask"}})
    assert what_differs(HEADER, again) == ["inputs.topic: 'Ray' -> 'Dask'"]


def test_nothing_differs_when_both_say_the_same() -> None:
    """S-DUR-36."""
    check_same(RUN, HEADER, header(READ), doing="resume")
