"""What a user's type checker sees of the context of a run; mypy and pyright read this file, pytest runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_type

from ensemble_ray import (
    CurrentRun,
    TaskHandlerContext,
    ToolContext,
    current_run_context,
    current_tool_context,
    tool,
)


@dataclass
class Shop:
    """Deps."""

    prices: dict[str, int]


class CornerShop(Shop):
    """More special deps."""


@tool
def look_up(context: ToolContext[Shop], name: str) -> int:
    """Price of a thing."""
    assert_type(context.deps, Shop)
    assert_type(context.user, str)
    assert_type(context.inputs, Mapping[str, str])
    return context.deps.prices[name]


def handle(context: TaskHandlerContext[Shop]) -> str:
    """A handler."""
    assert_type(context.deps, Shop)
    return str(context.deps.prices)


def untyped(context: ToolContext) -> object:
    """A context without a class: its deps are an object."""
    assert_type(context.deps, object)
    return context.run_id


def test_contexts_know_the_class_of_their_deps() -> None:
    """S-CTX-2, S-CTX-4: a context of more special deps is one of their base, too."""
    run = CurrentRun(deps=CornerShop({"tea": 3}))
    assert_type(run.deps, CornerShop)
    context = ToolContext(run=run)
    assert_type(context, ToolContext[CornerShop])
    assert assert_type(look_up(context, "tea"), int) == 3
    assert handle(TaskHandlerContext(description="d", expected_output="e", run=run)) == "{'tea': 3}"
    assert untyped(context) == ""
    assert_type(current_run_context(), CurrentRun[object])
    assert_type(current_tool_context(), ToolContext[object])


def of_shop() -> CurrentRun[Shop]:
    """The checked form of `current_run_context`."""
    return current_run_context(Shop)
