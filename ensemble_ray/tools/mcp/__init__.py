"""The tools of MCP servers (extra `mcp`)."""

from __future__ import annotations

from ensemble_ray.tools.mcp.provider import MCP

__all__ = ["MCP"]
