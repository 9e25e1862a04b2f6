"""`ensemble-ray runs`: the recorded runs, newest first. Package: cli."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.inputs.records import age_of, as_data, no_runs, own_store, where
from ensemble_ray.cli.view.terminal import FAILED, FINE, own_command, say, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore, RunSummary

__all__ = ["States", "runs", "states_of"]

_LISTED = 20
#: Runs whose records are read at the same time.
_READERS = 8

#: Tasks with an output, tasks, what is wrong with the record, run and task of a fork; None: not known, or none
_Done = tuple[int | None, int | None, str, Mapping[str, str] | None]

States = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        metavar="STATE",
        help="Only runs in that state: running, completed, failed, cancelled, budget_exhausted, interrupted; repeatable.",
    ),
]


def runs(
    *,
    states: States = None,
    is_all: Annotated[bool, typer.Option("--all", help="Leave no run out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> int:
    """List recorded runs: state, age, tasks done, where they came from.

    Newest first; those that were interrupted can be resumed.

    Exit codes: 1 the record of a run that is listed is damaged.
    """
    from ensemble_ray.process.loop import run_blocking

    chosen = states_of(states or ())
    store = own_store()
    found = [run for run in run_blocking(store.runs()) if not chosen or run.state.value in chosen]
    shown = found if is_all else found[:_LISTED]
    done = run_blocking(_tasks_done(store, shown))
    damaged = [f"Error: run {run.run_id}: {each[2]}" for run, each in zip(shown, done, strict=True) if each[2]]
    if as_json:
        data = [
            {
                **as_data(run),
                "tasks_done": each[0],
                "tasks": each[1],
                **({"damage": each[2]} if each[2] else {}),
                **({"forked_from": each[3]} if each[3] else {}),
            }
            for run, each in zip(shown, done, strict=True)
        ]
        show_json(data)
        return FAILED if damaged else FINE
    if not found:
        say(f"No run in {where()} is {' or '.join(sorted(chosen))}" if chosen else no_runs())
        return FINE
    _list(shown, done)
    if len(found) > len(shown):
        say(f"and {len(found) - len(shown)} older ones in {where()}; all of them: --all")
    if any(run.state.value == "interrupted" for run in shown):
        say(f"Interrupted runs go on with: {own_command()} resume RUN")
    for line in damaged:
        say(line)
    return FAILED if damaged else FINE


def states_of(names: Sequence[str]) -> set[str]:
    """Return the states that were named.

    Raises:
        ValidationError: one of them is none.
    """
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.values.outputs import RunState

    states = [state.value for state in RunState]
    for state in names:
        if state.lower() not in states:
            raise ValidationError(f"--state: unknown state '{state}'. Known: [{', '.join(states)}]")
    return {state.lower() for state in names}


def _list(shown: Sequence[RunSummary], done: Sequence[_Done]) -> None:
    from ensemble_ray.values.value import utc_now

    now = utc_now()
    rows = [
        (run.run_id, run.state.value, age_of(run.created_at, now), _counted(each), run.origin)
        for run, each in zip(shown, done, strict=True)
    ]
    names, ages, counts = (max(len(row[column]) for row in rows) for column in (0, 2, 3))
    for name, state, age, count, origin in rows:
        show(f"{name:<{names}}  {state:<11}  {age:>{ages}}  {count:>{counts}} tasks  {origin}".rstrip())


def _counted(each: _Done) -> str:
    done, total, *_ = each
    return "?" if done is None or total is None else f"{done}/{total}"


async def _tasks_done(store: RunStore, shown: Sequence[RunSummary]) -> list[_Done]:
    """Return how far each run is; unknown where the record cannot be read."""
    import asyncio

    from ensemble_ray.errors import RecordError, message_of
    from ensemble_ray.record.progress import tasks_done
    from ensemble_ray.record.resume.run_head import read_head

    readers = asyncio.Semaphore(_READERS)

    async def count(run: RunSummary) -> _Done:
        async with readers:
            try:
                progress = await tasks_done(store, run.run_id)
                parent = (await read_head(store, run.run_id)).forked_from
            except RecordError as error:  # a list shows what there is; a run that was deleted meanwhile is not damaged
                return None, None, message_of(error) if await store.summary(run.run_id) is not None else "", None
            return progress.done, progress.total, "", None if parent is None else parent._asdict()

    return list(await asyncio.gather(*(count(run) for run in shown)))
