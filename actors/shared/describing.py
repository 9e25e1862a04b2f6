"""What an actor says of its own process, as part of its description."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import ray

from ensemble_ray.values.descriptions import ActorKind, ProcessDescription

__all__ = ["describe_this_process"]


def describe_this_process(kind: ActorKind, name: str, **more: Any) -> ProcessDescription:
    """Return what this process is.

    Args:
        kind: What it is for.
        name: How others call it.
        more: Other fields of the description.
    """
    context = ray.get_runtime_context()
    return ProcessDescription(
        name=name,
        kind=kind,
        node_id=str(context.get_node_id()),
        host=socket.gethostname(),
        pid=os.getpid(),
        memory_bytes=psutil.Process().memory_info().rss,
        **more,
    )
