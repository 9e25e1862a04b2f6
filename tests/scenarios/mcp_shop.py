"""An MCP server for tests, made with the official SDK: over stdio, or on a port. Its calls are told in a file.

Usage: mcp_shop.py JOURNAL [PORT]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

journal = Path(sys.argv[1])
server = MCPServer("shop", log_level="WARNING")


def note(text: str) -> int:
    """Write what was called, and return how often it was called before, by any server of this journal."""
    before = journal.read_text().splitlines().count(text) if journal.exists() else 0
    with journal.open("a") as file:
        file.write(f"{text}\n")
    return before


@server.tool()
def buy(what: str) -> str:
    """Buy something."""
    note("buy")
    return f"bought {what}"


@server.tool(name="look-up", annotations=ToolAnnotations(read_only_hint=True))
def look_up(what: str) -> dict[str, str]:
    """Look something up; the first server that is asked dies."""
    if note("look-up") == 0:
        os._exit(3)
    return {"found": what}


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def put(what: str) -> str:
    """Put something down; the first server that is asked dies."""
    if note("put") == 0:
        os._exit(3)
    return f"put {what}"


@server.tool()
def pay() -> str:
    """Pay, and die before an answer."""
    note("pay")
    os._exit(3)


@server.tool()
def refuse() -> str:
    """Say no."""
    raise ToolError("out of stock")


@server.tool()
def picture() -> Image:
    """Give an image of three bytes."""
    return Image(data=b"abc", format="png")


@server.tool()
async def grow(ctx: Context) -> str:
    """Offer one tool more."""

    def sell() -> str:
        """Sell."""
        return "sold"

    server.add_tool(sell)
    return "grown"


@server.tool()
def secret() -> str:
    """Tell which variables of the environment the server has."""
    return f"{os.environ.get('SHOP_KEY')} {os.environ.get('OPENAI_API_KEY')}"


@server.tool()
async def sleep() -> str:
    """Never answer, and tell when the call was cancelled."""
    import anyio

    note("sleep")
    try:
        await anyio.sleep_forever()
    finally:
        note("woken")


@server.resource("shop://list", description="What there is.")
def listing() -> str:
    """Tell what there is."""
    return "apples, pears"


@server.prompt()
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello {name}"


if len(sys.argv) > 2:
    server.run("streamable-http", port=int(sys.argv[2]))
else:
    server.run()
