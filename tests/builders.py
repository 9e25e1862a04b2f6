"""Definitions and answers that tests are made of, with what a test does not care about filled in.

In: what matters to the test. Out: an agent, a task, a tool request, a model's answer. Never: anything that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray import Agent, ChatResponse, Task, TokenUsage, ToolCall, UnitOutput


def agent(llm: object, role: str = "Writer", **fields: object) -> Agent:
    """Return an agent of that role."""
    return Agent(**{"role": role, "goal": f"be a good {role}", "llm": llm, **fields})  # type: ignore[arg-type]


def task(description: str, by: Agent | None = None, **fields: object) -> Task:
    """Return a task of that description."""
    return Task(**{"description": description, "expected_output": "a text", "agent": by, **fields})  # type: ignore[arg-type]


def task_after(description: str, *context: Task | UnitOutput, **fields: object) -> Task:
    """Return a task of that description that uses the outputs of those."""
    return Task(**{"description": description, "expected_output": "e", "context": context, **fields})  # type: ignore[arg-type]


def call(name: str, arguments: str = "{}", *, number: int = 0) -> ToolCall:
    """Return a tool request of a model."""
    return ToolCall(id=f"call-{name}-{number}", name=name, arguments=arguments)


def answer(
    text: str, input_tokens: int = -1, output_tokens: int = -1, *, calls: Sequence[ToolCall] = ()
) -> ChatResponse:
    """Return a model's answer with its usage."""
    return ChatResponse(text=text, tool_calls=tuple(calls), usage=TokenUsage(input_tokens, output_tokens))
