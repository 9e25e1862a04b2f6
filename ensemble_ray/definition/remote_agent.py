"""RemoteAgent: an agent of another system, asked by the A2A protocol. Package: definition.

In: where it is. Out: an agent like any other, whose runner asks it. It asks nobody by itself: the card is read when a task begins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from pydantic import Field, model_validator

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import StrictText, initially
from ensemble_ray.errors import ToolConfigurationError, ValidationError
from ensemble_ray.process.loop import run_blocking
from ensemble_ray.tools.a2a.address import IDEMPOTENT_MESSAGES, AgentAddress
from ensemble_ray.tools.a2a.answers import RemoteAnswer
from ensemble_ray.tools.a2a.asking import ask_agent
from ensemble_ray.tools.a2a.connecting import RemoteAgentError, fetch_card
from ensemble_ray.tools.a2a.tool import A2ATool, seconds_of
from ensemble_ray.tools.tool import AgentTool
from ensemble_ray.values.messages import Effect
from ensemble_ray.values.task_request import TaskAnswer, TaskRequest

__all__ = ["RemoteAgent"]

_CONNECT_S, _RUN_S, _CALL_S = 10.0, 1800.0, 30.0
_GOAL = "Do the task that it is handed"


class RemoteAgent(Agent):
    """An agent of another system, which does tasks of ensembles over the A2A protocol.

    It takes the arguments of an `Agent` that has a runner, and these. Without a `role` it is called by the last part of its URL.

    Attributes:
        url: Where its card is found: the part before `/.well-known/agent-card.json`.
        headers: Sent with every request, such as `{"Authorization": "Bearer ..."}`; values do not show anywhere.
        hosts: Hosts that its card may name besides the one of the URL; requests go to no other.
        timeout: For one task, in seconds or as a `timedelta`; then it is cancelled there.
        connect_timeout: Until a connection stands, in seconds or as a `timedelta`.
    """

    url: StrictText
    headers: Mapping[str, str] = Field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = initially(())
    timeout: float | timedelta = _RUN_S
    connect_timeout: float | timedelta = _CONNECT_S

    def __init__(self, url: str, *, role: str | None = None, goal: str = _GOAL, **fields: Any) -> None:
        """Check and keep the fields.

        Raises:
            ValidationError: one of them is refused.
        """
        values: dict[str, Any] = {"url": url, "goal": goal, **fields}
        if role is not None:
            values["role"] = role
        super().__init__(**values)

    @model_validator(mode="before")
    @classmethod
    def _connect(cls, data: Any) -> Any:
        """Make the runner, and name what has no name."""
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        if not isinstance(arguments.get("runner"), _Asker | None):
            raise ValidationError("RemoteAgent has a runner of its own: leave out runner, or use an Agent")
        connect_timeout = arguments.get("connect_timeout", _CONNECT_S)
        address = AgentAddress.of(
            arguments.get("url", ""),
            headers=arguments.get("headers"),
            hosts=() if arguments.get("hosts") is None else arguments["hosts"],
            connect_timeout_s=seconds_of(connect_timeout, "connect_timeout"),
        )
        arguments["hosts"] = tuple(sorted(address.hosts))
        arguments["headers"] = dict(address.headers)
        timeout_s = seconds_of(arguments.get("timeout", _RUN_S), "timeout")
        effect: Effect = arguments.get("runner_effect") or "once"
        arguments["runner"] = _Asker(address, timeout_s, effect)
        arguments.setdefault("role", address.name)
        return arguments

    @classmethod
    def discover(cls, url: str, **fields: Any) -> RemoteAgent:
        """Return the agent with what its card says: the name as role, the description as goal.

        One whose card says that a message may be sent again is asked again after a crash (`runner_effect="idempotent"`).

        Raises:
            ToolConfigurationError: its card cannot be read.
            ValidationError: as for the class.
        """
        return run_blocking(cls.adiscover(url, **fields))

    @classmethod
    async def adiscover(cls, url: str, **fields: Any) -> RemoteAgent:
        """`discover` for async code, with the same contract."""
        known = cls(url, **fields)
        try:
            card = await fetch_card(cast("_Asker", known.runner).address)
        except RemoteAgentError as error:
            raise ToolConfigurationError(str(error)) from error
        said: dict[str, Any] = {"role": card.name or known.role, "goal": card.description or known.goal}
        if any(each.uri == IDEMPOTENT_MESSAGES for each in card.capabilities.extensions):
            said["runner_effect"] = "idempotent"
        return cls(url, **{**said, **fields})

    def as_tool(
        self, *, name: str | None = None, description: str | None = None, timeout: float | timedelta = _CALL_S
    ) -> AgentTool:
        """Return a tool that asks it; what fails is told to the model that called it.

        Args:
            name: What the model calls it; None: `ask_` and the last part of its URL.
            description: Tells the model when to use it; None: that it asks the agent.
            timeout: For one question, in seconds or as a `timedelta`.
        """
        return A2ATool(
            self.url,
            name=name,
            description=description,
            headers=self.headers,
            hosts=self.hosts,
            effect=self.runner_effect or "once",
            timeout=timeout,
            connect_timeout=self.connect_timeout,
        )


@dataclass(frozen=True, slots=True)
class _Asker:
    """The runner: asks the remote agent for one task after the other."""

    address: AgentAddress
    timeout_s: float
    effect: Effect

    async def run(self, request: TaskRequest) -> AsyncGenerator[str | TaskAnswer]:
        """Ask, and yield pieces of the answer, then the answer.

        Raises:
            RemoteAgentError: there is none.
        """
        said = [f"{each.role.capitalize()}: {each.content or ''}" for each in request.history]
        asking = ask_agent(
            self.address,
            "\n\n".join((*said, request.prompt)),
            message_id=request.idempotency_key,
            may_repeat=self.effect != "once",
            timeout_s=self.timeout_s,
        )
        try:
            async with aclosing(asking) as pieces:
                async for piece in pieces:
                    if isinstance(piece, RemoteAnswer):
                        yield TaskAnswer(text=piece.shown, structured_output=piece.data)
                    elif request.is_streaming:
                        yield piece
        except RemoteAgentError as error:
            if not error.may_be_done or self.effect != "once":
                raise
            raise RemoteAgentError(f"Outcome unknown: {error}", may_be_done=True) from error
