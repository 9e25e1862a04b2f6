"""The clusters that studio asks from a process of its own (S-STU-34, S-STU-35).

One that was named, and no other; where none was, those that runs of this machine belong to. On the library's loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from ensemble_ray.process.forks import threads
from ensemble_ray.process.private_files import FoundCluster, find_cluster
from ensemble_ray.studio.cluster_process import ClusterProcess

#: What `RAY_ADDRESS` is where programs shall start a cluster of their own.
_LOCAL = "local"
#: Clusters that are asked at a time.
_MOST = 4
#: How long it holds which cluster a process is in, s: one that drives runs may start a cluster later.
_LASTING_S = 10.0


class LocalClusters:
    """Asks clusters, each through a process of its own. Fulfils `ClusterList`."""

    def __init__(self, address: str = "") -> None:
        """Make it; `address` is the cluster that was named, empty: none was."""
        self._named = ClusterProcess(address) if address not in {"", _LOCAL} else None
        self._found: OrderedDict[str, ClusterProcess] = OrderedDict()
        #: by process: until when it holds, and its cluster
        self._owners: dict[int, tuple[float, FoundCluster | None]] = {}

    async def clusters(self, owners: Sequence[int]) -> Sequence[ClusterProcess]:
        """Return the cluster that was named, else those of these processes."""
        if self._named is not None:
            return [self._named]
        now = asyncio.get_running_loop().time()
        self._owners = {pid: held for pid, held in self._owners.items() if held[0] > now}
        found = [each for each in [await self._look(pid) for pid in owners] if each is not None]
        chosen = {each.address: each for each in found[-_MOST:]}
        for address, each in chosen.items():
            if address not in self._found:
                self._found[address] = ClusterProcess(address, dict(each.environment))
            self._found.move_to_end(address)
        while len(self._found) > _MOST:
            await self._found.popitem(last=False)[1].close()
        return [self._found[address] for address in chosen]

    async def close(self) -> None:
        """End the processes that ask."""
        asking = [*self._found.values(), *([self._named] if self._named else [])]
        await asyncio.gather(*(each.close() for each in asking))

    async def _look(self, pid: int) -> FoundCluster | None:
        if pid not in self._owners:
            found = await threads.run(find_cluster, pid)
            self._owners[pid] = (asyncio.get_running_loop().time() + _LASTING_S, found)
        return self._owners[pid][1]
