"""`Jobs`: programs that run on a cluster, as whoever starts them from elsewhere sees them. Package: ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["JobEnd", "Jobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended."""

    #: None: it never ran, or was killed
    exit_code: int | None
    is_stopped: bool
    #: the cluster's own words
    message: str


class Jobs(Protocol):
    """The job server of a cluster. Its calls block."""

    @property
    def address(self) -> str:
        """Its URL."""
        ...

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
        """Start a program on the cluster's head.

        Args:
            entrypoint: A line for its shell.
            job_id: The job's name.
            working_dir: Directory that is sent along, without what `.gitignore` and `.rayignore` name.
            pip: Requirements that are installed for it on the nodes.
            env: Environment variables of it and of its workers.
            metadata: Kept with the job.

        Raises:
            EnsembleError: the directory cannot be sent, or the server refuses the job.
        """
        ...

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobEnd:
        """Show a job's log from its beginning to its end, as it is written. A connection that breaks is made again.

        Raises:
            EnsembleError: the server has been gone for too long.
        """
        ...

    def stop(self, job_id: str) -> None:
        """Ask a job to end; its program is told as by `kill`, and has time to end what it does.

        Raises:
            EnsembleError: the server refuses, or is gone.
        """
        ...
