"""FlowDrawer: graphs of runs with places for their nodes.

In: a run's plan and its steps. Out: its graph as declared, with what ran of each node, or as it ran. Rules: places depend on nodes and
edges alone, so that a run whose steps only change their status is not laid out again; a layout is computed in a thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ensemble_ray.process.forks import new_lock, threads
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.studio.schemas.flow import FlowSchema
from ensemble_ray.visualization.declared import declared_flow, worker_id
from ensemble_ray.visualization.flow import PlacedFlow, flow_data, place_flow
from ensemble_ray.visualization.ran import RanStep, ran_flow

if TYPE_CHECKING:
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.studio.schemas.steps import StepSchema
    from ensemble_ray.values.trace import GraphTrace
    from ensemble_ray.visualization.flow import Flow
    from ensemble_ray.visualization.layout import Layout

FlowView = Literal["declared", "ran"]
#: Layouts that are kept.
_KEPT = 64


class FlowDrawer:
    """Draws the graphs of runs; thread-safe."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._layouts: OrderedDict[object, Layout] = OrderedDict()

    async def draw(
        self, header: PlanRecorded, steps: Sequence[StepSchema], view: FlowView, trace: GraphTrace | None = None
    ) -> FlowSchema:
        """Return the graph of a run.

        Args:
            header: The run's first fact.
            steps: Its steps, in the order in which they began.
            view: As declared, or as it ran; a run whose tasks are made while it goes on has no declared graph.
            trace: Of a run of a graph: tells the edges that it took.

        Raises:
            RecordError: the recorded plan is damaged.
        """
        return await threads.run(self._draw, header, steps, view, trace)

    def _draw(
        self, header: PlanRecorded, steps: Sequence[StepSchema], view: FlowView, trace: GraphTrace | None
    ) -> FlowSchema:
        plan: Plan | None = None
        if header.plan and not header.is_dynamic:
            plan = recorded_plan(header.plan)
        if view == "declared" and plan is not None:
            ran: dict[str, list[tuple[str, str]]] = {}
            for step in steps:
                node = worker_id(step.agent) if step.kind == "delegation" else step.node
                if node is not None:
                    ran.setdefault(node, []).append((step.id, step.status))
            return FlowSchema.model_validate(flow_data(self._place(declared_flow(plan, trace)), ran))
        shown = [
            RanStep(
                id=step.id, kind=step.kind, title=step.title, agent=step.agent, status=step.status, level=step.level
            )
            for step in sorted(steps, key=lambda each: each.started_at or 0)
        ]
        return FlowSchema.model_validate(flow_data(self._place(ran_flow(shown, plan, workflow=header.workflow or ""))))

    def _place(self, graph: Flow) -> PlacedFlow:
        """Return a graph with places; those of one with the same nodes and edges are used again."""
        key = (
            tuple((node.id, node.group) for node in graph.nodes),
            tuple((edge.source, edge.target, edge.label, edge.is_back) for edge in graph.edges),
            tuple((group.id, group.parent) for group in graph.groups),
        )
        with self._lock:
            layout = self._layouts.get(key)
            if layout is not None:
                self._layouts.move_to_end(key)
        if layout is None:
            layout = place_flow(graph).layout
            with self._lock:
                self._layouts[key] = layout
                while len(self._layouts) > _KEPT:
                    self._layouts.popitem(last=False)
        return PlacedFlow(flow=graph, layout=layout)
