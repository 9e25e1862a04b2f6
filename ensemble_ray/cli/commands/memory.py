"""`ensemble-ray memory`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view.terminal import FAILED, FINE, align, show, show_json, write_note
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.memory.lasting import MemoryTables
    from ensemble_ray.ports import EmbeddingModel
    from ensemble_ray.values.memory import MemoryEntry

memory = typer.Typer(
    help="Show, search and delete the entries of a SqliteMemory or a PostgresMemory.",
    no_args_is_help=True,
    epilog="Examples: ensemble-ray memory ls --file memory.db; ensemble-ray memory search refund; "
    "ensemble-ray memory clear letters --yes",
)

_VARIABLE = "ENSEMBLE_RAY_MEMORY"
_DEFAULT = "memory.db"
_SCHEMES = ("postgresql://", "postgres://")

MemoryPath = Annotated[
    str | None,
    Option(
        "--file",
        "-f",
        metavar="PATH",
        help="The file of a SqliteMemory; default: ENSEMBLE_RAY_MEMORY, else memory.db in the current directory.",
        show_default=False,
    ),
]
MemoryUrl = Annotated[
    str | None,
    Option(
        "--store",
        metavar="URL",
        help="The database of a PostgresMemory, postgresql://...; ENSEMBLE_RAY_MEMORY may be such a URL too, with its password.",
        show_default=False,
    ),
]
_SHOWN = 20
_FOUND = 5

Scope = Annotated[str | None, Argument(metavar="SCOPE", help="The scope's name, as `ls` shows it.", show_default=False)]
IsLongTerm = Annotated[bool, Option("--long-term", help="Long-term memory in place of a scope.")]
IsEntities = Annotated[bool, Option("--entities", help="The facts about entities in place of a scope.")]


@memory.command("ls", epilog="Example: ensemble-ray memory ls --file memory.db")
def list_scopes(*, path: MemoryPath = None, url: MemoryUrl = None, as_json: options.ItAsJson = False) -> int:
    """List the scopes of a memory with their entries, long-term memory, and facts about entities."""
    from ensemble_ray.memory.lasting import LONG_TERM

    tables = _open_memory(path, url)
    counts, facts, model = dict(tables.scopes()), tables.facts(), tables.embedding_model()
    long_term = counts.pop(LONG_TERM, 0)
    if as_json:
        data = {"scopes": counts, "long_term": long_term, "entities": len(facts)}
        show_json({"place": tables.location, "embedding_model": None if model is None else model[0], **data})
        return FINE
    rows = [(scope, _format_count(count, "entry", "entries")) for scope, count in counts.items()]
    rows += [("(long-term memory)", _format_count(long_term, "entry", "entries"))] if long_term else []
    rows += [("(entities)", _format_count(len(facts), "fact", "facts"))] if facts else []
    if rows:
        show("\n".join(align(rows)))
    else:
        write_note(f"{tables.location} is empty")
    return FINE


@memory.command("show", epilog="Examples: ensemble-ray memory show letters; ensemble-ray memory show --entities --json")
def show_scope(
    *,
    scope: Scope = None,
    is_long_term: IsLongTerm = False,
    is_entities: IsEntities = False,
    path: MemoryPath = None,
    url: MemoryUrl = None,
    is_all: Annotated[bool, Option("--all", help=f"All entries, not only the newest {_SHOWN}.")] = False,
    as_json: options.ItAsJson = False,
) -> int:
    """Show the entries of a scope, the oldest first."""
    _check_target(scope, is_long_term=is_long_term, is_entities=is_entities)
    tables = _open_memory(path, url)
    if is_entities:
        facts = tables.facts()
        if as_json:
            show_json(facts)
        for entity, fact in () if as_json else facts.items():
            show(f"{entity}: {fact}")
        if not as_json and not facts:
            write_note("There are no facts about entities")
        return FINE
    name, total = _count_entries(tables, scope)
    entries = tables.newest(name, total if is_all else _SHOWN)
    if as_json:
        show_json([_as_data(entry) for entry in entries])
        return FINE
    for entry in entries:
        show(_format_entry(entry))
    if not entries:
        write_note(f"{tables.location} has no long-term memory")
    elif total > len(entries):
        write_note(f"and {total - len(entries)} older ones; all of them: --all")
    return FINE


@memory.command(
    "search", epilog="Examples: ensemble-ray memory search 'money back'; ensemble-ray memory search Ann --words"
)
def search(
    text: Annotated[str, Argument(metavar="TEXT", help="What to look for.", show_default=False)],
    *,
    scope: Annotated[str | None, Option("--scope", metavar="SCOPE", help="Only in that scope.")] = None,
    limit: Annotated[int, Option("--limit", metavar="N", min=1, help="Maximum entries per scope.")] = _FOUND,
    is_by_words: Annotated[
        bool, Option("--words", help="Find entries that contain TEXT, without the embedding model.")
    ] = False,
    path: MemoryPath = None,
    url: MemoryUrl = None,
    as_json: options.ItAsJson = False,
) -> int:
    """Find entries of scopes and of long-term memory, and facts about entities.

    Searches by meaning, with the model that made the vectors; a memory without vectors is searched for the text itself, and
    so are facts.
    """
    if not text.strip():
        raise ValidationError("TEXT must not be blank")
    tables = _open_memory(path, url)
    names = list(tables.scopes()) if scope is None else [_count_entries(tables, scope)[0]]
    found = _find(tables, names, text, limit, is_by_words=is_by_words)
    facts = {} if scope is not None else {n: f for n, f in tables.facts().items() if _has(f"{n}: {f}", text)}
    if as_json:
        rows = [{"scope": name or None, **_as_data(entry)} for name, entries in found for entry in entries]
        show_json({"entries": rows, "entities": facts})
        return FINE
    for name, entries in found:
        show(name or "(long-term memory)")
        show(_indent("\n".join(map(_format_entry, entries))))
    if facts:
        show("(entities)")
        for entity, fact in facts.items():
            show(_indent(f"{entity}: {fact}"))
    if not found and not facts:
        write_note(f"No entry was found in {tables.location}")
    return FINE


@memory.command(
    "clear", epilog="Examples: ensemble-ray memory clear letters; ensemble-ray memory clear --long-term --yes"
)
def clear(
    *,
    scope: Scope = None,
    is_long_term: IsLongTerm = False,
    is_entities: IsEntities = False,
    path: MemoryPath = None,
    url: MemoryUrl = None,
    is_sure: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Delete the entries of a scope permanently.

    Asks first. Records of runs still contain the memory that their tasks used: ensemble-ray delete RUN.
    """
    _check_target(scope, is_long_term=is_long_term, is_entities=is_entities)
    tables = _open_memory(path, url)
    facts, name, total = tables.facts(), "", 0
    if is_entities:
        what = f"{_format_count(len(facts), 'fact', 'facts')} about entities"
    else:
        name, total = _count_entries(tables, scope)
        of = f"scope '{name}'" if name else "long-term memory"
        what = f"{_format_count(total, 'entry', 'entries')} of {of}"
    if not is_sure:
        question = f"Delete {what} in {tables.location}, for good?"
        if not sys.stdin.isatty():
            raise ValidationError(f"{question} There is no terminal to ask on: repeat the command with --yes")
        write_note(f"{question} [y/N]")
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            write_note("Nothing was deleted")
            return FAILED
    if is_entities:
        for entity in facts:
            tables.remove_fact(entity)
    else:
        tables.clear(name)
    show(f"Deleted {what}")
    return FINE


def _check_target(scope: str | None, *, is_long_term: bool, is_entities: bool) -> None:
    if (scope is not None) + is_long_term + is_entities != 1:
        raise ValidationError("Name one of SCOPE, --long-term and --entities. The scopes: ensemble-ray memory ls")


def _count_entries(tables: MemoryTables, scope: str | None) -> tuple[str, int]:
    """None: long-term memory."""
    from ensemble_ray.memory.lasting import LONG_TERM

    counts = tables.scopes()
    if scope is None:
        return LONG_TERM, counts.get(LONG_TERM, 0)
    if not scope.strip() or scope not in counts:
        known = ", ".join(name for name in counts if name)
        raise ValidationError(f"There is no scope '{scope}' in {tables.location}. Known: [{known}]")
    return scope, counts[scope]


def _find(
    tables: MemoryTables, scopes: Sequence[str], text: str, limit: int, *, is_by_words: bool
) -> list[tuple[str, Sequence[MemoryEntry]]]:
    model = None if is_by_words else _model_of(tables)
    if model is None:
        if not is_by_words and (unknown := tables.embedding_model()) is not None:
            write_note(
                f"The memory has vectors of {unknown[0]}, which is not available here: searching for the text itself"
            )
        newest = ((each, (stored.entry for stored in reversed(tables.entries(each)))) for each in scopes)
        found = [(each, [entry for entry in entries if _has(entry.content, text)][:limit]) for each, entries in newest]
        return [(each, entries) for each, entries in found if entries]
    from ensemble_ray.memory.lasting import VectorSearch

    vectors = VectorSearch(tables, model)
    return [(each, entries) for each in scopes if (entries := vectors.search(each, text, limit))]


def _as_data(entry: MemoryEntry) -> dict[str, object]:
    stored_at = None if entry.stored_at is None else entry.stored_at.isoformat()
    content = {"content": entry.content, "structured_content": entry.structured_content}
    return {**content, "stored_at": stored_at, "metadata": dict(entry.metadata)}


def _format_entry(entry: MemoryEntry) -> str:
    from ensemble_ray.values.memory import AGENT_ROLE, TASK_DESCRIPTION

    at = "" if entry.stored_at is None else f"{entry.stored_at:%Y-%m-%d %H:%M} UTC"
    whose = ": ".join(filter(None, (entry.get_meta(AGENT_ROLE), entry.get_meta(TASK_DESCRIPTION))))
    return "\n".join(["  ".join(filter(None, (at, whose))) or "-", _indent(entry.content)])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _format_count(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _has(content: str, text: str) -> bool:
    return text.strip().casefold() in content.casefold()


def _open_memory(path: str | None, url: str | None) -> MemoryTables:
    if path and url:
        raise ValidationError("Name one of --file and --store")
    named = path or url or os.environ.get(_VARIABLE, "").strip() or _DEFAULT
    if url or (not path and named.startswith(_SCHEMES)):
        from ensemble_ray.memory.postgres import MemoryDatabase

        database = MemoryDatabase(named)
        if not database.is_made():
            raise ValidationError(
                f"There is no memory in {database.location}. Name the database of your PostgresMemory: --store URL"
            )
        return database
    from ensemble_ray.memory.sqlite import MemoryFile

    found = Path(named).expanduser().absolute()
    if not found.is_file():
        raise ValidationError(
            f"There is no memory file {found}. Name the file of your SqliteMemory, or the database of your PostgresMemory: "
            f"--file PATH, --store URL, or export {_VARIABLE}=PATH"
        )
    return MemoryFile(found)


def _model_of(tables: MemoryTables) -> EmbeddingModel | None:
    """None without vectors, or if the library lacks their model."""
    from ensemble_ray.memory.embedding_models import LocalEmbeddingModel, resolve_embedding_model

    found = tables.embedding_model()
    if found is None:
        return None
    kind, _, name = found[0].partition(" ")
    if kind == LocalEmbeddingModel.__name__:
        return LocalEmbeddingModel()
    return resolve_embedding_model(f"openai:{name}") if kind == "OpenAIEmbeddingModel" else None
