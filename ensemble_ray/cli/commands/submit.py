"""`ensemble-ray submit` and `attach`."""

from __future__ import annotations

import asyncio
import os
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import own_store, say_where
from ensemble_ray.cli.view.terminal import FAILED, FINE, INTERRUPTED, WAITING, own_command, say, show_answer, show_json
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.cli.view.progress import Display
    from ensemble_ray.events.messages import WireEvent
    from ensemble_ray.record.following import RunFollower
    from ensemble_ray.record.stores import RunStore


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
    from ensemble_ray.cli.jobs import ClusterCommand, confirm_leaving, path_within, ships, wanted_environment
    from ensemble_ray.runtime import ray_runtime_class
    from ensemble_ray.values.ids import new_run_id

    read_inputs(inputs or (), inputs_file)  # reports their errors before the upload
    options.run_options(None, None, tags)
    directory, name = ships(target, working_dir)
    chosen = run_id or new_run_id()
    words = ["run", name, "--runtime", "ray", "--run-id", chosen]
    words += [word for each in inputs or () for word in ("--input", each)]
    words += [word for each in tags or () for word in ("--tag", each)]
    if inputs_file is not None:
        words += ["--inputs-file", path_within(inputs_file, directory, "--inputs-file")]
    valued = {"--workflow": workflow, "--llm": llm, "--max-tokens": max_tokens, "--max-cost": max_cost}
    words += [word for option, value in valued.items() if value is not None for word in (option, str(value))]
    flags = (("--check-nodes", checks), ("--json", as_json), ("--quiet", quiet))
    words += [flag for flag, is_set in flags if is_set]
    variables = wanted_environment(env or (), os.environ)
    server = ray_runtime_class().job_server(address)
    job_id = f"ensemble-ray-{chosen}-{secrets.token_hex(3)}"
    if not quiet:
        say(f"Run {chosen}, job {job_id} at {server.address}")
        say(f"Sending {directory}")
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
        say(f"The run continues. Watch it again: {own_command()} attach {found.run_id}")
        return INTERRUPTED
    _show_end(end, details, as_json=as_json, is_quiet=quiet)
    return _CODES.get(end["state"], FAILED)


def _show_end(end: dict[str, Any], details: Sequence[str], *, as_json: bool, is_quiet: bool) -> None:
    if as_json:
        show_json(end)
    elif end["raw"] is not None:
        show_answer(end["raw"])
    for position, error in enumerate(end["errors"]):
        say(f"Error: {error}")
        for line in () if position else details:
            say(f"  {line}")
    if not is_quiet:
        if end["state"] != "completed":
            say(f"The run is {end['state']}")
        for note in end["notes"]:
            say(note)
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
    from ensemble_ray.cli.jobs import ClusterCommand
    from ensemble_ray.runtime import ray_runtime_class

    flags = (("--wait", is_waiting), ("--json", as_json), ("--quiet", is_quiet))
    command = ClusterCommand(
        words=["attach", run, *(flag for flag, is_set in flags if is_set)],
        job_id=f"ensemble-ray-attach-{secrets.token_hex(4)}",
        on_interrupt=lambda: True,
    )
    return command.carry_out(ray_runtime_class().job_server(address))
