"""What each reason to submit a run means for its record."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ensemble_ray import Durability, RunExistsError, RunState
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.ports import Persistence
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import OwnedRun, StoreAddress
from ensemble_ray.runs.ports import SubmissionReason, claim_run, release_run

PLAN = Fact(run="r", name="run", at=1.0, data=PlanRecorded())


@pytest.mark.parametrize(
    ("submission", "is_recorded", "takes_over", "is_restart"),
    [
        (SubmissionReason.FIRST, False, False, False),
        (SubmissionReason.RESUMED, True, False, False),
        (SubmissionReason.TAKEN_OVER, True, True, False),
        (SubmissionReason.RESUBMITTED, False, False, False),
        (SubmissionReason.RESTARTED, True, False, True),
    ],
)
def test_each_submission_says_what_it_expects_of_the_record(
    submission: SubmissionReason, *, is_recorded: bool, takes_over: bool, is_restart: bool
) -> None:
    """S-DUR-17, S-DUR-32: only a person's wish takes a run over; only a restart lets a cancellation stand."""
    assert (submission.is_recorded, submission.takes_over, submission.is_restart) == (
        is_recorded,
        takes_over,
        is_restart,
    )
    assert pickle.loads(pickle.dumps(submission)) is submission  # noqa: S301  what was just written


def test_resume_takes_over_where_it_was_asked_to() -> None:
    """S-DUR-17: by the argument of `resume`."""
    assert SubmissionReason.of_resume(takes_over=False) is SubmissionReason.RESUMED
    assert SubmissionReason.of_resume(takes_over=True) is SubmissionReason.TAKEN_OVER


def test_run_without_an_answer_is_submitted_again_as_what_it_is() -> None:
    """S-DUR-32: a first submission may have arrived; one that goes on from a record does so in any case."""
    assert SubmissionReason.FIRST.without_answer() is SubmissionReason.RESUBMITTED
    assert SubmissionReason.RESUBMITTED.without_answer() is SubmissionReason.RESUBMITTED
    assert SubmissionReason.RESUMED.without_answer() is SubmissionReason.RESUMED
    assert SubmissionReason.TAKEN_OVER.without_answer() is SubmissionReason.TAKEN_OVER


def test_resubmission_is_settled_by_the_record() -> None:
    """S-DUR-32: a run that began is restarted, so that what it was told stands; else it begins."""
    assert SubmissionReason.RESUBMITTED.resolve(is_recorded=True) is SubmissionReason.RESTARTED
    assert SubmissionReason.RESUBMITTED.resolve(is_recorded=False) is SubmissionReason.FIRST
    assert SubmissionReason.RESUMED.resolve(is_recorded=False) is SubmissionReason.RESUMED


async def claim(home: Path, submission: SubmissionReason) -> OwnedRun:
    """The run, owned by this process."""
    store = store_at(StoreAddress(home=str(home)))
    return await claim_run(store, "r", origin="", durability=Durability.EFFECTS, submission=submission)


async def test_claimed_run_is_running_and_a_released_one_is_interrupted(tmp_path: Path) -> None:
    """S-DUR-16: each owner has a higher epoch than the one before, and reads what that one wrote."""
    store = store_at(StoreAddress(home=str(tmp_path)))
    first = await claim(tmp_path, SubmissionReason.FIRST)
    await first.journal.append((PLAN,), until=Persistence.COMMITTED)
    running = await store.summary("r")
    await release_run(first)
    released = await store.summary("r")
    second = await claim(tmp_path, SubmissionReason.RESUMED)
    await release_run(second)

    assert running is not None
    assert released is not None
    assert (running.state, released.state) == (RunState.RUNNING, RunState.INTERRUPTED)
    assert second.epoch > first.epoch
    assert [fact.kind for fact in await store.facts("r")] == ["plan"]


@pytest.mark.heavy
async def test_owned_run_is_claimed_only_by_force(tmp_path: Path) -> None:
    """S-DUR-17: a run that hangs is taken from its owner where a person says so."""
    owner = await claim(tmp_path, SubmissionReason.FIRST)
    await owner.journal.append((PLAN,), until=Persistence.COMMITTED)
    with pytest.raises(RunExistsError):
        await claim(tmp_path, SubmissionReason.RESUMED)
    heir = await claim(tmp_path, SubmissionReason.TAKEN_OVER)
    await release_run(heir)
    await release_run(owner)

    assert heir.epoch > owner.epoch
