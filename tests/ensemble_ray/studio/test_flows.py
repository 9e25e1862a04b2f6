"""Places of graphs: computed once for the same nodes and edges."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Ensemble, InlineRuntime, Task, TaskHandlerContext
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.studio import documents as flows
from ensemble_ray.studio.documents import FlowDrawer
from ensemble_ray.studio.views.steps import StepsView
from tests.builders import task

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


async def test_both_views_mark_the_same_critical_path_when_the_run_has_ended(tmp_path: Path) -> None:
    """S-STU-251, S-VIZ-90: one slow task, beside a longer chain of quick ones."""

    def done(_: TaskHandlerContext) -> str:
        return "x"

    def named(name: str, *context: Task) -> Task:
        return task(f"Do {name}", name=name, context=list(context), handler=done)

    first, slow = named("first"), named("slow")
    second = named("second", first)
    team = Ensemble(tasks=[first, second, slow, named("end", second, slow)], workflow="parallel")
    await team.arun(runtime=InlineRuntime(home=tmp_path), run_id="timed")
    facts, view = await SqliteStore(tmp_path).facts("timed"), StepsView()
    for each in facts:
        view.apply(each)
    header = facts[0].data
    assert isinstance(header, PlanRecorded)
    times = {"first": (0, 1), "second": (1, 2), "slow": (0, 9), "end": (9, 10)}
    steps = [
        step.model_copy(update=dict(zip(("started_at", "ended_at"), times[step.node or ""], strict=True)))
        for step in view.rows()
    ]
    for kind, names in (("declared", ["slow", "end"]), ("ran", ["slow#0", "end#0"])):
        flow = FlowDrawer().draw(header, steps, kind).root  # type: ignore[arg-type]
        assert flow["critical_path"] == names
        assert [node["id"] for node in flow["nodes"] if node["critical"]] == names
        assert [(edge["from"], edge["to"]) for edge in flow["edges"] if edge["critical"]] == [tuple(names)]
        active = [steps[0].model_copy(update={"status": "running", "ended_at": None}), *steps[1:]]
        assert FlowDrawer().draw(header, active, kind).root["critical_path"] == []  # type: ignore[arg-type]
