"""What each type of process is made with, as plain classes: no cluster."""

from __future__ import annotations

import pytest

from ensemble_ray.actors import spawn
from ensemble_ray.actors.scheduler.processes import _CLASSES
from ensemble_ray.actors.worker import agent
from ensemble_ray.actors.worker.agent import AgentActor
from ensemble_ray.llm.limits.endpoints import process_endpoints


@pytest.mark.parametrize("made", _CLASSES.values())
async def test_process_reports_to_the_scheduler_that_made_it(
    made: type[AgentActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-CLU-60: which may be one of several; all types are made in the same way."""
    asked: list[str] = []
    monkeypatch.setattr(spawn, "existing", asked.append)
    monkeypatch.setattr(agent, "freeze_modules", lambda: None)
    monkeypatch.setattr(process_endpoints(), "share", process_endpoints().share)  # set by it, and set back
    made("agent-1", "scheduler-1")
    assert asked[0] == "scheduler-1"


@pytest.mark.parametrize("made", _CLASSES.values())
def test_head_of_ray_keeps_no_calls_of_processes(made: type[object]) -> None:
    """S-CLU-74: an endpoint makes some twenty of them a request."""
    assert spawn.actor_class(made, max_restarts=0)._default_options["enable_task_events"] is False
