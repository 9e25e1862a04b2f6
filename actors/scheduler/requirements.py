"""What a run's agents ask of nodes, held against what the cluster has, before its processes are started (S-CLU-43)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray

from ensemble_ray.errors import ValidationError
from ensemble_ray.plan.placement import Placement
from ensemble_ray.plan.requirements import ClusterNode, ProcessDemand, find_obstacle

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import AgentTemplate
    from ensemble_ray.actors.scheduler.session import SessionLimits

__all__ = ["check_comer", "check_requirements"]


def check_requirements(templates: Sequence[AgentTemplate], limits: SessionLimits) -> None:
    """Refuse agents whose processes the cluster can never have, all at the same time.

    Args:
        templates: The agents.
        limits: What their run is held to.

    Raises:
        ValidationError: nobody has what one of them asks for, or the cluster has not enough of it.
    """
    placement = Placement(max_own=limits.max_own, most_replicas=limits.most_replicas)
    placement.place(template.placement for template in templates)
    roles = {template.key: template.role for template in templates}
    demands = [
        ProcessDemand(
            who=", ".join(f"Agent '{roles[key]}'" for key in placement.members(group)),
            requirements=placement.requirements_of(group),
            count=placement.begins_with(group),
        )
        for group in placement.groups
    ]
    obstacle = find_obstacle(demands, (*limits.nodes, *_nodes_to_come()))
    if obstacle is not None:
        raise ValidationError(
            f"{obstacle}. Ask for less, add a node that has it (a local Ray takes RayRuntime(init_options={{'num_gpus': 1}}) "
            "and the like), or use runtime='inline', where nothing is reserved"
        )


def check_comer(template: AgentTemplate, limits: SessionLimits) -> None:
    """Refuse an agent that is made while its run goes on, as `check_requirements` does."""
    check_requirements((template,), limits)


def _nodes_to_come() -> list[ClusterNode]:
    """Return the kinds of nodes that the cluster's autoscaler may add; none where it has none."""
    config = cast("Any", ray)._private.state.state.get_cluster_config()  # noqa: SLF001  there is no public way
    groups: Iterable[Any] = () if config is None else config.node_group_configs
    return [
        ClusterNode(
            resources={str(name): float(amount) for name, amount in group.resources.items()},
            labels=None,
            count=float("inf") if group.max_count < 0 else float(group.max_count),
        )
        for group in groups
        if group.max_count
    ]
