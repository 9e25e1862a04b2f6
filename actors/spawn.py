"""The only place that makes actors and remote functions: names, namespace, resources, restarts, concurrency.

Classes stay plain elsewhere. All actors wait on models or on each other, so none reserves a CPU; only CPU-heavy tools
do, as tasks. Who wants an actor brings its class, since actors make each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ensemble_ray.plan.placement import NOTHING, ResourceRequirements
from ensemble_ray.tools.cpu import call_packed

NAMESPACE = "ensemble_ray"
#: Name of the first scheduler; a number follows in those of the others.
SCHEDULER = "scheduler"
#: Between the name of a namespace of ours, which has none of it, and that of a scheduler.
_BETWEEN = "/"
#: How the names of journals begin; the node's id follows.
_JOURNAL = "journal-"
#: What the head node alone has.
_ON_HEAD = {"node:__internal_head__": 0.001}
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
            # Ray's head would keep each call of theirs for its lists of tasks, up to 100,000 (measured: 56 kB a request to an
            # endpoint). What they do is in the record.
            "enable_task_events": False,
        }
        _classes[name] = cast("Any", ray.remote)(**options)(cls)  # noqa: TID251  the one place
    return _classes[name]


def _get_shared(cls: type[object], name: str, *arguments: object, **options: object) -> Any:
    """Return the cluster's one actor of that name; made with these arguments if there is none. It outlives its drivers."""
    actor = actor_class(cls, max_restarts=-1)
    options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return actor.options(**options).remote(*arguments)


def scheduler_name(shard: int, namespace: str = "") -> str:
    """Return the name of a scheduler, by its number from 0; of a namespace that has a name, behind that."""
    name = f"{SCHEDULER}-{shard}" if shard else SCHEDULER
    return f"{namespace}{_BETWEEN}{name}" if namespace else name


def namespace_of(scheduler: str) -> str:
    """Return the namespace of a scheduler, by the name that `scheduler_name` gave; empty: that without a name."""
    return scheduler.rpartition(_BETWEEN)[0]


def scheduler(cls: type[object], shard: int = 0, namespace: str = "") -> Any:
    """Return a scheduler of the cluster. It stays on the head node, where its runs' files are: elsewhere it could not go on."""
    name = scheduler_name(shard, namespace)
    return _get_shared(cls, name, name, resources=_ON_HEAD)


def existing_schedulers(namespace: str = "") -> dict[str, Any]:
    """Return the schedulers of a namespace by their names."""
    names = (name for name in _names(scheduler_name(0, namespace)) if namespace_of(name) == namespace)
    return {name: found for name in names if (found := existing(name)) is not None}


def run_driver(cls: type[object], name: str, config: object) -> Any:
    """Return what drives the runs of an endpoint. It stays on the head node, where their files are.

    Args:
        cls: Its class.
        name: Which endpoint's.
        config: What it is made with; plain data, since Ray makes it again with the same.
    """
    return _get_shared(cls, name, config, resources=_ON_HEAD)


def journal_actor(cls: type[object], node_id: str) -> Any:
    """Return the one who writes for processes on other nodes, on the node where files are."""
    on_that_node = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return _get_shared(cls, f"{_JOURNAL}{node_id}", scheduling_strategy=on_that_node)


def existing_journals() -> list[Any]:
    """Return those that write for processes on other nodes; one per node that has files."""
    return [found for name in _names(_JOURNAL) if (found := existing(name)) is not None]


def existing_shared() -> dict[str, Any]:
    """Return the actors that the cluster has one of by name, of all namespaces of ours; none is started."""
    return {name: found for name in _names("") if (found := existing(name)) is not None}


def _names(prefix: str) -> list[str]:
    """Return the names of shared actors that begin so."""
    named = cast("list[dict[str, str]]", cast("Any", list_named_actors)(all_namespaces=True))
    return [each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]


def event_hub(cls: type[object]) -> Any:
    """Return the cluster's event hub."""
    return _get_shared(cls, "event_hub")


def rate_limiter(cls: type[object]) -> Any:
    """Return the cluster's rate limiter."""
    return _get_shared(cls, "rate_limiter")


def disposable(
    cls: type[object],
    name: str,
    scheduler: str,
    *,
    requirements: ResourceRequirements = NOTHING,
    node_id: str = "",
) -> Any:
    """Return a fresh process of a run. What is lost with it is sent again to another, not restarted in it.

    Args:
        cls: What it is for.
        name: Its name.
        scheduler: Name of the scheduler whose runs it works for.
        requirements: What it asks of its node; it waits for one that has it.
        node_id: Where it is; it fails if that node is gone. Empty: anywhere. Who asks for something is where that is.
    """
    options: dict[str, Any] = {}
    if requirements:
        options = {"num_cpus": requirements.num_cpus, "num_gpus": requirements.num_gpus}
        options |= {"resources": dict(requirements.resources), "label_selector": dict(requirements.labels)}
        options["scheduling_strategy"] = "SPREAD"
    elif node_id:
        # Ray's own SPREAD takes nodes in turn, however many processes each has: one that has just come would wait its turn.
        # A soft affinity is not kept (of four that were begun at once, up to three were elsewhere).
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return actor_class(cls, max_restarts=0).options(**options).remote(name, scheduler)


def cpu_call() -> Any:
    """Return the remote function that runs CPU-heavy tools, one CPU each."""
    return ray.remote(num_cpus=1, max_retries=0)(call_packed)  # noqa: TID251  the one place


def on_node(function: Callable[..., object], node_id: str) -> Any:
    """Return the remote function that does this in a process of that node."""
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return cast("Any", ray.remote)(**options)(function)  # noqa: TID251  the one place


def existing(name: str) -> Any:
    """Return the cluster's actor of that name; None when there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
