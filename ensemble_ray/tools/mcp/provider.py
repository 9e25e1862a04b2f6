"""`MCP`: a server's tools in a list of tools. Package: tools.

In: where the server is, and what is known of its tools. Out: its tools as they are when a task begins.
Rules: the value travels, the session does not: each process that runs the agent has its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pydantic

from ensemble_ray.errors import ToolConfigurationError, ValidationError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.tools.foreign_schema import SchemaError
from ensemble_ray.tools.mcp.address import ServerAddress
from ensemble_ray.tools.mcp.connection import ServerLostError, ask_server
from ensemble_ray.tools.mcp.delivery import is_lost
from ensemble_ray.tools.mcp.listing import collect_pages, log_left_out, tool_names
from ensemble_ray.tools.mcp.remote_tools import effect_of_hints, prompt_tool, remote_tool, resource_tools
from ensemble_ray.tools.tool import (
    DEFAULT_TIMEOUT_S,
    AgentTool,
    DynamicToolProvider,
    check_effect,
    check_tool_name,
    current_tool_context,
    timeout_seconds,
)
from ensemble_ray.values.messages import Effect

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import Prompt, Tool

__all__ = ["MCP"]

_log = bounded_logger(__name__)


class MCP(DynamicToolProvider):
    """The tools of an MCP server; they are listed anew when a task begins. Needs the extra `mcp`.

    Args:
        server: `"stdio:COMMAND ARGUMENTS"`, a program that is started where the agent runs, or the URL of a server that
            speaks streamable HTTP, or the older transport with server-sent events.
        headers: Sent with each request to a URL.
        env: Variables of the program, beside the few that every program needs; keys of models are not among those.
        cwd: Where the program runs.
        tools: Names of those that are offered, as the server has them; None: all.
        prefix: Put before each name, so that tools of two servers do not clash.
        effect: What calls do to the world: one word for all of the server's tools, or by name; without it the server's
            hints are taken: `readOnlyHint` is `none`, `idempotentHint` is `idempotent`, all others `once`.
        resources: Whether the agent gets two tools more that list and read the server's resources.
        prompts: Whether each prompt of the server is a tool, named `prompt_NAME`.
        sampling: Whether the server may ask the agent's model in the middle of a call, under the run's budget and the model's limits.
        max_samples: How often it may do so in one call.
        timeout: How long one call may take, in seconds or as a `timedelta`; None: as long as it likes.
        connect_timeout: How long the server may take to start or to answer first, and to list what it offers, the same.

    Raises:
        ValidationError: a value cannot work.

    Examples:
        >>> MCP("https://example.com/mcp", prefix="shop_", effect={"search": "none"})
        MCP('https://example.com/mcp')
    """

    def __init__(
        self,
        server: str,
        *,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        tools: str | Collection[str] | None = None,
        prefix: str = "",
        effect: Effect | Mapping[str, Effect] | None = None,
        resources: bool = False,
        prompts: bool = False,
        sampling: bool = False,
        max_samples: int = 10,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
        connect_timeout: float | timedelta = 30.0,
    ) -> None:
        connect_timeout_s = timeout_seconds(connect_timeout)
        if connect_timeout_s is None:
            raise ValidationError("MCP connect_timeout must end")
        self._address = ServerAddress.of(
            server,
            env=env or {},
            headers=headers or {},
            cwd=None if cwd is None else os.fspath(cwd),
            connect_timeout_s=connect_timeout_s,
            max_samples=max_samples if sampling else 0,
        )
        if prefix and (problem := check_tool_name(prefix)):
            raise ValidationError(f"MCP prefix: {problem}")
        for name, each in effect.items() if isinstance(effect, Mapping) else [("", effect)]:
            if each is not None:
                check_effect(each, f"MCP tool '{name}'" if name else "MCP")
        if max_samples < 1:
            raise ValidationError(
                f"MCP max_samples must be >= 1, got: {max_samples}. To allow none, leave sampling out"
            )
        timeout_seconds(timeout)
        self._tools = None if tools is None else (tools,) if isinstance(tools, str) else tuple(tools)
        self._prefix = prefix
        self._effect: Effect | dict[str, Effect] | None = dict(effect) if isinstance(effect, Mapping) else effect
        self._has_resources = resources
        self._has_prompts = prompts
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"MCP({self._address.shown!r})"

    async def resolve(self) -> Sequence[AgentTool]:
        """Ask the server what it offers now.

        Raises:
            ToolConfigurationError: it cannot be started or reached, refuses, or lacks a tool that is named.
        """
        address = replace(self._address, has_reviewer=current_tool_context().review_handler is not None)
        try:
            tools, prompts, has_resources = await ask_server(
                address, self._list, may_repeat=True, limit_s=address.connect_timeout_s
            )
        except ServerLostError as error:
            raise ToolConfigurationError(str(error)) from error
        names = tool_names([*(each.name for each in tools), *(f"prompt_{each.name}" for each in prompts)], self._prefix)
        offered: list[AgentTool] = []
        flaws: list[str] = []
        for tool in self._choose(tools):
            effect = self._effect_of(tool)
            try:
                offered.append(remote_tool(address, tool, name=names[tool.name], effect=effect, timeout=self._timeout))
            except SchemaError as error:
                flaws.append(f"'{tool.name[:100]}': {error}")
        log_left_out(address.shown, flaws)
        if has_resources:
            offered += resource_tools(address, prefix=self._prefix, timeout=self._timeout)
        offered += [
            prompt_tool(address, prompt, name=names[f"prompt_{prompt.name}"], timeout=self._timeout)
            for prompt in prompts
        ]
        return offered

    async def _list(self, client: Client) -> tuple[list[Tool], list[Prompt], bool]:
        """Return its tools and prompts, and whether its resources are tools."""
        from mcp import MCPError

        can = client.server_capabilities
        try:
            tools: list[Tool] = []
            if can.tools is not None:
                tools = await collect_pages(
                    lambda cursor: client.list_tools(cursor=cursor, cache_mode="refresh"), lambda page: page.tools
                )
            prompts: list[Prompt] = []
            if self._has_prompts and can.prompts is not None:
                prompts = await collect_pages(
                    lambda cursor: client.list_prompts(cursor=cursor, cache_mode="refresh"), lambda page: page.prompts
                )
        except (MCPError, pydantic.ValidationError, ToolConfigurationError) as error:
            if isinstance(error, MCPError) and is_lost(error):  # another session is opened, and asked
                raise
            raise ToolConfigurationError(
                f"MCP server '{self._address.shown}' lists no tools: {message_of(error)}"
            ) from error
        return tools, prompts, self._has_resources and can.resources is not None

    def _choose(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        known = [tool.name for tool in tools]
        named = [*(self._tools or ()), *(self._effect if isinstance(self._effect, dict) else ())]
        for name in named:
            if name not in known:
                raise ToolConfigurationError(f"MCP server '{self._address.shown}' has no tool '{name}'. Known: {known}")
        return tools if self._tools is None else [tool for tool in tools if tool.name in self._tools]

    def _effect_of(self, tool: Tool) -> Effect:
        effect = self._effect
        declared = effect if effect is None or isinstance(effect, str) else effect.get(tool.name)
        return declared or effect_of_hints(tool)
