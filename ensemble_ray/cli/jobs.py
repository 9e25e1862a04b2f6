"""Commands that run as jobs of a cluster."""

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

from ensemble_ray.cli.view.terminal import (
    FAILED,
    INTERRUPTED,
    MARK_VARIABLE,
    align,
    count_noun,
    say,
    screen_line,
    show_answer,
)
from ensemble_ray.errors import EnsembleError, ValidationError

if TYPE_CHECKING:
    from ensemble_ray.ports import JobEnd, Jobs
    from ensemble_ray.teamfile import Runnable
    from ensemble_ray.values.descriptions import NodeReport, NodesReport

_RAY_LOG_LINE = re.compile(r"[\d-]+ [\d:,]+\s+INFO job_manager\.py:\d+ -- ")


class JobLogLine(NamedTuple):
    text: str
    is_result: bool


class JobLog:
    """Splits the log of a job into lines; results begin with a mark."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._rest = ""

    def feed(self, text: str) -> Iterator[JobLogLine]:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            yield from self._split(line)

    def close(self) -> Iterator[JobLogLine]:
        rest, self._rest = self._rest, ""
        if rest:
            yield from self._split(rest)

    def _split(self, line: str) -> Iterator[JobLogLine]:
        if _RAY_LOG_LINE.match(line):
            return
        before, mark, found = line.partition(self._mark)
        if not mark:
            yield JobLogLine(line, is_result=False)
            return
        try:
            result = json.loads(found)
        except ValueError:  # the command itself, which some program printed
            yield JobLogLine(line, is_result=False)
            return
        if before:  # other output without a line break
            yield JobLogLine(before, is_result=False)
        yield JobLogLine(str(result), is_result=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCommand:
    """At Ctrl-C, `on_interrupt` decides whether to stop the job."""

    words: Sequence[str]
    job_id: str
    on_interrupt: Callable[[], bool]
    working_dir: Path | None = None
    pip: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    run_id: str = ""

    def carry_out(self, server: Jobs) -> int:
        mark = f"result-{secrets.token_hex(8)}:"
        line = f"{MARK_VARIABLE}={mark} exec python -m ensemble_ray.cli {shlex.join(self.words)}"
        metadata = {"ensemble_ray_run": self.run_id} if self.run_id else {}
        server.submit(
            line, job_id=self.job_id, working_dir=self.working_dir, pip=self.pip, env=self.env, metadata=metadata
        )
        return _Follower(server, self, JobLog(mark)).follow()


class _Follower:
    """A thread reads the log, so that Ctrl-C takes effect immediately."""

    def __init__(self, server: Jobs, command: ClusterCommand, log: JobLog) -> None:
        self._server = server
        self._job_id = command.job_id
        self._log = log
        self._on_interrupt = command.on_interrupt
        self._is_package_missing = False
        #: pieces of the log, then the job's end or an error
        self._read: queue.SimpleQueue[str | JobEnd | EnsembleError] = queue.SimpleQueue()

    def follow(self) -> int:
        def read_log() -> None:
            try:
                self._read.put(self._server.follow(self._job_id, self._read.put))
            except EnsembleError as error:
                self._read.put(error)

        reader = threading.Thread(target=read_log, daemon=True)
        is_stopping = False
        while True:
            try:
                if reader.ident is None:  # Ctrl-C during `start` leaves a started thread
                    reader.start()
                match self._read.get():
                    case str() as text:
                        self._show(text)
                    case EnsembleError() as error:
                        raise error
                    case end:
                        return self._finish(end)
            except KeyboardInterrupt:
                if is_stopping or not self._on_interrupt():
                    return INTERRUPTED
                say("Stopping; Ctrl-C again leaves immediately.")
                self._server.stop(self._job_id)
                is_stopping = True

    def _show(self, text: str, *, is_last: bool = False) -> None:
        for line in self._log.close() if is_last else self._log.feed(text):
            if line.is_result:
                show_answer(line.text)
            else:
                self._is_package_missing |= "No module named ensemble_ray" in line.text
                say(line.text)

    def _finish(self, end: JobEnd) -> int:
        self._show("", is_last=True)
        if end.is_stopped:
            return INTERRUPTED
        if end.exit_code is None:
            raise EnsembleError(f"Job {self._job_id} did not run to its end: {end.message}")
        if self._is_package_missing:
            say("  What to do: install ensemble-ray on the cluster's nodes, or send it along: --pip ensemble-ray")
        return end.exit_code if end.exit_code >= 0 else FAILED


def ships(target: str, working_dir: Path | None) -> tuple[Path, str]:
    """Return the directory to upload with a team, and the team's name inside it."""
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
    if not path.resolve().is_relative_to(directory):
        raise ValidationError(f"{what} '{path}' is not below '{directory}', which is sent along: --working-dir")
    return path.resolve().relative_to(directory).as_posix()


def wanted_environment(entries: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """`NAME` is a variable of this environment."""
    found: dict[str, str] = {}
    for entry in entries:
        name, is_given, value = entry.partition("=")
        if not is_given and name not in environment:
            raise ValidationError(f"--env {name}: it is not set here. Write --env {name}=VALUE")
        found[name] = value if is_given else environment[name]
    return found


def confirm_leaving(advice: str) -> bool:
    """Ask at Ctrl-C whether to stop the run; without a terminal, let it continue (S-CLU-16)."""
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
    from ensemble_ray.process.concurrency import run_blocking
    from ensemble_ray.runtime import ray_runtime_class

    found = run_blocking(ray_runtime_class()().check_nodes(team))
    if not is_quiet or not found.is_fine:
        say("\n".join(node_lines(found)))
    if not found.is_fine:
        raise ValidationError(
            "The team cannot run on all nodes of the cluster. Nothing was asked of any model. To run it all the same: "
            "without --check-nodes, or submit --no-check"
        )


_TEXT = 200
_ID = 8
_COLUMNS = ("ray", "ensemble-ray")  # packages with a separate column


def node_lines(found: NodesReport) -> Sequence[str]:
    rows: list[tuple[str, ...]] = [("", "node", "Python", *_COLUMNS, "code", "endpoints")]
    rows += [_row(found, node) for node in found.nodes]
    head, *lines = align(rows)
    table = [head]
    for node, line in zip(found.nodes, lines, strict=True):
        table.append(line)
        for problem, advice in found.problems(node):
            table += [f"      {screen_line(problem, _TEXT)}", f"      -> {advice}"]
    wrong = sum(bool(found.problems(node)) for node in found.nodes)
    count = count_noun(len(found.nodes), "node")
    verdict = f"{wrong} of {count} cannot run it" if wrong else f"{count} can run it"
    return (*table, f"{verdict}; asked in {found.duration_s:.1f} s")


def node_data(found: NodesReport) -> dict[str, object]:
    nodes = [
        {**node.to_dict(), "problems": [{"problem": what, "advice": advice} for what, advice in found.problems(node)]}
        for node in found.nodes
    ]
    return {"is_fine": found.is_fine, "here": found.here.to_dict(), "nodes": nodes}


def _row(found: NodesReport, node: NodeReport) -> tuple[str, ...]:
    mark = "FAIL" if found.problems(node) else "ok"
    name = f"{screen_line(node.address, _TEXT)} {node.node_id[:_ID]}".rstrip()
    if node.refusal:
        return (mark, name, *("?" for _ in range(len(_COLUMNS) + 3)))
    versions = (screen_line(node.packages.get(each, "") or "missing", _TEXT) for each in _COLUMNS)
    code = f"{len(node.unloadable)} fail" if node.unloadable else "ok"
    out_of_reach = sum(map(bool, node.endpoints.values()))
    endpoints = f"{out_of_reach} of {len(node.endpoints)} fail" if out_of_reach else f"{len(node.endpoints)} ok"
    return (mark, name, screen_line(node.python, _TEXT), *versions, code, endpoints if node.endpoints else "-")
