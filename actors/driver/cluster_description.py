"""What the actors of the cluster say that this process is connected to (S-CLU-103). Starts nothing, and joins nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import ray
import ray.exceptions
from ray._private import state

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.failures import last_line
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.process.threads import threads
from ensemble_ray.values.descriptions import (
    ActorDescription,
    ClusterDescription,
    NodeDescription,
    load_actor,
)

__all__ = ["describe_cluster"]

#: How long one actor may take to answer, s: a scheduler asks its processes first.
_ANSWER_S = 5.0
#: How long Ray may take to say which nodes and actors there are, s.
_LOOK_S = 10.0


async def describe_cluster() -> ClusterDescription:
    """Return what the actors of the cluster say of themselves, and who did not answer.

    Raises:
        EnsembleError: this process is connected to no cluster, or the cluster does not say which nodes and actors it has.
    """
    if not ray.is_initialized():
        raise EnsembleError("This process is connected to no cluster")
    try:
        async with asyncio.timeout(_LOOK_S):
            nodes, shared = await asyncio.gather(threads.run(_nodes), threads.run(spawn.existing_shared))
    except TimeoutError:
        raise EnsembleError(f"The cluster did not answer within {_LOOK_S:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise EnsembleError(f"The cluster cannot be reached: {last_line(error)}") from None
    names = sorted(shared)
    found = await asyncio.gather(*(_ask(name, shared[name]) for name in names))
    return ClusterDescription(
        address=str(ray.get_runtime_context().gcs_address),
        nodes=tuple(nodes),
        actors=tuple(each for each in found if isinstance(each, ActorDescription)),
        notes=tuple(each for each in found if isinstance(each, str) and each),
    )


async def _ask(name: str, actor: Any) -> ActorDescription | str:
    """Return what an actor says, or why it says nothing; empty where nothing is expected of it."""
    ask = getattr(actor, "describe", None)
    if ask is None:
        is_old = name.rpartition("/")[2].startswith(spawn.SCHEDULER)
        text = (
            f"The scheduler '{name}' is of an older version and does not say what its processes do: restart the cluster"
        )
        return text if is_old else ""
    try:
        async with asyncio.timeout(_ANSWER_S):
            described = load_actor(await ask.remote())
            restarts = await threads.run(_restarts_of, actor)
        return replace(described, process=replace(described.process, restarts=restarts))
    except TimeoutError:
        return f"'{name}' did not answer within {_ANSWER_S:.0f} s"
    except ray.exceptions.RayError as error:
        return f"'{name}' cannot be reached: {last_line(error)}"
    except ValueError as error:  # pydantic's, of an actor of another version
        return f"'{name}' says what this version does not understand: {message_of(error).splitlines()[0]}"


def _restarts_of(actor: Any) -> int | None:
    """Return how often Ray started an actor again; None: it does not know the actor."""
    # Ray's own public way to it asks a dashboard, which a cluster need not have.
    found = cast("dict[str, Any]", cast("Any", state).actors(actor_id=actor._actor_id.hex()))  # noqa: SLF001  it has no other
    return int(found["NumRestarts"]) if found else None


def _nodes() -> list[NodeDescription]:
    listed = cast("list[dict[str, Any]]", cast("Any", ray.nodes)())
    return [
        NodeDescription(
            node_id=node["NodeID"],
            name=node.get("NodeManagerHostname") or node.get("NodeName") or node["NodeID"][:8],
            address=node.get("NodeManagerAddress") or "",
        )
        for node in listed
        if node["Alive"]
    ]
