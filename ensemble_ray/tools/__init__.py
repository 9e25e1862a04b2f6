"""Room tools: what a tool is, how one is looked up, and one guarded call of it."""

from __future__ import annotations

from ensemble_ray.tools.decorator import tool
from ensemble_ray.tools.tool import (
    AbstractAgentTool,
    AgentTool,
    CustomSchemaAgentTool,
    DynamicToolProvider,
    NoOpToolMetrics,
    ToolContext,
    ToolMetrics,
    ToolResult,
    current_tool_context,
)
from ensemble_ray.tools.typed import AbstractTypedAgentTool, TypedAgentTool

__all__ = [
    "AbstractAgentTool",
    "AbstractTypedAgentTool",
    "AgentTool",
    "CustomSchemaAgentTool",
    "DynamicToolProvider",
    "NoOpToolMetrics",
    "ToolContext",
    "ToolMetrics",
    "ToolResult",
    "TypedAgentTool",
    "current_tool_context",
    "tool",
]
