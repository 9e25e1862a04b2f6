"""`ensemble-ray memory`: show, search and delete lasting memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ensemble_ray.cli.inputs.records import MemoryPath, MemoryUrl, memory_tables, model_of
from ensemble_ray.cli.view.terminal import FAILED, FINE, say, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.memory.lasting import MemoryTables
    from ensemble_ray.values.memory import MemoryEntry

memory = typer.Typer(
    help="Show, search and delete the entries of a SqliteMemory or a PostgresMemory.",
    no_args_is_help=True,
    epilog="Examples: ensemble-ray memory ls --file memory.db; ensemble-ray memory search refund; "
    "ensemble-ray memory clear letters --yes",
)

_SHOWN = 20
_FOUND = 5

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Scope = Annotated[
    str | None, typer.Argument(metavar="SCOPE", help="The scope's name, as `ls` shows it.", show_default=False)
]
IsLongTerm = Annotated[bool, typer.Option("--long-term", help="Long-term memory in place of a scope.")]
IsEntities = Annotated[bool, typer.Option("--entities", help="The facts about entities in place of a scope.")]


@memory.command("ls", epilog="Example: ensemble-ray memory ls --file memory.db")
def list_scopes(*, path: MemoryPath = None, url: MemoryUrl = None, as_json: AsJson = False) -> int:
    """List the scopes of a memory with their entries, long-term memory, and facts about entities."""
    tables = memory_tables(path, url)
    counts, facts, model = dict(tables.scopes()), tables.facts(), tables.embedding_model()
    long_term = counts.pop(_long_term(), 0)
    if as_json:
        data = {"scopes": counts, "long_term": long_term, "entities": len(facts)}
        show_json({"place": tables.location, "embedding_model": None if model is None else model[0], **data})
        return FINE
    rows = [(scope, _format_count(count, "entry", "entries")) for scope, count in counts.items()]
    rows += [("(long-term memory)", _format_count(long_term, "entry", "entries"))] if long_term else []
    rows += [("(entities)", _format_count(len(facts), "fact", "facts"))] if facts else []
    width = max((len(name) for name, _ in rows), default=0)
    for name, count in rows:
        show(f"{name:<{width}}  {count}")
    if not rows:
        say(f"{tables.location} is empty")
    return FINE


@memory.command("show", epilog="Examples: ensemble-ray memory show letters; ensemble-ray memory show --entities --json")
def show_scope(
    *,
    scope: Scope = None,
    is_long_term: IsLongTerm = False,
    is_entities: IsEntities = False,
    path: MemoryPath = None,
    url: MemoryUrl = None,
    is_all: Annotated[bool, typer.Option("--all", help=f"All entries, not only the newest {_SHOWN}.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show the entries of a scope, the oldest first."""
    _check_target(scope, is_long_term=is_long_term, is_entities=is_entities)
    tables = memory_tables(path, url)
    if is_entities:
        _show_facts(tables.facts(), as_json=as_json)
        return FINE
    name, total = _count_entries(tables, scope)
    entries = tables.newest(name, total if is_all else _SHOWN)
    if as_json:
        show_json([_as_data(entry) for entry in entries])
        return FINE
    for entry in entries:
        show(_format_entry(entry))
    if not entries:
        say(f"{tables.location} has no long-term memory")
    elif total > len(entries):
        say(f"and {total - len(entries)} older ones; all of them: --all")
    return FINE


@memory.command(
    "search", epilog="Examples: ensemble-ray memory search 'money back'; ensemble-ray memory search Ann --words"
)
def search(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to look for.", show_default=False)],
    *,
    scope: Annotated[str | None, typer.Option("--scope", metavar="SCOPE", help="Only in that scope.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Maximum entries per scope.")] = _FOUND,
    is_by_words: Annotated[
        bool, typer.Option("--words", help="Find entries that contain TEXT, without the embedding model.")
    ] = False,
    path: MemoryPath = None,
    url: MemoryUrl = None,
    as_json: AsJson = False,
) -> int:
    """Find entries of scopes and of long-term memory, and facts about entities.

    Searches by meaning, with the model that made the vectors; a memory without vectors is searched for the text itself, and
    so are facts.
    """
    from ensemble_ray.errors import ValidationError

    if not text.strip():
        raise ValidationError("TEXT must not be blank")
    tables = memory_tables(path, url)
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
        say(f"No entry was found in {tables.location}")
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
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Delete the entries of a scope permanently.

    Asks first. Records of runs still contain the memory that their tasks used: ensemble-ray delete RUN.
    """
    _check_target(scope, is_long_term=is_long_term, is_entities=is_entities)
    tables = memory_tables(path, url)
    what, delete = _facts_part(tables) if is_entities else _scope_part(tables, scope)
    if not is_sure and not _agrees(f"Delete {what} in {tables.location}, for good?"):
        say("Nothing was deleted")
        return FAILED
    delete()
    show(f"Deleted {what}")
    return FINE


def _scope_part(tables: MemoryTables, scope: str | None) -> tuple[str, Callable[[], None]]:
    """Return a description of a scope's entries, and the function that deletes them; None: long-term memory."""
    name, total = _count_entries(tables, scope)
    where = f"scope '{name}'" if name else "long-term memory"
    return f"{_format_count(total, 'entry', 'entries')} of {where}", partial(tables.clear, name)


def _facts_part(tables: MemoryTables) -> tuple[str, Callable[[], None]]:
    facts = tables.facts()

    def delete() -> None:
        for entity in facts:
            tables.remove_fact(entity)

    return f"{_format_count(len(facts), 'fact', 'facts')} about entities", delete


def _check_target(scope: str | None, *, is_long_term: bool, is_entities: bool) -> None:
    from ensemble_ray.errors import ValidationError

    if (scope is not None) + is_long_term + is_entities != 1:
        raise ValidationError("Name one of SCOPE, --long-term and --entities. The scopes: ensemble-ray memory ls")


def _count_entries(tables: MemoryTables, scope: str | None) -> tuple[str, int]:
    """Return a scope's name and its number of entries; None: long-term memory.

    Raises:
        ValidationError: The scope does not exist.
    """
    from ensemble_ray.errors import ValidationError

    counts = tables.scopes()
    if scope is None:
        return _long_term(), counts.get(_long_term(), 0)
    if not scope.strip() or scope not in counts:
        known = ", ".join(name for name in counts if name)
        raise ValidationError(f"There is no scope '{scope}' in {tables.location}. Known: [{known}]")
    return scope, counts[scope]


def _find(
    tables: MemoryTables, scopes: Sequence[str], text: str, limit: int, *, is_by_words: bool
) -> list[tuple[str, Sequence[MemoryEntry]]]:
    model = None if is_by_words else model_of(tables)
    if model is None:
        if not is_by_words and (unknown := tables.embedding_model()) is not None:
            say(f"The memory has vectors of {unknown[0]}, which is not available here: searching for the text itself")
        found = [
            (each, [s.entry for s in reversed(tables.entries(each)) if _has(s.entry.content, text)]) for each in scopes
        ]
        return [(each, entries[:limit]) for each, entries in found if entries]
    from ensemble_ray.memory.lasting import VectorSearch

    vectors = VectorSearch(tables, model)
    near = [(each, vectors.search(each, text, limit)) for each in scopes]
    return [(each, entries) for each, entries in near if entries]


def _agrees(question: str) -> bool:
    """Ask for confirmation on the terminal.

    Raises:
        ValidationError: Standard input is not a terminal.
    """
    from ensemble_ray.errors import ValidationError

    if not sys.stdin.isatty():
        raise ValidationError(f"{question} There is no terminal to ask on: repeat the command with --yes")
    say(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _long_term() -> str:
    from ensemble_ray.memory.lasting import LONG_TERM

    return LONG_TERM


def _show_facts(facts: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        show_json(facts)
        return
    for name, fact in facts.items():
        show(f"{name}: {fact}")
    if not facts:
        say("There are no facts about entities")


def _as_data(entry: MemoryEntry) -> dict[str, object]:
    return {
        "content": entry.content,
        "structured_content": entry.structured_content,
        "stored_at": None if entry.stored_at is None else entry.stored_at.isoformat(),
        "metadata": dict(entry.metadata),
    }


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
