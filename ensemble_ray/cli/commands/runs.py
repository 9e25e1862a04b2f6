"""`ensemble-ray runs`, `trace`, `cancel`, `delete` and `prune`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import age_of, as_data, no_runs, own_store, where
from ensemble_ray.cli.view import export
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    own_command,
    revealing,
    screen_line,
    show,
    show_json,
    show_json_text,
    write_note,
)
from ensemble_ray.errors import EnsembleError, RecordError, RunExistsError, ValidationError, message_of
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import RecordedError
    from ensemble_ray.record.stores import RecordedRun, RunStore
    from ensemble_ray.record.view.map_reduce import MapReduceView
    from ensemble_ray.record.view.tree import TreeRow
    from ensemble_ray.values.trace import ExecutionTrace
    from ensemble_ray.visualization.flow import Flow

_LISTED = 20
_READERS = 8  # records that are read concurrently
_REASON = 160


class _Listed(NamedTuple):
    run: RecordedRun
    done: int | None = None  # tasks with an output; None: unknown
    total: int | None = None
    damage: str = ""  # the error of a damaged record
    tags: Mapping[str, str] = {}
    name: str = ""
    forked_from: Mapping[str, str] | None = None  # run and task
    incomplete_answers: int = 0
    capped: Sequence[str] = ()  # loops and graphs that ended at a cap
    error: RecordedError | None = None
    is_interrupted: bool = False  # it stopped by itself, and can be resumed


States = Annotated[
    list[str] | None,
    Option(
        "--state",
        metavar="STATE",
        help="Only runs in that state: running, completed, failed, cancelled, budget_exhausted, interrupted; repeatable.",
    ),
]


def runs(
    *,
    states: States = None,
    tags: Annotated[
        list[str] | None,
        Option("--tag", metavar="NAME[=VALUE]", help="Only runs with this tag; repeatable: with all of them."),
    ] = None,
    is_all: Annotated[bool, Option("--all", help="List all runs.")] = False,
    as_json: options.ThemAsJson = False,
) -> int:
    """List recorded runs: state, age, tasks done, names of their teams, tags.

    Newest first; interrupted runs can be resumed.

    Exit codes: 1 the record of a run that is listed is damaged.
    """
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
        wanted = [f"is {' or '.join(sorted(chosen))}"] if chosen else []
        wanted += [f"has the tag {' and '.join(tags)}"] if tags else []
        write_note(f"No run in {where()} {' and '.join(wanted)}" if wanted else no_runs())
        return FINE
    _list_details(shown)
    left = found.index(shown[-1].run) + 1
    if left < len(found) and not is_all:
        count = f"{len(found) - left} older ones" if not tags else "older ones were not looked at"
        write_note(f"and {count} in {where()}; all of them: --all")
    interrupted = [each.run for each in shown if each.run.state.value == "interrupted"]
    for advice in sorted({resume_advice("RUN", run.origin, command=own_command()) for run in interrupted}):
        write_note(f"Interrupted runs go on with: {advice}")
    for line in damaged:
        write_note(line)
    return FAILED if damaged else FINE


def states_of(names: Sequence[str]) -> set[str]:
    from ensemble_ray.values.outputs import RunState

    states = [state.value for state in RunState]
    for state in names:
        if state.lower() not in states:
            raise ValidationError(f"--state: unknown state '{state}'. Known: [{', '.join(states)}]")
    return {state.lower() for state in names}


def _list_details(shown: Sequence[_Listed]) -> None:
    from ensemble_ray.cli.view.run_view import notes_of
    from ensemble_ray.values.value import utc_now

    now = utc_now()
    rows: list[tuple[str, ...]] = []
    for each in shown:
        error, run = each.error, each.run
        tags = " ".join(f"{tag}={value}" if value else tag for tag, value in each.tags.items())
        ends = ", ".join(notes_of(each.incomplete_answers, each.capped))
        why = "" if error is None else screen_line(f"{error.error_type}: {error.message}", _REASON)
        notes = (each.name, f"[{tags}]" if tags else "", ends, why)
        count = "?" if each.done is None or each.total is None else f"{each.done}/{each.total}"
        rows.append((run.run_id, run.state.value, age_of(run.created_at, now), count, "  ".join(filter(None, notes))))
    names, ages, counts = (max(len(row[column]) for row in rows) for column in (0, 2, 3))
    for name, state, age, count, rest in rows:
        show(f"{name:<{names}}  {state:<11}  {age:>{ages}}  {count:>{counts}} tasks  {rest}".rstrip())


def _data(listed: _Listed) -> dict[str, object]:
    from ensemble_ray.cli.view.run_view import error_data

    why = listed.error
    more = {
        "damage": listed.damage, "incomplete_answers": listed.incomplete_answers, "capped": list(listed.capped),
        "error": error_data(why) if why else None, "interruption": why.message if why and listed.is_interrupted else None,
        "forked_from": listed.forked_from,
    }  # fmt: skip
    named = {"name": listed.name} if listed.name else {}
    counts = {"tasks_done": listed.done, "tasks": listed.total, "tags": dict(listed.tags)}
    return {**as_data(listed.run), **named, **counts, **{key: value for key, value in more.items() if value}}


async def _read(
    store: RunStore, runs: Sequence[RecordedRun], tags: Sequence[str], *, most: int | None
) -> list[_Listed]:
    """Return the first `most` of these runs that have the tags (None: all)."""
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
    """Return None if the run lacks the tags. Counts are unknown if its record is unreadable."""
    from ensemble_ray.definition.fields import Origin
    from ensemble_ray.definition.run_options import has_tag
    from ensemble_ray.record.failure import WITH_REASON
    from ensemble_ray.record.head import read_head
    from ensemble_ray.record.progress import tasks_done

    try:
        head = await read_head(store, run.run_id)
        if not all(has_tag(head.tags, each, separator="=") for each in tags):
            return None
        progress = await tasks_done(store, run.run_id)
    except RecordError as error:  # a run that was just deleted is not damaged
        if tags:
            return None
        damage = message_of(error) if await store.summary(run.run_id) is not None else ""
        return _Listed(run, damage=damage, name=Origin(place=run.origin).name)
    parent = None if head.forked_from is None else head.forked_from._asdict()
    cause = head.errors[0] if head.errors and run.state in WITH_REASON else None
    found = _Listed(run, progress.done, progress.total, tags=head.tags, name=head.name, forked_from=parent, error=cause)
    found = found._replace(is_interrupted=head.interruption is not None)
    end = head.end
    return found if end is None else found._replace(incomplete_answers=end.incomplete_answers, capped=end.capped)


_STYLES = {
    "run": "bold", "tags": "dim", "level": "bold cyan", "unit": "bold cyan", "verdict": "yellow", "task": "cyan", "model": "",
    "tool": "magenta", "answer": "dim", "history": "dim", "reasoning": "dim", "context": "yellow", "review": "magenta",
    "reflection": "dim", "directive": "dim", "error": "red",
}  # fmt: skip


def trace(
    run: Annotated[
        str | None, Argument(metavar="[RUN]", help="A run's id or its start, or 'latest'. Without: the newest runs.")
    ] = None,
    task: Annotated[
        str | None,
        Option("--task", metavar="TASK", help="Only that task, such as map-17 of a map-reduce, or loop:refine#2."),
    ] = None,
    *,
    as_json: options.ItAsJson = False,
    svg: export.Svg = None,
    mermaid: export.Mermaid = None,
    dag: export.Dag = None,
    otlp: export.Otlp = None,
    content: export.WithContent = False,
    reveal: Annotated[
        bool, Option("--reveal", help="Show the values of a redacted run, with ENSEMBLE_RAY_REDACTION_KEY.")
    ] = False,
) -> int:
    """Show a recorded run as a tree.

    With times, tokens and tool calls; also a running or interrupted run. A map-reduce that creates its tasks while it runs
    is shown by its levels. --svg, --mermaid and --dag write the run as a graph instead; --otlp sends it to an
    OpenTelemetry receiver.

    Exit codes: 1 a part of the record is lost; the rest is shown.
    """
    pictures = export.Pictures(svg=svg, mermaid=mermaid, dag=dag)
    export.check_sending(
        otlp, has_content=content, has_run=run is not None, is_shown=as_json or task is not None or pictures.is_asked
    )
    _check_reveal(reveal=reveal, is_shown=run is not None and otlp is None and not pictures.is_asked)
    store = own_store()
    if run is None:
        runs = run_blocking(store.runs())
        if as_json:
            show_json([as_data(each) for each in runs])
        elif not runs:
            write_note(no_runs())
        else:
            width = max(len(each.run_id) for each in runs[:_LISTED])
            for each in runs[:_LISTED]:
                created = each.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
                show(f"{each.run_id:<{width}}  {created}  {each.state.value:<11}  {each.origin}".rstrip())
            if len(runs) > _LISTED:
                write_note(f"and {len(runs) - _LISTED} older ones in {where()}")
        return FINE
    named = run_blocking(store.find(run))
    if otlp is not None:
        export.send_run(store, named, otlp, has_content=content)
        return FINE
    if pictures.is_asked:
        _draw_run(store, named, pictures)
        return FINE
    with revealing(_read_values(store, named) if reveal else None):
        try:
            _show_run(store, named, task, as_json=as_json)
        except RecordError:
            with contextlib.suppress(EnsembleError):
                _show_run(store, named, task, as_json=as_json, is_partial=True)
            raise
    return FINE


def _check_reveal(*, reveal: bool, is_shown: bool) -> None:
    if reveal and not is_shown:
        raise ValidationError(
            "--reveal shows one run here, and writes no file. What to do: name the run, and leave --otlp, --svg, --mermaid "
            "and --dag out, such as: ensemble-ray trace latest --reveal"
        )


def _read_values(store: RunStore, named: RecordedRun) -> Callable[[str], str]:
    from ensemble_ray.recovery.revealing import read_redaction

    return run_blocking(read_redaction(store, named.run_id)).restore


def _show_run(
    store: RunStore, named: RecordedRun, task: str | None, *, as_json: bool, is_partial: bool = False
) -> None:
    """`is_partial`: the readable part of its record."""
    from ensemble_ray.record.head import locate_errors, read_head
    from ensemble_ray.record.history import RunHistory
    from ensemble_ray.record.trace import trace_of
    from ensemble_ray.record.units import verdicts_of
    from ensemble_ray.record.view.tree import directive_data, directive_rows, directives_in, reflection_rows, tree_rows

    run_id = named.run_id
    head = run_blocking(read_head(store, run_id, is_partial=is_partial))
    if task is None and head.is_dynamic:
        with locate_errors(named.location):
            view = run_blocking(_view(store, named, is_partial=is_partial))
            rows, data = tuple(view.rows()), view.data()
        if as_json:
            show_json(data)
        else:
            _print_run(store, named, rows, is_partial=is_partial)
        return
    if task is None:
        facts = run_blocking(store.facts(run_id, is_partial=is_partial))
    else:
        facts = run_blocking(_facts_of_task(store, run_id, task, is_partial=is_partial))
    if not facts:
        raise RecordError(f"Run '{run_id}' has recorded nothing in {named.location}", named.location)
    with locate_errors(named.location):
        history = RunHistory(facts, has_details=True)
        found = trace_of(history)
    directives = directives_in(facts)
    metadata = {
        **found.metadata,
        **({"tags": dict(head.tags)} if head.tags else {}),
        **({} if head.forked_from is None else {"forked_from": head.forked_from._asdict()}),
        **(directive_data(directives) if directives else {}),
    }
    found = found.replace(metadata=metadata)
    if as_json:
        show_json_text(found.to_json())
        return
    verdicts = tuple(verdicts_of(history.stimuli.groups))
    tree = [*tree_rows(found, verdicts), *directive_rows(directives), *reflection_rows(facts)]
    if task is not None:
        _print_tree(tree)
    else:
        _print_run(store, named, tree, is_partial=is_partial)


def _print_run(store: RunStore, named: RecordedRun, rows: Sequence[TreeRow], *, is_partial: bool) -> None:
    """Print the tree of a run and, if it failed, why. The error is not printed twice."""
    from ensemble_ray.record.failure import read_failure

    failure = run_blocking(read_failure(store, named, command=own_command(), is_partial=is_partial))
    why = () if failure is None else failure.rows()
    told = {row.title for row in why}
    _print_tree([*(row for row in rows if row.kind != "error" or row.title not in told), *why])


def _draw_run(store: RunStore, named: RecordedRun, pictures: export.Pictures) -> None:
    from ensemble_ray.record.head import locate_errors, read_head
    from ensemble_ray.record.source import recorded_plan
    from ensemble_ray.record.trace import fold_trace
    from ensemble_ray.visualization.dag_model import DagExporter
    from ensemble_ray.visualization.declared import tally_flow
    from ensemble_ray.visualization.dev_tools import trace_steps
    from ensemble_ray.visualization.ran import ran_flow

    def make_trace() -> ExecutionTrace:
        facts = run_blocking(store.facts(named.run_id))
        with locate_errors(named.location):
            return fold_trace(facts)

    def make_flow() -> Flow:
        if head.is_dynamic:
            with locate_errors(named.location):
                return tally_flow(run_blocking(_view(store, named, is_partial=False)).levels)
        trace = make_trace()
        with locate_errors(named.location):
            plan = recorded_plan(head.header.plan) if head.header.plan else None
        return ran_flow(trace_steps(trace, plan), plan, workflow=trace.workflow)

    head = run_blocking(read_head(store, named.run_id))
    pictures.write(f"Run {named.run_id}", make_flow, lambda: DagExporter.build(make_trace()))


async def _view(store: RunStore, run: RecordedRun, *, is_partial: bool) -> MapReduceView:
    from ensemble_ray.record.view.map_reduce import VIEW_KINDS, MapReduceView

    view = MapReduceView(run.run_id, is_running=run.state.is_active)
    async for page in store.read(run.run_id, kinds=VIEW_KINDS, is_partial=is_partial):
        view.apply(page)
    return view


async def _facts_of_task(store: RunStore, run_id: str, task: str, *, is_partial: bool) -> list[Fact]:
    """Include the run as a whole, and delegations."""
    from ensemble_ray.record.head import HEAD_KINDS
    from ensemble_ray.record.view.tree import is_named
    from ensemble_ray.values.ids import RUN, task_instance

    facts: list[Fact] = []
    is_found = False
    async for page in store.read(run_id, is_partial=is_partial):
        for fact in page:
            is_of_task = is_named(task, task_instance(fact.name))
            if is_of_task or (fact.name == RUN and fact.kind in HEAD_KINDS):
                facts.append(fact)
                is_found |= is_of_task
    if not is_found:
        raise ValidationError(f"Run '{run_id}' has recorded nothing of a task '{task}'")
    return facts


def _print_tree(rows: Sequence[TreeRow]) -> None:
    from ensemble_ray.record.view.tree import render_rows

    text = render_rows(rows)
    if not sys.stdout.isatty():
        show(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for row, line in zip(rows, text.split("\n"), strict=True):
        console.print(Text(line, style="bold red" if row.is_bad else _STYLES[row.kind]))


_PATIENCE_S = 30.0  # its owner polls once a second, and its tasks get a few seconds
_POLL_S = 0.2


def cancel(run: options.RunName) -> int:
    """End a run, and keep its results.

    A running one ends within seconds, wherever its owner is; an interrupted one is marked as cancelled. Both can be
    resumed.

    Exit codes: 0 it is cancelled, 1 its owner did not end it, 2 there is no such run or it has ended.
    """
    return run_blocking(_cancel(own_store(), run))


async def _cancel(store: RunStore, name: str) -> int:
    from ensemble_ray.recovery.deciding import end_unowned, request_end
    from ensemble_ray.values.outputs import RunState

    found: RecordedRun | None = await store.find(name)
    assert found is not None  # noqa: S101  `find` raises if there is none
    run_id, has_lost_owner = found.run_id, not found.owner
    await request_end(store, found)
    if found.state.is_active:
        write_note(f"Ending run {run_id}")
    found = await store.summary(run_id)
    deadline = time.monotonic() + _PATIENCE_S
    while found is not None and time.monotonic() < deadline:
        if found.state in {RunState.INTERRUPTED, RunState.WAITING}:
            await end_unowned(store, run_id)
        elif found.state.is_final:
            show(f"Run {run_id}: {found.state.value}")
            if has_lost_owner:
                await _note_open_batches(store, run_id)
            return FINE
        else:
            await asyncio.sleep(_POLL_S)
        found = await store.summary(run_id)
    owner = f" ({found.owner})" if found is not None and found.owner else ""
    write_note(
        f"Error: the owner of run '{run_id}'{owner} has not ended it within {_PATIENCE_S:.0f} s. "
        f"If that process hangs, claim the run: {own_command()} resume {run_id} --take-over"
    )
    return FAILED


async def _note_open_batches(store: RunStore, run_id: str) -> None:
    """Name the batches that the process of a run left at the provider (S-BAT-54)."""
    from ensemble_ray.facts.runs import BatchRecorded
    from ensemble_ray.record.batches import RecordedBatches

    batches = RecordedBatches()
    async for page in store.read(run_id, kinds=(BatchRecorded.KIND,)):
        batches.apply_all(page)
    if found := [each.provider_batch for each in batches if each.is_open and each.provider_batch]:
        count = "1 batch is" if len(found) == 1 else f"{len(found):,} batches are"
        write_note(
            f"{count} still open at the provider: {', '.join(found)}. Cancel them there, or resume the run and cancel it "
            f"while it runs: {own_command()} resume {run_id}"
        )


def delete(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="Ids, starts of ids, or 'latest'.", show_default=False)],
) -> int:
    """Remove the records of runs permanently.

    Running runs are never removed. If one of the named runs cannot be removed, none is.
    """
    for run_id in run_blocking(_delete(own_store(), runs)):
        show(f"Removed {run_id}")
    return FINE


async def _delete(store: RunStore, names: list[str]) -> list[str]:
    from ensemble_ray.cli.map_team import forget_items

    found = {run.run_id: run for run in [await store.find(name) for name in names]}
    for run in found.values():
        if run.state.is_active:
            owner = f" ({run.owner})" if run.owner else ""
            raise RunExistsError(
                f"Run '{run.run_id}' is running{owner}, and its record is not removed. End it first: "
                f"ensemble-ray cancel {run.run_id}"
            )
    for run_id in found:
        await store.delete(run_id)
        forget_items(run_id)
    return list(found)


def prune(
    *,
    older_than: Annotated[
        str, Option("--older-than", metavar="AGE", help="Such as 30d, 12h or 2w.", show_default=False)
    ],
    keep: Annotated[int, Option("--keep", metavar="N", min=0, help="Keep the newest N, however old they are.")] = 0,
    states: States = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List the runs, and remove none.")] = False,
) -> int:
    """Remove the records of old runs.

    By default of runs that completed, failed, spent their budget or were cancelled; --state selects other states. Running
    ones are never removed. ENSEMBLE_RAY_RETENTION=30d does the same at the end of each run.
    """
    from ensemble_ray.record.runs import prune as remove
    from ensemble_ray.values.outputs import RunState
    from ensemble_ray.values.value import age_from, utc_now

    age = age_from(older_than)
    chosen = [RunState(state) for state in sorted(states_of(states or ()))]
    removed = run_blocking(remove(own_store(), age, keep=keep, states=chosen, is_dry=dry_run))
    now = utc_now()
    for run in removed:
        verb = "Would remove" if dry_run else "Removed"
        show(f"{verb} {run.run_id}  {run.state.value}  {age_of(run.created_at, now)}  {run.origin}".rstrip())
    if not removed:
        write_note("Nothing is that old")
    return FINE
