"""An MCP server for tests that breaks the protocol, without the SDK, on standard input and output. Usage: mcp_broken.py JOURNAL HOW."""

from __future__ import annotations

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


def list_tools(cursor: str | None) -> dict[str, Any] | None:
    """A page of tools; None: the answer is no message."""
    tools = [{"name": "put", "inputSchema": {"type": "object"}}, {"name": "process_id", "inputSchema": {}}]
    match how:
        case "pages":
            return {"tools": [], "nextCursor": "more"}
        case "many":
            return {"tools": [{**tools[0], "name": f"put{number}"} for number in range(1001)]}
        case "long":
            return {"tools": [{**tools[0], "description": "x" * 9_000_000}], "nextCursor": "more"}
        case "no-list":
            return {"tools": "none"}
        case "garbage":
            return None
        case "silent":
            time.sleep(600)
        case "chatty":
            while True:
                write('{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}')
        case "stuck" if note("list") == 1:  # the second of the first process
            time.sleep(600)
    return {"tools": tools}


def call(name: str) -> dict[str, Any] | None:
    """The result of a call; None: it is no message."""
    if name == "process_id":
        return {"content": [{"type": "text", "text": str(os.getpid())}]}
    note("put")
    match how:
        case "garbled" | "garbage":
            return None
        case "endless":
            while True:
                sys.stdout.write("x" * 1_000_000)
        case "unread":
            write('{"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "what?"}}')
            time.sleep(600)
        case "odd":
            return {"content": 5}
    return {"content": [{"type": "text", "text": "put"}]}


if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
write("a greeting")
for line in sys.stdin:
    asked = json.loads(line)
    result: dict[str, Any] | None = {}
    match asked["method"]:
        case "initialize":
            version, info = asked["params"]["protocolVersion"], {"name": "broken", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            result = list_tools((asked.get("params") or {}).get("cursor"))
        case "tools/call":
            result = call(asked["params"]["name"])
    if result is None:
        write("no message")
    elif "id" in asked:
        answer = {"result": result} if result else {"error": {"code": -32601, "message": "no"}}
        write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}))
if how == "deaf":
    time.sleep(600)
