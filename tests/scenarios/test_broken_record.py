"""A disk that takes no more: the run ends with an error that says so; it never waits for ever."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

import pytest

from ensemble_ray import Ensemble, RecordError
from tests.builders import agent, task
from tests.scenarios.dying import process_of
from tests.scenarios.teams import PATIENCE_S, Marks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from ensemble_ray import RayRuntime
    from ensemble_ray.testing import ScriptedModel


@contextlib.contextmanager
def full_disk(pid: int) -> Generator[None, None, None]:
    """Files of that process take no more bytes in the block; a limit on their size stands for a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_run_ends_with_an_error_when_the_disk_of_the_scheduler_is_full(
    ray_runtime: RayRuntime, scripted: Callable[..., ScriptedModel], tmp_path: Path
) -> None:
    """S-SET-26, S-PAR-34: a result that cannot be recorded ends the run; the next one is not concerned."""
    gate = Marks(tmp_path / "marks")

    def second(_: object) -> str:
        gate.add("second")
        gate.wait("full")
        return "two"

    writer = agent(scripted("one", second, "three", "four"))
    begun = Ensemble(tasks=[task(f"writing {number}", writer) for number in range(4)]).start(runtime=ray_runtime)
    gate.wait("second")
    with full_disk(process_of("scheduler")):
        gate.add("full")
        with pytest.raises(RecordError, match="Cannot write"):
            begun.result(PATIENCE_S)
    team = Ensemble(tasks=[task("writing", agent(scripted("after")))])
    assert team.start(runtime=ray_runtime).result(PATIENCE_S).raw == "after"
