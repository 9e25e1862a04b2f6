"""Tools and listeners for the tests of this room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from ensemble_ray import AbstractAgentTool, AgentTool, ToolResult
from ensemble_ray.tools.cpu import call_packed, pack, unpack_reply


class Plain(AgentTool):
    """A bare AgentTool around a function of its input."""

    def __init__(self, work: Callable[[str], object], name: str = "plain") -> None:
        self.name = name
        self.description = f"does {name}"
        self.work = work

    def execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        return self.work(text)  # type: ignore[return-value]  # tests return wrong things on purpose


class Safe(AbstractAgentTool):
    """An AbstractAgentTool around a function of its input, sync or async."""

    def __init__(self, work: Callable[[str], object], name: str = "safe") -> None:
        self.name = name
        self.description = f"does {name}"
        self.work = work

    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult | None] | None:
        return self.work(text)  # type: ignore[return-value]  # same


class SafeAsync(Safe):
    """The same, written for the event loop."""

    async def do_execute(self, text: str, /) -> ToolResult | None:
        return await self.work(text)  # type: ignore[misc,no-any-return]  # same


class CountingMetrics:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.counts: list[tuple[str, str, str]] = []
        self.durations: list[tuple[str, str, float]] = []

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        self.counts.append(("success", tool_name, agent_role))

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        self.counts.append(("failure", tool_name, agent_role))

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        self.counts.append(("error", tool_name, agent_role))

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        self.durations.append((tool_name, agent_role, duration_s))


class PoolHere:
    """A `CpuPool` in this very process; what it is given is packed and unpacked as for another one."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.timeouts: list[float | None] = []

    async def run(
        self, function: bytes, arguments: Mapping[str, object], *, timeout_s: float | None, may_repeat: bool = True
    ) -> object:
        self.timeouts.append(timeout_s)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return unpack_reply(call_packed(function, pack(dict(arguments))))
