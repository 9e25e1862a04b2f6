"""A cluster that is there: `python -m tests.chaos.cluster FILE [--two-nodes]` keeps one until it is ended.

FILE gets the address, and with two nodes the process id of the second one's raylet; a second node that was killed is
replaced by another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tests.processes import Program, own_directory, own_environment, program

__all__ = ["Cluster", "cluster_there", "environment_in"]

ROOT = Path(__file__).resolve().parents[2]
_WATCH_S = 0.5
#: Generous: Ray starts on two cores while other things run.
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster of the harness's own."""

    program: Program
    #: where it says how to find it
    file: Path
    #: what drivers need to join it
    environment: Mapping[str, str]

    @property
    def second_raylet(self) -> int:
        """Process id of the second node's raylet."""
        return int(_read(self.file)["second_raylet"])


def environment_in(directory: Path, **variables: str) -> dict[str, str]:
    """What programs of the harness need; Ray's token is the directory's own."""
    token = directory / "token"
    if not token.exists():
        token.write_text(os.urandom(16).hex(), encoding="utf-8")
        token.chmod(0o600)
    ours = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return own_environment(directory, **{**ours, **variables})


@contextlib.contextmanager
def cluster_there(*, has_two_nodes: bool = False) -> Generator[Cluster, None, None]:
    """Start a cluster; at the end all its processes are gone."""
    with own_directory() as directory:
        file = directory / "cluster.json"
        command = [sys.executable, "-m", "tests.chaos.cluster", str(file)]
        environment = environment_in(directory)
        if has_two_nodes:
            command.append("--two-nodes")
            # A node that is gone is noticed after seconds instead of a minute; one that is there may be slow to answer.
            for name, value in (("initial_delay", 0), ("period", 500), ("timeout", 10_000)):
                environment[f"RAY_health_check_{name}_ms"] = str(value)
            environment["RAY_health_check_failure_threshold"] = "3"
        with program(command, log=directory / "log", env=environment, cwd=ROOT) as running:
            running.until(file.exists, "the cluster", timeout_s=_PATIENCE_S)
            joining = {name: environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")}
            address = str(_read(file)["address"])
            yield Cluster(program=running, file=file, environment={**joining, "RAY_ADDRESS": address})


def _read(file: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))


def _write(file: Path, **values: object) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(file)


def _one_node(file: Path) -> None:
    import ray  # the harness that imports this module does not need it

    begun: Any = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    _write(file, address=begun.address_info["gcs_address"])
    while True:
        time.sleep(_WATCH_S)


def _two_nodes(file: Path) -> None:
    from ray.cluster_utils import Cluster as LocalCluster  # as above

    cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    while True:
        node = cluster.add_node(num_cpus=2)
        raylet = node.all_processes["raylet"][0].process
        _write(file, address=cluster.address, second_raylet=raylet.pid)
        while raylet.poll() is None:
            time.sleep(_WATCH_S)
        cluster.remove_node(node, allow_graceful=False)


def main() -> None:
    """Keep a cluster."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.cluster", description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--two-nodes", action="store_true")
    chosen = parser.parse_args()
    (_two_nodes if chosen.two_nodes else _one_node)(chosen.file)


if __name__ == "__main__":
    main()
