"""Running under an id that was used before."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray.errors import RunExistsError, ValidationError
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import RunState
from ensemble_ray.record.journal_file import OpenRun, open_run
from ensemble_ray.record.rerun import recorded_output

from .facts_of_runs import RUN, begun, completed, ended, failed, header, node, output

READ = node("read", "Read Ray")
HEADER = header(READ)
DONE = [*begun(READ), *completed("read", output("Read Ray", "facts"), 105), ended(106)]


class Named:
    """Anything with a hidden id."""

    def __init__(self, object_id: str) -> None:
        self.object_id = object_id


async def _record(home: Path, facts: Sequence[Fact], state: RunState | None) -> OpenRun:
    run = open_run(home, RUN)
    run.directory.write_state(RunState.RUNNING)
    await run.journal.append(facts)
    await run.journal.close()
    if state is not None:
        run.directory.write_state(state)
    return run


def test_run_begins_when_the_id_is_new(tmp_path: Path) -> None:
    """S-SET-39: there is nothing to answer from."""
    assert recorded_output(tmp_path, RUN, HEADER) is None


async def test_recorded_output_is_given_when_the_run_is_finished(tmp_path: Path) -> None:
    """S-SET-39: same definition and inputs, whatever the hidden ids of this process are."""
    await _record(tmp_path, DONE, RunState.COMPLETED)
    again = header({**READ, "object_id": "another"})
    given = recorded_output(tmp_path, RUN, again, object_ids={"read": "another"})
    assert given is not None
    assert (given.raw, given.run_id) == ("facts", RUN)
    assert given.get_output(Named("another")) == given.task_outputs[0]


@pytest.mark.parametrize(
    ("current", "text"),
    [
        (header(node("read", "Read Dask")), "nodes.0.description: 'Read Ray' -> 'Read Dask'"),
        (header(READ, inputs={"topic": "Dask"}), "topic: 'Ray' -> 'Dask'"),
        (header(READ, node("edit", "Edit")), "nodes.1: absent -> "),
        (header(READ, digest="other"), "something that the plan does not show"),
    ],
)
async def test_answer_is_refused_when_definition_or_inputs_differ(
    tmp_path: Path, current: dict[str, object], text: str
) -> None:
    """S-SET-39: an error that says where."""
    await _record(tmp_path, DONE, RunState.COMPLETED)
    with pytest.raises(ValidationError, match="Run 'run-1' is finished, and was of another definition") as caught:
        recorded_output(tmp_path, RUN, current)
    assert text in str(caught.value)


async def test_run_exists_while_it_is_running(tmp_path: Path) -> None:
    """S-SET-39: an EnsembleError of its own."""
    run = await _record(tmp_path, begun(READ), None)
    with pytest.raises(RunExistsError, match="Run 'run-1' is running"):
        recorded_output(tmp_path, RUN, HEADER)
    run.directory.release()


async def test_resume_is_named_when_the_run_was_interrupted(tmp_path: Path) -> None:
    """S-SET-39: its owner is gone without an end."""
    run = await _record(tmp_path, begun(READ), None)
    run.directory.release()
    with pytest.raises(ValidationError, match=r"Run 'run-1' was interrupted .*: resume it, or choose another run_id"):
        recorded_output(tmp_path, RUN, HEADER)


async def test_resume_is_named_when_the_run_was_cancelled(tmp_path: Path) -> None:
    """S-SET-39, S-SET-27: a cancelled run can be resumed."""
    await _record(tmp_path, [*begun(READ), ended(103, "cancelled", "cancelled")], RunState.CANCELLED)
    with pytest.raises(ValidationError, match=r"Run 'run-1' was cancelled .*: resume it, or choose another run_id"):
        recorded_output(tmp_path, RUN, HEADER)


async def test_failed_run_is_not_run_again(tmp_path: Path) -> None:
    """S-SET-39: one id, one run."""
    await _record(tmp_path, [*begun(READ), *failed("read", 105), ended(106, "failed", "error")], RunState.FAILED)
    with pytest.raises(ValidationError, match="Run 'run-1' has failed"):
        recorded_output(tmp_path, RUN, HEADER)


async def test_facts_decide_when_the_process_died_before_it_wrote_the_state(tmp_path: Path) -> None:
    """S-SET-39: the end is recorded, so the run is finished."""
    run = await _record(tmp_path, DONE, None)
    run.directory.release()
    given = recorded_output(tmp_path, RUN, HEADER)
    assert given is not None
    assert given.raw == "facts"


async def test_run_begins_when_nothing_was_recorded(tmp_path: Path) -> None:
    """S-SET-39: it was stopped before its first fact."""
    run = await _record(tmp_path, [], None)
    run.directory.release()
    assert recorded_output(tmp_path, RUN, HEADER) is None


def test_id_is_refused_when_it_cannot_name_a_record(tmp_path: Path) -> None:
    """S-SET-39: before anything is looked for."""
    with pytest.raises(ValidationError, match="cannot name a record"):
        recorded_output(tmp_path, "../etc", HEADER)
