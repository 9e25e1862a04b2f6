"""Tools of agents, imported at their first use. Import from the module `tool` by `from ensemble_ray.tools.tool import ...`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ensemble_ray.ports import ToolMetrics
from ensemble_ray.tools.registry import PipelineErrorStrategy, ToolPipeline
from ensemble_ray.tools.tool import (
    AbstractAgentTool,
    AbstractTypedAgentTool,
    AgentTool,
    CustomSchemaAgentTool,
    DynamicToolProvider,
    ToolContext,
    ToolResult,
    TypedAgentTool,
    current_tool_context,
    tool,
)
from ensemble_ray.tools.user_code import NoOpToolMetrics

if TYPE_CHECKING:
    from ensemble_ray.tools.a2a.client import A2ATool
    from ensemble_ray.tools.builtin import (
        CalculatorTool,
        DateTimeTool,
        FileReadTool,
        FileWriteTool,
        HttpAgentTool,
        HumanInputTool,
        JsonParserTool,
        ProcessAgentTool,
        WebScraperTool,
        WebSearchProvider,
        WebSearchTool,
    )
    from ensemble_ray.tools.mcp import MCP

__all__ = [
    "MCP", "A2ATool", "AbstractAgentTool", "AbstractTypedAgentTool", "AgentTool", "CalculatorTool",
    "CustomSchemaAgentTool", "DateTimeTool", "DynamicToolProvider", "FileReadTool", "FileWriteTool",
    "HttpAgentTool", "HumanInputTool", "JsonParserTool", "NoOpToolMetrics", "PipelineErrorStrategy",
    "ProcessAgentTool", "ToolContext", "ToolMetrics", "ToolPipeline", "ToolResult", "TypedAgentTool",
    "WebScraperTool", "WebSearchProvider", "WebSearchTool", "current_tool_context", "tool",
]  # fmt: skip

_REMOTE = {"A2ATool": "ensemble_ray.tools.a2a.client", "MCP": "ensemble_ray.tools.mcp"}


def __getattr__(name: str) -> object:
    if name in _REMOTE:
        return getattr(importlib.import_module(_REMOTE[name]), name)
    builtin = importlib.import_module("ensemble_ray.tools.builtin")
    if name not in builtin.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(builtin, name)


def __dir__() -> list[str]:
    return sorted(__all__)
