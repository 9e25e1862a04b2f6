"""`ensemble-ray demo`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view.terminal import write_note
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray import MapReduceEnsemble

_PASSAGES = 8


def demo(
    files: Annotated[
        list[Path] | None,
        Argument(metavar="[FILES]...", help="Texts to read. Without: topics of Python's language reference."),
    ] = None,
    *,
    chunks: Annotated[int, Option("--chunks", min=1, metavar="N", help="How many passages to read.")] = _PASSAGES,
    runtime: Annotated[
        options.RuntimeName, Option("--runtime", help="Runtime of the agents.")
    ] = options.RuntimeName.ray,
    llm: Annotated[
        str, Option("--llm", metavar="MODEL", help="Another model: openai:NAME, local:PATH.gguf.")
    ] = "local",
    crash: Annotated[
        bool, Option("--crash", help="Kill it half-way, resume it, and show that no answered call was repeated.")
    ] = False,
    serve: Annotated[
        bool, Option("--serve", help="Serve two teams, ask them over HTTP, decide a review, stop.")
    ] = False,
    studio: Annotated[bool, Option("--studio", help="Show the run in the browser until Ctrl-C.")] = False,
    run_id: Annotated[str | None, Option("--run-id", metavar="ID", help="Name of the record.")] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress, no notes.")] = False,
) -> int:
    """Let a team read texts with the embedded model.

    A map-reduce: agents take notes of all passages in parallel, and join them level by level into a digest. It runs on Ray
    actors, and needs no key and no network.
    """
    from ensemble_ray.cli.commands.run import carry_out
    from ensemble_ray.cli.demo import crash_and_resume, demo_team, render_digest, serve_and_ask, show_in_studio
    from ensemble_ray.cli.view.run_view import TerminalRunView
    from ensemble_ray.llm.local import LocalChatModel, acquire
    from ensemble_ray.process.concurrency import call_user, submit

    if serve + crash + studio > 1:
        raise ValidationError("--serve, --crash and --studio are three demonstrations: choose one")
    if serve:
        return serve_and_ask(llm)
    threads = None  # the engine decides
    with contextlib.suppress(OSError):
        if os.getloadavg()[0] > (os.cpu_count() or 1):
            # The threads synchronize many times per token. If other programs use the cores, two are slower than one.
            threads = 1
    prepared = demo_team(files or (), chunks=chunks, llm=llm, threads=threads)
    if crash:
        words = ["--chunks", str(chunks), "--runtime", runtime.value, "--llm", llm, *map(str, files or ())]
        slots = prepared.team.max_parallel_tasks or chunks
        return crash_and_resume(words, run_id=run_id, passages=len(prepared.selection.passages), slots=slots)
    if not quiet:
        count, available = len(prepared.selection.passages), prepared.selection.available
        what = "the files" if files else "topics of Python's language reference"
        write_note(f"Reading {count} of {available} passages of {what} with {llm}, on the {runtime.value} runtime.")
        if count < available:
            write_note(f"For more: --chunks {min(available, count * 2)}")
    if isinstance(prepared.reader, LocalChatModel):
        # Load the model while the agents start. The run reports an error of it.
        submit(call_user(acquire, prepared.reader.spec))
    title, passages = f"demo on {runtime.value}", prepared.selection.passages
    view = TerminalRunView(title, is_quiet=quiet, render=lambda output: render_digest(passages, output))

    def run(team: MapReduceEnsemble) -> int:
        return carry_out(team, {}, runtime=runtime, run_id=run_id, title=title, view=view)

    if studio:
        return show_in_studio(prepared.team, run)
    return run(prepared.team)
