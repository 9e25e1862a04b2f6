"""Asking for the end of a run that has ended: nothing happens, on both runtimes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray import Ensemble, ExitReason
from tests.builders import agent, task
from tests.scenarios.teams import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray import Runtime
    from ensemble_ray.testing import ScriptedModel


async def test_nothing_happens_when_an_ended_run_is_cancelled(
    runtime: Runtime, scripted: Callable[..., ScriptedModel]
) -> None:
    """S-SET-27: its record is closed; the cancellation is neither an error nor a fact."""
    begun = Ensemble(tasks=[task("writing", agent(scripted("done")))]).start(runtime=runtime)
    assert begun.result(PATIENCE_S).exit_reason is ExitReason.COMPLETED
    await begun.acancel()
    assert (await begun.aresult()).raw == "done"
