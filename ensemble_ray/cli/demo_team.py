"""The demo's team as its options make it. Package: cli; `resume` finds it here by the options that a run recorded.

In: texts to read, how many passages, a model, as texts. Out: the team. The same options make the same team, in any
process: what the machine is busy with is asked once, and recorded as an option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.demo.digest import BUDGET_TOKENS, digest_team
from ensemble_ray.cli.demo.passages import Selection, select_passages
from ensemble_ray.map_reduce import MapReduceEnsemble

if TYPE_CHECKING:
    from ensemble_ray.ports import ChatModel

#: Longest answers, tokens: a note, and a joined text.
_NOTE_TOKENS, _DIGEST_TOKENS = 40, BUDGET_TOKENS // 2
#: Small models repeat themselves and the headings of their prompts: a light penalty, and the engine's grammar allows
#: one paragraph of plain text only.
_STYLE = {"temperature": 0, "repeat_penalty": 1.05, "grammar": r"root ::= [A-Z] [^\n#*`]+"}
#: Model calls at a time; the embedded model answers four.
LOCAL_SLOTS, OTHER_SLOTS = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTeam:
    """The team, what it reads, and its readers' model."""

    team: MapReduceEnsemble
    selection: Selection
    reader: ChatModel


def demo_team(files: Sequence[Path], *, chunks: int, llm: str, threads: int | None) -> DemoTeam:
    """Return the team of these options; it knows how to be made again.

    Args:
        files: Texts to read; none: topics of Python's language reference.
        chunks: How many passages at most.
        llm: `local`, `local:PATH.gguf` or `openai:NAME`.
        threads: Of the embedded model's engine; None: its own choice.

    Raises:
        ValidationError: a text cannot be read, or the model is not there.
    """
    is_local = llm.partition(":")[0].strip() == "local"
    reader, editor = _models(llm, is_local=is_local, threads=threads)
    selection = select_passages(files, count=chunks)
    slots = LOCAL_SLOTS if is_local else OTHER_SLOTS
    team = digest_team(selection.passages, reader_llm=reader, editor_llm=editor, max_parallel_tasks=slots)
    options = _as_texts(files, chunks=chunks, llm=llm, threads=threads)
    team = team.with_origin(f"{__name__}:{recorded_demo.__name__}", options, called="demo")
    return DemoTeam(team=team, selection=selection, reader=reader)


def _as_texts(files: Sequence[Path], *, chunks: int, llm: str, threads: int | None) -> Mapping[str, str]:
    """Return the options as `recorded_demo` takes them."""
    paths = json.dumps([str(file.resolve()) for file in files])
    return {"files": paths, "chunks": str(chunks), "model": llm, "threads": "" if threads is None else str(threads)}


def recorded_demo(files: str = "[]", chunks: str = "8", model: str = "local", threads: str = "") -> MapReduceEnsemble:
    """Return the team of recorded options; `files` is a JSON list."""
    paths = [Path(file) for file in json.loads(files)]
    return demo_team(paths, chunks=int(chunks), llm=model, threads=int(threads) if threads else None).team


def _models(llm: str, *, is_local: bool, threads: int | None) -> tuple[ChatModel, ChatModel]:
    """Return the readers' model and the editor's.

    Raises:
        ValidationError: the embedded model is not installed, or there is no such model.
    """
    from ensemble_ray.llm.factory import resolve_llm  # the help does not need them
    from ensemble_ray.llm.local import LocalChatModel
    from ensemble_ray.llm.openai import OpenAIChatModel

    name = llm.partition(":")[2].strip()
    if not is_local:
        resolve_llm(llm)
        return OpenAIChatModel(name, max_tokens=_NOTE_TOKENS * 2), OpenAIChatModel(name, max_tokens=_DIGEST_TOKENS * 2)
    style: dict[str, Any] = {**_STYLE, "threads": threads}
    reader = LocalChatModel(name or None, max_tokens=_NOTE_TOKENS, **style)
    editor = LocalChatModel(name or None, max_tokens=_DIGEST_TOKENS, **style)
    if not reader.path.is_file():
        from ensemble_ray.errors import ValidationError

        raise ValidationError(f"There is no model file '{reader.path}'")
    return reader, editor
