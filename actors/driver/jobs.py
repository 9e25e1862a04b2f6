"""The job server of a cluster. Uses HTTP and joins no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ray.exceptions
from ray.job_submission import JobStatus, JobSubmissionClient

from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.ports import JobEnd

_ADDRESS = "RAY_API_SERVER_ADDRESS"
#: How long a stopped job may take to end its run, s.
_STOP_S = 30
_PATIENCE_S = 60.0
_PAUSE_S = 0.5
_TALKATIVE = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


class JobServer:
    """Submits jobs to one cluster and follows them. Implements `Jobs`.

    Args:
        address: `http://HOST:8265`, or the address of the cluster; None: `RAY_API_SERVER_ADDRESS`, `RAY_ADDRESS`, or the
            cluster of this machine.

    Raises:
        EnsembleError: the server cannot be reached, or refuses.
    """

    def __init__(self, address: str | None = None) -> None:
        shown = address or os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "this machine"
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            with _use_address(address):
                self._client = JobSubmissionClient()
        except ray.exceptions.AuthenticationError:
            raise EnsembleError(
                f"The job server at {shown} refuses: the cluster demands its token. Set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN_PATH to the file that has it"
            ) from None  # a model's endpoint has an error of the same name
        except Exception as error:  # RuntimeError, ValueError, ConnectionError or an error of Ray's HTTP client
            raise EnsembleError(
                f"No job server answers at {shown}: {message_of(error).rstrip('.')}. It is the cluster's dashboard, on port 8265 of "
                "the head node unless it was started otherwise, and needs 'ray[default]' there and here "
                "(pip install 'ray[default]'); ray dashboard CLUSTER.yaml forwards it"
            ) from error

    @property
    def address(self) -> str:
        return str(self._client.get_address())

    def submit(
        self,
        entrypoint: str,
        *,
        job_id: str,
        working_dir: Path | None = None,
        pip: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        runtime_env: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S), **(env or {})}}
        if working_dir is not None:
            runtime_env["working_dir"] = str(working_dir)
        if pip:
            runtime_env["pip"] = list(pip)
        try:
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=job_id, runtime_env=runtime_env, metadata=dict(metadata or {})
            )
        except Exception as error:  # as above, or an error of the directory
            where = "" if working_dir is None else f" with '{working_dir}'"
            raise EnsembleError(f"The job cannot be submitted{where}: {message_of(error)}") from error

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobEnd:
        seen = 0

        async def show_new() -> None:
            nonlocal seen
            left = seen
            async for text in self._client.tail_job_logs(job_id):
                new = text[left:]
                left = max(0, left - len(text))
                if new:
                    seen += len(new)
                    show(new)

        deadline = time.monotonic() + _PATIENCE_S
        while True:
            before = seen
            try:
                asyncio.run(show_new())
                if (end := self._end(job_id)) is not None:
                    if rest := self._client.get_job_logs(job_id)[seen:]:
                        show(rest)
                    return end
            except Exception as error:  # the server restarts, or the network is down
                if seen > before:
                    deadline = time.monotonic() + _PATIENCE_S
                if time.monotonic() > deadline:
                    raise EnsembleError(f"The log of job {job_id} cannot be read: {message_of(error)}") from error
            time.sleep(_PAUSE_S)

    def _end(self, job_id: str) -> JobEnd | None:
        info = cast("Any", self._client.get_job_info(job_id))
        if not info.status.is_terminal():
            return None
        return JobEnd(
            exit_code=0 if info.status == JobStatus.SUCCEEDED else info.driver_exit_code,
            is_stopped=info.status == JobStatus.STOPPED,
            message=str(info.message or ""),
        )

    def stop(self, job_id: str) -> None:
        try:
            self._client.stop_job(job_id)
        except Exception as error:  # as above
            raise EnsembleError(f"Job {job_id} cannot be stopped: {message_of(error)}") from error


@contextlib.contextmanager
def _use_address(address: str | None) -> Generator[None]:
    """Ray's own variable would override an argument."""
    if address is None:
        yield
        return
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADDRESS]
        else:
            os.environ[_ADDRESS] = before
