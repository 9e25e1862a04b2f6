"""MCP servers that break the protocol or outlive their session: what bounds them, and what a call of them gives."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import MCP, ToolConfigurationError, ToolResult
from ensemble_ray.process.concurrency import library_loop
from ensemble_ray.tools.mcp import program
from ensemble_ray.tools.mcp import session as connection
from ensemble_ray.tools.mcp import session as listing
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.session import ErrorLines, ServerLostError, ask_server, repair_listing
from tests.scenarios.teams import PATIENCE_S
from tests.scenarios.test_mcp import calls_of, ended, offered, use
from tests.template import ForkedProgram

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


@pytest.mark.parametrize(("how", "pages"), [("flood", 1), ("nameless", 2)])
async def test_entries_that_are_left_out_count_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, pages: int
) -> None:
    """S-INT-87, S-LLM-64: a page with too many entries is not read, and a page has one log line."""
    journal = tmp_path / "journal"
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ToolConfigurationError, match="the server lists more than 1000 entries"):
            await MCP(broken(journal, how)).resolve()
    assert calls_of(journal) == ["list"] * pages
    assert len([each for each in caplog.messages if "left out" in each]) == pages


async def test_a_listing_is_mended_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-87: the loop of the sessions goes on, and with it their limits of time."""

    def mend(tools: Sequence[object], server: str) -> list[dict[str, Any]]:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), library_loop()).result(PATIENCE_S)
        return repair_listing(tools, server)

    monkeypatch.setattr(listing, "repair_listing", mend)
    assert "put" in await offered(MCP(broken(tmp_path / "journal", "plain")))


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
    server = MCP(broken(tmp_path / "journal", "stuck"), connect_timeout=3)
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
    """S-INT-88: nobody knows which of them it answers; one process has both."""
    journal = tmp_path / "journal"
    tools = await offered(MCP(broken(journal, "unread-both"), timeout=None))
    failed: Sequence[ToolResult] = await asyncio.gather(use(tools["put"]), use(tools["put"]))
    assert ["cannot read a message: what?" in (each.error_message or "") for each in failed] == [True, True]
    first, second, *others = calls_of(journal)
    assert first == second
    assert others == ["put"]


async def test_an_error_32700_with_an_id_is_an_answer_of_a_program(tmp_path: Path) -> None:
    """S-INT-88: the server goes on, and has been called once."""
    journal = tmp_path / "journal"
    tools = await offered(MCP(broken(journal, "denied"), effect="idempotent"))
    process_id = (await use(tools["process_id"])).output
    failed = await use(tools["put"])
    assert "cannot parse the date" in (failed.error_message or "")
    assert calls_of(journal) == ["put"]
    assert (await use(tools["process_id"])).output == process_id


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
    command = [sys.executable, "-c", script, broken(journal, "deaf"), str(forks)]
    with ForkedProgram[str](command, stdout=subprocess.PIPE, text=True) as owner:
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


async def test_a_program_runs_where_its_guard_cannot_open_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-91: then it is not guarded."""
    monkeypatch.setattr(program, "_GUARDED", program._GUARDED.replace("/dev/fd", str(tmp_path)))
    tools = await offered(MCP(broken(tmp_path / "journal", "plain")))
    assert (await use(tools["put"])).output == "put"


async def test_a_guard_is_no_child_of_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-91: a program that waits for its children ends by itself."""
    monkeypatch.setattr(connection, "_IDLE_S", 0.2)
    journal = tmp_path / "journal"
    tools = await offered(MCP(broken(journal, "waits")))
    await ended(int((await use(tools["process_id"])).output))
    assert calls_of(journal) == ["waited"]


async def test_a_program_is_run_by_the_sdk_where_there_are_no_process_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-5, S-INT-88: as on Windows; a greeting is passed over there, too, and a call that was lost is unknown."""
    monkeypatch.setattr(program, "_HAS_GROUPS", False)
    journal = tmp_path / "journal"
    tools = await offered(MCP(broken(journal, "dies"), cwd=str(tmp_path)))
    assert (await use(tools["process_id"])).is_success
    assert ((await use(tools["put"])).error_message or "").startswith("Outcome unknown: ")
    assert calls_of(journal) == ["put"]


@pytest.mark.parametrize("cwd", [None, ".", "absolute"])
async def test_a_program_is_found_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cwd: str | None
) -> None:
    """S-INT-1: from the working directory of the program."""
    script = tmp_path / "server.sh"
    script.write_text(
        f"#!/bin/sh\nexec {shlex.join([sys.executable, str(BROKEN), str(tmp_path / 'journal'), 'plain'])}\n"
    )
    script.chmod(0o755)
    if cwd == "absolute":
        cwd = str(tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
    tools = await offered(MCP("stdio:./server.sh", cwd=cwd))
    assert (await use(tools["put"])).output == "put"


async def test_lines_without_a_message_have_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S-INT-88: blank lines have none."""
    tools = await offered(MCP(broken(tmp_path / "journal", "blank")))
    assert (await use(tools["put"])).output == "put"
    assert len([each for each in caplog.messages if "wrote to its standard output" in each]) == 1


async def test_a_long_line_of_standard_error_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """S-SEC-102: what follows its beginning is dropped as it comes."""
    caplog.set_level(logging.DEBUG)
    lines = ErrorLines()
    stderr = lines.open()
    await asyncio.to_thread(stderr.write, f"{'x' * 5_000_000}\nafter\n")
    lines.close()
    assert [len(line) for line in (await lines.last()).splitlines()] == [500, 5]
    assert max(map(len, caplog.messages)) < 100_000


async def test_the_output_of_a_program_is_not_read_any_more_when_its_end_is_cancelled() -> None:
    """S-INT-91: no task is left behind."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)  # noqa: ASYNC220  our own program
    with process:
        before = asyncio.all_tasks()
        ending = asyncio.create_task(program._end(process, asyncio.StreamReader()))
        await asyncio.sleep(0)  # it has begun
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert asyncio.all_tasks() == before
        process.kill()
