"""RayRun, with a scheduler and a cluster that are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import ActorUnavailableError

from ensemble_ray import EnsembleError, ExitReason, Plan, RunState
from ensemble_ray.actors.driver import cluster as connection
from ensemble_ray.actors.driver.runtime import RayRun
from ensemble_ray.actors.link import reach
from ensemble_ray.actors.link.packing import pack, pack_output, unpack
from ensemble_ray.actors.link.wire import EndPage, Submission, WireOutcome
from ensemble_ray.execute.orders import RunContext, RunOutcome
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.ports import SubmissionReason
from tests.actors.test_wire import output_of

if TYPE_CHECKING:
    from ensemble_ray.runs.ports import RunRequest


class Lost:
    """A scheduler whose calls fail at once, as they do when its host refuses connections."""

    @property
    def wait(self) -> Lost:
        """Its method."""
        return self

    async def remote(self, run_id: str, *_: object) -> None:
        """Call it."""
        raise ActorUnavailableError(f"{run_id} cannot be asked for", None)


@pytest.mark.heavy
async def test_driver_is_told_when_the_cluster_is_gone_and_calls_fail_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DUR-34: before Ray notices, which ends the driver's process; the scheduler's death is told of once."""
    looks = iter([True, False, True, *[False] * 3])

    async def answers() -> bool:
        return next(looks)

    monkeypatch.setattr(connection, "_answers", answers)
    monkeypatch.setattr(reach, "_PATIENT_PAUSES_S", (0.0,))
    lost = cast("Submission", SimpleNamespace(store=StoreAddress(home="/nowhere")))
    run = RayRun(cast("RunRequest", SimpleNamespace(run_id="r", origin="team.yaml")), lost, Lost())
    with pytest.raises(EnsembleError, match=r"the cluster is gone.*ensemble-ray resume r") as caught:
        await run.wait()
    assert caught.value.run_id == "r"
    assert next(looks, None) is None
    ours = [record for record in caplog.records if record.name == connection.__name__]  # other threads log too
    assert [record.message for record in ours] == [
        "Run r: the scheduler's process died; the run continues when it is back"
    ]


class Paging:
    """A scheduler that has an end in pages, and is another one when it is asked for a page the second time."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.forgotten: list[str] = []
        self.submitted: list[SubmissionReason] = []
        self._lives = ["first", "second"]

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self, f"on_{name}"))

    async def on_wait(self, _: str, cursor: int, end_id: str) -> bytes | None:
        """Give a page; the first life ends behind its second page."""
        self.asked.append((cursor, end_id))
        if len(self.asked) == 3:
            self._lives.pop(0)
        if len(self.asked) in {3, 4}:
            return None  # nothing is known of that end, nor of the run before it was submitted again
        return pack(self._page(cursor))

    async def on_submit(self, body: bytes) -> None:
        """Take the run."""
        self.submitted.append(unpack(body, Submission).reason)

    def on_drop(self, _: str, end_id: str) -> None:
        """Drop an end."""
        self.forgotten.append(end_id)

    def _page(self, cursor: int) -> EndPage:
        end: WireOutcome = RunOutcome(
            state=RunState.COMPLETED,
            exit_reason=ExitReason.COMPLETED,
            started_at=1.0,
            completed_at=2.0,
            completed=[(f"t{cursor}", pack_output(output_of(f"t{cursor}")))],
        )
        return EndPage(end_id=self._lives[0], cursor=cursor + 1, is_last=cursor == 2, end=end)


async def test_all_pages_come_when_the_scheduler_is_started_anew_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-32: the run is submitted again, its end is read from the first page on, and forgotten once all is here."""

    async def answers() -> bool:
        return True

    monkeypatch.setattr(connection, "_answers", answers)
    scheduler = Paging()
    submission = Submission(
        run_id="r",
        plan=Plan(workflow="sequential", nodes=()),
        context=RunContext(run_id="r", workflow="sequential", total_tasks=3),
        header=PlanRecorded(),
        templates=(),
        tasks={},
        store=StoreAddress(home="/nowhere"),
    )
    run = RayRun(cast("RunRequest", SimpleNamespace(run_id="r", origin="team.yaml")), submission, scheduler)
    outcome = await run.wait()
    assert [(key, output.raw) for key, output in outcome.completed] == [("t0", "t0"), ("t1", "t1"), ("t2", "t2")]
    assert scheduler.asked == [(0, ""), (1, "first"), (2, "first"), (0, ""), (0, ""), (1, "second"), (2, "second")]
    assert scheduler.submitted == [SubmissionReason.RESUBMITTED]
    assert scheduler.forgotten == ["second"]
