"""What the built-in tools say of their effects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ensemble_ray import (
    CalculatorTool,
    DateTimeTool,
    FileReadTool,
    FileWriteTool,
    HttpAgentTool,
    JsonParserTool,
    ProcessAgentTool,
    ToolPipeline,
    WebScraperTool,
    WebSearchTool,
)


def test_built_in_tools_declare_their_effects(tmp_path: Path) -> None:
    """S-DUR-21."""
    reading = (
        CalculatorTool(),
        DateTimeTool(),
        FileReadTool(tmp_path),
        JsonParserTool(),
        WebScraperTool(fetcher=lambda url: url),
        WebSearchTool(lambda query: query),
    )
    assert {tool.effect for tool in reading} == {"none"}
    assert FileWriteTool(tmp_path).effect == "idempotent"
    assert ProcessAgentTool("run", "Runs", [sys.executable]).effect == "once"
    assert ToolPipeline.of(CalculatorTool(), FileWriteTool(tmp_path)).effect == "idempotent"


@pytest.mark.parametrize(
    ("method", "effect"),
    [("GET", "none"), ("get", "none"), ("HEAD", "none"), ("POST", "once"), ("PUT", "once"), ("DELETE", "once")],
)
def test_effect_of_an_http_tool_is_that_of_its_method(method: str, effect: str) -> None:
    """S-DUR-21."""
    assert HttpAgentTool("call", "Calls", "http://127.0.0.1:1/", method=method).effect == effect
