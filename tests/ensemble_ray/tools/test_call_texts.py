"""One guarded call: heavy functions, log lines, cut texts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable

import pytest

from ensemble_ray import ExitEarlyError, ToolResult, current_tool_context, tool
from ensemble_ray.ports import Services, use_services
from ensemble_ray.tools.call import cut_for_log, truncate_output
from ensemble_ray.tools.cpu import CannotTravelError, ToolOutcome
from tests.ensemble_ray.tools.doubles import Plain, PoolHere
from tests.ensemble_ray.tools.test_call import call

LOG = "ensemble_ray.tools.call"


@tool(cpu=True, timeout=7)
def crunch(n: int, *, times: int = 2) -> str:
    """Stateless."""
    context = current_tool_context()
    return f"{n * times} {context.logger.name} {context.idempotency_key} {context.agent_role}"


def services(pool: PoolHere) -> Services:
    """Services with that pool; nothing else is asked for here."""
    return Services(limiter=None, cpu=pool)  # type: ignore[arg-type]


async def test_pool_does_the_work_when_a_function_is_heavy() -> None:
    """S-SET-35, S-SET-34: it gets the tool's time; logger and key are all that the tool finds there."""
    pool = PoolHere()
    with use_services(services(pool)):
        outcome = await call(crunch, '{"n": "4"}', idempotency_key="k", agent_role="Writer")
    assert outcome == ToolOutcome("8 ensemble_ray.tool.crunch k unknown", "success")
    assert pool.timeouts == [7.0]


async def test_text_is_the_same_when_a_heavy_function_fails() -> None:
    """S-SET-35, S-SET-34, S-TOOL-15: errors, time limit and failures read as for any function."""

    @tool(cpu=True)
    def broken(kind: str) -> object:
        if kind == "exit":
            raise ExitEarlyError(kind)
        return {"result": ToolResult.failure("no"), "text": "Error: no"}[kind]

    with use_services(services(PoolHere())):
        assert await call(broken, '{"kind": "x"}') == ToolOutcome("Tool error: KeyError: 'x'", "error")
        assert await call(broken, '{"kind": "result"}') == ToolOutcome("Error: no", "failure")
        assert await call(broken, '{"kind": "text"}') == ToolOutcome("Error: no", "failure")
        assert (await call(broken, "{}")).text.startswith("Tool error: invalid arguments: 'kind'")
        with pytest.raises(ExitEarlyError, match="exit"):
            await call(broken, '{"kind": "exit"}')
    with use_services(services(PoolHere(TimeoutError()))):
        assert await call(crunch, '{"n": 1}') == ToolOutcome("Tool error: timed out after 7 s", "error")


async def test_thread_does_the_work_when_a_heavy_function_cannot_travel(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-35: inline it runs all the same, with one WARN; its time limit still holds."""
    lock = threading.Lock()

    @tool(cpu=True)
    def locked() -> str:
        with lock:
            return threading.current_thread().name

    @tool(cpu=True)
    def foreign() -> str:
        return threading.current_thread().name

    with caplog.at_level(logging.WARNING):
        with use_services(services(PoolHere())):
            assert (await call(locked)).text == "ensemble-ray-user"
            assert (await call(locked)).text == "ensemble-ray-user"
        with use_services(services(PoolHere(CannotTravelError("no module there")))):
            assert (await call(foreign)).text == "ensemble-ray-user"
            assert (await call(foreign)).text == "ensemble-ray-user"
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" runs in a thread")[0] for text in told] == ["Tool 'locked'", "Tool 'foreign'"]


async def test_one_line_is_logged_when_a_call_ends(caplog: pytest.LogCaptureFixture) -> None:
    """S-TOOL-90, S-ENG-72: role, name, input, output, milliseconds; WARN for a failure; whole texts on DEBUG."""

    @tool
    async def echo(text: str) -> str:
        return text

    with caplog.at_level(logging.DEBUG, logger=LOG):
        await call(echo, '{"text": "Error: abcdefghij"}', agent_role="Writer", log_truncate_length=9)
        await call(echo, '{"text": "x"}', agent_role="Writer", log_truncate_length=-1)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["WARNING", "DEBUG", "INFO", "DEBUG"]
    assert lines[0][1].startswith('[Writer] Tool error: echo({"text": ...) -> Error: ab... [')
    assert lines[0][1].endswith("ms]")
    assert "abcdefghij" in lines[1][1]
    assert lines[2][1].startswith('[Writer] Tool call: echo({"text": "x"}) -> x [')


@pytest.mark.parametrize(("length", "shown"), [(-1, "abcdef"), (0, ""), (3, "abc..."), (6, "abcdef"), (7, "abcdef")])
def test_log_text_is_cut_when_it_is_longer(length: int, shown: str) -> None:
    """S-ENG-72."""
    assert cut_for_log("abcdef", length) == shown


@pytest.mark.parametrize(
    ("length", "sent"),
    [
        (-1, "abcdef"),
        (6, "abcdef"),
        (7, "abcdef"),
        (2, "ab... [truncated, full length: 6 chars]"),
        (0, "... [truncated, full length: 6 chars]"),
    ],
)
def test_output_is_cut_when_it_is_longer(length: int, sent: str) -> None:
    """S-ENG-70."""
    assert truncate_output("abcdef", length) == sent


async def test_outcome_has_the_full_text_when_lines_are_cut() -> None:
    """S-ENG-71, S-ENG-72: cutting is for log lines and for the model; the outcome, which events and traces carry, is whole."""
    long_text = "x" * 10_000
    outcome = await call(Plain(lambda _text: ToolResult.success(long_text)), log_truncate_length=0)
    assert outcome.text == long_text


async def test_awaitable_is_awaited_when_a_sync_function_gives_one() -> None:
    """S-CONV-16."""

    @tool
    def indirect(n: int) -> Awaitable[int]:
        async def later() -> int:
            return n + 1

        return later()

    assert (await call(indirect, '{"n": 1}')).text == "2"
