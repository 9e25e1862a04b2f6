"""The only place that makes actors and remote functions: names, namespace, resources, restarts, concurrency.

Classes stay plain elsewhere. All actors wait on models or on each other, so none reserves a CPU; only CPU-heavy tools
do, as tasks. Actor classes are imported where they are made, since actors make each other.
"""

from __future__ import annotations

from typing import Any, cast

import ray

__all__ = [
    "NAMESPACE",
    "actor_class",
    "agent_actor",
    "callable_host",
    "cpu_call",
    "event_hub",
    "existing",
    "existing_journals",
    "journal_actor",
    "load_on",
    "manager_actor",
    "rate_limiter",
    "scheduler",
]

NAMESPACE = "ensemble_ray"
#: How the names of journals begin; the node's id follows.
_JOURNAL = "journal-"
#: A ceiling far above use; the real limits are agents' slots and plans' caps.
_CONCURRENCY = 100_000


#: Ray keeps every actor class that it is given, so each is made once.
_classes: dict[tuple[str, int], Any] = {}


def actor_class(cls: type[object], *, max_restarts: int) -> Any:
    """Return the actor class of a plain class; made once, since Ray keeps each one that it is given."""
    name = (f"{cls.__module__}.{cls.__qualname__}", max_restarts)
    if name not in _classes:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_concurrency": _CONCURRENCY,
            "max_task_retries": 0,
            "max_restarts": max_restarts,
        }
        _classes[name] = cast("Any", ray.remote)(**options)(cls)  # noqa: TID251  the one place
    return _classes[name]


def _shared(cls: type[object], name: str, **options: object) -> Any:
    """Return the cluster's one actor of that name; made if there is none. It outlives its drivers."""
    made = actor_class(cls, max_restarts=-1)
    return made.options(name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, **options).remote()


def scheduler() -> Any:
    """Return the cluster's scheduler. It stays on the head node, where its runs' files are: elsewhere it could not go on."""
    from ensemble_ray.actors.scheduler.scheduler import SchedulerActor

    return _shared(SchedulerActor, "scheduler", resources={"node:__internal_head__": 0.001})


def journal_actor(node_id: str) -> Any:
    """Return the one who writes for processes on other nodes, on the node where files are."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ensemble_ray.actors.shared.journal import JournalActor

    on_that_node = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return _shared(JournalActor, f"{_JOURNAL}{node_id}", scheduling_strategy=on_that_node)


def existing_journals() -> list[Any]:
    """Return those that write for processes on other nodes; one per node that has files."""
    from ray.util import list_named_actors

    named = cast("list[dict[str, str]]", cast("Any", list_named_actors)(all_namespaces=True))
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(_JOURNAL)]
    return [found for name in names if (found := existing(name)) is not None]


def event_hub() -> Any:
    """Return the cluster's event hub."""
    from ensemble_ray.actors.shared.event_hub import EventHub

    return _shared(EventHub, "event_hub")


def rate_limiter() -> Any:
    """Return the cluster's rate limiter."""
    from ensemble_ray.actors.shared.rate_limiter import RateLimiter

    return _shared(RateLimiter, "rate_limiter")


def agent_actor(name: str, *, is_spread: bool = False) -> Any:
    """Return a fresh process for agents. It is disposable: work is sent again to another, not restarted in it.

    Args:
        name: Its name.
        is_spread: Whether it should be on a node that has few others.
    """
    from ensemble_ray.actors.worker.agent import AgentActor

    made = actor_class(AgentActor, max_restarts=0)
    if not is_spread:
        return made.remote(name)
    # Ray spreads only what asks for something, else all may be on one node; a byte is free where all CPUs are taken.
    return made.options(scheduling_strategy="SPREAD", memory=1).remote(name)


def manager_actor(name: str) -> Any:
    """Return a fresh process for the manager of a run; as disposable, since its decisions are on record."""
    from ensemble_ray.actors.worker.manager import ManagerActor

    return actor_class(ManagerActor, max_restarts=0).remote(name)


def callable_host(name: str) -> Any:
    """Return a fresh process for one run's callables; a lost process is lost state."""
    from ensemble_ray.actors.worker.callable_host import CallableHost

    return actor_class(CallableHost, max_restarts=0).remote(name)


def cpu_call() -> Any:
    """Return the remote function that runs CPU-heavy tools, one CPU each."""
    from ensemble_ray.tools.cpu import call_packed

    return ray.remote(num_cpus=1, max_retries=0)(call_packed)  # noqa: TID251  the one place


def load_on(node_id: str) -> Any:
    """Return the remote function that loads pickles in a process of that node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ensemble_ray.actors.scheduler.loading import load_all

    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return cast("Any", ray.remote)(**options)(load_all)  # noqa: TID251  the one place


def existing(name: str) -> Any:
    """Return the cluster's actor of that name; None when there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
