"""The tools of the teams. Apart from the jobs, since marking a function imports `ensemble_ray`, which no floor may."""

from __future__ import annotations

from benchmarks.jobs import cpu_tools, tool_loop
from ensemble_ray import tool

__all__ = ["burn", "look_up", "look_up_once"]


@tool(effect="none")
def look_up(number: int) -> str:
    """Look up a number."""
    return tool_loop.look_up(number)


@tool(name="look_up", effect="once")
def look_up_once(number: int) -> str:
    """Look up a number."""
    return tool_loop.look_up(number)


@tool(cpu=True)
def burn(loops: int) -> int:
    """Add up numbers."""
    return cpu_tools.burn(loops)
