"""Runs with loops, phases or a graph are neither forked nor replayed, and nothing is done then."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Ensemble, InlineRuntime, Loop
from ensemble_ray.errors import ValidationError
from ensemble_ray.recovery.forking import fork
from ensemble_ray.testing import ScriptedModel, replay
from tests.builders import agent, task

WHY = "has loops, phases or a graph, whose tasks run several times: it cannot be "


def _recorded(home: InlineRuntime) -> tuple[Ensemble, ScriptedModel]:
    """Return a team with a loop whose run is recorded, and its model."""
    model = ScriptedModel("a", "b")
    team = Ensemble(loops=[Loop(name="refine", body=[task("write", agent(model), name="writer")], max_iterations=2)])
    team.run(runtime=home, run_id="one")
    return team, model


def test_run_with_units_is_not_forked(tmp_path: Path) -> None:
    """S-DUR-120: the message says what can be done."""
    home = InlineRuntime(home=tmp_path)
    team, model = _recorded(home)
    with pytest.raises(ValidationError) as caught:
        fork("one", "writer", team, runtime=home)
    resume = "Where it was interrupted or cancelled, ensemble-ray resume one goes on with it"
    assert str(caught.value) == f"Run 'one' {WHY}forked. {resume}"
    assert len(model.calls) == 2


def test_run_with_units_is_not_replayed(tmp_path: Path) -> None:
    """S-DUR-121."""
    home = InlineRuntime(home=tmp_path)
    team, _ = _recorded(home)
    with pytest.raises(ValidationError) as caught:
        replay("one", team, home=tmp_path)
    assert str(caught.value) == f"Run 'one' {WHY}replayed. A resume with today's definition says whether that differs"
