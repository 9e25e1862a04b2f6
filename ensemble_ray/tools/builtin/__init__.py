"""The built-in tools (S-BIT), each imported at its first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.tools.builtin.files import FileReadTool, FileWriteTool
    from ensemble_ray.tools.builtin.offline import CalculatorTool, DateTimeTool, HumanInputTool, JsonParserTool
    from ensemble_ray.tools.builtin.process import ProcessAgentTool
    from ensemble_ray.tools.builtin.web import HttpAgentTool, WebScraperTool, WebSearchProvider, WebSearchTool

__all__ = [
    "CalculatorTool", "DateTimeTool", "FileReadTool", "FileWriteTool", "HttpAgentTool", "HumanInputTool",
    "JsonParserTool", "ProcessAgentTool", "WebScraperTool", "WebSearchProvider", "WebSearchTool",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(("CalculatorTool", "DateTimeTool", "HumanInputTool", "JsonParserTool"), "offline"),
    **dict.fromkeys(("FileReadTool", "FileWriteTool"), "files"),
    **dict.fromkeys(("HttpAgentTool", "WebScraperTool", "WebSearchProvider", "WebSearchTool"), "web"),
    "ProcessAgentTool": "process",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
