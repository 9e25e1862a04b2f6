"""Package tools: the tools of MCP servers, by the official SDK (extra `mcp`), which is imported when a task needs it."""

from __future__ import annotations

from ensemble_ray.tools.mcp.provider import MCP

__all__ = ["MCP"]
