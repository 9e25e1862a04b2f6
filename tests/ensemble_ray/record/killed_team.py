"""A team whose process ends at a chosen place, before facts that no step has waited for are committed.

`python -c "from tests.ensemble_ray.record.killed_team import main; main(...)"`, with a home, a file for marks and a place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatResponse,
    Ensemble,
    EnsembleListener,
    GuardrailInput,
    GuardrailResult,
    InlineRuntime,
    Task,
    TaskCompleteEvent,
    ToolCall,
    ToolCallEvent,
    ToolSpec,
    tool,
)
from ensemble_ray.record.sqlite import journal

RUN_ID = "killed"
#: Exit status of the process that dies.
DIED = 9
#: A commit that no step waits for does not begin in the life of a test, s.
_NEVER_S = 600.0


class Killed:
    """Its team, what was done so far, and the place where its process ends."""

    def __init__(self, marks: Path, place: str = "") -> None:
        self._marks = marks
        self._place = place

    @property
    def done(self) -> list[str]:
        """What was done in all lives, in order."""
        return self._marks.read_text().split("\n")[:-1] if self._marks.exists() else []

    def mark(self, what: str) -> None:
        """Note what is done, and end the process if it is the place."""
        with self._marks.open("a") as file:
            file.write(f"{what}\n")
        if what == self._place:
            os._exit(DIED)

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """One tool after the other, then a text; the same to the same conversation."""
        task = "facts" if tools else "article"
        results = sum(message.role == "tool" for message in messages)
        self.mark(f"request {task} {results}")
        if results < len(tools):
            return ChatResponse(tool_calls=[ToolCall(f"c{results}", tools[results].name, "{}")])
        return ChatResponse(text=f"The {task}")

    def team(self, *, has_effect: bool, listens: bool) -> Ensemble:
        """Facts with tools, then an article with a guardrail on its input."""

        @tool(effect="none")
        def look_up() -> str:
            """Look it up."""
            self.mark("look_up")
            return "a thing"

        @tool(effect="once")
        def order() -> str:
            """Order it."""
            self.mark("order")
            return "ordered"

        def check(_: GuardrailInput) -> GuardrailResult:
            self.mark("guardrail")
            return GuardrailResult.success()

        class Listener(EnsembleListener):
            def on_task_complete(_, event: TaskCompleteEvent) -> None:  # noqa: N805  `self` is the team
                self.mark(f"complete {event.task_output.raw}")

            def on_tool_call(_, event: ToolCallEvent) -> None:  # noqa: N805  as above
                self.mark(f"called {event.tool_name}")

        tools = [look_up, order] if has_effect else [look_up]
        finder = Agent(role="Finder", goal="Find", tools=tools, llm=self)
        writer = Agent(role="Writer", goal="Write", llm=self)
        facts = Task(name="facts", description="Find facts", expected_output="x", agent=finder)
        article = Task(
            name="article",
            description="Write",
            expected_output="x",
            agent=writer,
            context=[facts],
            input_guardrails=[check] if has_effect else [],
        )
        return Ensemble(tasks=[facts, article], listeners=[Listener()] if listens else [])


def main(home: str, marks: str, place: str, *, has_effect: bool, listens: bool) -> None:
    """Run the team; only steps that wait for a commit begin one."""
    journal.SOON_S = _NEVER_S
    journal._writer = journal.GroupWriter(_NEVER_S)
    team = Killed(Path(marks), place).team(has_effect=has_effect, listens=listens)
    team.run(runtime=InlineRuntime(home=home), run_id=RUN_ID)
