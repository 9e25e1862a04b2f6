"""Package tools: the built-in tools (S-BIT). Each name is imported when it is first asked for: most teams use one or two.

Never here: an import of a web library, or of a tool nobody asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.tools.builtin.calculator import CalculatorTool
    from ensemble_ray.tools.builtin.date_time import DateTimeTool
    from ensemble_ray.tools.builtin.file_read import FileReadTool
    from ensemble_ray.tools.builtin.file_write import FileWriteTool
    from ensemble_ray.tools.builtin.http import HttpAgentTool
    from ensemble_ray.tools.builtin.human_input import HumanInputTool
    from ensemble_ray.tools.builtin.json_parse import JsonParserTool
    from ensemble_ray.tools.builtin.process import ProcessAgentTool
    from ensemble_ray.tools.builtin.web_scrape import WebScraperTool
    from ensemble_ray.tools.builtin.web_search import WebSearchProvider, WebSearchTool

__all__ = [
    "CalculatorTool",
    "DateTimeTool",
    "FileReadTool",
    "FileWriteTool",
    "HttpAgentTool",
    "HumanInputTool",
    "JsonParserTool",
    "ProcessAgentTool",
    "WebScraperTool",
    "WebSearchProvider",
    "WebSearchTool",
]

_HOMES = {
    "CalculatorTool": "calculator",
    "DateTimeTool": "date_time",
    "FileReadTool": "file_read",
    "FileWriteTool": "file_write",
    "HttpAgentTool": "http",
    "HumanInputTool": "human_input",
    "JsonParserTool": "json_parse",
    "ProcessAgentTool": "process",
    "WebScraperTool": "web_scrape",
    "WebSearchProvider": "web_search",
    "WebSearchTool": "web_search",
}


def __getattr__(name: str) -> object:
    """Import the module of a built-in tool."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
