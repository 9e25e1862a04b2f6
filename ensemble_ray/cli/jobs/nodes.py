"""The check of a cluster's nodes before a run. Package: cli."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.cli.view.node_table import node_lines
from ensemble_ray.cli.view.terminal import say

if TYPE_CHECKING:
    from ensemble_ray.loader import Runnable

__all__ = ["check_nodes"]


def check_nodes(team: Runnable, *, is_quiet: bool) -> None:
    """Ask every node whether a team can run there, and show what they said.

    Raises:
        ValidationError: it cannot on one of them; nothing was asked of any model.
    """
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.process.loop import run_blocking
    from ensemble_ray.runtime import ray_runtime_class

    found = run_blocking(ray_runtime_class()().check_nodes(team))
    if not is_quiet or not found.is_fine:
        say("\n".join(node_lines(found)))
    if not found.is_fine:
        raise ValidationError(
            "The team cannot run on all nodes of the cluster. Nothing was asked of any model. To run it all the same: "
            "without --check-nodes, or submit --no-check"
        )
