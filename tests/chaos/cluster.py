"""A cluster that is there: `python -m tests.chaos.cluster FILE` keeps one until it is ended.

FILE gets the address. Whoever makes a file of the same name that ends in `.wanted` gets a second node: once it is gone
again, there is one, and FILE tells the process id of its raylet. One that was killed is replaced when it is wanted again.
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

from tests.chaos.victims import end_session
from tests.processes import Program, own_directory, own_environment, program

__all__ = ["Cluster", "cluster_there", "environment_in", "inline_environment_in"]

ROOT = Path(__file__).resolve().parents[2]
_WATCH_S = 0.1
#: Generous: Ray starts on two cores while other things run.
_PATIENCE_S = 240.0


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

    def have_second_node(self) -> None:
        """See to it that there is one; all that joins the cluster from then on finds it."""
        wanted = _wanted(self.file)
        wanted.touch()
        self.program.until(lambda: not wanted.exists(), "the second node", timeout_s=_PATIENCE_S)


def environment_in(directory: Path, **variables: str) -> dict[str, str]:
    """What programs of the harness need; Ray's token is the directory's own."""
    token = directory / "token"
    if not token.exists():
        token.write_text(os.urandom(16).hex(), encoding="utf-8")
        token.chmod(0o600)
    ours = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return own_environment(directory, **{**ours, **variables})


def inline_environment_in(directory: Path, **variables: str) -> dict[str, str]:
    """What programs need whose runs are inline; they are forked, as nothing is in it that Ray reads when it is imported."""
    return own_environment(directory, PYTHONPATH=str(ROOT), ENSEMBLE_RAY_RUNTIME="inline", **variables)


@contextlib.contextmanager
def cluster_there(*, has_two_nodes: bool = False) -> Generator[Cluster, None, None]:
    """Start a cluster; at the end all its processes are gone."""
    with own_directory() as directory:
        file = directory / "cluster.json"
        environment = environment_in(directory)
        # A node that is gone is noticed after seconds instead of a minute; one that is there may be slow to answer.
        for name, value in (("initial_delay", 0), ("period", 500), ("timeout", 10_000)):
            environment[f"RAY_health_check_{name}_ms"] = str(value)
        environment["RAY_health_check_failure_threshold"] = "3"
        command = [sys.executable, "-m", "tests.chaos.cluster", str(file)]
        with program(command, log=directory / "log", env=environment, cwd=ROOT) as running:
            running.until(file.exists, "the cluster", timeout_s=_PATIENCE_S)
            joining = {name: environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")}
            address = str(_read(file)["address"])
            cluster = Cluster(program=running, file=file, environment={**joining, "RAY_ADDRESS": address})
            try:
                if has_two_nodes:
                    cluster.have_second_node()
                yield cluster
            finally:
                end_session(running.process.pid)  # ending in peace takes it seconds


def _read(file: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))


def _wanted(file: Path) -> Path:
    return file.with_suffix(".wanted")


def _write(file: Path, **values: object) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(file)


def _keep(file: Path) -> None:
    from ray.cluster_utils import Cluster as LocalCluster  # the harness that imports this module does not need it

    from ensemble_ray.actors.driver.cluster import _adapt_raylet, _leave_out

    # No driver of its own, nobody who reads logs, nobody who adds nodes, and nobody who looks at a page, as in a local instance.
    head = {"num_cpus": 2, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    with _leave_out(has_log_monitor=True), _adapt_raylet(has_dashboard=False):
        cluster = LocalCluster(initialize_head=True, head_node_args=head)
        _write(file, address=cluster.address)
        node: Any = None
        while True:
            time.sleep(_WATCH_S)
            if not _wanted(file).exists():
                continue
            if node is not None and node.all_processes["raylet"][0].process.poll() is not None:
                cluster.remove_node(node, allow_graceful=False)
                node = None
            if node is None:
                node = cluster.add_node(num_cpus=2)
                _write(file, address=cluster.address, second_raylet=node.all_processes["raylet"][0].process.pid)
            _wanted(file).unlink()


def main() -> None:
    """Keep a cluster."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.cluster", description=main.__doc__)
    parser.add_argument("file", type=Path)
    _keep(parser.parse_args().file)


if __name__ == "__main__":
    main()
