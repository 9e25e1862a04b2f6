"""`ensemble-ray runs`: the recorded runs, newest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ensemble_ray.cli.inputs.records import age_of, as_data, no_runs, own_store, where
from ensemble_ray.cli.inputs.tags import TagFilter, format_tags, is_tagged
from ensemble_ray.cli.view.terminal import FAILED, FINE, own_command, say, screen_line, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.facts.runs import RecordedError
    from ensemble_ray.record.stores import RecordedRun, RunStore


_LISTED = 20
#: Records that are read concurrently.
_READERS = 8
#: States that the first error explains; runs in other states left failed work out.
_WITH_REASON = frozenset({"failed", "budget_exhausted", "interrupted"})
#: Characters of an error message.
_REASON = 160


class _Listed(NamedTuple):
    """A run of the list, with facts from its record."""

    run: RecordedRun
    #: tasks with an output; None: unknown
    done: int | None = None
    #: tasks; None: unknown
    total: int | None = None
    #: the error of a damaged record
    damage: str = ""
    tags: Mapping[str, str] = {}
    #: name of its team
    name: str = ""
    #: run and task of a fork
    forked_from: Mapping[str, str] | None = None
    incomplete_answers: int = 0
    #: keys of loops and graphs that ended at a cap
    capped: Sequence[str] = ()
    #: why it failed or stopped
    error: RecordedError | None = None
    #: whether it stopped by itself, and can be resumed
    is_interrupted: bool = False


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
    tags: TagFilter = None,
    is_all: Annotated[bool, typer.Option("--all", help="List all runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> int:
    """List recorded runs: state, age, tasks done, names of their teams, tags.

    Newest first; interrupted runs can be resumed.

    Exit codes: 1 the record of a run that is listed is damaged.
    """
    from ensemble_ray.process.forks import run_blocking
    from ensemble_ray.record.stores import resume_advice

    chosen = states_of(states or ())
    store = own_store()
    found = [run for run in run_blocking(store.runs()) if not chosen or run.state.value in chosen]
    shown = run_blocking(_read(store, found, tags or (), most=None if is_all else _LISTED))
    damaged = [f"Error: run {each.run.run_id}: {each.damage}" for each in shown if each.damage]
    if as_json:
        show_json([_data(each) for each in shown])
        return FAILED if damaged else FINE
    if not shown:
        say(_nothing_found(chosen, tags or ()))
        return FINE
    _list(shown)
    left = found.index(shown[-1].run) + 1
    if left < len(found) and not is_all:
        count = f"{len(found) - left} older ones" if not tags else "older ones were not looked at"
        say(f"and {count} in {where()}; all of them: --all")
    interrupted = [each.run for each in shown if each.run.state.value == "interrupted"]
    for advice in sorted({resume_advice("RUN", run.origin, command=own_command()) for run in interrupted}):
        say(f"Interrupted runs go on with: {advice}")
    for line in damaged:
        say(line)
    return FAILED if damaged else FINE


def states_of(names: Sequence[str]) -> set[str]:
    """Return the named states.

    Raises:
        ValidationError: A name is not a state.
    """
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.values.outputs import RunState

    states = [state.value for state in RunState]
    for state in names:
        if state.lower() not in states:
            raise ValidationError(f"--state: unknown state '{state}'. Known: [{', '.join(states)}]")
    return {state.lower() for state in names}


def _nothing_found(states: set[str], tags: Sequence[str]) -> str:
    wanted = [f"is {' or '.join(sorted(states))}"] if states else []
    wanted += [f"has the tag {' and '.join(tags)}"] if tags else []
    return f"No run in {where()} {' and '.join(wanted)}" if wanted else no_runs()


def _list(shown: Sequence[_Listed]) -> None:
    from ensemble_ray.cli.view.run_view import notes_of
    from ensemble_ray.values.value import utc_now

    now = utc_now()
    rows: list[tuple[str, ...]] = []
    for each in shown:
        error, run = each.error, each.run
        notes = (
            each.name,
            f"[{format_tags(each.tags)}]" if each.tags else "",
            ", ".join(notes_of(each.incomplete_answers, each.capped)),
            "" if error is None else screen_line(f"{error.error_type}: {error.message}", _REASON),
        )
        count = "?" if each.done is None or each.total is None else f"{each.done}/{each.total}"
        rows.append((run.run_id, run.state.value, age_of(run.created_at, now), count, "  ".join(filter(None, notes))))
    names, ages, counts = (max(len(row[column]) for row in rows) for column in (0, 2, 3))
    for name, state, age, count, rest in rows:
        show(f"{name:<{names}}  {state:<11}  {age:>{ages}}  {count:>{counts}} tasks  {rest}".rstrip())


def _data(listed: _Listed) -> dict[str, object]:
    from ensemble_ray.cli.view.run_view import error_data

    return {
        **as_data(listed.run),
        **({"name": listed.name} if listed.name else {}),
        "tasks_done": listed.done,
        "tasks": listed.total,
        "tags": dict(listed.tags),
        **({"damage": listed.damage} if listed.damage else {}),
        **({"incomplete_answers": listed.incomplete_answers} if listed.incomplete_answers else {}),
        **({"capped": list(listed.capped)} if listed.capped else {}),
        **({"error": error_data(listed.error)} if listed.error else {}),
        **({"interruption": listed.error.message} if listed.error and listed.is_interrupted else {}),
        **({"forked_from": listed.forked_from} if listed.forked_from else {}),
    }


async def _read(
    store: RunStore, runs: Sequence[RecordedRun], tags: Sequence[str], *, most: int | None
) -> list[_Listed]:
    """Return the first of these runs that have the tags, with facts from their records.

    Args:
        store: The store of the runs.
        runs: The runs, in the order of the list.
        tags: Required tags, which only records contain.
        most: Maximum number; None: all.
    """
    import asyncio

    readers = asyncio.Semaphore(_READERS)

    async def read(run: RecordedRun) -> _Listed | None:
        async with readers:
            return await _read_one(store, run, tags)

    most = len(runs) if most is None else most
    found: list[_Listed] = []
    position = 0
    while position < len(runs) and len(found) < most:
        some = runs[position : position + most]
        found += [each for each in await asyncio.gather(*map(read, some)) if each is not None]
        position += len(some)
    return found[:most]


async def _read_one(store: RunStore, run: RecordedRun, tags: Sequence[str]) -> _Listed | None:
    """Read a run's record; counts are unknown if it is unreadable. Return None if the run lacks the tags."""
    from ensemble_ray.definition.fields import Origin
    from ensemble_ray.errors import RecordError, message_of
    from ensemble_ray.record.head import read_head
    from ensemble_ray.record.progress import tasks_done

    try:
        head = await read_head(store, run.run_id)
        if not is_tagged(head.tags, tags):
            return None
        progress = await tasks_done(store, run.run_id)
    except RecordError as error:  # listed anyway; a run that was just deleted is not damaged
        if tags:
            return None
        damage = message_of(error) if await store.summary(run.run_id) is not None else ""
        return _Listed(run, damage=damage, name=Origin(place=run.origin).name)
    parent = None if head.forked_from is None else head.forked_from._asdict()
    found = _Listed(
        run,
        progress.done,
        progress.total,
        tags=head.tags,
        name=head.name,
        forked_from=parent,
        error=head.errors[0] if head.errors and run.state.value in _WITH_REASON else None,
        is_interrupted=head.interruption is not None,
    )
    end = head.end
    return found if end is None else found._replace(incomplete_answers=end.incomplete_answers, capped=end.capped)
