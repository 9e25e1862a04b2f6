"""`ensemble-ray demo`: a team of agents reads real text with a real model on this machine. Room: cli."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ensemble_ray.cli.run import RuntimeName
from ensemble_ray.cli.terminal import say

if TYPE_CHECKING:
    from ensemble_ray.cli.passages import Selection
    from ensemble_ray.ports import ChatModel

__all__ = ["demo"]

_PASSAGES = 8
#: Longest answers, tokens: a note, and a joined text.
_NOTE_TOKENS, _DIGEST_TOKENS = 40, 150
#: Small models repeat themselves and the headings of their prompts: a light penalty, and the engine's grammar allows
#: one paragraph of plain text only.
_STYLE = {"temperature": 0, "repeat_penalty": 1.05, "grammar": r"root ::= [A-Z] [^\n#*`]+"}
#: Model calls at a time; the embedded model answers four.
_LOCAL_SLOTS, _OTHER_SLOTS = 4, 16


def demo(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]...", help="Texts to read. Without: topics of Python's language reference."),
    ] = None,
    chunks: Annotated[int, typer.Option("--chunks", min=1, metavar="N", help="How many passages to read.")] = _PASSAGES,
    runtime: Annotated[RuntimeName, typer.Option("--runtime", help="Where the agents live.")] = RuntimeName.ray,
    llm: Annotated[
        str, typer.Option("--llm", metavar="MODEL", help="Another model: openai:NAME, local:PATH.gguf.")
    ] = "local",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")] = False,
) -> int:
    """Let a team read texts with the embedded model.

    Readers take notes of passages in parallel, an editor joins them into a digest: on Ray actors, without key or
    network.
    """
    from ensemble_ray.cli.digest import digest_team, render_digest
    from ensemble_ray.cli.passages import select_passages
    from ensemble_ray.cli.run import carry_out

    is_local = llm.partition(":")[0].strip() == "local"
    reader, editor = _models(llm, is_local=is_local)
    selection = select_passages(files or (), count=chunks)
    slots = _LOCAL_SLOTS if is_local else _OTHER_SLOTS
    team = digest_team(selection.passages, reader_llm=reader, editor_llm=editor, max_parallel_tasks=slots)
    if not quiet:
        _introduce(selection, is_own=not files, llm=llm, runtime=runtime)
    _warm_up(reader)
    return carry_out(
        team.ensemble,
        {},
        runtime=runtime,
        title=f"demo on {runtime.value}",
        is_quiet=quiet,
        render=lambda output: render_digest(team, output),
    )


def _models(llm: str, *, is_local: bool) -> tuple[ChatModel, ChatModel]:
    """The readers' model and the editor's.

    Raises:
        ValidationError: the embedded model is not installed, or there is no such model.
    """
    from ensemble_ray.llm.factory import resolve_llm  # the help does not need them
    from ensemble_ray.llm.local import LocalChatModel
    from ensemble_ray.llm.openai import OpenAIChatModel

    if not is_local:
        resolve_llm(llm)
        name = llm.partition(":")[2].strip()
        return OpenAIChatModel(name, max_tokens=_NOTE_TOKENS * 2), OpenAIChatModel(name, max_tokens=_DIGEST_TOKENS * 2)
    path = llm.partition(":")[2].strip() or None
    style: dict[str, Any] = {**_STYLE, "threads": _threads()}
    reader = LocalChatModel(path, max_tokens=_NOTE_TOKENS, **style)
    editor = LocalChatModel(path, max_tokens=_DIGEST_TOKENS, **style)
    if not reader.path.is_file():
        from ensemble_ray.errors import ValidationError

        raise ValidationError(f"There is no model file '{reader.path}'")
    return reader, editor


def _threads() -> int | None:
    """Threads of the engine: its own choice, but one where the machine is busy already.

    Its threads wait for each other without giving way; where others want the cores, two are five times slower than one.
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
    """Let the embedded model load while the agents start; what fails here fails again where it is told."""
    from ensemble_ray.llm import local_server  # the help does not need them
    from ensemble_ray.llm.local import LocalChatModel
    from ensemble_ray.loop import submit
    from ensemble_ray.threads import call_user

    if isinstance(model, LocalChatModel):
        submit(call_user(local_server.acquire, model.spec))
