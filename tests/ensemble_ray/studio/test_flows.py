"""Places of graphs: computed once for the same nodes and edges."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.studio import documents as flows
from ensemble_ray.studio.documents import FlowDrawer
from ensemble_ray.studio.views.steps import StepsView

from .stored_runs import recorded_team


async def test_a_change_of_status_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-26: the layout is that of before, though steps have ended meanwhile."""
    _, facts = await recorded_team(tmp_path, "flat")
    header, laid_out, placed = facts[0].data, list[object](), flows.place_flow
    assert isinstance(header, PlanRecorded)
    monkeypatch.setattr(flows, "place_flow", lambda graph: (laid_out.append(graph), placed(graph))[1])
    drawer, view = FlowDrawer(), StepsView()
    places: list[list[tuple[str, float, float]]] = []
    for each in facts:
        view.apply(each)
        flow = drawer.draw(header, view.rows(), "declared")
        places.append([(node["id"], node["x"], node["y"]) for node in flow.root["nodes"]])
    assert len(laid_out) == 1
    assert places.count(places[0]) == len(facts)
