"""Loading of what a run sends, tried on every node before anything is asked (S-SET-56). Called by the driver's `loading`.

It is loaded in a worker process of each node, of the scheduler's own job, where agents live too. Must never happen: user
code that is loaded in the scheduler.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import Mapping
from typing import Any, cast

import ray
import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.threads import USER_ERRORS
from ensemble_ray.text.foreign_text import one_line

__all__ = ["load_all", "load_everywhere"]

_log = bounded_logger(__name__)
#: How long a node may take to start a process and load what it is sent, s; one that takes longer is not waited for.
_PATIENCE_S = 60.0
#: Digests of bodies by node that loaded them, in the scheduler's process.
_proven: set[tuple[str, str]] = set()
_MOST_PROVEN = 10_000


async def load_everywhere(payloads: Mapping[str, bytes]) -> None:
    """Load these on every node; called in the scheduler, which does not load them itself.

    Raises:
        ValidationError: one cannot be loaded on some node.
    """
    digest = hashlib.sha256(repr(sorted(payloads.items())).encode()).hexdigest()
    nodes = {
        str(node["NodeID"]): str(node["NodeManagerAddress"])
        for node in cast("list[dict[str, Any]]", cast("Any", ray.nodes)())
        if node["Alive"]
    }
    asked = [node for node in nodes if (node, digest) not in _proven]
    answers = await asyncio.gather(*(_load_on(node, payloads) for node in asked))
    failures = {node: found for node, found in zip(asked, answers, strict=True) if found}
    if len(_proven) > _MOST_PROVEN:
        _proven.clear()
    _proven.update((node, digest) for node, found in zip(asked, answers, strict=True) if found == [])
    if failures:
        node, ((what, why), *_) = next(iter(failures.items()))
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise ValidationError(
            f"{what} cannot be loaded on node {nodes[node]}{more}: {why}. Nothing was asked of any model. The cluster's "
            "processes do not see the modules of your directory: send it along, as `ray job submit --working-dir . -- "
            "ensemble-ray run ...` does, install the module on every node, or use runtime='inline'"
        )


async def _load_on(node: str, payloads: Mapping[str, bytes]) -> list[tuple[str, str]] | None:
    """Return what that node could not load, and why; None where it cannot be asked, which a run may not even notice."""
    try:
        asked: Any = spawn.on_node(load_all, node).remote(payloads)
        return cast("list[tuple[str, str]]", await asyncio.wait_for(asked, _PATIENCE_S))
    except (ray.exceptions.RayError, TimeoutError) as error:
        _log.warning("Node %s cannot be asked to load a run in advance: %s", node, one_line(message_of(error)))
        return None


def load_all(payloads: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Load them in this process; return the names of those that cannot be loaded, and why."""
    failed: list[tuple[str, str]] = []
    for name, body in payloads.items():
        try:
            pickle.loads(body)  # noqa: S301  bytes of our own driver
        except USER_ERRORS as error:
            failed.append((name, str(one_line(message_of(error)))))
    return failed
