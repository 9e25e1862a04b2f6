"""An MCP server for tests that breaks the protocol, without the SDK, on standard input and output. Usage: mcp_broken.py JOURNAL HOW."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

journal, how = Path(sys.argv[1]), sys.argv[2]


def note(text: str) -> int:
    """Write what was called, and return how often it was called before, by any server of this journal."""
    before = journal.read_text().splitlines().count(text) if journal.exists() else 0
    with journal.open("a") as file:
        file.write(f"{text}\n")
    return before


def write(text: str) -> None:
    """Write a line, whatever it says."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


PUT: dict[str, Any] = {"name": "put", "inputSchema": {"type": "object"}}
#: Pages that one server lists alone; None: the answer is no message.
PAGES: dict[str, dict[str, Any] | None] = {
    "pages": {"tools": [], "nextCursor": "more"},
    "many": {"tools": [{**PUT, "name": f"put{number}"} for number in range(1001)]},
    "long": {"tools": [{**PUT, "description": "x" * 9_000_000}], "nextCursor": "more"},
    "flood": {"tools": [{}] * 100_000, "nextCursor": "more"},
    "nameless": {"tools": [{"description": "x" * 9_000_000}], "nextCursor": "more"},
    "no-list": {"tools": "none"},
    "garbage": None,
}


def list_tools() -> dict[str, Any] | None:
    """A page of tools; None: the answer is no message."""
    if how in {"flood", "nameless"}:
        note("list")
    if how in PAGES:
        return PAGES[how]
    match how:
        case "silent":
            time.sleep(600)
        case "chatty":
            while True:
                write('{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}')
        case "stuck" if note("list") == 1:  # the second of the first process
            time.sleep(600)
    return {"tools": [PUT, {"name": "process_id", "inputSchema": {}}]}


def call(name: str) -> dict[str, Any] | None:
    """The result or error of a call; None: it is no message."""
    if name == "process_id":
        return {"content": [{"type": "text", "text": str(os.getpid())}]}
    if how == "unread-both":
        note(f"put by {os.getpid()}")
        assert json.loads(sys.stdin.readline())["method"] == "tools/call"
        note(f"put by {os.getpid()}")
    note("put")
    match how:
        case "garbled" | "garbage":
            return None
        case "endless":
            while True:
                sys.stdout.write("x" * 1_000_000)
        case "denied":
            return {"code": -32700, "message": "cannot parse the date"}
        case "dies":
            os._exit(1)
        case "unread" | "unread-both":
            write('{"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "what?"}}')
            time.sleep(600)
        case "odd":
            return {"content": 5}
    return {"content": [{"type": "text", "text": "put"}]}


if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
write("a greeting")
if how == "blank":
    write("another\n" * 2)
for line in sys.stdin:
    asked = json.loads(line)
    result: dict[str, Any] | None = {}
    match asked["method"]:
        case "initialize":
            version, info = asked["params"]["protocolVersion"], {"name": "broken", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            result = list_tools()
        case "tools/call":
            result = call(asked["params"]["name"])
    if result is None:
        write("no message")
    elif "id" in asked:
        result = result or {"code": -32601, "message": "no"}
        write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error" if "code" in result else "result": result}))
    if how == "blank":
        write("\n" * 1000)
if how == "deaf":
    time.sleep(600)
if how == "waits":
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    note("waited")
