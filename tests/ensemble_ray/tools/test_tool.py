"""What a tool is: results, names, context, and the safe form of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from datetime import timedelta

import pytest

from ensemble_ray import (
    AgentTool,
    ExitEarlyError,
    IllegalStateError,
    NoOpToolMetrics,
    ToolConfigurationError,
    ToolContext,
    ToolMetrics,
    ToolResult,
    ValidationError,
    current_tool_context,
)
from ensemble_ray.tools.tool import check_tool_name, make_tool_name, timeout_seconds, use_tool_context
from tests.ensemble_ray.tools.doubles import CountingMetrics, Plain, Safe, SafeAsync


def test_abstract_tool_is_refused_when_it_lacks_execute() -> None:
    """S-TOOL-1: AgentTool is abstract; a subclass has name, description and execute."""
    with pytest.raises(TypeError):
        AgentTool()  # type: ignore[abstract]
    tool = Plain(lambda text: ToolResult.success(text.upper()), name="loud")
    assert (tool.name, tool.description) == ("loud", "does loud")
    assert tool.execute("a") == ToolResult.success("A")


def test_result_tells_success_when_made_by_success() -> None:
    """S-TOOL-2, S-TOOL-3, S-SET-2: text, no message, payload; None is an empty text."""
    result = ToolResult.success("done", {"n": 1})
    assert result.is_success
    assert (result.output, result.error_message, result.structured_output) == ("done", None, {"n": 1})
    assert ToolResult.success(None).output == ""
    assert ToolResult.success({"n": 1}) == ToolResult('{"n":1}', None, {"n": 1})
    assert ToolResult.success([1], {"n": 1}).structured_output == {"n": 1}
    for plain in ("text", 5, b"text", ToolResult):
        assert ToolResult.success(plain).structured_output is None
    with pytest.raises(TypeError, match=r"object, which has no text.*ToolResult.success\(text, value\)"):
        ToolResult.success(object())


def test_result_tells_failure_when_made_by_failure() -> None:
    """S-TOOL-2, S-TOOL-3, S-SET-2: no text, a message, no payload; None is a message of its own."""
    result = ToolResult.failure("no such file")
    assert not result.is_success
    assert (result.output, result.error_message, result.structured_output) == ("", "no such file", None)
    assert ToolResult.failure(None).error_message == "Tool execution failed with no message"


def test_result_stays_as_it_is_when_assigned_to() -> None:
    """S-TOOL-2: frozen."""
    result = ToolResult.success("done")
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.output = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", [None, "", "  ", "\n"])
def test_name_is_refused_when_blank(name: str | None) -> None:
    """S-DOM-7, S-TOOL-4."""
    assert check_tool_name(name) == "Tool name must not be blank"


@pytest.mark.parametrize("name", ["web search", "web-search", "search\n", "süche", "a.b"])
def test_name_is_refused_when_a_character_is_not_allowed(name: str) -> None:
    """S-DOM-8, S-TOOL-4: ASCII letters, digits, underscore, over the whole string."""
    assert check_tool_name(name) == f"Tool name '{name}' must contain only alphanumeric characters and underscores"
    assert check_tool_name("Web_search2") is None


@pytest.mark.parametrize(
    ("text", "name"), [("news-desk.v2", "news_desk_v2"), ("Web_search2", "Web_search2"), ("\u00e9 \n", "___")]
)
def test_any_text_makes_a_name_of_a_tool(text: str, name: str) -> None:
    """S-DOM-8; a name that a tool may have stays as it is."""
    assert make_tool_name(text) == name
    assert check_tool_name(name) is None


def test_timeout_is_read_when_given_as_seconds_or_timedelta() -> None:
    """S-SET-34: 300 s unless said otherwise, None for none."""
    assert timeout_seconds(AgentTool.timeout) == 300
    assert timeout_seconds(timedelta(minutes=1)) == 60
    assert timeout_seconds(None) is None
    for wrong in (0, -1, True, "5"):
        with pytest.raises(ValidationError, match="Tool timeout must be > 0"):
            timeout_seconds(wrong)  # type: ignore[arg-type]


def test_execute_wraps_do_execute_when_called() -> None:
    """S-TOOL-40: subclasses write do_execute, callers use execute; None is an empty success (S-TOOL-41)."""
    assert Safe(lambda text: ToolResult.success(text * 2)).execute("ab") == ToolResult.success("abab")
    assert Safe(lambda _text: None).execute("ab") == ToolResult.success("")


def test_exception_becomes_a_failure_when_do_execute_raises(caplog: pytest.LogCaptureFixture) -> None:
    """S-TOOL-41: outside an agent a WARN with the traceback, and class and text as message."""

    def work(_text: str) -> ToolResult:
        msg = "disk full"
        raise OSError(msg)

    with caplog.at_level(logging.WARNING):
        assert Safe(work).execute("x") == ToolResult.failure("OSError: disk full")
    (line,) = caplog.records
    assert (line.levelname, line.getMessage()) == ("WARNING", "Tool 'safe' raised")
    assert line.exc_info is not None
    assert str(line.exc_info[1]) == "disk full"


@pytest.mark.parametrize("error", [ExitEarlyError("enough"), IllegalStateError("bad"), ToolConfigurationError("worse")])
async def test_error_passes_when_it_is_not_for_the_model(error: Exception) -> None:
    """S-TOOL-41: ExitEarlyError, IllegalStateError and its subclasses leave execute unchanged."""

    def work(_text: str) -> ToolResult:
        raise error

    with pytest.raises(type(error)) as caught:
        Safe(work).execute("x")
    assert caught.value is error
    with pytest.raises(type(error)):
        await Safe(work).aexecute("x")


@pytest.mark.parametrize(
    ("work", "counted"),
    [
        (lambda _text: ToolResult.success("ok"), "success"),
        (lambda _text: ToolResult.failure("no"), "failure"),
        (lambda _text: 1 / 0, "error"),
    ],
)
async def test_one_count_and_one_duration_are_recorded_when_a_call_ends(work: object, counted: str) -> None:
    """S-TOOL-42: exactly one of success, failure, error, with tool name and role."""
    metrics = CountingMetrics()
    tool = Safe(work, name="worker")  # type: ignore[arg-type]
    with use_tool_context(ToolContext(tool_name="worker", agent_role="Analyst", metrics=metrics)):
        tool.execute("x")
        await tool.aexecute("x")
    assert metrics.counts == [(counted, "worker", "Analyst")] * 2
    assert [entry[:2] for entry in metrics.durations] == [("worker", "Analyst")] * 2


async def test_error_is_counted_when_a_call_is_cancelled() -> None:
    """S-TOOL-42: a call that is given up counts too, once."""
    metrics = CountingMetrics()
    reached = asyncio.Event()

    async def work(_text: str) -> ToolResult:
        reached.set()
        await asyncio.Event().wait()
        return ToolResult.success("never")

    with use_tool_context(ToolContext(tool_name="t", agent_role="Analyst", metrics=metrics)):
        call = asyncio.ensure_future(SafeAsync(work).aexecute("x"))
        await reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert [entry[0] for entry in metrics.counts] == ["error"]
    assert len(metrics.durations) == 1


def test_role_is_unknown_when_no_agent_is_around() -> None:
    """S-TOOL-42."""
    metrics = CountingMetrics()
    with use_tool_context(ToolContext(tool_name="t", metrics=metrics)):
        Safe(lambda _text: None, name="t").execute("x")
    assert metrics.counts == [("success", "t", "unknown")]


def test_result_stands_when_metrics_raise() -> None:
    """S-TOOL-42: counting does not change what the tool gave."""

    class Broken(CountingMetrics):
        def increment_success(self, tool_name: str, agent_role: str) -> None:
            raise KeyError(tool_name)

    with use_tool_context(ToolContext(tool_name="t", metrics=Broken())):
        assert Safe(lambda _text: None).execute("x").is_success


def test_tool_works_alone_when_no_context_is_given() -> None:
    """S-TOOL-43: module logger, metrics that count nothing, no run."""
    seen: list[ToolContext] = []

    def work(text: str) -> ToolResult:
        seen.append(current_tool_context())
        return ToolResult.success(text)

    tool = Safe(work)
    assert tool.execute("alone").output == "alone"
    context = seen[0]
    assert context is tool.context
    assert (context.agent_role, context.run_id, context.logger.name) == ("unknown", "", "ensemble_ray.tools.tool")
    assert isinstance(context.metrics, NoOpToolMetrics)
    assert isinstance(context.metrics, ToolMetrics)
    context.metrics.increment_success("t", "r")
    context.metrics.increment_failure("t", "r")
    context.metrics.increment_error("t", "r")
    context.metrics.record_duration("t", "r", 1.0)


def test_logger_is_named_after_the_tool_when_context_is_made() -> None:
    """S-TOOL-35."""
    assert ToolContext(tool_name="search").logger.name == "ensemble_ray.tool.search"
    inner = ToolContext(tool_name="search", agent_role="Analyst", idempotency_key="k").renamed("parse")
    assert (inner.logger.name, inner.agent_role, inner.idempotency_key) == (
        "ensemble_ray.tool.parse",
        "Analyst",
        "k/0/parse",
    )


async def test_execute_waits_when_do_execute_is_async() -> None:
    """S-TOOL-40: also inside a running loop, where a caller cannot wait otherwise."""

    async def work(text: str) -> ToolResult:
        return ToolResult.success(text + "!")

    assert SafeAsync(work).execute("now").output == "now!"
    assert (await SafeAsync(work).aexecute("now")).output == "now!"
    assert Safe(work).execute("now").output == "now!"
    assert (await Safe(work).aexecute("now")).output == "now!"
