"""An agent of another system as a tool (S-INT-85). Package: tools. In: what the model writes. Out: a `ToolResult`, always."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import aclosing
from datetime import timedelta

from ensemble_ray.errors import ToolConfigurationError, ValidationError
from ensemble_ray.tools.a2a.address import AgentAddress
from ensemble_ray.tools.a2a.answers import RemoteAnswer
from ensemble_ray.tools.a2a.asking import ask_agent
from ensemble_ray.tools.a2a.connecting import RemoteAgentError
from ensemble_ray.tools.tool import (
    AbstractAgentTool,
    ToolResult,
    check_effect,
    check_tool_name,
    make_tool_name,
    timeout_seconds,
)
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.messages import Effect

__all__ = ["A2ATool"]

#: The guard around every tool comes after the tool's own limit, whose text says more, and the cancellation there, s.
_GRACE_S = 15.0
_UNKNOWN = (
    "Outcome unknown: {error}. The agent may have done the work, done a part of it, or nothing; it has not been asked "
    "again. Find out whether it was done before you call it again. If you cannot find out, do not repeat it, and say in "
    "your answer that its outcome is unknown."
)


class A2ATool(AbstractAgentTool):
    """Hands its input to an agent of another system, and returns what that answers.

    Args:
        url: Where the agent's card is found: the part before `/.well-known/agent-card.json`.
        name: What the model calls it; None: `ask_` and the last part of the URL.
        description: Tells the model when to use it; None: that it asks the agent.
        headers: Sent with every request; values do not show anywhere.
        hosts: Hosts that its card may name besides the one of the URL.
        effect: What asking it does to the world. Only what is not `once` is asked again.
        timeout: For one question, in seconds or as a `timedelta`.
        connect_timeout: Until a connection stands, in seconds or as a `timedelta`.

    Raises:
        ValidationError: the URL, the name, a header or a limit is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        description: str | None = None,
        headers: Mapping[str, str] | None = None,
        hosts: Collection[str] = (),
        effect: Effect = "once",
        timeout: float | timedelta = 30.0,
        connect_timeout: float | timedelta = 10.0,
    ) -> None:
        self._address = AgentAddress.of(
            url, headers=headers, hosts=hosts, connect_timeout_s=seconds_of(connect_timeout, "connect_timeout")
        )
        self.name = name or f"ask_{make_tool_name(self._address.name)}"
        if problem := check_tool_name(self.name):
            raise ValidationError(f"A2ATool: {problem}")
        self.description = (
            description or f"Asks the agent '{self._address.name}' of another system. Say all it must know."
        )
        self.effect = check_effect(effect, "A2ATool")
        self._limit_s = seconds_of(timeout, "timeout")
        self.timeout = self._limit_s + _GRACE_S

    def __repr__(self) -> str:
        return f"A2ATool({self._address.url!r})"

    async def do_execute(self, text: str, /) -> ToolResult:
        """Ask the agent, and return its answer."""
        message_id = self.context.idempotency_key or new_run_id()
        asking = ask_agent(
            self._address, text, message_id=message_id, may_repeat=self.effect != "once", timeout_s=self._limit_s
        )
        try:
            async with aclosing(asking) as pieces:
                async for piece in pieces:
                    if isinstance(piece, RemoteAnswer):
                        return ToolResult.success(piece.shown, piece.data)
        except RemoteAgentError as error:
            is_unknown = error.may_be_done and self.effect == "once"
            return ToolResult.failure(_UNKNOWN.format(error=error) if is_unknown else str(error))
        except ToolConfigurationError as error:
            return ToolResult.failure(str(error))
        return ToolResult.failure(f"Remote agent {self._address.url} gave no answer")


def seconds_of(timeout: float | timedelta, name: str) -> float:
    """Return a limit in seconds.

    Raises:
        ValidationError: it is none, or has no end.
    """
    seconds = timeout_seconds(timeout)
    if seconds is None:
        raise ValidationError(f"RemoteAgent {name} must end")
    return seconds
