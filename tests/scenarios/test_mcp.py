"""Tools of MCP servers: real servers of the official SDK, over stdio and HTTP, also killed in the middle of a call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ensemble_ray import (
    MCP,
    AgentTool,
    Ensemble,
    EnsembleError,
    Image,
    Runtime,
    ToolConfigurationError,
    ToolResult,
    ValidationError,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.tools.mcp import session as connection
from ensemble_ray.tools.registry import resolve_tools
from tests.builders import agent, call, task
from tests.processes import free_ports
from tests.scenarios.teams import PATIENCE_S

pytest.importorskip("mcp")

pytestmark = pytest.mark.usefixtures("forked_servers")

TEA = '{"what": "tea"}'
SHOP = Path(__file__).with_name("mcp_shop.py")


def command(journal: Path) -> str:
    """The server as a program."""
    return f"stdio:{shlex.join([sys.executable, str(SHOP), str(journal)])}"


@contextlib.contextmanager
def listening(journal: Path, port: int, *how: str) -> Generator[subprocess.Popen[bytes]]:
    """The server on a port, until the end of the block."""
    process = subprocess.Popen(  # noqa: S603  our own server
        [sys.executable, str(SHOP), str(journal), str(port), *how], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < deadline, "the server did not listen"
            time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def calls_of(journal: Path) -> list[str]:
    """What the servers were asked to do."""
    return journal.read_text().splitlines() if journal.exists() else []


async def offered(server: MCP) -> dict[str, AgentTool]:
    """The tools of a server by name."""
    async with asyncio.timeout(PATIENCE_S):
        return {tool.name: tool for tool in await server.resolve()}


async def use(tool: AgentTool, arguments: str = "{}") -> ToolResult:
    """What a call gives."""
    result = tool.execute(arguments)
    assert not isinstance(result, ToolResult)
    async with asyncio.timeout(PATIENCE_S):
        return await result


async def ended(pid: int) -> None:
    """Wait for the end of a process."""
    with contextlib.suppress(ProcessLookupError):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.02)


@pytest.mark.program
def test_an_agent_uses_a_servers_tools(runtime: Runtime, tmp_path: Path) -> None:
    """S-INT-1, S-INT-2, S-INT-5, S-INT-8: on both runtimes; a server that died is started again, a reading call repeated."""
    journal = tmp_path / "journal"
    model = ScriptedModel([call("look_up", '{"what": "tea"}')], [call("buy", '{"what": "tea"}')], [call("pay")], "done")
    buyer = agent(model, "Buyer", tools=[MCP(command(journal))])
    output = Ensemble(tasks=[task("buy tea", buyer)]).run(runtime=runtime)
    assert output.raw == "done"
    (spoken,) = [asked.messages for asked in model.calls[-1:]]
    looked, bought, paid = [message.content or "" for message in spoken if message.role == "tool"]
    assert '"found": "tea"' in looked
    assert bought == "bought tea"
    assert "Outcome unknown" in paid
    assert calls_of(journal) == ["look-up", "look-up", "buy", "pay"]


@pytest.mark.program
@pytest.mark.parametrize("effect", ["once", "idempotent"])
async def test_a_declared_effect_decides_of_a_repetition(tmp_path: Path, effect: str) -> None:
    """S-INT-4, S-INT-5: it outranks the server's hints, for all tools or by name."""
    journal = tmp_path / "journal"
    tools = await offered(MCP(command(journal), effect={"look-up": effect}))  # type: ignore[dict-item]  one of them
    assert (tools["look_up"].effect, tools["put"].effect, tools["buy"].effect) == (effect, "idempotent", "once")
    result = await use(tools["look_up"], '{"what": "tea"}')
    assert result.is_success == (effect == "idempotent")
    assert len(calls_of(journal)) == (2 if effect == "idempotent" else 1)
    assert {tool.effect for tool in await MCP(command(journal), effect="none").resolve()} == {"none"}


@pytest.mark.program
async def test_a_server_on_a_port_is_used_like_a_program(tmp_path: Path) -> None:
    """S-INT-1, S-INT-5, S-INT-8: a call that was lost is unknown; with a new server there the session is a new one."""
    journal = tmp_path / "journal"
    (port,) = free_ports(1)
    server = MCP(f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "k"})
    with listening(journal, port):
        tools = await offered(server)
        assert (await use(tools["buy"], '{"what": "tea"}')).output == "bought tea"
        lost = await use(tools["pay"])
        assert "Outcome unknown" in (lost.error_message or "")
    gone = await use(tools["buy"], '{"what": "tea"}')
    assert "cannot be reached" in (gone.error_message or "")
    with pytest.raises(ToolConfigurationError, match="cannot be reached"):
        await server.resolve()
    with listening(journal, port):
        assert (await use(tools["buy"], '{"what": "milk"}')).output == "bought milk"


@pytest.mark.program
@pytest.mark.parametrize(
    ("status", "effect", "said", "bought"),
    [
        ("502", "once", "Outcome unknown", 1),
        ("504", "idempotent", "bought tea", 2),
        ("401", "idempotent", "error response", 1),
    ],
)
async def test_a_proxy_that_answers_for_a_server_says_nothing_of_a_call(
    tmp_path: Path, status: str, effect: str, said: str, bought: int
) -> None:
    """S-INT-5: from 500 on the server is lost, and the call may have been done; a refusal is a refusal."""
    journal = tmp_path / "journal"
    (port,) = free_ports(1)
    with listening(journal, port, status):
        tools = await offered(MCP(f"http://127.0.0.1:{port}/mcp", effect={"buy": effect}))  # type: ignore[dict-item]
        result = await use(tools["buy"], TEA)
    assert said in (result.output or result.error_message or "")
    assert calls_of(journal).count("buy") == bought


@pytest.mark.program
async def test_a_session_that_a_server_forgot_is_opened_anew(tmp_path: Path) -> None:
    """S-INT-5: for the next task as for the next call, whatever its effect; the server did not look at it."""
    journal = tmp_path / "journal"
    (port,) = free_ports(1)
    server = MCP(f"http://127.0.0.1:{port}/mcp")
    with listening(journal, port, "older"):
        tools = await offered(server)
        assert (await use(tools["buy"], TEA)).output == "bought tea"
    with listening(journal, port, "older"):
        assert "buy" in await offered(server)
    with listening(journal, port, "older"):
        assert (await use(tools["buy"], TEA)).output == "bought tea"
    assert calls_of(journal).count("buy") == 2


@pytest.mark.program
async def test_a_server_of_the_older_transport_is_used_like_others(tmp_path: Path) -> None:
    """S-LLM-66, S-INT-5: a call that was lost is unknown; with a new server there the session is a new one."""
    journal = tmp_path / "journal"
    (port,) = free_ports(1)
    server = MCP(f"http://127.0.0.1:{port}/sse", headers={"X-Key": "k"})
    with listening(journal, port, "sse"):
        tools = await offered(server)
        assert (await use(tools["buy"], TEA)).output == "bought tea"
        lost = await use(tools["pay"])
        assert "Outcome unknown" in (lost.error_message or "")
    with listening(journal, port, "sse"):
        assert (await use(tools["buy"], TEA)).output == "bought tea"
    assert calls_of(journal) == ["buy", "pay", "buy"]


@pytest.mark.parametrize(
    ("post", "get", "said"),
    [
        (
            405,
            404,
            r"refuses streamable HTTP \(HTTP status 405: .*\), and the older SSE transport failed, too: HTTP status 404",
        ),
        (
            404,
            200,
            r"refuses streamable HTTP \(HTTP status 404: .*\), and the older SSE transport failed, too: HTTP status 404",
        ),
        (401, 200, "error response"),
    ],
)
async def test_an_error_names_both_transports_when_a_url_speaks_neither(post: int, get: int, said: str) -> None:
    """S-LLM-66: a key that is refused is no matter of the transport."""

    class Refusing(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the base class
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(post)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(get)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"event: endpoint\ndata: /messages?session=secret\n\n" * (get == 200))
            self.wfile.flush()
            answered.wait(PATIENCE_S * (get == 200))

    answered = threading.Event()
    web = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with pytest.raises(ToolConfigurationError, match=said) as caught:
            await MCP(f"http://127.0.0.1:{web.server_port}/sse").resolve()
    finally:
        answered.set()
        web.shutdown()
        web.server_close()
    assert "secret" not in str(caught.value)


@pytest.mark.program
async def test_tools_that_no_endpoint_accepts_are_mended_or_left_out(tmp_path: Path) -> None:
    """S-LLM-60, S-LLM-62, S-LLM-64, S-LLM-65: the server is called with its own names."""
    tools = await offered(MCP(f"{command(tmp_path / 'journal')} odd"))
    bare, tell = tools.values()
    spoken = resolve_tools([bare, tell]).specs
    assert [dict(each.parameters) for each in spoken] == [
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"_top": {"type": "integer"}}},
    ]
    assert bare.name == "bare"
    assert len(tell.name) == 64
    assert (await use(tell, '{"_top": 5}')).output == '{"$top": 5}'


@pytest.mark.program
async def test_a_call_to_a_program_that_died_while_nobody_used_it_is_made(tmp_path: Path) -> None:
    """S-INT-5: it never left, so it is made in a new session, once, whatever its effect."""
    journal = tmp_path / "journal"
    tools = await offered(MCP(command(journal)))
    server_pid = int((await use(tools["process_id"])).output)
    os.kill(server_pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, server_pid, os.WEXITED | os.WNOWAIT)
    assert (await use(tools["buy"], TEA)).output == "bought tea"
    assert calls_of(journal) == ["buy"]


@pytest.mark.program
async def test_a_call_to_a_port_where_nobody_listens_is_no_unknown_outcome(tmp_path: Path) -> None:
    """S-INT-5, S-INT-8: there was no connection, so nothing was done."""
    journal = tmp_path / "journal"
    (port,) = free_ports(1)
    server = MCP(f"http://127.0.0.1:{port}/mcp")
    with listening(journal, port):
        tools = await offered(server)
    gone = await use(tools["buy"], TEA)
    assert "cannot be reached" in (gone.error_message or "")
    with listening(journal, port):
        tools = await offered(server)
    with listening(journal, port):
        assert (await use(tools["buy"], TEA)).output == "bought tea"
    assert calls_of(journal) == ["buy"]


@pytest.mark.program
async def test_answers_become_texts(tmp_path: Path) -> None:
    """S-INT-3, S-INT-6, S-INT-7, S-ATT-67: images, errors, wrong arguments, resources and prompts; tools are listed anew."""
    journal = tmp_path / "journal"
    server = MCP(command(journal), prefix="shop_", resources=True, prompts=True, env={"SHOP_KEY": "k"})
    tools = await offered(server)
    pictured = await use(tools["shop_picture"])
    assert (pictured.output, pictured.attachments) == ("[image image.png]", (Image(b"abc", media_type="image/png"),))
    broken = await use(tools["shop_broken_picture"])
    assert (broken.output, broken.attachments) == ("[image, which cannot be read: Image 'of bytes' is empty]", ())
    logo = await use(tools["shop_read_resource"], '{"uri": "shop://logo.png"}')
    assert (logo.output, logo.attachments) == (
        "[image logo.png]",
        (Image(b"abc", name="logo.png", media_type="image/png"),),
    )
    assert "out of stock" in ((await use(tools["shop_refuse"])).error_message or "")
    assert "Field required" in ((await use(tools["shop_buy"])).error_message or "")
    assert "JSON object" in ((await use(tools["shop_buy"], "tea")).error_message or "")
    assert "shop://list" in (await use(tools["shop_list_resources"])).output
    assert (await use(tools["shop_read_resource"], '{"uri": "shop://list"}')).output == "apples, pears"
    assert "no" in ((await use(tools["shop_read_resource"], '{"uri": "shop://no"}')).error_message or "")
    assert (await use(tools["shop_prompt_greet"], '{"name": "Bo"}')).output == "user: Hello Bo"
    assert "shop_sell" not in tools
    assert (await use(tools["shop_grow"])).output == "grown"
    assert "shop_sell" in await offered(server)


@pytest.mark.program
async def test_a_program_gets_no_keys_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-9: it has the variables it was given, and not those of models."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    tools = await offered(MCP(command(tmp_path / "journal"), env={"SHOP_KEY": "k"}))
    assert (await use(tools["secret"])).output == "k None"


@pytest.mark.program
async def test_a_call_that_is_cancelled_is_cancelled_at_the_server(tmp_path: Path) -> None:
    """S-INT-10: the session stays, and serves the next call."""
    journal = tmp_path / "journal"
    tools = await offered(MCP(command(journal)))
    asked = asyncio.ensure_future(use(tools["sleep"]))
    async with asyncio.timeout(PATIENCE_S):
        while calls_of(journal) != ["sleep"]:  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.02)
        asked.cancel()
        while calls_of(journal) != ["sleep", "woken"]:  # noqa: ASYNC110  as above
            await asyncio.sleep(0.02)
    assert (await use(tools["buy"], '{"what": "tea"}')).output == "bought tea"


@pytest.mark.program
async def test_a_call_that_takes_too_long_is_cancelled_at_the_server(tmp_path: Path) -> None:
    """S-INT-10: by the tool's own limit; the session stays, and serves the next call."""
    journal = tmp_path / "journal"

    def answer(asked: ScriptedCall) -> object:
        if asked.text == "bought tea":
            return "done"
        # The time of a call may end before the server has begun with it: then the call is made again.
        return call("buy", TEA) if "woken" in calls_of(journal) else call("sleep")

    model = ScriptedModel(otherwise=answer)
    server = command(journal)
    buyer = agent(
        model,
        "Buyer",
        max_iterations=500,
        tools=[MCP(server, tools=["sleep"], timeout=0.2), MCP(server, tools=["buy"])],
    )
    output = await Ensemble(tasks=[task("buy tea", buyer)]).arun(runtime="inline")
    assert output.raw == "done"
    *late, bought = [each.content or "" for each in model.calls[-1].messages if each.role == "tool"]
    assert late
    assert all("timed out after 0.2 s" in each for each in late)
    assert bought == "bought tea"


@pytest.mark.program
async def test_a_session_that_nobody_uses_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-2: its program ends; the next call has a new one."""
    monkeypatch.setattr(connection, "_IDLE_S", 0.2)
    tools = await offered(MCP(command(tmp_path / "journal")))
    first = int((await use(tools["process_id"])).output)
    await ended(first)
    assert int((await use(tools["process_id"])).output) != first


@pytest.mark.program
async def test_servers_end_with_the_process(tmp_path: Path) -> None:
    """S-INT-2: also a program that does not hear the end of its input."""
    script = (
        "import asyncio, sys\n"
        "from ensemble_ray import MCP\n"
        "async def main():\n"
        "    tools = {tool.name: tool for tool in await MCP(sys.argv[1]).resolve()}\n"
        "    print((await tools['process_id'].execute('{}')).output)\n"
        "asyncio.run(main())\n"
    )
    ran = subprocess.run(  # noqa: ASYNC221, S603  our own program; nothing else goes on here
        [sys.executable, "-c", script, f"{command(tmp_path / 'journal')} deaf"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    await ended(int(ran.stdout))
    assert calls_of(tmp_path / "journal") == ["deaf"]
    assert "Task was destroyed" not in ran.stderr


@pytest.mark.program
@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("stdio:no_such_program --x", "'stdio:no_such_program' cannot be started"),
        (f"stdio:{sys.executable} -c 'raise SystemExit(\"lacks a key\")'", "lacks a key"),
        ("http://127.0.0.1:1/mcp", "cannot be reached"),
    ],
)
def test_a_server_that_is_not_there_fails_the_task_before_a_model_is_asked(server: str, said: str) -> None:
    """S-INT-8: with what the program wrote, where it wrote something."""
    model = ScriptedModel("never")
    with pytest.raises(EnsembleError, match=said):
        Ensemble(tasks=[task("buy", agent(model, tools=[MCP(server)]))]).run(runtime="inline")
    assert not model.calls


@pytest.mark.program
async def test_tools_that_are_named_must_be_there(tmp_path: Path) -> None:
    """S-INT-3: those alone are offered, in the server's order."""
    server = command(tmp_path / "journal")
    assert list(await offered(MCP(server, tools=["pay", "buy"]))) == ["buy", "pay"]
    assert list(await offered(MCP(server, tools="pay"))) == ["pay"]
    with pytest.raises(ToolConfigurationError, match="has no tool 'by'"):
        await MCP(server, tools=["by"]).resolve()


@pytest.mark.parametrize(
    ("server", "options"),
    [
        ("ftp://x", {}),
        ("stdio:", {}),
        ("stdio:'", {}),
        ("https://me:pw@host/mcp", {}),
        ("https://host/mcp", {"env": {"A": "b"}}),
        ("stdio:x", {"headers": {"A": "b"}}),
        ("stdio:x", {"effect": "twice"}),
        ("stdio:x", {"prefix": "a-b"}),
        ("stdio:x", {"timeout": 0}),
        ("stdio:x", {"sampling": True, "max_samples": 0}),
    ],
)
def test_what_cannot_work_is_refused_at_once(server: str, options: dict[str, object]) -> None:
    """S-INT-1: before any run; the text has no password."""
    with pytest.raises(ValidationError) as caught:
        MCP(server, **options)  # type: ignore[arg-type]  wrong on purpose
    assert "pw" not in str(caught.value)


def test_the_value_travels_and_hides_its_secrets() -> None:
    """S-INT-1, S-INT-9: it holds no session."""
    server = MCP("https://host/mcp?key=secret", headers={"Authorization": "Bearer secret"})
    assert "secret" not in repr(server)
    assert repr(pickle.loads(pickle.dumps(server))) == repr(server)  # noqa: S301  our own
