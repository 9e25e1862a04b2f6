"""One command of ours as a job of a cluster, in front of somebody who may interrupt it.

In: the words of the command, what is sent along. Out: its log on standard error, its results on standard output, its exit code.
"""

from __future__ import annotations

import json
import queue
import re
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ensemble_ray.cli.view.node_table import node_lines
from ensemble_ray.cli.view.terminal import FAILED, INTERRUPTED, MARK_VARIABLE, say, show_answer
from ensemble_ray.errors import EnsembleError, ValidationError

if TYPE_CHECKING:
    from ensemble_ray.ports import JobEnd, Jobs
    from ensemble_ray.teamfile import Runnable


#: What Ray says of the job itself.
_OF_RAY = re.compile(r"[\d-]+ [\d:,]+\s+INFO job_manager\.py:\d+ -- ")


class JobLogLine(NamedTuple):
    """One line of a log."""

    text: str
    is_result: bool


class JobLog:
    """Takes a log piece by piece.

    Args:
        mark: What stands before results.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._rest = ""

    def feed(self, text: str) -> Iterator[JobLogLine]:
        """Return the lines that are whole now."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            yield from self._split(line)

    def close(self) -> Iterator[JobLogLine]:
        """Return what is left of a last line without an end."""
        rest, self._rest = self._rest, ""
        if rest:
            yield from self._split(rest)

    def _split(self, line: str) -> Iterator[JobLogLine]:
        if _OF_RAY.match(line):
            return
        before, mark, found = line.partition(self._mark)
        if not mark:
            yield JobLogLine(line, is_result=False)
            return
        try:
            result = json.loads(found)
        except ValueError:  # the command, shown by somebody
            yield JobLogLine(line, is_result=False)
            return
        if before:  # somebody wrote a line without an end
            yield JobLogLine(before, is_result=False)
        yield JobLogLine(str(result), is_result=True)


_LACKS_US = "No module named ensemble_ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCommand:
    """What runs there.

    Attributes:
        words: The command and its arguments.
        job_id: Name of the job.
        working_dir: Sent along; None: nothing is.
        pip: Installed for it.
        env: Environment of it and of its workers.
        run_id: The run that it is about.
        on_interrupt: Asked at Ctrl-C; True: end the job, False: leave it.
    """

    words: Sequence[str]
    job_id: str
    on_interrupt: Callable[[], bool]
    working_dir: Path | None = None
    pip: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    run_id: str = ""

    def carry_out(self, server: Jobs) -> int:
        """Submit it, show its log, and return its exit code.

        Raises:
            EnsembleError: it cannot be submitted, or did not even begin.
        """
        mark = f"result-{secrets.token_hex(8)}:"
        line = f"{MARK_VARIABLE}={mark} exec python -m ensemble_ray.cli {shlex.join(self.words)}"
        metadata = {"ensemble_ray_run": self.run_id} if self.run_id else {}
        server.submit(
            line, job_id=self.job_id, working_dir=self.working_dir, pip=self.pip, env=self.env, metadata=metadata
        )
        return _Follower(server, self.job_id, JobLog(mark), self.on_interrupt).follow()


class _Follower:
    """Shows one job's log. It is read on a thread of its own, so that Ctrl-C is taken at once."""

    def __init__(self, server: Jobs, job_id: str, log: JobLog, on_interrupt: Callable[[], bool]) -> None:
        self._server = server
        self._job_id = job_id
        self._log = log
        self._on_interrupt = on_interrupt
        self._lacks_us = False
        #: pieces of the log, then its end
        self._read: queue.SimpleQueue[str | JobEnd | EnsembleError] = queue.SimpleQueue()

    def follow(self) -> int:
        """Show it to its end; return the exit code.

        Raises:
            EnsembleError: the log cannot be read, or the job did not even begin.
        """
        reading = threading.Thread(target=self._read_log, daemon=True)
        is_stopping = False
        while True:
            try:
                if reading.ident is None:  # an interrupted start has started it
                    reading.start()
                match self._read.get():
                    case str() as text:
                        self._show(text)
                    case EnsembleError() as error:
                        raise error
                    case end:
                        return self._finish(end)
            except KeyboardInterrupt:
                if is_stopping or not self._asked_to_stop():
                    return INTERRUPTED
                is_stopping = True

    def _asked_to_stop(self) -> bool:
        if not self._on_interrupt():
            return False
        say("Stopping; Ctrl-C again leaves at once.")
        self._server.stop(self._job_id)
        return True

    def _read_log(self) -> None:
        try:
            self._read.put(self._server.follow(self._job_id, self._read.put))
        except EnsembleError as error:
            self._read.put(error)

    def _show(self, text: str, *, is_last: bool = False) -> None:
        for line in self._log.close() if is_last else self._log.feed(text):
            if line.is_result:
                show_answer(line.text)
            else:
                self._lacks_us |= _LACKS_US in line.text
                say(line.text)

    def _finish(self, end: JobEnd) -> int:
        self._show("", is_last=True)
        if end.is_stopped:
            return INTERRUPTED
        if end.exit_code is None:
            raise EnsembleError(f"Job {self._job_id} did not run to its end: {end.message}")
        if self._lacks_us:
            say("  What to do: install ensemble-ray on the cluster's nodes, or send it along: --pip ensemble-ray")
        return end.exit_code if end.exit_code >= 0 else FAILED


def ships(target: str, working_dir: Path | None) -> tuple[Path, str]:
    """Return the directory that is sent along with a team, and what the team is called in it.

    Args:
        target: A YAML file, or `module:attribute`.
        working_dir: As the user says; None: the directory of the file, or the current one.

    Raises:
        ValidationError: there is no such file, or it lies elsewhere.
    """
    is_file = Path(target).suffix.lower() in {".yaml", ".yml"}
    if working_dir is not None and not working_dir.is_dir():
        raise ValidationError(f"--working-dir: '{working_dir}' is no directory")
    if not is_file:
        return (working_dir or Path.cwd()).resolve(), target
    if not Path(target).is_file():
        raise ValidationError(f"There is no file '{target}'")
    directory = (working_dir or Path(target).parent).resolve()
    return directory, path_within(Path(target), directory, "the team file")


def path_within(path: Path, directory: Path, what: str) -> str:
    """Return a path as it is called in the directory that is sent along.

    Raises:
        ValidationError: it lies elsewhere.
    """
    if not path.resolve().is_relative_to(directory):
        raise ValidationError(f"{what} '{path}' is not below '{directory}', which is sent along: --working-dir")
    return path.resolve().relative_to(directory).as_posix()


def wanted_environment(entries: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables of a job from `NAME=VALUE`, or `NAME` for one of this environment.

    Raises:
        ValidationError: one is not set here.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, is_given, value = entry.partition("=")
        if not is_given and name not in environment:
            raise ValidationError(f"--env {name}: it is not set here. Write --env {name}=VALUE")
        found[name] = value if is_given else environment[name]
    return found


def confirm_leaving(advice: str) -> bool:
    """Ask at Ctrl-C whether a run shall go on without us; return whether to stop it (S-CLU-16).

    Without a terminal nobody can be asked, and it goes on.

    Args:
        advice: Said where it goes on: how to come back to it, how to end it.
    """
    if sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write("\nLeave the run going on the cluster? [Y/n] (Ctrl-C again stops it) ")
        sys.stderr.flush()
        try:
            if sys.stdin.readline().strip().lower() in {"n", "no"}:
                return True
        except KeyboardInterrupt:
            return True
    say(advice)
    return False


def check_nodes(team: Runnable, *, is_quiet: bool) -> None:
    """Ask every node whether a team can run there, and show what they said.

    Raises:
        ValidationError: it cannot on one of them; nothing was asked of any model.
    """
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.runtime import ray_runtime_class

    found = run_blocking(ray_runtime_class()().check_nodes(team))
    if not is_quiet or not found.is_fine:
        say("\n".join(node_lines(found)))
    if not found.is_fine:
        raise ValidationError(
            "The team cannot run on all nodes of the cluster. Nothing was asked of any model. To run it all the same: "
            "without --check-nodes, or submit --no-check"
        )
