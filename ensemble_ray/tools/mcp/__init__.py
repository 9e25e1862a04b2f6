"""The tools of MCP servers (extra `mcp`). The official SDK is imported at the first use."""

from __future__ import annotations

from ensemble_ray.tools.mcp.provider import MCP

__all__ = ["MCP"]
