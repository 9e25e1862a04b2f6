"""An MCP server for tests, made with the official SDK: over stdio, or on a port. Its calls are told in a file.

Usage: mcp_shop.py JOURNAL [PORT [older | sse | STATUS] | older | deaf | odd]

`older`: knows nothing of the newer protocol. STATUS: a proxy answers so in place of the first call. `deaf`: does not hear the end of its input.
`sse`: speaks the transport of 2024-11-05 alone. `odd`: lists tools that no protocol allows, beside one that tells its arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp import MCPError
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    ImageContent,
    InputRequiredResult,
    SamplingMessage,
    TextContent,
    ToolAnnotations,
)

journal = Path(sys.argv[1])
server = MCPServer("shop", log_level="WARNING")


def note(text: str) -> int:
    """Write what was called, and return how often it was called before, by any server of this journal."""
    before = journal.read_text().splitlines().count(text) if journal.exists() else 0
    with journal.open("a") as file:
        file.write(f"{text}\n")
    return before


@server.tool()
def process_id() -> str:
    """Tell which process this is."""
    return str(os.getpid())


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
def broken_picture() -> CallToolResult:
    """Give an image without content."""
    return CallToolResult(content=[ImageContent(data="", mime_type="image/png")])


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
    note("sleep")
    try:
        await anyio.sleep_forever()
    finally:
        note("woken")


FORM = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "description": "Pieces"},
        "gift": {"type": "boolean", "default": False},
    },
    "required": ["count"],
}


async def asked(ctx: Context, params: ElicitRequestFormParams | ElicitRequestURLParams) -> Any:
    """What the client's user answers; in the newer protocol a result that asks, until the call comes again with the answer."""
    if ctx.session.can_send_request:
        request, place = ElicitRequest(params=params), ServerMessageMetadata(ctx.request_id)
        return await ctx.session.send_request(request, ElicitResult, metadata=place)
    if ctx.input_responses is None:
        return InputRequiredResult(input_requests={"asked": ElicitRequest(params=params)})
    return ctx.input_responses["asked"]


@server.tool()
async def order(what: str, ctx: Context) -> Any:
    """Order something, and ask how many."""
    note("order")
    answer = await asked(ctx, ElicitRequestFormParams(message=f"How many of {what}?", requested_schema=FORM))
    if isinstance(answer, InputRequiredResult):
        return answer
    if answer.action == "accept":
        note("ordered")
    return f"{answer.action} {answer.content}"


@server.tool()
async def login(ctx: Context) -> Any:
    """Have somebody open a page."""
    url = "https://shop.example/"
    answer = await asked(ctx, ElicitRequestURLParams(message="Log in", url=url, elicitation_id="e"))
    return answer if isinstance(answer, InputRequiredResult) else answer.action


@server.tool()
async def advise(what: str, ctx: Context) -> Any:
    """Have the client's model say something of it."""
    content: Any = TextContent(text=what) if what != "photo" else ImageContent(data="YQ==", mime_type="image/png")
    messages = [SamplingMessage(role="user", content=content)]
    request = CreateMessageRequest(
        params=CreateMessageRequestParams(messages=messages, system_prompt="Advise", max_tokens=9)
    )
    if ctx.session.can_send_request:
        place = ServerMessageMetadata(ctx.request_id)
        said = await ctx.session.send_request(request, CreateMessageResult, metadata=place)
    elif ctx.input_responses is None:
        return InputRequiredResult(input_requests={"asked": request})
    else:
        said = ctx.input_responses["asked"]
    note("advise")
    return f"{said.content.text} ({said.stop_reason})"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def reserve(what: str, ctx: Context) -> Any:
    """Ask how many; the first server that is answered dies."""
    answer = await asked(ctx, ElicitRequestFormParams(message=f"How many of {what}?", requested_schema=FORM))
    if isinstance(answer, InputRequiredResult):
        return answer
    if note("reserve") == 0:
        os._exit(3)
    return f"{answer.action} {answer.content}"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def consult(what: str, ctx: Context) -> Any:
    """Have the client's model say something of it; the first server that is answered dies."""
    said = await advise(what, ctx)
    if isinstance(said, str) and note("consult") == 0:
        os._exit(3)
    return said


@server.tool()
async def pester(ctx: Context) -> str:
    """Ask the client's model and its user twelve times each; an older server that may send requests."""
    place, told = ServerMessageMetadata(ctx.request_id), list[str]()
    said = SamplingMessage(role="user", content=TextContent(text="More?"))
    for _ in range(12):
        request = CreateMessageRequest(params=CreateMessageRequestParams(messages=[said], max_tokens=9))
        try:
            await ctx.session.send_request(request, CreateMessageResult, metadata=place)
            told.append("said")
        except MCPError as error:
            told.append(error.message)
    for _ in range(12):
        form = ElicitRequestFormParams(message="How many?", requested_schema=FORM)
        told.append((await asked(ctx, form)).action)
    return ", ".join(told)


@server.tool()
async def roots(ctx: Context) -> str:
    """Ask which directories the client shows."""
    return str(await ctx.session.list_roots())


@server.resource("shop://list", description="What there is.")
def listing() -> str:
    """Tell what there is."""
    return "apples, pears"


@server.resource("shop://logo.png", mime_type="image/png")
def logo() -> bytes:
    """Give three bytes."""
    return b"abc"


@server.prompt()
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello {name}"


async def serve_older() -> None:
    """Serve on standard input and output, and know nothing of the newer protocol."""
    lowlevel = server._lowlevel_server
    async with stdio_server() as (received, sent):
        await serve_loop(lowlevel, received, sent, lifespan_state={})


def serve_on_a_port(port: int, how: str) -> None:
    """Serve over HTTP: as it is, without the newer protocol, or behind a proxy that fails."""
    app = server.streamable_http_app()

    async def between(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        body, is_whole = b"", False
        while not is_whole:
            part = await receive()
            body, is_whole = body + part.get("body", b""), not part.get("more_body", False)
        left = [{"type": "http.request", "body": body}]

        async def again() -> Any:
            return left.pop() if left else await receive()

        async def nowhere(_message: Any) -> None:
            pass

        status = None
        if how == "older" and b"server/discover" in body:
            status = 404
        elif how.isdigit() and b"tools/call" in body and note("proxy") == 0:
            await app(scope, again, nowhere)
            status = int(how)
        if status is None:
            await app(scope, again, send)
        else:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})

    uvicorn.run(between, port=port, log_level="warning")


ODD = [
    {"name": "bare"},
    {"name": "text", "inputSchema": {"type": "string"}},
    {"name": "tell-" + "x" * 80, "inputSchema": {"properties": {"$top": {"type": "integer"}}, "required": True}},
]


def serve_odd() -> None:
    """Serve on standard input and output without the SDK, which lists no such tools."""
    for line in sys.stdin:
        asked = json.loads(line)
        result: dict[str, Any] | None = None
        match asked["method"]:
            case "initialize":
                version = asked["params"]["protocolVersion"]
                info = {"name": "odd", "version": "1"}
                result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                result = {"tools": ODD}
            case "tools/call":
                result = {"content": [{"type": "text", "text": json.dumps(asked["params"]["arguments"])}]}
        answer = {"result": result} if result else {"error": {"code": -32601, "message": "no"}}
        if "id" in asked:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}) + "\n")
            sys.stdout.flush()


match sys.argv[2:]:
    case ["odd"]:
        serve_odd()
    case [port, "sse"]:
        server.run("sse", port=int(port))
    case ["older"]:
        anyio.run(serve_older)
    case ["deaf"]:
        server.run()
        note("deaf")
        time.sleep(600)
    case [port, how]:
        serve_on_a_port(int(port), how)
    case [port]:
        server.run("streamable-http", port=int(port))
    case _:
        server.run()
