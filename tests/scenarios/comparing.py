"""What runs show, as data without what belongs to one run, so that two runs can be compared."""

from __future__ import annotations

import json
import re
from typing import cast

__all__ = ["as_data", "plain"]

#: Values that differ from run to run, by the name of their field.
_OF_THE_RUN = {
    *("started_at", "completed_at", "occurred_at", "timestamp", "duration", "total_duration", "latency"),
    *("llm_latency", "tool_execution_time", "prompt_build_time", "run_id", "ensemble_id", "stack_trace"),
    *("iteration_duration", "step_duration"),
    *("total_llm_latency", "total_tool_execution_time", "total_prompt_build_time"),
}
_FRAMES = re.compile(r"at 0x[0-9a-f]+")


def plain(value: object) -> object:
    """JSON data without what belongs to one run."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: plain(each) for name, each in fields.items() if name not in _OF_THE_RUN}
    if isinstance(value, list):
        return [plain(each) for each in cast("list[object]", value)]
    return _FRAMES.sub("", value) if isinstance(value, str) else value


def as_data(value: object) -> object:
    """The same, of a pydantic value."""
    return plain(json.loads(value.model_dump_json()))  # type: ignore[attr-defined]
