"""`ensemble-ray submit` and `attach`, and the jobs of a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Struct
from typer import Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import own_store, say_where
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    INTERRUPTED,
    MARK_VARIABLE,
    WAITING,
    align,
    count_noun,
    own_command,
    screen_line,
    show_answer,
    show_json,
    write_note,
)
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.cli.view.progress import Display
    from ensemble_ray.events.messages import WireEvent
    from ensemble_ray.ports import JobEnd, Jobs
    from ensemble_ray.record.following import RunFollower
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.teamfile import Runnable
    from ensemble_ray.values.metrics import NodeReport, NodesReport


def submit(
    target: options.Target,
    *,
    address: options.JobAddress = None,
    inputs: options.Inputs = None,
    inputs_file: options.InputsFile = None,
    workflow: options.Workflow = None,
    llm: options.Llm = None,
    run_id: options.RunId = None,
    max_tokens: options.MaxTokens = None,
    max_cost: options.MaxCost = None,
    tags: options.Tags = None,
    user: options.User = None,
    working_dir: Annotated[
        Path | None,
        Option(
            "--working-dir",
            metavar="DIRECTORY",
            help="Directory to upload. Default: the team file's, or the current one.",
        ),
    ] = None,
    pip: Annotated[
        list[str] | None,
        Option("--pip", metavar="REQUIREMENT", help="Install this for the job on every node; repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="A variable of the job and its workers; without a value: as here. All users of the cluster can read it. "
            "Repeatable.",
        ),
    ] = None,
    checks: Annotated[
        bool, Option("--check/--no-check", help="Ask every node first whether the team can run there.")
    ] = True,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Run a team on a cluster, as a job, and print its output.

    Uploads the team's directory (without files that .gitignore and .rayignore name), runs `ensemble-ray run` there, and
    shows its progress here. Ctrl-C asks whether the run should continue; a second one stops it. Without a terminal it
    continues.

    Exit codes: as run; 130 also if you leave a running run.
    """
    from ensemble_ray.cli.inputs.arguments import read_inputs
    from ensemble_ray.runtime import ray_runtime_class
    from ensemble_ray.values.ids import new_run_id

    read_inputs(inputs or (), inputs_file)  # reports their errors before the upload
    options.run_options(None, None, tags, user)
    directory, name = ships(target, working_dir)
    chosen = run_id or new_run_id()
    words = ["run", name, "--runtime", "ray", "--run-id", chosen]
    words += [word for each in inputs or () for word in ("--input", each)]
    words += [word for each in tags or () for word in ("--tag", each)]
    if inputs_file is not None:
        words += ["--inputs-file", path_within(inputs_file, directory, "--inputs-file")]
    valued = {"--workflow": workflow, "--llm": llm, "--max-tokens": max_tokens, "--max-cost": max_cost}
    valued["--user"] = user
    words += [word for option, value in valued.items() if value is not None for word in (option, str(value))]
    flags = (("--check-nodes", checks), ("--json", as_json), ("--quiet", quiet))
    words += [flag for flag, is_set in flags if is_set]
    variables = wanted_environment(env or (), os.environ)
    server = ray_runtime_class().job_server(address)
    job_id = f"ensemble-ray-{chosen}-{secrets.token_hex(3)}"
    if not quiet:
        write_note(f"Run {chosen}, job {job_id} at {server.address}")
        write_note(f"Sending {directory}")
    again = f"{own_command()} attach {chosen} --address {server.address}"
    stops = f"{own_command()} cancel {chosen} on the cluster, or ray job stop {job_id}"
    leave = partial(confirm_leaving, f"The run continues. Watch it: {again}\nEnd it: {stops}")
    sent = partial(ClusterCommand, working_dir=directory, pip=pip or (), env=variables, run_id=chosen)
    return sent(words=words, job_id=job_id, on_interrupt=leave).carry_out(server)


_READ_S = 60.0
_LOOK_S = 1.0
_END_S = 0.1

_CODES = {"completed": FINE, "cancelled": INTERRUPTED, "waiting": WAITING}


def attach(
    run: options.RunName,
    *,
    address: Annotated[
        str | None,
        Option("--address", metavar="URL", help="Watch it on the cluster of that job server: http://HOST:8265."),
    ] = None,
    wait: Annotated[
        bool, Option("--wait", help="Stay also while the run is interrupted, or waits for reviews, until it goes on.")
    ] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Watch a run that another process drives, and print its output when it ends.

    Reads the run's record: on this machine, in the database, or with --address on a cluster. Prints the output of an ended
    run immediately. Ctrl-C stops watching, never the run.

    Exit codes: as run; 1 also if the run has no owner, 130 also after Ctrl-C.
    """
    if address is not None:
        return _attach_by_job(run, address, is_waiting=wait, as_json=as_json, is_quiet=quiet)
    from ensemble_ray.cli.view.run_view import read_end

    store = own_store()
    found = run_blocking(store.find(run))
    try:
        if not found.state.is_final:
            run_blocking(_Watch(store, found.run_id, is_quiet=quiet).follow(is_waiting=wait))
        end, details = run_blocking(read_end(store, found.run_id))
    except KeyboardInterrupt:
        write_note(f"The run continues. Watch it again: {own_command()} attach {found.run_id}")
        return INTERRUPTED
    _show_end(end, details, as_json=as_json, is_quiet=quiet)
    return _CODES.get(end["state"], FAILED)


def _show_end(end: dict[str, Any], details: Sequence[str], *, as_json: bool, is_quiet: bool) -> None:
    if as_json:
        show_json(end)
    elif end["raw"] is not None:
        show_answer(end["raw"])
    for position, error in enumerate(end["errors"]):
        write_note(f"Error: {error}")
        for line in () if position else details:
            write_note(f"  {line}")
    if not is_quiet:
        if end["state"] != "completed":
            write_note(f"The run is {end['state']}")
        for note in end["notes"]:
            write_note(note)
        say_where(end["run_id"])


class _Watch:
    def __init__(self, store: RunStore, run_id: str, *, is_quiet: bool) -> None:
        self._store = store
        self._run_id = run_id
        self._is_quiet = is_quiet

    async def follow(self, *, is_waiting: bool) -> None:
        """`is_waiting`: also wait while the run has no owner."""
        from ensemble_ray.cli.view.progress import Display, ItemProgress, TaskProgress
        from ensemble_ray.record.following import RunFollower
        from ensemble_ray.record.head import read_head

        head = await read_head(self._store, self._run_id)
        progress = ItemProgress(self._run_id) if head.is_dynamic else TaskProgress(self._run_id)
        follower = RunFollower(self._store, self._run_id, outcome=self._idle_state)
        with Display(progress, is_quiet=self._is_quiet) as display:
            with display.catch_up():
                while messages := await follower.read(0):
                    _show(display, messages)
            display.note_line(f"{self._run_id}: {display.standing()}")
            while not await self._read_to_end(follower, display) and is_waiting:
                while (found := await self._store.summary(self._run_id)) is not None:
                    if found.state.is_active or found.state.is_final:
                        break
                    await asyncio.sleep(_LOOK_S)
                display.note("the run continues")
                follower = RunFollower(self._store, self._run_id, after=follower.cursor, outcome=self._idle_state)

    async def _idle_state(self) -> str | None:
        """None while an owner works on the run."""
        from ensemble_ray.values.outputs import RunState

        found = await self._store.summary(self._run_id)
        if found is None or found.state.is_active:
            return None
        return (found.state if found.state.is_final or found.state is RunState.WAITING else RunState.INTERRUPTED).value

    async def _read_to_end(self, follower: RunFollower, display: Display) -> bool:
        """Return whether the run has reached a final state."""
        while not follower.is_over:
            _show(display, await follower.read(_READ_S))
        found = await self._store.summary(self._run_id)
        while found is not None and found.state.is_active:  # the record has the end before the state changes
            await asyncio.sleep(_END_S)
            found = await self._store.summary(self._run_id)
        return found is None or found.state.is_final


def _show(display: Display, messages: Sequence[WireEvent]) -> None:
    from ensemble_ray.cli.view.followed import event_of

    for message in messages:
        event = event_of(message)
        if event is not None:
            display.show(event)


def _attach_by_job(run: str, address: str, *, is_waiting: bool, as_json: bool, is_quiet: bool) -> int:
    """A job on the cluster can read the record."""
    from ensemble_ray.runtime import ray_runtime_class

    flags = (("--wait", is_waiting), ("--json", as_json), ("--quiet", is_quiet))
    command = ClusterCommand(
        words=["attach", run, *(flag for flag, is_set in flags if is_set)],
        job_id=f"ensemble-ray-attach-{secrets.token_hex(4)}",
        on_interrupt=lambda: True,
    )
    return command.carry_out(ray_runtime_class().job_server(address))


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


class ClusterCommand(Struct, frozen=True, kw_only=True):
    """At Ctrl-C, `on_interrupt` decides whether to stop the job."""

    words: Sequence[str]
    job_id: str
    on_interrupt: Callable[[], bool]
    working_dir: Path | None = None
    pip: Sequence[str] = ()
    env: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
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
                write_note("Stopping; Ctrl-C again leaves immediately.")
                self._server.stop(self._job_id)
                is_stopping = True

    def _show(self, text: str, *, is_last: bool = False) -> None:
        for line in self._log.close() if is_last else self._log.feed(text):
            if line.is_result:
                show_answer(line.text)
            else:
                self._is_package_missing |= "No module named ensemble_ray" in line.text
                write_note(line.text)

    def _finish(self, end: JobEnd) -> int:
        self._show("", is_last=True)
        if end.is_stopped:
            return INTERRUPTED
        if end.exit_code is None:
            raise EnsembleError(f"Job {self._job_id} did not run to its end: {end.message}")
        if self._is_package_missing:
            write_note(
                "  What to do: install ensemble-ray on the cluster's nodes, or send it along: --pip ensemble-ray"
            )
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
    write_note(advice)
    return False


def check_nodes(team: Runnable, *, is_quiet: bool) -> None:
    from ensemble_ray.process.concurrency import run_blocking
    from ensemble_ray.runtime import ray_runtime_class

    found = run_blocking(ray_runtime_class()().check_nodes(team))
    if not is_quiet or not found.is_fine:
        write_note("\n".join(node_lines(found)))
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
