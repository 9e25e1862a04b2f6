"""RayRun, with a scheduler and a cluster that are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from ray.exceptions import ActorUnavailableError

from ensemble_ray import EnsembleError
from ensemble_ray.actors.driver import cluster as connection
from ensemble_ray.actors.driver.run import RayRun
from ensemble_ray.actors.link import reach
from ensemble_ray.record.stores import StoreAddress

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import Submission
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


async def test_driver_is_told_when_the_cluster_is_gone_and_calls_fail_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DUR-34: before Ray notices, which ends the driver's process; the scheduler's death is told of once."""
    looks = iter([True, False, True, *[False] * 3])

    async def answers() -> bool:
        return next(looks)

    monkeypatch.setattr(connection, "_answers", answers)
    monkeypatch.setattr(reach, "_PATIENT_PAUSES_S", (0.0,))
    submission = cast("Submission", SimpleNamespace(store=StoreAddress(home="/nowhere")))
    run = RayRun(cast("RunRequest", SimpleNamespace(run_id="r")), submission, Lost())
    with pytest.raises(EnsembleError, match=r"the cluster is gone.*ensemble-ray resume r") as caught:
        await run.wait()
    assert caught.value.run_id == "r"
    assert next(looks, None) is None
    ours = [record for record in caplog.records if record.name == connection.__name__]  # other threads log too
    assert [record.message for record in ours] == [
        "Run r: the scheduler's process died; the run goes on when it is back"
    ]
