"""What an MCP server lists, such that one wrong entry does not hide the others. Package: tools.

In: the names that a server has for its tools, and its answers as they come in. Out: names that all endpoints accept; listings whose entries
the SDK can read. The SDK refuses a whole listing for one member of one tool.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pydantic
from pydantic_core import to_json

from ensemble_ray.errors import ToolConfigurationError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.tools.foreign_schema import LONGEST_NAME, SchemaError, hash_name, normalise_parameters
from ensemble_ray.tools.mcp.delivery import MESSAGE_BYTES, ReadMessages
from ensemble_ray.tools.tool import make_tool_name

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp_types import PaginatedResult

__all__ = ["collect_pages", "log_left_out", "mend_listing", "mend_transport", "tool_names"]

T = TypeVar("T")
Page = TypeVar("Page", bound="PaginatedResult")

_log = bounded_logger(__name__)
#: Of one listing.
_MOST_PAGES, _MOST_ENTRIES = 100, 1_000
#: Where a listing is stored in a result.
_LISTINGS = ("tools", "prompts", "resources", "resourceTemplates")
#: In the metadata of a listing: its entries and bytes as the server sent them.
_SIZE = "ensemble-ray/size"
#: Tools in a log line, and characters about each.
_MOST_SHOWN, _SHOWN = 5, 150
#: The protocol that has the narrowest words for a tool.
_VERSION = "2025-11-25"


def tool_names(names: Sequence[str], prefix: str) -> dict[str, str]:
    """Return what a model calls each of a server's tools by: different names of at most 64 letters, digits and underscores.

    A name does not depend on the order of the others (S-LLM-62).
    """
    made = {name: prefix + make_tool_name(name) for name in names}
    made = {name: f"_{fitting}" if fitting[:1].isdigit() else fitting for name, fitting in made.items()}
    often = Counter(made.values())
    return {
        name: hash_name(fitting, name)
        if len(fitting) > LONGEST_NAME or (often[fitting] > 1 and fitting != prefix + name)
        else fitting
        for name, fitting in made.items()
    }


def mend_listing(tools: Sequence[object], server: str) -> list[dict[str, Any]]:
    """Return the tools of a listing that can be read: wrong members are left out, and tools that are wrong without them.

    Args:
        tools: As the server sent them.
        server: For log lines.
    """
    kept: dict[str, dict[str, Any]] = {}
    flaws: list[str] = []
    for tool in tools:
        name = cast("dict[str, object]", tool).get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not name.strip():
            flaws.append("one without a name")
        elif name in kept:
            flaws.append(f"a second '{name[:100]}'")
        else:
            try:
                kept[name] = _mend(dict(cast("dict[str, Any]", tool)))
            except (SchemaError, pydantic.ValidationError) as error:
                flaws.append(f"'{name[:100]}': {error}")
    log_left_out(server, flaws)
    return list(kept.values())


def log_left_out(server: str, flaws: Sequence[str]) -> None:
    """Log the tools of a listing that are left out, in one line."""
    if flaws:
        shown = "; ".join(one_line(flaw, _SHOWN) for flaw in flaws[:_MOST_SHOWN])
        more = "; ..." if len(flaws) > _MOST_SHOWN else ""
        _log.warning("MCP server '%s': %d of its tools are left out: %s%s", server, len(flaws), shown, more)


def _mend(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without wrong members.

    Raises:
        SchemaError: the schema of its arguments cannot be mended.
        pydantic.ValidationError: something else cannot.
    """
    from mcp_types.methods import validate_server_result

    try:
        validate_server_result("tools/list", _VERSION, {"tools": [tool]})
    except pydantic.ValidationError as error:
        for member in {str(member) for fault in error.errors() for member in fault["loc"][2:3]}:  # tools, 0, member
            if member == "inputSchema":
                tool[member] = normalise_parameters(tool.get(member) or {}).parameters
            else:
                tool.pop(member, None)
        validate_server_result("tools/list", _VERSION, {"tools": [tool]})
    return tool


async def collect_pages(fetch: Callable[[str | None], Awaitable[Page]], entries: Callable[[Page], list[T]]) -> list[T]:
    """Return the entries of all pages of a listing.

    Args:
        fetch: Asks for the page of a cursor; None: the first one.
        entries: Those of a page.

    Raises:
        ToolConfigurationError: there are too many pages or entries, or they are too long.
    """
    found: list[T] = []
    cursor, listed, listed_bytes = None, 0, 0
    for _ in range(_MOST_PAGES):
        page = await fetch(cursor)
        found += entries(page)
        size: tuple[int, int] = (page.meta or {}).get(_SIZE, (0, 0))
        listed += size[0]
        listed_bytes += size[1]
        if listed > _MOST_ENTRIES or listed_bytes > MESSAGE_BYTES:
            break
        if not (cursor := page.next_cursor):
            return found
    raise ToolConfigurationError(
        f"the server lists more than {_MOST_ENTRIES} entries, {_MOST_PAGES} pages or {MESSAGE_BYTES} bytes, the limits of a listing"
    )


@asynccontextmanager
async def mend_transport(
    transport: AbstractAsyncContextManager[TransportStreams], server: str, on_fault: Callable[[str], None]
) -> AsyncGenerator[TransportStreams]:
    """Open a transport; listings of tools that come in are mended before the SDK reads them.

    Args:
        transport: The SDK's, or one of ours.
        server: For log lines.
        on_fault: Called with what the server did wrong when a message cannot be read: which request it answers is not known.
    """
    async with transport as (received, sent):
        yield _MendedStream(received, server, on_fault), sent


class _MendedStream(ReadMessages):
    """The stream of messages from a server, which ends with the first one that cannot be read."""

    def __init__(
        self, inner: ReadStream[SessionMessage | Exception], server: str, on_fault: Callable[[str], None]
    ) -> None:
        self._inner = inner
        self._server = server
        self._on_fault = on_fault

    @property
    def last_context(self) -> object:
        """The sender's context, which the SDK asks for."""
        return getattr(self._inner, "last_context", None)

    async def aclose(self) -> None:
        """Close the stream inside."""
        await self._inner.aclose()

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message.

        Raises:
            anyio.EndOfStream: no other comes, or it cannot be read.
        """
        from anyio import EndOfStream
        from mcp_types import PARSE_ERROR, JSONRPCError

        item = await self._inner.receive()
        if isinstance(item, Exception):
            self._on_fault(f"sent a message that cannot be read: {message_of(item)}")
            raise EndOfStream
        message = item.message
        if isinstance(message, JSONRPCError) and message.id is None and message.error.code == PARSE_ERROR:
            self._on_fault(f"cannot read a message: {message.error.message}")
            raise EndOfStream
        result: object = getattr(message, "result", None)
        if isinstance(result, dict) and not result.keys().isdisjoint(_LISTINGS):
            # Beside the loop, on which limits of time run: megabytes of schemas take seconds.
            await asyncio.to_thread(_bound_listing, cast("dict[str, object]", result), self._server)
        return item


def _bound_listing(result: dict[str, object], server: str) -> None:
    """Cut a listing short, note how long it was, and mend its tools."""
    listings = {
        name: cast("list[object]", entries) for name in _LISTINGS if isinstance(entries := result.get(name), list)
    }
    size = (sum(map(len, listings.values())), len(to_json(result)))
    meta = result.get("_meta")
    result["_meta"] = {**(cast("dict[str, object]", meta) if isinstance(meta, dict) else {}), _SIZE: size}
    for entries in listings.values():
        del entries[_MOST_ENTRIES + 1 :]
    if "tools" in listings:
        result["tools"] = mend_listing(listings["tools"], server)
