"""How a driver comes to a cluster, where it does not."""

from __future__ import annotations

import pytest
import ray

from actors.connection import LOCAL, join_or_start
from ensemble_ray.errors import EnsembleError


@pytest.mark.parametrize("kind", [Exception, TimeoutError, RuntimeError])
def test_what_to_do_is_told_when_ray_cannot_be_started(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    """Whatever it raises: of a start that takes too long that is an `Exception`."""

    def init(**_: object) -> None:
        raise kind("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        EnsembleError, match=r"Ray cannot be started on this machine: .*timed out during startup"
    ) as told:
        join_or_start(LOCAL, {})
    assert isinstance(told.value.__cause__, kind)
