"""`ensemble-ray run`, `resume` and `fork`. Other commands share the display of runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.inputs.records import own_store, say_where
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    INTERRUPTED,
    is_terminal,
    own_command,
    screen_line,
    show_answer,
    show_json,
    show_result,
    write_note,
)
from ensemble_ray.errors import EnsembleError, RecordError, StaleEpochError, ValidationError, message_of
from ensemble_ray.process.concurrency import run_blocking

if TYPE_CHECKING:
    from ensemble_ray.cli.view.run_view import TerminalRunView
    from ensemble_ray.definition.run_options import RunOptions
    from ensemble_ray.events.delivery import EnsembleListener
    from ensemble_ray.record.head import RunHead
    from ensemble_ray.recovery.forking import ForkOffer
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun
    from ensemble_ray.teamfile import Runnable
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.values.trace import ExecutionTrace

_RELEASE_S = 15.0  # time in which an interrupted run may end


def run(
    target: options.Target,
    *,
    inputs: options.Inputs = None,
    inputs_file: options.InputsFile = None,
    runtime: options.RuntimeChoice = None,
    workflow: options.Workflow = None,
    llm: options.Llm = None,
    run_id: options.RunId = None,
    max_tokens: options.MaxTokens = None,
    max_cost: options.MaxCost = None,
    max_iterations: options.MaxIterations = None,
    context: options.Context = None,
    tags: options.Tags = None,
    user: options.User = None,
    as_json: options.AsJson = False,
    trace: options.TraceFile = None,
    nodes_checked: Annotated[
        bool, Option("--check-nodes", help="Ask every node of the cluster first whether the team can run there.")
    ] = False,
    quiet: options.Quiet = False,
) -> int:
    """Run a team and print its output.

    Progress goes to standard error, the output to standard output.

    Exit codes: 0 the run completed, 1 it failed or spent its budget, 2 the command or the team is wrong, 4 it waits
    for reviews, 130 interrupted.
    """
    from ensemble_ray.cli.inputs.arguments import check_inputs, input_warnings, read_inputs
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.teamfile import load_runnable

    values = read_inputs(inputs or (), inputs_file)
    ensemble = load_runnable(target, llm=llm)
    if workflow is not None:
        if not isinstance(ensemble, Ensemble):
            raise ValidationError(f"--workflow: '{target}' is a {type(ensemble).__name__}, which has no other workflow")
        chosen = {**ensemble.source.overrides, "workflow": workflow.value}
        ensemble = ensemble.replace(workflow=workflow.value).with_origin(ensemble.origin or target, chosen)
    if isinstance(ensemble, Ensemble):
        check_inputs(ensemble, values)
    if not quiet:
        for line in input_warnings(inputs or (), ensemble if isinstance(ensemble, Ensemble) else None, values):
            write_note(line)
    place = options.runtime_name(runtime)
    if nodes_checked:
        if place != "ray":
            raise ValidationError(f"--check-nodes: the runtime {place} has no nodes. What to do: --runtime ray")
        from ensemble_ray.cli.commands.submit import check_nodes

        check_nodes(ensemble, is_quiet=quiet)
    title = f"{Path(target).name} on {place}"
    limits = options.run_options(max_tokens, max_cost, tags, user, max_iterations=max_iterations, context=context)
    shown = partial(carry_out, title=title, as_json=as_json, trace=trace, is_quiet=quiet)
    return shown(ensemble, values, runtime=runtime, run_id=run_id, limits=limits)


def carry_out(
    ensemble: Runnable,
    inputs: Mapping[str, object],
    *,
    runtime: options.RuntimeName | None,
    run_id: str | None = None,
    limits: RunOptions | None = None,
    title: str,
    as_json: bool = False,
    trace: Path | None = None,
    is_quiet: bool = False,
    view: TerminalRunView | None = None,
) -> int:
    """Without a view, the ensemble determines it."""
    from ensemble_ray.cli.inputs.arguments import check_keys_here
    from ensemble_ray.cli.view.run_view import view_of

    check_keys_here(ensemble, runtime)
    source, chosen = ensemble.source, None if runtime is None else runtime.value

    def begin(listener: EnsembleListener) -> Run | MapReduceRun:
        team = ensemble.with_additional_listener(listener).with_source(source)
        return team.begin(inputs, runtime=chosen, run_id=run_id, options=limits, is_watched=False)

    return show_run(begin, view or view_of(ensemble, title, is_quiet=is_quiet), as_json=as_json, trace=trace)


def show_run(
    begin: Callable[[EnsembleListener], Run | MapReduceRun],
    view: TerminalRunView,
    *,
    as_json: bool = False,
    trace: Path | None = None,
) -> int:
    if trace is not None and (refused := find_write_error(trace)) is not None:
        write_note(f"{_trace_refusal(trace, refused)}. Nothing was run")
        return FAILED
    watched = _Watched()
    try:
        output, is_cancelled = watched.result(begin, view)
        view.finish(watched.run, output)
    except Exception as error:
        view.finish(watched.run)
        _show_failed(error, watched.run_id, view, trace)
        if as_json:
            show_json(_failure_data(error, watched.run_id))
        raise
    is_cancelled = is_cancelled or output.exit_reason.value == "cancelled"  # by another process
    is_traced = _write_trace(output.trace if output.trace.ensemble_id else None, trace)  # no id: it never started
    text = None
    if as_json:
        found = run_blocking(own_store().summary(str(output.run_id)))
        place = None if found is None else found.location
        show_json({**view.to_data(output), "state": output.state.value, "record": place})
    elif not is_cancelled:
        text = view.to_text(output)
    if text is not None:
        show_answer(text)
    if not view.is_quiet:
        if is_terminal() and text is not None:
            write_note("")
        write_note("\n".join(view.summarize(output)))
        if not output.is_complete and not output.open_reviews:
            write_note(f"The run ended early: {output.exit_reason.value}")
        say_where(str(output.run_id))
    code = INTERRUPTED if is_cancelled else view.exit_code(output)
    return code if is_traced or code != FINE else FAILED


def _show_failed(error: Exception, run_id: str | None, view: TerminalRunView, trace: Path | None) -> None:
    """Write the trace, the closing lines and the record's location, if the run had started."""
    from ensemble_ray.cli.view.run_view import read_notes

    began = getattr(error, "run_id", None) is not None or isinstance(error, RecordError | StaleEpochError)
    if not began or run_id is None:
        return
    _write_trace(error.trace if isinstance(error, EnsembleError) else None, trace)
    if not view.is_quiet:
        write_note("\n".join(view.summarize(None, run_blocking(read_notes(own_store(), run_id)))))
        say_where(run_id)


class _Watched:
    def __init__(self) -> None:
        self.run: Run | MapReduceRun | None = None

    @property
    def run_id(self) -> str | None:
        return None if self.run is None else self.run.id

    def result(
        self, begin: Callable[[EnsembleListener], Run | MapReduceRun], view: TerminalRunView
    ) -> tuple[EnsembleOutput, bool]:
        """Return whether it was interrupted: the first Ctrl-C ends the run, the second the process."""
        display = view.display
        with display, terminable():
            display.note("starting the runtime")
            try:
                with display.hold():
                    self.run = begin(display.listener)
                    view.begin(self.run)
                return self.run.result(), False
            except KeyboardInterrupt:
                begun = self.run
                if begun is None:
                    raise
                display.note_line("Ending the run; Ctrl-C again leaves immediately.")
                if _leave(begun):
                    display.note_line("Its batches stay at the provider: a resume reads their answers.")
                try:
                    if begun.join(_RELEASE_S):
                        return begun.result(), True
                    raise
                except KeyboardInterrupt:
                    if begun.is_recorded:
                        display.note_line(f"Resume it: {own_command()} resume {begun.id}")
                    raise


def _leave(begun: Run | MapReduceRun) -> bool:
    """End the run; return whether batches stay at the provider, for a resume (S-BAT-52)."""
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun

    if isinstance(begun, MapReduceRun) and any(each.is_open for each in begun.batches):
        begun.detach()
        return True
    begun.cancel()
    return False


@contextlib.contextmanager
def terminable() -> Generator[None]:
    """Treat SIGTERM like Ctrl-C."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _failure_data(error: Exception, run_id: str | None) -> dict[str, Any]:
    """A run that never started has no id."""
    found = None
    if run_id is not None and getattr(error, "run_id", None) is not None:
        with contextlib.suppress(RecordError):
            found = run_blocking(own_store().summary(run_id))
    return {
        "run_id": getattr(error, "run_id", None),
        "state": "failed" if found is None else found.state.value,
        "error": {"type": type(error).__name__, "message": message_of(error)},
        "record": None if found is None else found.location,
    }


def find_write_error(file: Path) -> OSError | None:
    """Return the reason why a file cannot be written, before a run costs money."""
    is_there = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
        if not is_there:
            file.unlink()
    except OSError as error:
        return error
    return None


def _trace_refusal(file: Path, error: OSError) -> str:
    return f"Error: --trace: '{file}' cannot be written: {error.strerror or error}"


def _write_trace(found: ExecutionTrace | None, file: Path | None) -> bool:
    """Return False if that failed, after a message."""
    if file is None or found is None:
        return True
    try:
        found.to_json(file)
    except OSError as error:
        write_note(_trace_refusal(file, error))
        return False
    return True


AllowChanges = Annotated[
    bool, Option("--allow-changes", help="Accept a changed definition; recorded results are used unchanged.")
]
RuntimeAgain = Annotated[options.RuntimeName | None, Option("--runtime", help="Default: the run's first runtime.")]


def resume(
    run: options.RunName,
    *,
    take_over: Annotated[
        bool, Option("--take-over", help="Claim the run even if a process owns it, such as one that hangs.")
    ] = False,
    allow_changes: AllowChanges = False,
    allow_loss: Annotated[
        bool,
        Option(
            "--allow-loss",
            help="Resume even if a part of the record is lost: its work is repeated, and calls of tools that may "
            "not be repeated are flagged.",
        ),
    ] = False,
    runtime: RuntimeAgain = None,
    max_tokens: options.MaxTokens = None,
    max_cost: options.MaxCost = None,
    max_iterations: options.MaxIterations = None,
    context: options.Context = None,
    tags: options.Tags = None,
    as_json: options.AsJson = False,
    trace: options.TraceFile = None,
    quiet: options.Quiet = False,
) -> int:
    """Resume a run that was interrupted or cancelled, or spent its budget, and print its output.

    Recorded results are used again. The team is loaded from where the run began: a YAML file or module:attribute. Of a
    completed run the recorded output is printed. A budget counts from the run's beginning.

    Exit codes: as run.
    """
    from ensemble_ray.cli.view.run_view import view_of
    from ensemble_ray.record.head import read_head
    from ensemble_ray.recovery.resuming import start_resumed

    limits = options.run_options(max_tokens, max_cost, tags, max_iterations=max_iterations, context=context)
    store = own_store()
    found = run_blocking(store.find(run))
    if allow_loss:
        run_blocking(store.accept_loss(found.run_id, by_force=take_over))
    head = run_blocking(read_head(store, found.run_id))
    team = _recorded_team(head)
    chosen = options.runtime_name(runtime, head.header.runtime)
    name = f"{found.run_id} ({Path(found.origin).name})" if found.origin else found.run_id
    start = partial(start_resumed, runtime=chosen, options=limits, take_over=take_over, allow_changes=allow_changes)

    def begin(listener: EnsembleListener) -> Run | MapReduceRun:
        return run_blocking(start(found.run_id, None if team is None else team.with_additional_listener(listener)))

    return show_run(begin, view_of(team, f"{name} on {chosen}", is_quiet=quiet), as_json=as_json, trace=trace)


def _recorded_team(head: RunHead) -> Runnable | None:
    from ensemble_ray.teamfile import load_source

    return load_source(head.source) if head.source.place else None


_SHOWN = 80


def fork(
    run: options.RunName,
    *,
    from_task: Annotated[
        str,
        Option(
            "--from",
            metavar="TASK",
            help="The first task to run again, or an execution such as loop:refine#2.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str | None, Option("--target", metavar="TARGET", help="The team; default: the run's own team.")
    ] = None,
    inputs: options.Inputs = None,
    inputs_file: options.InputsFile = None,
    run_id: options.RunId = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List the tasks that would run again, and stop.")] = False,
    allow_changes: AllowChanges = False,
    max_tokens: options.MaxTokens = None,
    max_cost: options.MaxCost = None,
    max_iterations: options.MaxIterations = None,
    context: options.Context = None,
    tags: options.Tags = None,
    user: options.User = None,
    runtime: RuntimeAgain = None,
    as_json: options.AsJson = False,
    trace: options.TraceFile = None,
    quiet: options.Quiet = False,
) -> int:
    """Start a new run that uses the results of a recorded run before a task.

    That task and later ones run again: all later tasks of a sequential run, all dependent tasks of a parallel one, and
    tasks without an output. The definitions and inputs of these tasks may have changed.
    Iterations, attempts, steps and tasks inside of them have the names that trace shows.

    Exit codes: as run.
    """
    from ensemble_ray.cli.inputs.arguments import input_warnings, read_inputs
    from ensemble_ray.cli.view.run_view import TerminalRunView
    from ensemble_ray.record.head import read_head
    from ensemble_ray.recovery.forking import accept_fork, offer_fork
    from ensemble_ray.teamfile import load_ensemble

    values = read_inputs(inputs or (), inputs_file)
    limits = options.run_options(max_tokens, max_cost, tags, user, max_iterations=max_iterations, context=context)
    store = own_store()
    found = run_blocking(store.find(run))
    head = run_blocking(read_head(store, found.run_id))
    team = _recorded_team(head) if target is None else load_ensemble(target)
    chosen = options.runtime_name(runtime, head.header.runtime)
    offer = run_blocking(offer_fork(found.run_id, from_task, team, inputs=values, runtime=chosen))
    text = "\n".join([*input_warnings(inputs or (), offer.ensemble, values), *_describe_offer(offer)])
    if dry_run:
        show_result(_offer_data(offer), [text], as_json=as_json)
        return FINE
    if not quiet:
        write_note(text)
    title = f"fork of {found.run_id}" + (f" ({Path(found.origin).name})" if found.origin else "") + f" on {chosen}"
    accept = partial(accept_fork, runtime=chosen, new_run_id=run_id, allow_changes=allow_changes, options=limits)
    return show_run(
        lambda listener: run_blocking(accept(offer, listeners=(listener,))),
        TerminalRunView(title, is_quiet=quiet),
        as_json=as_json,
        trace=trace,
    )


def _offer_data(offer: ForkOffer) -> dict[str, object]:
    def list_tasks(keys: Iterable[str]) -> list[dict[str, str]]:
        return [{"task": key, "description": offer.descriptions[key]} for key in keys]

    used, again = list_tasks(offer.plan.reused), list_tasks(offer.plan.again)
    differences = list(offer.differences)
    return {
        "run_id": offer.run_id,
        "from": offer.from_task,
        "used": used,
        "done_again": again,
        "differences": differences,
    }


def _describe_offer(offer: ForkOffer) -> list[str]:
    is_task = any(node.key == offer.from_task for node in offer.planned.plan.nodes)
    lines = [f"Fork of run {offer.run_id} from {'task ' if is_task else ''}'{offer.from_task}'"]
    lines += _list_tasks("Used as recorded", offer, offer.plan.reused)
    lines += _list_tasks("Done again", offer, offer.plan.again)
    if offer.differences:
        lines += ["Defined otherwise now, though used:", *(f"  {each}" for each in offer.differences)]
    return lines


def _list_tasks(title: str, offer: ForkOffer, keys: Sequence[str]) -> list[str]:
    if not keys:
        return [f"{title}: nothing"]
    width = max(map(len, keys))
    lines = (f"  {key:<{width}}  {screen_line(offer.descriptions[key], _SHOWN)}" for key in keys)
    return [f"{title}:", *map(str.rstrip, lines)]
