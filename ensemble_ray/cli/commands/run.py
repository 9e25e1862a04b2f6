"""`ensemble-ray run`: run a team and print its output. Other commands share its options and its display of runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ensemble_ray.cli.inputs.records import say_where
from ensemble_ray.cli.inputs.tags import Tags, run_options
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    INTERRUPTED,
    is_terminal,
    own_command,
    say,
    show_answer,
    show_json,
)

if TYPE_CHECKING:
    from ensemble_ray.cli.view.run_view import TerminalRunView
    from ensemble_ray.definition.run_options import RunOptions
    from ensemble_ray.events.delivery import EnsembleListener
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun
    from ensemble_ray.teamfile import Runnable
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.values.trace import ExecutionTrace


#: Seconds that an interrupted run may take to end.
_RELEASE_S = 15.0


class RuntimeName(StrEnum):
    ray = "ray"
    inline = "inline"


class WorkflowName(StrEnum):
    sequential = "sequential"
    parallel = "parallel"
    hierarchical = "hierarchical"


Target = Annotated[str, typer.Argument(metavar="TARGET", help="A YAML file, or module:attribute.")]
Inputs = Annotated[
    list[str] | None, typer.Option("--input", "-i", metavar="NAME=VALUE", help="A value for {NAME}; repeatable.")
]
InputsFile = Annotated[
    Path | None, typer.Option("--inputs-file", metavar="FILE", help="JSON object of inputs; --input wins over it.")
]
Llm = Annotated[
    str | None,
    typer.Option(
        "--llm", metavar="MODEL", help="A model in place of every other: openai:NAME, local, local:PATH.gguf."
    ),
]
Workflow = Annotated[WorkflowName | None, typer.Option("--workflow", help="In place of the team's own workflow.")]
RuntimeChoice = Annotated[
    RuntimeName | None, typer.Option("--runtime", help="Default: ENSEMBLE_RAY_RUNTIME, else ray.")
]
RunId = Annotated[
    str | None,
    typer.Option("--run-id", metavar="ID", help="Name of the record; a finished run of that name is not run again."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Tokens that the run may spend, input and output together."),
]
MaxCost = Annotated[
    float | None,
    typer.Option("--max-cost", metavar="C", help="Money that the run may spend; the team says what tokens cost."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole output as JSON.")]
TraceFile = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write the trace there as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes; errors only.")]


def run(
    target: Target,
    *,
    inputs: Inputs = None,
    inputs_file: InputsFile = None,
    runtime: RuntimeChoice = None,
    workflow: Workflow = None,
    llm: Llm = None,
    run_id: RunId = None,
    max_tokens: MaxTokens = None,
    max_cost: MaxCost = None,
    tags: Tags = None,
    as_json: AsJson = False,
    trace: TraceFile = None,
    nodes_checked: Annotated[
        bool,
        typer.Option("--check-nodes", help="Ask every node of the cluster first whether the team can run there."),
    ] = False,
    quiet: Quiet = False,
) -> int:
    """Run a team and print its output.

    Progress goes to standard error, the output to standard output.

    Exit codes: 0 the run completed, 1 it failed or spent its budget, 2 the command or the team is wrong, 4 it waits
    for reviews, 130 interrupted.
    """
    from ensemble_ray.cli.inputs.arguments import check_inputs, input_warnings, read_inputs
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.teamfile import load_runnable

    values = read_inputs(inputs or (), inputs_file)
    ensemble = load_runnable(target, llm=llm)
    if workflow is not None:
        if not isinstance(ensemble, Ensemble):
            raise ValidationError(f"--workflow: '{target}' is a {type(ensemble).__name__}, which has no other workflow")
        chosen = {**ensemble.source.overrides, "workflow": workflow.value}
        ensemble = ensemble.replace(workflow=workflow.value).with_origin(ensemble.origin or target, chosen)
    if isinstance(ensemble, Ensemble):  # the texts of a map-reduce are made of its items
        check_inputs(ensemble, values)
    if not quiet:
        for line in input_warnings(inputs or (), ensemble if isinstance(ensemble, Ensemble) else None, values):
            say(line)
    from ensemble_ray.process.config import Settings

    place = runtime.value if runtime else Settings.from_environment().runtime
    if nodes_checked:
        if place != "ray":
            raise ValidationError(f"--check-nodes: the runtime {place} has no nodes. What to do: --runtime ray")
        from ensemble_ray.cli.jobs import check_nodes

        check_nodes(ensemble, is_quiet=quiet)
    title = f"{Path(target).name} on {place}"
    return carry_out(
        ensemble,
        values,
        runtime=runtime,
        run_id=run_id,
        options=run_options(max_tokens, max_cost, tags),
        title=title,
        as_json=as_json,
        trace=trace,
        is_quiet=quiet,
    )


def carry_out(
    ensemble: Runnable,
    inputs: Mapping[str, object],
    *,
    runtime: RuntimeName | None,
    run_id: str | None = None,
    options: RunOptions | None = None,
    title: str,
    as_json: bool = False,
    trace: Path | None = None,
    is_quiet: bool = False,
    view: TerminalRunView | None = None,
) -> int:
    """Run an ensemble, show its progress, print its output and the location of its record, and return the exit code.

    Without a view, the ensemble determines it.

    Raises:
        EnsembleError: The run failed or cannot start. The location of its record was printed.
    """
    from ensemble_ray.cli.inputs.arguments import check_keys_here
    from ensemble_ray.cli.view.run_view import view_of  # the help does not need it

    check_keys_here(ensemble, runtime)
    source = ensemble.source
    return show_run(
        lambda listener: (
            ensemble.with_additional_listener(listener)
            .with_source(source)
            .begin(
                inputs,
                runtime=None if runtime is None else runtime.value,
                run_id=run_id,
                options=options,
                is_watched=False,
            )
        ),
        view or view_of(ensemble, title, is_quiet=is_quiet),
        as_json=as_json,
        trace=trace,
    )


def show_run(
    begin: Callable[[EnsembleListener], Run | MapReduceRun],
    view: TerminalRunView,
    *,
    as_json: bool = False,
    trace: Path | None = None,
) -> int:
    """Start a run that the view's display listens to, show it as `carry_out` does, and return the exit code.

    Raises:
        EnsembleError: The run failed or cannot start. The location of its record was printed.
    """
    if trace is not None and (refused := _unwritable(trace)) is not None:
        say(refused)
        return FAILED
    watched = _Watched()
    try:
        output, is_cancelled = watched.result(begin, view)
        view.finish(watched.run, output)
    except Exception as error:  # errors of predicates and factories too
        view.finish(watched.run)
        _show_failed(error, watched.run_id, view, trace)
        if as_json:
            show_json(_failure_data(error, watched.run_id))
        raise
    is_cancelled = is_cancelled or output.exit_reason.value == "cancelled"  # by another process
    is_traced = _write_trace(output.trace if output.trace.ensemble_id else None, trace)  # no id: it never started
    text = None
    if as_json:
        show_json(_as_data(view, output))
    elif not is_cancelled:
        text = view.to_text(output)
    if text is not None:
        show_answer(text)
    if not view.is_quiet:
        if is_terminal() and text is not None:
            say("")
        say("\n".join(view.summarize(output)))
        if not output.is_complete and not output.open_reviews:
            say(f"The run ended early: {output.exit_reason.value}")
        say_where(str(output.run_id))
    code = INTERRUPTED if is_cancelled else view.exit_code(output)
    return code if is_traced or code != FINE else FAILED


def _show_failed(error: Exception, run_id: str | None, view: TerminalRunView, trace: Path | None) -> None:
    """Write the trace, the closing lines and the record's location of a failed run, if it had started."""
    from ensemble_ray.cli.inputs.records import own_store
    from ensemble_ray.cli.view.run_view import read_notes
    from ensemble_ray.errors import EnsembleError, RecordError, StaleEpochError
    from ensemble_ray.process.forks import run_blocking

    began = getattr(error, "run_id", None) is not None or isinstance(error, RecordError | StaleEpochError)
    if not began or run_id is None:
        return
    _write_trace(error.trace if isinstance(error, EnsembleError) else None, trace)
    if not view.is_quiet:
        say("\n".join(view.summarize(None, run_blocking(read_notes(own_store(), run_id)))))
        say_where(run_id)


class _Watched:
    """A run with a display, which Ctrl-C interrupts."""

    def __init__(self) -> None:
        #: None until the run has started
        self.run: Run | MapReduceRun | None = None

    @property
    def run_id(self) -> str | None:
        return None if self.run is None else self.run.id

    def result(
        self, begin: Callable[[EnsembleListener], Run | MapReduceRun], view: TerminalRunView
    ) -> tuple[EnsembleOutput, bool]:
        """Return the output, and whether it was interrupted: the first Ctrl-C ends the run, the second the process."""
        display = view.display
        with display, _terminable():
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
                begun.cancel()
                try:
                    if begun.join(_RELEASE_S):
                        return begun.result(), True
                    raise
                except KeyboardInterrupt:
                    if begun.is_recorded:
                        display.note_line(f"Resume it: {own_command()} resume {begun.id}")
                    raise


@contextlib.contextmanager
def _terminable() -> Generator[None]:
    """Treat SIGTERM like Ctrl-C inside the block."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _as_data(view: TerminalRunView, output: EnsembleOutput) -> dict[str, Any]:
    from ensemble_ray.cli.inputs.records import own_store
    from ensemble_ray.process.forks import run_blocking

    found = run_blocking(own_store().summary(str(output.run_id)))
    place = None if found is None else found.location
    return {**view.to_data(output), "state": output.state.value, "record": place}


def _failure_data(error: Exception, run_id: str | None) -> dict[str, Any]:
    """Return the JSON data of a run that raised; a run that never started has no id."""
    from ensemble_ray.cli.inputs.records import own_store
    from ensemble_ray.errors import RecordError, message_of
    from ensemble_ray.process.forks import run_blocking

    found = None
    if run_id is not None and getattr(error, "run_id", None) is not None:
        with contextlib.suppress(RecordError):  # the error is printed anyway
            found = run_blocking(own_store().summary(run_id))
    return {
        "run_id": getattr(error, "run_id", None),
        "state": "failed" if found is None else found.state.value,
        "error": {"type": type(error).__name__, "message": message_of(error)},
        "record": None if found is None else found.location,
    }


def _unwritable(file: Path) -> str | None:
    """Return why the trace file cannot be written, or None. Checked before the run costs money."""
    is_there = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
        if not is_there:
            file.unlink()
    except OSError as error:
        return f"{_trace_refusal(file, error)}. Nothing was run"
    return None


def _trace_refusal(file: Path, error: OSError) -> str:
    return f"Error: --trace: '{file}' cannot be written: {error.strerror or error}"


def _write_trace(found: ExecutionTrace | None, file: Path | None) -> bool:
    """Write the trace to the file, if any; return False if that failed, after a message."""
    if file is None or found is None:
        return True
    try:
        found.to_json(file)
    except OSError as error:
        say(_trace_refusal(file, error))
        return False
    return True
