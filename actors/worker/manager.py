"""ManagerActor: the process of a hierarchical run's manager. Only managers of other runs run beside it.

It runs one task, the manager's own loop; each `delegate_task` of it is a message to a worker's process (`peers`), and
the answer a message back. What is allowed is decided by `schedule.hierarchy` inside that task, and recorded before any
worker is asked: whoever takes this process's place decides nothing again.
"""

from __future__ import annotations

from ensemble_ray.actors.worker.agent import AgentActor

__all__ = ["ManagerActor"]


class ManagerActor(AgentActor):
    """Hosts the manager of a run; lists of processes show it under this name."""
