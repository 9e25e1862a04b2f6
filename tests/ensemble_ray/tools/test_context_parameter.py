"""The context of a call as the first parameter of a `@tool` function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ensemble_ray import CurrentRun, ToolContext, ValidationError, tool
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.registry import BoundFunction, resolve_tools

CONTEXT = ToolContext(tool_name="t", run=CurrentRun(deps="shop"))


@tool
def plain(context: ToolContext[str], name: str, count: int = 1) -> str:
    """Sell.

    Args:
        context: Not for the model.
        name: What.
    """
    return f"{context.deps} {name} {count}"


@tool(name="plain")
def bare(context: ToolContext, name: str, count: int = 1) -> str:
    """Sell."""
    return f"{context.deps} {name} {count}"


@tool(name="plain")
def positional(context: ToolContext[str], name: str, /, count: int = 1) -> str:
    """Sell."""
    return f"{context.deps} {name} {count}"


@tool(name="plain")
async def named(*, context: ToolContext[str], name: str, count: int = 1) -> str:
    """Sell."""
    return f"{context.deps} {name} {count}"


class Counter:
    """An object with a tool."""

    @tool
    def plain(self, context: ToolContext[str], name: str, count: int = 1) -> str:
        """Sell."""
        return f"{context.deps} {name} {count}"


@pytest.mark.parametrize("entry", [plain, bare, positional, named, Counter()], ids=lambda each: type(each).__name__)
async def test_the_context_is_passed_and_not_shown(entry: object) -> None:
    """S-CTX-10: an argument of its name from the model is ignored."""
    (bound,) = resolve_tools([entry])
    assert list(bound.spec.parameters["properties"]) == ["name", "count"]  # type: ignore[call-overload]
    assert "Not for the model" not in str(bound.spec.parameters)
    arguments = '{"name": "tea", "count": 2, "context": "mine"}'
    assert (await call_tool(bound, arguments, context=CONTEXT)).text == "shop tea 2"
    assert (await call_tool(bound, '{"name": "tea"}', context=CONTEXT)).text == "shop tea 1"


def test_the_function_itself_is_called_as_it_is_written() -> None:
    """S-CTX-7."""
    assert plain(CONTEXT, "tea") == "shop tea 1"
    assert isinstance(next(iter(resolve_tools([plain]))), BoundFunction)


@tool
def second(name: str, context: ToolContext[str]) -> str:
    """Sell."""
    return f"{name}{context.deps}"


@tool
def twice(context: ToolContext[str], more: ToolContext[str]) -> str:
    """Sell."""
    return f"{context.deps}{more.deps}"


@tool(cpu=True)
def far(context: ToolContext[str]) -> str:
    """Sell."""
    return context.deps


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (second, "Tool 'second': the context must be its first parameter, and the only one: 'context' is another"),
        (twice, "Tool 'twice': the context must be its first parameter, and the only one: 'more' is another"),
        (far, r"Tool 'far' has the context 'context', but @tool\(cpu=True\) runs in another process"),
    ],
)
def test_a_context_at_another_place_is_refused(entry: Callable[..., Any], text: str) -> None:
    """S-CTX-11, S-CTX-12."""
    with pytest.raises(ValidationError, match=text):
        resolve_tools([entry])
