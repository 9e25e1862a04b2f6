"""Clusters that cannot be asked, and processes that are in none."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from ensemble_ray.studio.cluster_finding import find_cluster
from ensemble_ray.studio.local_clusters import LocalClusters
from tests.processes import free_ports
from tests.studio.conftest import Serve


@pytest.mark.program
def test_a_cluster_that_is_not_there_is_told_of(serve: Serve, tmp_path: Path) -> None:
    """S-STU-34, S-STU-35: the one that was named, and why it cannot be asked; nobody asks it again at once."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    client = serve(tmp_path, cluster=address)
    told = client.get("api/studio/actors").json()
    assert re.fullmatch(f"The cluster at {address} cannot be asked: .*refused.*", told["note"])
    assert client.get("api/studio/actors").json() == told
    assert (told["nodes"], told["clusters"]) == ([], [])


async def test_only_clusters_that_runs_are_in_are_asked() -> None:
    """S-STU-35: none where no owner is in one; the one that was named whoever owns runs; `local` names none."""
    parent = os.getppid()
    assert find_cluster(parent) is None
    assert find_cluster(2**22 + 1) is None  # nobody has that number
    assert await LocalClusters().clusters([parent]) == []
    assert await LocalClusters("local").clusters([parent]) == []
    named = LocalClusters("10.0.0.1:6379")
    (cluster,) = await named.clusters([])
    assert await named.clusters([parent]) == [cluster]
    await asyncio.gather(named.close(), cluster.close())
