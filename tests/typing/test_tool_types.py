"""What a user's type checker sees of the tools room; mypy and pyright read this file, pytest runs it."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

from pydantic import BaseModel

from ensemble_ray import (
    AbstractAgentTool,
    AbstractTypedAgentTool,
    AgentTool,
    Effect,
    Task,
    ToolPipeline,
    ToolResult,
    current_tool_context,
    tool,
)


@tool
def word_count(text: str) -> int:
    """Count words."""
    return len(text.split())


@tool("Fetch a page")
async def fetch(url: str, *, retries: int = 2) -> str:
    """Ignored."""
    return f"{url}{retries}"


@tool(name="crunch", description="Crunch numbers", timeout=timedelta(minutes=1), cpu=True)
def crunch(numbers: list[float]) -> float:
    """Ignored."""
    return sum(numbers)


class Shop:
    """Some tools."""

    @tool
    def price(self, item: str) -> float:
        """Price of an item."""
        return float(len(item))


class Query(BaseModel):
    """Input of `Search`."""

    text: str


class Echo(AgentTool):
    """The shortest tool."""

    name = "echo"
    description = "Repeats"

    def execute(self, text: str, /) -> ToolResult:
        """Repeat."""
        return ToolResult.success(text)


class Shout(AbstractAgentTool):
    """The safe kind, with its own name for the argument."""

    name = "shout"
    description = "Repeats loudly"

    async def do_execute(self, input: str) -> ToolResult:  # noqa: A002  a user may call it so
        """Repeat."""
        self.context.logger.debug("loud")
        return ToolResult.success(input.upper())


class Search(AbstractTypedAgentTool[Query]):
    """The typed kind."""

    name = "search"
    description = "Finds"
    input_type = Query

    def execute_typed(self, query: Query) -> ToolResult:
        """Find."""
        return ToolResult.success(query.text, query)


class Lookup(Echo):
    """It only reads."""

    effect = "none"


@tool(effect="idempotent")
def ping(text: str) -> str:
    """Ping."""
    return text


def test_signature_is_kept_when_decorated() -> None:
    """S-TOOL-16: a decorated function is what it was, for the checker and at run time."""
    assert_type(word_count("a b"), int)
    assert_type(crunch([1.0, 2.0]), float)
    assert_type(Shop().price("tea"), float)
    assert word_count(text="a b") == 2


async def test_coroutine_stays_one_when_decorated() -> None:
    """S-TOOL-16."""
    assert_type(await fetch("x", retries=3), str)


def test_results_are_typed_when_tools_are_called() -> None:
    """S-TOOL-1, S-TOOL-40, S-SET-1: subclasses may narrow, and name the argument as they like."""
    assert_type(Echo().execute("a"), ToolResult)
    assert_type(Shout().execute("a"), ToolResult)
    assert_type(Search().execute('{"text": "a"}'), ToolResult)
    assert_type(ToolPipeline.of(Echo(), (Search(), lambda result: result.output)).execute("a"), ToolResult)
    assert_type(current_tool_context().agent_role, str)
    assert Shout().execute("a").output == "A"


def test_effects_are_typed_when_declared() -> None:
    """S-DUR-20: one of the three words, said by a class, a decorator or a task."""
    assert_type(Echo().effect, Effect)
    assert (Lookup.effect, Echo.effect) == ("none", "once")
    assert (ping("a"), Task(description="d", expected_output="e", handler=ping, effect="none").effect) == ("a", "none")
