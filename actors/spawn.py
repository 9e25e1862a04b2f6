"""Creates all actors and remote functions.

Other modules contain plain classes and pass them in, since actors start each other. Actors wait for models or for each
other, so none reserves a CPU; only CPU-heavy tools do, as tasks.
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
#: The names of other schedulers end with a number.
SCHEDULER = "scheduler"
#: No namespace contains it.
_BETWEEN = "/"
#: The node's id follows.
_JOURNAL = "journal-"
_ON_HEAD = {"node:__internal_head__": 0.001}
#: Far above use; the real limits are agents' slots and plans' caps.
_CONCURRENCY = 100_000
_classes: dict[tuple[str, int], Any] = {}


def actor_class(cls: type[object], *, max_restarts: int) -> Any:
    """The class is cached because Ray keeps each actor class."""
    name = (f"{cls.__module__}.{cls.__qualname__}", max_restarts)
    if name not in _classes:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_concurrency": _CONCURRENCY,
            "max_task_retries": 0,
            "max_restarts": max_restarts,
            # Ray's head would store up to 100,000 calls (measured: 56 kB per request to an endpoint). The record contains the tasks.
            "enable_task_events": False,
        }
        _classes[name] = cast("Any", ray.remote)(**options)(cls)  # noqa: TID251  the one place
    return _classes[name]


def _get_shared(cls: type[object], name: str, *arguments: object, **options: object) -> Any:
    """The actor is created if missing, and outlives its drivers."""
    actor = actor_class(cls, max_restarts=-1)
    options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return actor.options(**options).remote(*arguments)


def scheduler_name(shard: int, namespace: str = "") -> str:
    name = f"{SCHEDULER}-{shard}" if shard else SCHEDULER
    return f"{namespace}{_BETWEEN}{name}" if namespace else name


def namespace_of(scheduler: str) -> str:
    return scheduler.rpartition(_BETWEEN)[0]


def scheduler(cls: type[object], shard: int = 0, namespace: str = "") -> Any:
    """A scheduler stays on the head node with the files of its runs; elsewhere it could not resume them."""
    name = scheduler_name(shard, namespace)
    return _get_shared(cls, name, name, resources=_ON_HEAD)


def existing_schedulers(namespace: str = "") -> dict[str, Any]:
    names = (name for name in _names(scheduler_name(0, namespace)) if namespace_of(name) == namespace)
    return {name: found for name in names if (found := existing(name)) is not None}


def run_driver(cls: type[object], name: str, config: object) -> Any:
    """Return the actor that drives the runs of an endpoint, on the head node with their files."""
    return _get_shared(cls, name, config, resources=_ON_HEAD)


def journal_actor(cls: type[object], node_id: str) -> Any:
    """Return the actor on the node with the files that writes for processes on other nodes."""
    on_that_node = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return _get_shared(cls, f"{_JOURNAL}{node_id}", scheduling_strategy=on_that_node)


def existing_journals() -> list[Any]:
    return [found for name in _names(_JOURNAL) if (found := existing(name)) is not None]


def existing_shared() -> dict[str, Any]:
    """Return the actors of all our namespaces by name."""
    return {name: found for name in _names("") if (found := existing(name)) is not None}


def _names(prefix: str) -> list[str]:
    named = cast("list[dict[str, str]]", cast("Any", list_named_actors)(all_namespaces=True))
    return [each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]


def event_hub(cls: type[object]) -> Any:
    return _get_shared(cls, "event_hub")


def rate_limiter(cls: type[object]) -> Any:
    return _get_shared(cls, "rate_limiter")


def disposable(
    cls: type[object], name: str, scheduler: str, *, requirements: ResourceRequirements = NOTHING, node_id: str = ""
) -> Any:
    """Return a new process for runs. It is never restarted: its lost work is sent to another.

    Args:
        requirements: It waits for a node that has these.
        node_id: It fails if the node is gone. Empty, or with requirements: Ray chooses the node.
    """
    options: dict[str, Any] = {}
    if requirements:
        options = {"num_cpus": requirements.num_cpus, "num_gpus": requirements.num_gpus}
        options |= {"resources": dict(requirements.resources), "label_selector": dict(requirements.labels)}
        options["scheduling_strategy"] = "SPREAD"
    elif node_id:
        # Ray's SPREAD uses nodes in turn, however many processes each has. A soft affinity is not reliable: of four processes that
        # started together, up to three were elsewhere.
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return actor_class(cls, max_restarts=0).options(**options).remote(name, scheduler)


def cpu_call() -> Any:
    return ray.remote(num_cpus=1, max_retries=0)(call_packed)  # noqa: TID251  the one place


def on_node(function: Callable[..., object], node_id: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return cast("Any", ray.remote)(**options)(function)  # noqa: TID251  the one place


def existing(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
