"""MCP servers that break the protocol or outlive their session: what bounds them, and what a call of them gives."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray import MCP, ToolConfigurationError, ToolResult
from ensemble_ray.tools.mcp import program
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.connection import ServerLostError, ask_server
from tests.scenarios.teams import PATIENCE_S
from tests.scenarios.test_mcp import calls_of, ended, offered, use

pytest.importorskip("mcp")
pytestmark = pytest.mark.program

BROKEN = Path(__file__).with_name("mcp_broken.py")


def broken(journal: Path, how: str) -> str:
    """The server as a program."""
    return f"stdio:{shlex.join([sys.executable, str(BROKEN), str(journal), how])}"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("pages", "lists no tools: the server lists more than 1000 entries, 100 pages or 16777216 bytes"),
        ("many", "more than 1000 entries"),
        ("long", "16777216 bytes"),
        ("no-list", "lists no tools: "),
        ("garbage", "sent a message that cannot be read: 'no message' is no message of the protocol"),
    ],
)
async def test_a_listing_has_an_end(tmp_path: Path, how: str, said: str) -> None:
    """S-INT-87, S-INT-88: whatever the server answers, the task fails with a reason."""
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ToolConfigurationError, match="MCP server 'stdio:") as caught:
            await MCP(broken(tmp_path / "journal", how)).resolve()
    assert said in str(caught.value)


@pytest.mark.parametrize("how", ["silent", "chatty"])
async def test_a_listing_that_is_never_answered_counts_as_lost(tmp_path: Path, how: str) -> None:
    """S-INT-87: and is asked for once more, in a new session."""
    journal = tmp_path / "journal"
    address = ServerAddress(command=(sys.executable, str(BROKEN), str(journal), how))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ServerLostError, match=r"did not answer within 0\.5 s"):
            await ask_server(address, lambda client: client.list_tools(), may_repeat=True, limit_s=0.5)


async def test_a_server_that_hangs_is_replaced(tmp_path: Path) -> None:
    """S-INT-87: the next task has another process."""
    server = MCP(broken(tmp_path / "journal", "stuck"), connect_timeout=10)
    first = (await use((await offered(server))["process_id"])).output
    assert (await use((await offered(server))["process_id"])).output != first


@pytest.mark.parametrize("how", ["garbled", "endless", "unread", "odd"])
async def test_a_call_whose_answer_cannot_be_read_is_flagged(tmp_path: Path, how: str) -> None:
    """S-INT-88: at once, and it is not made again; a call that may be repeated is, once."""
    journal = tmp_path / "journal"
    tools = await offered(MCP(broken(journal, how), timeout=None))
    failed = await use(tools["put"])
    assert (failed.error_message or "").startswith("Outcome unknown: MCP server")
    assert calls_of(journal) == ["put"]
    again = await offered(MCP(broken(journal, how), effect="idempotent", timeout=None))
    failed = await use(again["put"])
    assert "Outcome unknown" not in (failed.error_message or "")
    assert not failed.is_success
    assert calls_of(journal).count("put") == (2 if how == "odd" else 3)


async def test_all_open_calls_of_a_session_fail_with_a_message_that_cannot_be_read(tmp_path: Path) -> None:
    """S-INT-88: nobody knows which of them it answers."""
    journal = tmp_path / "journal"
    tools = await offered(MCP(broken(journal, "unread"), timeout=None))
    failed: Sequence[ToolResult] = await asyncio.gather(use(tools["put"]), use(tools["put"]))
    assert ["cannot read a message: what?" in (each.error_message or "") for each in failed] == [True, True]


@pytest.mark.parametrize("forks", [False, True])
async def test_a_program_ends_with_its_killed_owner(tmp_path: Path, forks: bool) -> None:  # noqa: FBT001  a case
    """S-INT-91: and what it started; a child that its owner forked keeps nothing alive."""
    journal = tmp_path / "journal"
    script = (
        "import asyncio, os, sys, time\n"
        "from ensemble_ray import MCP\n"
        "async def main():\n"
        "    tools = {tool.name: tool for tool in await MCP(sys.argv[1]).resolve()}\n"
        "    print((await tools['process_id'].execute('{}')).output, flush=True)\n"
        "asyncio.run(main())\n"
        "child = os.fork() if sys.argv[2] == 'True' else -1\n"
        "print(child, flush=True) if child else None\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(  # noqa: ASYNC220, S603  our own program
        [sys.executable, "-c", script, broken(journal, "deaf"), str(forks)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server_pid, child_pid = int(owner.stdout.readline()), int(owner.stdout.readline())
        try:
            owner.kill()
            await ended(server_pid)
            await ended(int(calls_of(journal)[0]))
        finally:
            if child_pid > 0:
                os.kill(child_pid, signal.SIGKILL)


async def test_a_program_is_started_without_a_shell_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-91."""
    monkeypatch.setattr(program, "_HAS_SHELL", False)
    tools = await offered(MCP(broken(tmp_path / "journal", "plain"), cwd=tmp_path))
    assert (await use(tools["put"])).output == "put"
