"""A cluster of a test's own with its job server: a head that is started as people start theirs."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.processes import Program, free_ports, own_environment, program

__all__ = ["RAY", "JobHead", "job_head"]

RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """A cluster that takes jobs."""

    program: Program
    #: of its job server
    url: str
    #: what its clients need
    environment: Mapping[str, str]


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def job_head(directory: Path, *, has_token: bool = True, **variables: str) -> Generator[JobHead, None, None]:
    """Start a head; at the end all its processes are gone.

    Args:
        directory: For its files, and the records of its runs.
        has_token: Whether it demands one.
        variables: More of its environment.
    """
    auth = {"RAY_AUTH_MODE": "disabled"}
    if has_token:
        token = directory / "token"
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        token.chmod(0o600)
        # Clients of a cluster that wants a token must be told so; they do not find out.
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    env = own_environment(directory, **auth, **variables)
    port, dashboard, agent, client = free_ports(4)
    head = [
        *(RAY, "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"),
        *(f"--port={port}", f"--temp-dir={directory / 'ray'}", f"--ray-client-server-port={client}"),
        # Nobody adds nodes to it, and a job's output is read without who reads logs for drivers.
        *("--no-monitor", "--include-log-monitor=False"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
    ]
    with program(head, log=directory / "log", env=env, cwd=directory) as cluster:
        cluster.until(lambda: "Ray runtime started" in cluster.text, "the head")
        # It says so before this one stands, and a job that is submitted waits ten seconds for it.
        cluster.until(lambda: _listens(agent), "the agent that starts jobs")
        yield JobHead(program=cluster, url=f"http://127.0.0.1:{dashboard}", environment=env)
