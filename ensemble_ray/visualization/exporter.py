"""DagExporter: the graph of a team, a plan or a run as data. Package: visualization.

In: a definition, or the trace of a run. Out: a `DagModel`. Never: a call of a model, a predicate or a strategy; what planning
calls to make tasks (the factories of a map-reduce) was called when the definition was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.definition.team_model import TeamModels
from ensemble_ray.definition.validation import declared_agents
from ensemble_ray.map_reduce import MapReduceEnsemble
from ensemble_ray.plan.nodes import NodeMaker, task_keys
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.planner import in_levels
from ensemble_ray.plan.unit_plans import plan_members
from ensemble_ray.values.trace import ExecutionTrace
from ensemble_ray.visualization.dag_model import DagAgentNode, DagModel, DagTaskNode
from ensemble_ray.visualization.plan_graph import dag_of_plan, groups_of, mode_of, type_of

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.values.unit_traces import GraphTrace

__all__ = ["DagExporter"]


class DagExporter:
    """Makes graphs of tasks as data."""

    @staticmethod
    def build(
        source: EnsembleDefinition | MapDefinition | Graph | ExecutionTrace | None,
        graph_trace: GraphTrace | None = None,
    ) -> DagModel:
        """Return the graph of a team, of a graph with what a run did in it, or of a run; nothing is run.

        Args:
            source: An ensemble, a map-reduce, a graph, or the trace of a run.
            graph_trace: Of a graph: `output.trace.graph_trace`, which tells the edges that a run took.

        Raises:
            ValueError: there is no source, or nothing to draw.
            NotImplementedError: a map-reduce whose tasks are made while it runs; build it from the trace of a run.
        """
        match source:
            case None:
                raise ValueError("ensemble must not be None")
            case ExecutionTrace():
                return _of_trace(source)
            case Graph():
                return dag_of_plan(_plan_of(EnsembleDefinition(graph=source)), graph_trace)
            case MapDefinition():
                return _of_map_reduce(source)
            case EnsembleDefinition():
                if not source.all_tasks:
                    raise ValueError("ensemble must have at least one task or loop")
                return dag_of_plan(_plan_of(source), graph_trace)


class _AsDeclared(TeamModels):
    """Leaves agents without a model as they are: a drawing needs none."""

    def resolve_agent(self, agent: Agent, task_model: ChatModel | None = None) -> Agent:
        del task_model
        return agent


def _plan_of(definition: EnsembleDefinition) -> Plan:
    """Return the plan of a definition as it stands: texts with their variables, and agents without a model."""
    tasks = definition.all_tasks
    maker = NodeMaker(definition, _AsDeclared(definition))
    members = plan_members(definition, list(zip(tasks, task_keys(tasks), strict=True)), maker)
    for agent in declared_agents(definition):
        maker.agent_key(agent)
    levels = definition.levels
    nodes = members.nodes if levels is None else in_levels(members.nodes, levels)
    return Plan(
        workflow="sequential" if definition.workflow is None else definition.workflow.value,
        nodes=tuple(nodes),
        agents=tuple(maker.entries),
        units=tuple(members.units),
        shown_as=None if levels is None else levels.workflow,
    )


def _of_map_reduce(definition: MapDefinition) -> DagModel:
    """S-VIZ-40, S-VIZ-41."""
    if not isinstance(definition, MapReduceEnsemble) or not definition.is_planned:
        raise NotImplementedError(
            f"The tasks of this {type(definition).__name__} are made while it runs, so there is no graph of them before. "
            "Build it from the trace of a run: DagExporter.build(output.trace)"
        )
    return dag_of_plan(_plan_of(definition.to_ensemble()))


def _of_trace(trace: ExecutionTrace) -> DagModel:
    """S-VIZ-42."""
    if not trace.task_traces:
        raise ValueError("trace must contain at least one task trace")
    levels = [task.map_reduce_level or 0 for task in trace.task_traces]
    tasks = [
        DagTaskNode(
            id=str(position),
            description=task.task_description,
            expected_output=task.expected_output,
            agent_role=task.agent_role,
            parallel_group=level,
            node_type=type_of(task.node_type),
            map_reduce_level=task.map_reduce_level,
            key=str(task.metadata["instance"]) if "instance" in task.metadata else None,
        )
        for position, (task, level) in enumerate(zip(trace.task_traces, levels, strict=True))
    ]
    return DagModel(
        workflow=trace.workflow,
        generated_at=trace.completed_at,
        agents=tuple(DagAgentNode(**agent.model_dump()) for agent in trace.agents),
        tasks=tuple(tasks),
        parallel_groups=groups_of(levels, [task.id for task in tasks]),
        map_reduce_mode=mode_of(trace.workflow),
    )
