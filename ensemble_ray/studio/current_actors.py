"""The processes that there are now, for a command that looks once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.studio.local_clusters import LocalClusters
from ensemble_ray.studio.processes import RunProcesses
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.studio.visitors import ANYBODY

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.studio.schemas.actors import Actors


async def look_at_actors(store: RunStore, run_id: str | None = None, *, cluster: str = "") -> Actors:
    """Return the processes of runs of a store that go on, and those of their clusters.

    Args:
        store: Has the records.
        run_id: The run whose processes are asked for; None: all.
        cluster: Address of the cluster to ask; empty: those that runs of this machine are in.

    Raises:
        RecordError: the store cannot be read.
    """
    clusters = LocalClusters(cluster)
    try:
        return await RunProcesses(store, StudioReader(store, can_decide=False), clusters).actors(ANYBODY, run_id)
    finally:
        await clusters.close()
