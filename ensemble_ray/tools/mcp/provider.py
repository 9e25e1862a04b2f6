"""`MCP`: a server's tools in a list of tools.

In: where the server is, and what is known of its tools. Out: its tools as they are when a task begins.
Rules: the value travels, the session does not: each process that runs the agent has its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pydantic

from ensemble_ray.errors import ToolConfigurationError, ValidationError, message_of
from ensemble_ray.events.telemetry.active import use_span
from ensemble_ray.process.context import bounded_logger, current_traceparent
from ensemble_ray.tools.foreign_schema import SchemaError, normalise_parameters, rename_properties
from ensemble_ray.tools.mcp.address import ServerAddress, is_lost
from ensemble_ray.tools.mcp.questions import CallQuestions
from ensemble_ray.tools.mcp.session import ServerLostError, ask_server, collect_pages, log_left_out, tool_names
from ensemble_ray.tools.registry import log_dropped_keywords
from ensemble_ray.tools.tool import (
    DEFAULT_TIMEOUT_S,
    AgentTool,
    ContextAgentTool,
    DynamicToolProvider,
    ToolResult,
    check_effect,
    check_tool_name,
    current_tool_context,
    timeout_seconds,
)
from ensemble_ray.values.messages import Effect

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import (
        BlobResourceContents,
        CallToolResult,
        ContentBlock,
        GetPromptResult,
        Prompt,
        ReadResourceResult,
        RequestParamsMeta,
        Resource,
        TextResourceContents,
        Tool,
    )


def result_of(answer: CallToolResult) -> ToolResult:
    """Return a tool's answer: its texts, else its structured content; what it calls an error is a failure."""
    text = _join(answer.content)
    if not text and answer.structured_content is not None:
        text = json.dumps(answer.structured_content, ensure_ascii=False)
    if answer.is_error:
        return ToolResult.failure(text or "the server gave no reason")
    return ToolResult.success(text, answer.structured_content)


def prompt_text(answer: GetPromptResult) -> str:
    """Return the messages of a prompt, each after its role."""
    return "\n\n".join(f"{message.role}: {_content_text(message.content)}" for message in answer.messages)


def resource_text(answer: ReadResourceResult) -> str:
    """Return the contents of a resource."""
    return "\n".join(_resource_part(part) for part in answer.contents)


def resource_list_text(resources: Iterable[Resource]) -> str:
    """Return a line for each resource: its address, name and description."""
    lines = [
        f"{each.uri} ({each.title or each.name}){f': {each.description}' if each.description else ''}"
        for each in resources
    ]
    return "\n".join(lines) or "There are no resources."


def _join(content: Iterable[ContentBlock]) -> str:
    return "\n".join(_content_text(block) for block in content)


def _content_text(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type}, {block.mime_type}, {_decoded_bytes(block.data)} bytes]"
        case "resource_link":
            return f"[resource {block.uri} ({block.title or block.name})]"
        case "resource":
            return _resource_part(block.resource)


def _resource_part(part: TextResourceContents | BlobResourceContents) -> str:
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    return f"[resource {part.uri}, {part.mime_type or 'bytes'}, {_decoded_bytes(getattr(part, 'blob', ''))} bytes]"


def _decoded_bytes(encoded: str) -> int:
    """Return how many bytes base64 text stands for."""
    return len(encoded) * 3 // 4 - encoded[-2:].count("=")


Work = Callable[["Client", dict[str, Any]], Awaitable[ToolResult]]
_OBJECT: Mapping[str, object] = {"type": "object", "properties": {}}
_URI: Mapping[str, object] = {
    "type": "object",
    "properties": {"uri": {"type": "string", "description": "Address of the resource."}},
    "required": ["uri"],
}


class _RemoteTool(ContextAgentTool):
    """One thing that a server can be asked."""

    def __init__(
        self,
        address: ServerAddress,
        work: Work,
        *,
        name: str,
        description: str,
        schema: Mapping[str, object],
        effect: Effect,
        timeout: float | timedelta | None,
    ) -> None:
        self.origin = address.shown
        self._address = address
        self._work = work
        self._schema = schema
        self.name = name
        self.description = description
        self.effect = effect
        self.timeout = timeout

    @property
    def parameter_schema(self) -> Mapping[str, object]:
        return self._schema

    async def execute(self, text: str, /) -> ToolResult:
        from mcp import MCPError

        arguments = _read(text)
        if arguments is None:
            return ToolResult.failure("The arguments must be a JSON object")
        questions = CallQuestions(self._address, current_tool_context())
        span = current_traceparent()

        async def work(client: Client) -> ToolResult:
            with use_span(span):  # the client works in a task of its own, which knows nothing of the call
                return await questions.answered_during(client, lambda: self._work(client, arguments))

        try:
            return await ask_server(self._address, work, may_repeat=self.effect != "once")
        except MCPError as error:
            return ToolResult.failure(error.message)
        except ServerLostError as lost:
            return self._failure(str(lost), may_be_done=lost.may_be_done)
        except pydantic.ValidationError as error:  # the SDK's word for a result that is none
            return self._failure(f"MCP server '{self.origin}' sent a result that cannot be read: {error}")
        except ToolConfigurationError as error:  # it went away after the task began; the model may do without it
            return ToolResult.failure(str(error))

    def _failure(self, why: str, *, may_be_done: bool = True) -> ToolResult:
        """Return the failure of a call without a result."""
        if self.effect != "once" or not may_be_done:
            return ToolResult.failure(why)
        return ToolResult.failure(
            f"Outcome unknown: {why.rstrip('.')}, before a result came back. The call may have been done, partly done, or not "
            "done at all; it has not been repeated. Find out whether it was done before you call it again. If you cannot "
            "find out, do not repeat it, and say in your answer that its outcome is unknown."
        )


def _read(text: str) -> dict[str, Any] | None:
    if not text.strip():
        return {}
    try:
        arguments: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else None


def effect_of_hints(tool: Tool) -> Effect:
    """Return what a call does to the world, as the server says; without a word of it, it must not be repeated."""
    hints = tool.annotations
    if hints is not None and hints.read_only_hint:
        return "none"
    return "idempotent" if hints is not None and hints.idempotent_hint else "once"


def remote_tool(
    address: ServerAddress, tool: Tool, *, name: str, effect: Effect, timeout: float | timedelta | None
) -> AgentTool:
    """Return a tool of the server under a name, with a schema that all endpoints accept.

    Raises:
        SchemaError: the schema cannot describe arguments.
    """
    foreign = normalise_parameters(tool.input_schema)
    log_dropped_keywords(f"Tool '{tool.name}' of MCP server '{address.shown}'", foreign.dropped)
    schema, originals = rename_properties(foreign.parameters)

    async def call(client: Client, arguments: dict[str, Any]) -> ToolResult:
        span = current_traceparent()
        meta = cast("RequestParamsMeta", {"traceparent": span}) if span else None  # S-INT-37
        named = {originals.get(key, key): value for key, value in arguments.items()}
        return result_of(await client.call_tool(tool.name, named, meta=meta))

    description = tool.description or tool.title or ""
    return _RemoteTool(address, call, name=name, description=description, schema=schema, effect=effect, timeout=timeout)


def resource_tools(address: ServerAddress, *, prefix: str, timeout: float | timedelta | None) -> list[AgentTool]:
    """Return two tools: one lists the server's resources, one reads one."""

    async def list_all(client: Client, _arguments: dict[str, Any]) -> ToolResult:
        resources = await collect_pages(
            lambda cursor: client.list_resources(cursor=cursor, cache_mode="refresh"), lambda page: page.resources
        )
        return ToolResult.success(resource_list_text(resources))

    async def read(client: Client, arguments: dict[str, Any]) -> ToolResult:
        uri = arguments.get("uri")
        if not isinstance(uri, str):
            return ToolResult.failure("'uri' must be the address of a resource")
        return ToolResult.success(resource_text(await client.read_resource(uri, cache_mode="refresh")))

    return [
        _RemoteTool(
            address,
            list_all,
            name=f"{prefix}list_resources",
            description="Lists the resources that can be read.",
            schema=_OBJECT,
            effect="none",
            timeout=timeout,
        ),
        _RemoteTool(
            address,
            read,
            name=f"{prefix}read_resource",
            description="Reads a resource.",
            schema=_URI,
            effect="none",
            timeout=timeout,
        ),
    ]


def prompt_tool(address: ServerAddress, prompt: Prompt, *, name: str, timeout: float | timedelta | None) -> AgentTool:
    """Return a tool that gives the text of a prompt."""
    arguments = prompt.arguments or []
    schema = {
        "type": "object",
        "properties": {
            each.name: {"type": "string", **({"description": each.description} if each.description else {})}
            for each in arguments
        },
        "required": [each.name for each in arguments if each.required],
    }

    async def render(client: Client, values: dict[str, Any]) -> ToolResult:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        return ToolResult.success(prompt_text(await client.get_prompt(prompt.name, texts)))

    description = prompt.description or f"Gives the prompt '{prompt.name}'."
    return _RemoteTool(
        address, render, name=name, description=description, schema=schema, effect="none", timeout=timeout
    )


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
