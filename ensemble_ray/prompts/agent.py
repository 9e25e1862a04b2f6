"""The system prompt: who the agent is. Package: prompts. In: an agent. Out: text, the same for the same agent."""

from __future__ import annotations

from ensemble_ray.definition.agent import Agent
from ensemble_ray.process.bounded_log import bounded_logger

__all__ = ["build_system_prompt"]

_log = bounded_logger(__name__)

#: What every agent is told (S-TPL-16, S-TPL-20).
_INSTRUCTION = (
    "You must produce a final answer that matches the expected output of the task you are given. "
    "Be accurate and thorough, and aim for the quality of work you would sign with your name. "
    "Give the answer itself and nothing else: no preamble before it and no postscript after it."
)


def build_system_prompt(agent: Agent) -> str:
    """Role, background, goal, the fixed instruction and the form of the answer, in this order.

    Parts that the agent does not have leave no trace; the text ends without white space.
    """
    parts = [f"You are {agent.role}."]
    background = (agent.background or "").strip()
    if background:
        parts.append(background)
    parts += ["", f"Your personal goal is: {agent.goal}", "", _INSTRUCTION]
    response_format = agent.response_format.strip()
    if response_format:
        parts.append(f"Output format instructions: {response_format}")
    prompt = "\n".join(parts).rstrip()
    _log.debug("System prompt built: %d characters", len(prompt))
    return prompt
