"""What agents' processes say reaches the driver's log, with the agent's role in front."""

from __future__ import annotations

import logging

import pytest

from ensemble_ray import Ensemble, RayRuntime, tool
from ensemble_ray.process.context import NOTICES
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task


@tool
def shout(text: str) -> str:
    """Print, warn and fail."""
    print(f"said {text} \x1b[2J")  # noqa: T201  as user code does
    logging.getLogger("team").warning("beware of %s", text)
    raise KeyError(text)


def _team() -> Ensemble:
    model = ScriptedModel(call("shout", '{"text": "zzz"}'), "done")
    return Ensemble(tasks=[task("one", agent=agent(model, tools=[shout]))])


def test_prints_warnings_and_errors_of_tools_reach_the_driver(
    ray_runtime: RayRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SET-57: a print as a notice, the records under their own loggers; all there when the run has ended."""
    assert _team().run(runtime=ray_runtime).raw == "done"
    told = [(each.name, each.getMessage()) for each in caplog.records]
    assert told.count((NOTICES, "Writer: said zzz \\x1b[2J")) == 1
    assert told.count(("team", "Writer: beware of zzz")) == 1
    (failed,) = [each for each in caplog.records if "Tool error: KeyError: 'zzz'" in each.getMessage()]
    assert (failed.levelno, failed.name.partition(".")[0]) == (logging.WARNING, "ensemble_ray")
    assert failed.getMessage().startswith("Writer: ")
    assert failed.getMessage().isprintable()


def test_nothing_is_forwarded_when_it_is_turned_off(ray_cluster: str, caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-57: `log_to_driver=False`."""
    assert ray_cluster
    with RayRuntime(log_to_driver=False) as runtime:
        assert _team().run(runtime=runtime).raw == "done"
    assert not [each for each in caplog.records if "zzz" in each.getMessage()]
