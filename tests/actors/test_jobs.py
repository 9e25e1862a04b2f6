"""The job server of a cluster that is not there."""

from __future__ import annotations

import pytest

from ensemble_ray import EnsembleError
from ensemble_ray.actors.driver.jobs import JobServer
from tests.processes import free_ports


def test_no_job_server_is_said_with_what_to_do() -> None:
    """S-CLU-18: where it was looked for, and what a cluster needs to have one."""
    (port,) = free_ports(1)
    with pytest.raises(
        EnsembleError, match=rf"No job server answers at http://127\.0\.0\.1:{port}: .*needs 'ray\[default\]'"
    ):
        JobServer(f"http://127.0.0.1:{port}")
