"""`ensemble-ray demo`: a team of agents reads texts with a model on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.commands.run import RuntimeName
from ensemble_ray.cli.view.terminal import say

if TYPE_CHECKING:
    from ensemble_ray import MapReduceEnsemble
    from ensemble_ray.cli.demo import Selection
    from ensemble_ray.ports import ChatModel


_PASSAGES = 8


def demo(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]...", help="Texts to read. Without: topics of Python's language reference."),
    ] = None,
    *,
    chunks: Annotated[int, typer.Option("--chunks", min=1, metavar="N", help="How many passages to read.")] = _PASSAGES,
    runtime: Annotated[RuntimeName, typer.Option("--runtime", help="Runtime of the agents.")] = RuntimeName.ray,
    llm: Annotated[
        str, typer.Option("--llm", metavar="MODEL", help="Another model: openai:NAME, local:PATH.gguf.")
    ] = "local",
    crash: Annotated[
        bool, typer.Option("--crash", help="Kill it half-way, resume it, and show that no answered call was repeated.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve two teams, ask them over HTTP, decide a review, stop.")
    ] = False,
    studio: Annotated[bool, typer.Option("--studio", help="Show the run in the browser until Ctrl-C.")] = False,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Name of the record.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")] = False,
) -> int:
    """Let a team read texts with the embedded model.

    A map-reduce: agents take notes of all passages in parallel, and join them level by level into a digest. It runs on Ray
    actors, and needs no key and no network.
    """
    from ensemble_ray.cli.commands.run import carry_out
    from ensemble_ray.cli.demo import demo_team, render_digest
    from ensemble_ray.cli.view.run_view import TerminalRunView
    from ensemble_ray.errors import ValidationError

    if serve + crash + studio > 1:
        raise ValidationError("--serve, --crash and --studio are three demonstrations: choose one")
    if serve:
        from ensemble_ray.cli.demo import serve_and_ask

        return serve_and_ask(llm)
    prepared = demo_team(files or (), chunks=chunks, llm=llm, threads=_threads())
    if crash:
        from ensemble_ray.cli.demo import crash_and_resume

        options = ["--chunks", str(chunks), "--runtime", runtime.value, "--llm", llm, *map(str, files or ())]
        slots = prepared.team.max_parallel_tasks or chunks
        return crash_and_resume(options, run_id=run_id, passages=len(prepared.selection.passages), slots=slots)
    if not quiet:
        _introduce(prepared.selection, is_own=not files, llm=llm, runtime=runtime)
    _warm_up(prepared.reader)
    title = f"demo on {runtime.value}"
    passages = prepared.selection.passages
    view = TerminalRunView(title, is_quiet=quiet, render=lambda output: render_digest(passages, output))

    def run(team: MapReduceEnsemble) -> int:
        return carry_out(team, {}, runtime=runtime, run_id=run_id, title=title, view=view)

    if studio:
        from ensemble_ray.cli.demo import show_in_studio

        return show_in_studio(prepared.team, run)
    return run(prepared.team)


def _threads() -> int | None:
    """Return the number of engine threads: one on a busy machine, else None for the engine's choice.

    The threads synchronize many times per token. If other programs use the cores, two threads are slower than one.
    """
    try:
        load = os.getloadavg()[0]
    except OSError:
        return None
    return 1 if load > (os.cpu_count() or 1) else None


def _introduce(selection: Selection, *, is_own: bool, llm: str, runtime: RuntimeName) -> None:
    count, available = len(selection.passages), selection.available
    what = "topics of Python's language reference" if is_own else "the files"
    say(f"Reading {count} of {available} passages of {what} with {llm}, on the {runtime.value} runtime.")
    if count < available:
        say(f"For more: --chunks {min(available, count * 2)}")


def _warm_up(model: ChatModel) -> None:
    """Load the embedded model while the agents start. An error here will recur in the run, which reports it."""
    from ensemble_ray.llm import local as local_server  # the help does not need them
    from ensemble_ray.llm.local import LocalChatModel
    from ensemble_ray.process.forks import call_user, submit

    if isinstance(model, LocalChatModel):
        submit(call_user(local_server.acquire, model.spec))
