"""`ensemble-ray attach`: watch a run that another process drives. It reads only the run's record."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.commands.run import AsJson, Quiet
from ensemble_ray.cli.inputs.records import RunName, own_store, say_where
from ensemble_ray.cli.view.terminal import FAILED, FINE, INTERRUPTED, WAITING, own_command, say, show_answer, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.cli.view.progress import Display
    from ensemble_ray.cli.view.run_view import RecordedEnd
    from ensemble_ray.events.messages import WireEvent
    from ensemble_ray.record.following import RunFollower
    from ensemble_ray.record.stores import RunStore

#: Timeout of a read, seconds.
_READ_S = 60.0
#: Polling interval for a run without an owner, seconds.
_LOOK_S = 1.0
#: Polling interval for the state of a run that has just ended, seconds.
_END_S = 0.1

_CODES = {"completed": FINE, "cancelled": INTERRUPTED, "waiting": WAITING}


def attach(
    run: RunName,
    *,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="URL", help="Watch it on the cluster of that job server: http://HOST:8265."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Stay also while the run is interrupted, or waits for reviews, until it goes on."),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Watch a run that another process drives, and print its output when it ends.

    Reads the run's record: on this machine, in the database, or with --address on a cluster. Prints the output of an ended
    run immediately. Ctrl-C stops watching, never the run.

    Exit codes: as run; 1 also if the run has no owner, 130 also after Ctrl-C.
    """
    if address is not None:
        return _attach_by_job(run, address, is_waiting=wait, as_json=as_json, is_quiet=quiet)
    from ensemble_ray.cli.view.run_view import read_end
    from ensemble_ray.process.forks import run_blocking

    store = own_store()
    found = run_blocking(store.find(run))
    try:
        if not found.state.is_final:
            run_blocking(_Watch(store, found.run_id, is_quiet=quiet).follow(is_waiting=wait))
        end = run_blocking(read_end(store, found.run_id))
    except KeyboardInterrupt:
        say(f"The run continues. Watch it again: {own_command()} attach {found.run_id}")
        return INTERRUPTED
    return _show_end(end, as_json=as_json, is_quiet=quiet)


def _show_end(end: RecordedEnd, *, as_json: bool, is_quiet: bool) -> int:
    if as_json:
        show_json(end.to_dict())
    elif end.text is not None:
        show_answer(end.text)
    for position, error in enumerate(end.errors):
        say(f"Error: {error}")
        for line in () if position else end.details:
            say(f"  {line}")
    if not is_quiet:
        if end.state != "completed":
            say(f"The run is {end.state}")
        for note in end.notes:
            say(note)
        say_where(end.run_id)
    return _CODES.get(end.state, FAILED)


class _Watch:
    def __init__(self, store: RunStore, run_id: str, *, is_quiet: bool) -> None:
        self._store = store
        self._run_id = run_id
        self._is_quiet = is_quiet

    async def follow(self, *, is_waiting: bool) -> None:
        """Show events until the run has ended; `is_waiting`: also wait while it has no owner."""
        from ensemble_ray.cli.view.item_progress import ItemProgress
        from ensemble_ray.cli.view.progress import Display, TaskProgress
        from ensemble_ray.record.following import RunFollower
        from ensemble_ray.record.head import read_head

        head = await read_head(self._store, self._run_id)
        progress = ItemProgress(self._run_id) if head.is_dynamic else TaskProgress(self._run_id)
        follower = RunFollower(self._store, self._run_id, outcome=self._idle_state)
        with Display(progress, is_quiet=self._is_quiet) as display:
            # Earlier events are counted, and shown in one line.
            with display.catch_up():
                while messages := await follower.read(0):
                    _show(display, messages)
            display.note_line(f"{self._run_id}: {display.standing()}")
            while not await self._read_to_end(follower, display) and is_waiting:
                await self._wait_until_resumed()
                display.note("the run continues")
                follower = RunFollower(self._store, self._run_id, after=follower.cursor, outcome=self._idle_state)

    async def _idle_state(self) -> str | None:
        """Return the state of a run without an active owner, or None while one works on it."""
        from ensemble_ray.values.outputs import RunState

        found = await self._store.summary(self._run_id)
        if found is None or found.state.is_active:
            return None
        return (found.state if found.state.is_final or found.state is RunState.WAITING else RunState.INTERRUPTED).value

    async def _read_to_end(self, follower: RunFollower, display: Display) -> bool:
        """Show messages until no more arrive; return whether the run has reached a final state."""
        while not follower.is_over:
            _show(display, await follower.read(_READ_S))
        found = await self._store.summary(self._run_id)
        while found is not None and found.state.is_active:  # the record has the end before the state changes
            await asyncio.sleep(_END_S)
            found = await self._store.summary(self._run_id)
        return found is None or found.state.is_final

    async def _wait_until_resumed(self) -> None:
        while True:
            found = await self._store.summary(self._run_id)
            if found is None or found.state.is_active or found.state.is_final:
                return
            await asyncio.sleep(_LOOK_S)


def _show(display: Display, messages: Sequence[WireEvent]) -> None:
    from ensemble_ray.cli.view.followed import event_of

    for message in messages:
        event = event_of(message)
        if event is not None:
            display.show(event)


def _attach_by_job(run: str, address: str, *, is_waiting: bool, as_json: bool, is_quiet: bool) -> int:
    """Watch the run from a job on the cluster, which can read the record."""
    import secrets

    from ensemble_ray.cli.jobs import ClusterCommand
    from ensemble_ray.runtime import ray_runtime_class

    flags = (("--wait", is_waiting), ("--json", as_json), ("--quiet", is_quiet))
    command = ClusterCommand(
        words=["attach", run, *(flag for flag, is_set in flags if is_set)],
        job_id=f"ensemble-ray-attach-{secrets.token_hex(4)}",
        on_interrupt=lambda: True,  # stops watching, never the run
    )
    return command.carry_out(ray_runtime_class().job_server(address))
