"""A program whose run hangs: `python -m tests.scenarios.hanging_run RUNTIME KIND MARKS`.

`model` and `tool` never answer and must be interrupted; `timeout` hangs in a tool whose time is limited.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ensemble_ray import ChatResponse, Ensemble, ExitReason, tool
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks

RUN_ID = "hanging"


class Model:
    """Asks for the tool; never answers when it shall hang."""

    def __init__(self, marks: Marks, *, hangs: bool) -> None:
        self._marks = marks
        self._hangs = hangs

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        if self._hangs:
            self._marks.add("under way")
            threading.Event().wait()
        if messages[-1].role == "tool":  # type: ignore[index]
            return ChatResponse(text=messages[-1].content)  # type: ignore[index]
        return ChatResponse(tool_calls=(call("hang", f'{{"path": "{self._marks.path}"}}'),))


@tool(timeout=None)
def hang(path: str) -> str:
    """Never return."""
    Marks(Path(path)).add("under way")
    threading.Event().wait()
    return "never"


def main() -> None:
    """Run it; the exit status is that of a program that does nothing else."""
    runtime, kind, path = sys.argv[1:]
    marks = Marks(Path(path))
    limited = tool(timeout=0.2)(hang.__wrapped__ if hasattr(hang, "__wrapped__") else hang)
    worker = agent(Model(marks, hangs=kind == "model"), tools=[limited if kind == "timeout" else hang])
    tasks = [task("first", handler=lambda _: "kept"), task("second", worker)]
    output = Ensemble(tasks=tasks).run(runtime=runtime, run_id=RUN_ID)
    assert output.exit_reason is ExitReason.COMPLETED
    print(output.raw)  # noqa: T201  for the test that reads it


if __name__ == "__main__":
    main()
