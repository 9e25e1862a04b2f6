"""Clusters that cannot be asked, and processes that are in none."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ensemble_ray import RunState
from ensemble_ray.process import private_files as cluster_finding
from ensemble_ray.process.private_files import FoundCluster, find_cluster
from ensemble_ray.record.stores import RecordedRun
from ensemble_ray.recovery import resuming
from ensemble_ray.studio.processes import LocalClusters
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


async def test_cluster_is_there_when_its_head_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-34: of a process of this machine that is in one; of others it is not known."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    monkeypatch.setattr(cluster_finding, "find_cluster", lambda pid: FoundCluster(address) if pid == 1 else None)

    async def is_there(owner: str) -> bool:
        run = RecordedRun(
            run_id="r", created_at=datetime.now(UTC), origin="", state=RunState.RUNNING, location="", owner=owner
        )
        return await resuming._is_cluster_there(run)

    here = socket.gethostname()
    asked = [await is_there(f"process {pid} on {host}") for pid, host in ((1, here), (2, here), (1, f"not-{here}"))]
    assert [*asked, await is_there("")] == [True, False, False, False]
    server.close()
    await server.wait_closed()
    assert not await is_there(f"process 1 on {here}")
