"""One guarded call: whatever a tool does, the model gets a text."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentTool,
    CustomSchemaAgentTool,
    Event,
    ExitEarlyError,
    FileChangedEvent,
    IllegalStateError,
    ToolConfigurationError,
    ToolContext,
    ToolResult,
    TypedAgentTool,
    current_tool_context,
    tool,
)
from ensemble_ray.process.context import log_context
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.registry import BoundTool, resolve_tools
from ensemble_ray.tools.tool import ToolOutcome
from tests.ensemble_ray.tools.doubles import CountingMetrics, Plain, Safe, SafeAsync
from tests.ensemble_ray.virtual_time import run_in_virtual_time

LOG = "ensemble_ray.tools.call"


def bound(entry: object) -> BoundTool:
    """The only tool of an entry."""
    (only,) = resolve_tools([entry])
    return only


async def call(entry: object, arguments: str = "{}", **context: object) -> ToolOutcome:
    """Call the only tool of an entry once."""
    target = bound(entry)
    return await call_tool(target, arguments, context=ToolContext(tool_name=target.name, **context))  # type: ignore[arg-type]


def raising(error: BaseException) -> Callable[..., str]:
    """A @tool that raises it."""

    @tool
    def broken() -> str:
        raise error

    return broken


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"input": "tides"}', "tides"),
        ('{"input": ""}', ""),
        ('{"input": {"a": 1}}', '{"a":1}'),
        ('{"input": 5}', "5"),
        ('{"input": null}', '{"input": null}'),
        ('{"query": "tides"}', '{"query": "tides"}'),
        ('["tides"]', '["tides"]'),
        ("tides", "tides"),
        ("", ""),
    ],
)
async def test_input_is_taken_out_of_the_arguments_when_the_tool_is_plain(arguments: str, seen: str) -> None:
    """S-TOOL-21, S-ENG-56: the value of `input`, as JSON text when it is no string, else the whole text."""
    outcome = await call(Plain(ToolResult.success), arguments)
    assert outcome == ToolOutcome(seen, "success")


async def test_whole_text_arrives_when_the_tool_brings_its_schema() -> None:
    """S-TOOL-24."""

    class Own(CustomSchemaAgentTool):
        name = "own"
        description = "own"

        @property
        def parameter_schema(self) -> Mapping[str, object]:
            return {"type": "object"}

        def execute(self, text: str, /) -> ToolResult:
            return ToolResult.success(text)

    assert (await call(Own(), '{"input": "x"}')).text == '{"input": "x"}'


async def test_text_follows_the_result_when_an_agent_tool_ends() -> None:
    """S-TOOL-22, S-ENG-52 to S-ENG-54: success, failure, nothing, exception."""
    assert await call(Plain(lambda _text: ToolResult.success("ok", [1]))) == ToolOutcome("ok", "success", [1])
    assert await call(Plain(lambda _text: ToolResult.failure("no"))) == ToolOutcome("Error: no", "failure")
    assert await call(Plain(lambda _text: None)) == ToolOutcome("", "success")
    assert await call(Plain(lambda _text: 1 / 0)) == ToolOutcome("Error: ZeroDivisionError: division by zero", "error")
    assert await call(Safe(lambda _text: 1 / 0)) == ToolOutcome("Error: ZeroDivisionError: division by zero", "failure")
    assert await call(Plain(lambda _text: {"a": 1})) == ToolOutcome('{"a":1}', "success")


async def test_text_follows_the_return_value_when_a_function_ends() -> None:
    """S-TOOL-13 to S-TOOL-15, S-ENG-51, S-ENG-53: coerced arguments, text of the value, text of the error."""

    @tool
    def half(n: int) -> object:
        return {1: None, 2: 1, 3: "Error: odd", 4: ToolResult.failure("no")}[n]

    assert await call(half, '{"n": "2", "m": 1}') == ToolOutcome("1", "success")
    assert await call(half, '{"n": 1}') == ToolOutcome("", "success")
    assert await call(half, '{"n": 3}') == ToolOutcome("Error: odd", "failure")
    assert await call(half, '{"n": 4}') == ToolOutcome("Error: no", "failure")
    assert await call(half, '{"n": 9}') == ToolOutcome("Tool error: KeyError: 9", "error")


def lines() -> Iterator[str]:
    yield "one"
    yield "two"


async def lines_async() -> AsyncIterator[str]:
    yield "one"
    yield "two"


async def lines_later() -> Iterator[str]:
    return lines()


async def lines_twice_awaited() -> object:
    return lines_later()


def promised_lines() -> object:
    return lines_later()


@pytest.mark.parametrize("work", [lines, lines_async, lines_later, lines_twice_awaited, promised_lines])
async def test_items_are_collected_when_a_tool_yields(work: Callable[[], object]) -> None:
    """S-LLM-45: in functions and in all kinds of tools; an awaitable that comes of a sync function is awaited."""
    expected = '["one","two"]'
    assert (await call(tool("Reads lines", name="read_lines")(work))).text == expected
    assert (await call(Plain(lambda _: work()), "x")).text == expected
    assert (await call(Safe(lambda _: work()), "x")).text == expected
    assert Safe(lambda _: work()).execute("x").output == expected


async def test_error_names_the_tool_when_its_result_has_no_text() -> None:
    """S-LLM-47."""

    @tool("Opens a connection", name="connect")
    def connect() -> object:
        return object()

    outcome = await call(connect)
    assert outcome.outcome == "error"
    assert "Tool 'connect' returned a object, which has no text" in outcome.text
    for kind in (Plain, Safe):
        assert "'find' returned a object, which has no text" in (await call(kind(lambda _: object(), "find"), "x")).text


async def test_generator_runs_in_the_tools_thread_and_ends_with_its_call() -> None:
    """S-LLM-46: the thread stops at the next item after the call was cancelled."""
    threads: set[int] = set()
    started, asked, closed = threading.Event(), threading.Event(), threading.Event()

    @tool("Counts")
    def count() -> Iterator[int]:
        try:
            while True:
                threads.add(threading.get_ident())
                started.set()
                asked.wait(60)
                yield 1
        finally:
            closed.set()

    calling = asyncio.ensure_future(call(count))
    try:
        assert await asyncio.to_thread(started.wait, 60)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    finally:
        asked.set()
    assert await asyncio.to_thread(closed.wait, 60)
    assert threading.get_ident() not in threads


async def test_time_limit_of_the_call_holds_for_a_generator() -> None:
    """S-LLM-46, S-SET-34: it never yields, and its thread may start after the limit."""
    asked = threading.Event()

    @tool("Counts", timeout=0.05)
    def count() -> Iterator[int]:
        asked.wait(60)
        yield 1

    outcome = await call(count)
    asked.set()
    assert (outcome.outcome, "timed out after 0.05 s" in outcome.text) == ("error", True)


async def test_items_are_made_in_the_thread_of_their_iterator_when_calls_are_many() -> None:
    """S-LLM-46: a `sqlite3.Cursor` belongs to the thread that made it."""
    both = threading.Barrier(4)

    def rows() -> Iterator[object]:
        connection = sqlite3.connect(":memory:")
        both.wait(20)
        return connection.execute("SELECT 1 UNION SELECT 2")

    for kind in (tool("Reads rows")(rows), Plain(lambda _: rows()), Safe(lambda _: rows())):
        found = await asyncio.gather(*(call(kind, "{}") for _ in range(4)))
        assert [each.text for each in found] == ["[[1],[2]]"] * 4


async def test_function_is_not_reached_when_arguments_do_not_fit() -> None:
    """S-TOOL-13, S-ENG-51, S-ENG-56: garbage from the model is told to the model."""
    reached: list[int] = []

    @tool
    def count(n: int) -> None:
        reached.append(n)

    for garbage in ("", "five", '{"n": "five"}', "[5]", '{"n":'):
        outcome = await call(count, garbage)
        assert outcome.outcome == "error"
        assert outcome.text.startswith("Tool error: invalid arguments: ")
    assert reached == []


async def test_class_name_is_told_when_an_error_has_no_text() -> None:
    """S-ENG-61, S-ENG-51, S-ENG-52."""
    assert (await call(raising(KeyError()))).text == "Tool error: KeyError"

    def fail(_text: str) -> ToolResult:
        raise TimeoutError

    assert (await call(Plain(fail))).text == "Error: TimeoutError"


@pytest.mark.parametrize(
    "error",
    [SystemExit(2), KeyboardInterrupt("own"), StopIteration("x"), RuntimeError("plain"), asyncio.CancelledError("own")],
)
async def test_model_is_told_when_a_tool_raises_something_unusual(error: BaseException) -> None:
    """S-TOOL-23, S-ENG-51: a plain RuntimeError, sys.exit, or a cancellation of the tool's own making end nothing."""
    outcome = await call(raising(error))
    assert outcome.outcome == "error"
    assert outcome.text.startswith("Tool error: ")

    @tool
    async def awaiting() -> None:
        raise error

    assert (await call(awaiting)).outcome == "error"


@pytest.mark.parametrize("error", [ExitEarlyError("enough"), IllegalStateError("bad"), ToolConfigurationError("worse")])
@pytest.mark.parametrize("kind", ["function", "plain", "safe"])
async def test_error_passes_when_it_ends_the_run(error: Exception, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """S-TOOL-23, S-ENG-58, S-ENG-59, S-TOOL-90: unchanged; the log has which call it was of a configuration error."""

    def work(_text: str) -> ToolResult:
        raise error

    entry = {"function": raising(error), "plain": Plain(work), "safe": Safe(work)}[kind]
    with caplog.at_level(logging.DEBUG, logger=LOG), pytest.raises(type(error)) as caught:
        await call(entry)
    assert caught.value is error
    logged = [record.levelname for record in caplog.records if record.name == LOG]
    assert logged == (["INFO"] if isinstance(error, IllegalStateError) else [])


async def test_context_is_each_calls_own_when_two_tasks_share_a_tool() -> None:
    """S-TOOL-35, S-TOOL-36: one tool object, two calls at once, each with its role, logger and key."""
    both = threading.Barrier(2, timeout=60)
    seen: dict[str, ToolContext] = {}

    def work(text: str) -> ToolResult:
        both.wait()
        seen[text] = current_tool_context()
        both.wait()
        return ToolResult.success(current_tool_context().agent_role)

    metrics = CountingMetrics()
    shared = Safe(work)
    first, second = await asyncio.gather(
        call(shared, "a", agent_role="Writer", idempotency_key="1", metrics=metrics),
        call(shared, "b", agent_role="Editor", idempotency_key="2", metrics=metrics),
    )
    assert (first.text, second.text) == ("Writer", "Editor")
    assert (seen["a"].idempotency_key, seen["b"].idempotency_key) == ("1", "2")
    assert seen["a"].logger.name == "ensemble_ray.tool.safe"
    assert sorted(metrics.counts) == [("success", "safe", "Editor"), ("success", "safe", "Writer")]


async def test_context_is_found_when_the_tool_is_a_function() -> None:
    """S-TOOL-35: sync and async alike; a plain AgentTool, being text in and result out, has none."""

    @tool
    def here() -> str:
        return current_tool_context().agent_role

    @tool
    async def there() -> str:
        return current_tool_context().agent_role

    def outside(_text: str) -> ToolResult:
        return ToolResult.success(current_tool_context().agent_role)

    assert (await call(here, agent_role="Writer")).text == "Writer"
    assert (await call(there, agent_role="Writer")).text == "Writer"
    assert (await call(Plain(outside), agent_role="Writer")).text == "unknown"
    assert current_tool_context().agent_role == "unknown"


async def test_events_arrive_on_the_loop_when_a_tool_emits_from_its_thread() -> None:
    """S-TOOL-35: and before the call ends; the taker needs no lock."""
    taken: list[tuple[Event, int]] = []

    def work(_text: str) -> ToolResult:
        current_tool_context().emit(
            FileChangedEvent(
                agent_role="Writer",
                file_path="a.txt",
                change_type="created",
                lines_added=1,
                lines_removed=0,
                timestamp=datetime(2026, 1, 1, tzinfo=UTC),
            )
        )
        return ToolResult.success(str(threading.get_ident()))

    outcome = await call(Safe(work), emit=lambda event: taken.append((event, threading.get_ident())))
    assert [thread for _, thread in taken] == [threading.get_ident()]
    assert outcome.text != str(threading.get_ident())


async def test_loop_goes_on_when_a_tool_blocks() -> None:
    """S-CONV-16, S-SET-48: sync tools run in daemon threads, with the log fields of the caller."""
    release = threading.Event()
    daemon: list[bool] = []

    def work(_text: str) -> ToolResult:
        daemon.append(threading.current_thread().daemon)
        release.wait(60)
        return ToolResult.success(json.dumps(dict(_fields())))

    with log_context({"task.index": "3"}):
        running = asyncio.ensure_future(call(Plain(work)))
        await asyncio.sleep(0)
        release.set()
        assert (await running).text == '{"task.index": "3"}'
    assert daemon == [True]


def _fields() -> Mapping[str, str]:
    from ensemble_ray.process.context import current_log_context

    return current_log_context()


async def test_thread_is_the_loops_when_a_tool_is_async() -> None:
    """S-CONV-16: async tools cost no thread."""

    @tool
    async def where() -> int:
        return threading.get_ident()

    async def work(_text: str) -> ToolResult:
        return ToolResult.success(threading.get_ident())

    assert (await call(where)).text == str(threading.get_ident())
    assert (await call(SafeAsync(work))).text == str(threading.get_ident())


def _hanging(timeout: float | None) -> list[object]:
    async def forever(_text: str) -> ToolResult:
        await asyncio.Event().wait()
        return ToolResult.success("never")

    @tool(timeout=timeout)
    async def hang() -> str:
        return (await forever("")).output

    tools: list[AgentTool] = [Plain(forever), SafeAsync(forever)]
    for found in tools:
        found.timeout = timeout
    return [hang, *tools]


@pytest.mark.parametrize(("timeout", "words"), [(300, "300"), (0.05, "0.05"), (90.0, "90")])
def test_time_limit_is_told_when_a_tool_does_not_return(timeout: float, words: str) -> None:
    """S-SET-34: the text, in seconds of the loop's clock; an AgentTool's differs from a function's."""
    function, plain, safe = _hanging(timeout)
    assert run_in_virtual_time(call(function)) == (
        ToolOutcome(f"Tool error: timed out after {words} s", "error"),
        timeout,
    )
    for entry in (plain, safe):
        outcome, waited_s = run_in_virtual_time(call(entry))
        assert outcome == ToolOutcome(f"Error: timed out after {words} s", "error")
        assert waited_s == timeout


def test_no_time_limit_holds_when_the_tool_has_none() -> None:
    """S-SET-34: timeout None."""

    async def late() -> ToolOutcome:
        @tool(timeout=None)
        async def slow() -> str:
            await asyncio.sleep(1e6)
            return "at last"

        return await call(slow)

    assert run_in_virtual_time(late()) == (ToolOutcome("at last"), 1e6)


async def test_result_is_the_tools_own_when_it_raises_a_timeout_itself() -> None:
    """S-SET-34: its TimeoutError is not the limit of the call."""
    assert (await call(raising(TimeoutError("server busy")))).text == "Tool error: TimeoutError: server busy"


async def test_call_is_given_up_when_a_blocking_tool_never_returns() -> None:
    """S-SET-34, S-SET-48."""
    never = threading.Event()

    @tool(timeout=0.01)
    def hang() -> None:
        never.wait()

    assert (await call(hang)).text == "Tool error: timed out after 0.01 s"
    never.set()


@pytest.mark.program
def test_process_exits_when_a_tool_never_returned() -> None:
    """S-SET-48: neither the run's end nor the process's exit waits for it."""
    script = (
        "import asyncio, threading\n"
        "from ensemble_ray.tools import ToolContext, tool\n"
        "from ensemble_ray.tools.call import call_tool\n"
        "from ensemble_ray.tools.registry import resolve_tools\n"
        "@tool(timeout=0.01)\n"
        "def hang() -> None:\n"
        "    threading.Event().wait()\n"
        "bound = resolve_tools([hang]).get('hang')\n"
        "print(asyncio.run(call_tool(bound, '', context=ToolContext())).text)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)  # noqa: S603  our own text
    assert done.stdout == "Tool error: timed out after 0.01 s\n"


async def test_cancellation_passes_when_the_caller_is_cancelled() -> None:
    """S-TOOL-23: a cancelled task is not a tool error."""
    reached = asyncio.Event()

    @tool
    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(call(wait))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@tool
def save(tags: list[str], more: dict[str, str] | None = None, count: int = 5) -> str:
    """Save."""
    return f"{tags} {more} {count}"


class Order(BaseModel):
    """What a typed tool orders."""

    items: list[str]
    count: int = 1


class Ordering(TypedAgentTool[Order]):
    """A typed tool that tells its arguments."""

    name = "ordering"
    description = "orders"
    input_type = Order

    def execute_typed(self, arguments: Order, /) -> object:
        return f"{arguments.items} {arguments.count}"


class Schemed(CustomSchemaAgentTool):
    """A tool that has a schema alone, and tells its text."""

    name = "schemed"
    description = "schemed"
    parameter_schema = {  # noqa: RUF012  # type: ignore[assignment]  read alone
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"type": "string"}}, "count": {"type": "integer"}},
    }

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text)


@pytest.mark.parametrize(
    ("entry", "arguments", "text", "repairs"),
    [
        (save, '{"tags": "[\\"a\\"]", "count": null}', "['a'] None 5", 2),
        (save, '{"tags": ["a\nb"]}', r"['a\nb'] None 5", 1),
        (save, '{"tags": ["a"], "count": "7"}', "['a'] None 7", 0),
        (Ordering(), '{"items": "[\\"a\\"]", "count": null}', "['a'] 1", 2),
        (Ordering(), json.dumps('{"items": ["a"]}'), "['a'] 1", 1),
        (Ordering(), '{"items": ["a"], "count": "7"}', "['a'] 7", 0),
        (Schemed(), '{"items": "[\\"a\\"]", "count": null}', '{"items": ["a"]}', 2),
        (Schemed(), '{"items": ["a"], "count": 7 }', '{"items": ["a"], "count": 7 }', 0),
        (Plain(ToolResult.success), '{"input": "a\nb"}', "a\nb", 1),
        (Plain(ToolResult.success), json.dumps('{"input": "a"}'), "a", 1),
        (Plain(ToolResult.success), '{"a": 1}}', '{"a": 1}}', 0),
    ],
)
async def test_arguments_are_repaired_when_they_do_not_fit_as_they_are(
    entry: object, arguments: str, text: str, repairs: int
) -> None:
    """S-LLM-40, S-LLM-43: of functions, typed tools, tools with a schema alone and plain ones."""
    outcome = await call(entry, arguments)
    assert (outcome.text, outcome.outcome, len(outcome.repairs)) == (text, "success", repairs)


async def test_lines_of_a_call_are_told_whatever_becomes_of_it() -> None:
    """S-TOOL-35: of a sync and an async tool, one that raises, and one that takes too long."""

    @tool
    def prints() -> str:
        print("read 3 pages")  # noqa: T201  the subject of this test
        current_tool_context().logger.warning("page 2 is empty")
        return "done"

    @tool
    async def raises() -> str:
        print("before")  # noqa: T201  the subject of this test
        raise ValueError("no")

    @tool(timeout=0.01)
    async def hangs() -> str:
        print("connecting", end="")  # noqa: T201  the subject of this test
        await asyncio.Event().wait()
        return "never"

    outcomes = [await call(each) for each in (prints, raises, hangs)]
    assert [(each.outcome, each.log) for each in outcomes] == [
        ("success", ("read 3 pages", "WARNING ensemble_ray.tool.prints: page 2 is empty")),
        ("error", ("before",)),
        ("error", ("connecting",)),
    ]


async def test_the_model_reads_what_is_wrong_behind_a_repair() -> None:
    """S-LLM-40: what cannot be repaired is asked for again, with the error of what could be read."""
    outcome = await call(save, '{"count": 1,}')
    assert (outcome.outcome, outcome.repairs) == ("error", ("arguments: a comma too many",))
    assert "'tags': Field required" in outcome.text
