"""`MCP`, an entry of a tool list for all tools of a server. It is pickled with its agent, without a session."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pydantic

from ensemble_ray.errors import ToolConfigurationError, ValidationError, message_of
from ensemble_ray.events.telemetry.listener import use_span
from ensemble_ray.process.context import current_traceparent
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
    mention,
    timeout_seconds,
)
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.messages import Effect

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import BlobResourceContents, ContentBlock, Prompt, RequestParamsMeta, TextResourceContents, Tool


class MCP(DynamicToolProvider):
    """The tools of an MCP server. They are listed at the start of each task. Needs the extra `mcp`.

    Args:
        server: `"stdio:COMMAND ARGUMENTS"`, a program that is started where the agent runs, or the URL of a server with
            the transport streamable HTTP or the older one with server-sent events.
        headers: Headers of each request to a URL.
        env: Variables of the program, besides a few default ones. API keys are not among the default ones.
        cwd: Working directory of the program.
        tools: The server's names of the tools to offer; None: all.
        prefix: Prefix of each name, so that tools of two servers have different names.
        effect: Effect of calls on the outside world: one value for all tools of the server, or by name. By default, it
            follows the server's hints: `readOnlyHint` is `none`, `idempotentHint` is `idempotent`, others are `once`.
        resources: Whether to offer two more tools, which list and read the server's resources.
        prompts: Whether to offer each prompt of the server as a tool `prompt_NAME`.
        sampling: Whether the server may use the agent's model during a call, within the run's budget and the model's limits.
        max_samples: Limit of such requests per call.
        timeout: Time limit of one call, in seconds or as a `timedelta`; None: no limit.
        connect_timeout: Time limit of starting or reaching the server, and of listing its tools, in the same form.

    Raises:
        ValidationError: an argument is invalid.

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
        """List the server's tools.

        Raises:
            ToolConfigurationError: the server cannot be started or reached, refuses, or lacks a tool of `tools`.
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
        known = [tool.name for tool in tools]
        for name in (*(self._tools or ()), *(self._effect if isinstance(self._effect, dict) else ())):
            if name not in known:
                raise ToolConfigurationError(f"MCP server '{address.shown}' has no tool '{name}'. Known: {known}")
        for tool in tools if self._tools is None else [tool for tool in tools if tool.name in self._tools]:
            effect = self._effect_of(tool)
            try:
                offered.append(_server_tool(address, tool, name=names[tool.name], effect=effect, timeout=self._timeout))
            except SchemaError as error:
                flaws.append(f"'{tool.name[:100]}': {error}")
        log_left_out(address.shown, flaws)
        if has_resources:
            offered += _resource_tools(address, prefix=self._prefix, timeout=self._timeout)
        offered += [
            _prompt_tool(address, prompt, name=names[f"prompt_{prompt.name}"], timeout=self._timeout)
            for prompt in prompts
        ]
        return offered

    async def _list(self, client: Client) -> tuple[list[Tool], list[Prompt], bool]:
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
            if isinstance(error, MCPError) and is_lost(error):  # `ask_server` repeats it in another session
                raise
            text = f"MCP server '{self._address.shown}' lists no tools: {message_of(error)}"
            raise ToolConfigurationError(text) from error
        return tools, prompts, self._has_resources and can.resources is not None

    def _effect_of(self, tool: Tool) -> Effect:
        effect = self._effect
        declared = effect if effect is None or isinstance(effect, str) else effect.get(tool.name)
        if declared:
            return declared
        hints = tool.annotations
        if hints is not None and hints.read_only_hint:
            return "none"
        return "idempotent" if hints is not None and hints.idempotent_hint else "once"


Work = Callable[["Client", dict[str, Any]], Awaitable[ToolResult]]


@dataclass(kw_only=True, eq=False, repr=False)
class _RemoteTool(ContextAgentTool):
    address: ServerAddress
    work: Work
    name: str
    description: str
    schema: Mapping[str, object]
    effect: Effect
    timeout: float | timedelta | None

    def __post_init__(self) -> None:
        self.origin = self.address.shown

    @property
    def parameter_schema(self) -> Mapping[str, object]:
        return self.schema

    async def execute(self, text: str, /) -> ToolResult:
        from mcp import MCPError

        try:
            parsed: object = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            return ToolResult.failure("The arguments must be a JSON object")
        arguments = cast("dict[str, Any]", parsed)
        questions = CallQuestions(self.address, current_tool_context())
        span = current_traceparent()

        async def work(client: Client) -> ToolResult:
            with use_span(span):  # the session's task does not inherit it
                return await questions.answered_during(client, lambda: self.work(client, arguments))

        try:
            return await ask_server(self.address, work, may_repeat=self.effect != "once")
        except MCPError as error:
            return ToolResult.failure(error.message)
        except ServerLostError as lost:
            return self._failure(str(lost), may_be_done=lost.may_be_done)
        except pydantic.ValidationError as error:  # the SDK's error for an invalid result
            return self._failure(f"MCP server '{self.origin}' sent a result that cannot be read: {error}")
        except ToolConfigurationError as error:  # the model may work without it
            return ToolResult.failure(str(error))

    def _failure(self, why: str, *, may_be_done: bool = True) -> ToolResult:
        if self.effect != "once" or not may_be_done:
            return ToolResult.failure(why)
        return ToolResult.failure(
            f"Outcome unknown: {why.rstrip('.')}, before a result arrived. The call may have finished all, a part or none of "
            "its work, and it was not repeated. Check the outcome before you call it again. If you cannot check it, do not "
            "repeat the call, and say in your answer that its outcome is unknown."
        )


def _server_tool(
    address: ServerAddress, tool: Tool, *, name: str, effect: Effect, timeout: float | timedelta | None
) -> AgentTool:
    foreign = normalise_parameters(tool.input_schema)
    log_dropped_keywords(f"Tool '{tool.name}' of MCP server '{address.shown}'", foreign.dropped)
    schema, originals = rename_properties(foreign.parameters)

    async def call(client: Client, arguments: dict[str, Any]) -> ToolResult:
        span = current_traceparent()
        meta = cast("RequestParamsMeta", {"traceparent": span}) if span else None  # S-INT-37
        named = {originals.get(key, key): value for key, value in arguments.items()}
        answer = await client.call_tool(tool.name, named, meta=meta)
        parts = [_content(block) for block in answer.content]
        text = _text_of(parts)
        if not text and answer.structured_content is not None:
            text = json.dumps(answer.structured_content, ensure_ascii=False)
        if answer.is_error:
            return ToolResult.failure(text or "the server reported no reason")
        return ToolResult(text, None, answer.structured_content, _attachments_of(parts))

    description = tool.description or tool.title or ""
    return _RemoteTool(
        address=address, work=call, name=name, description=description, schema=schema, effect=effect, timeout=timeout
    )


def _resource_tools(address: ServerAddress, *, prefix: str, timeout: float | timedelta | None) -> list[AgentTool]:
    async def list_all(client: Client, _arguments: dict[str, Any]) -> ToolResult:
        resources = await collect_pages(
            lambda cursor: client.list_resources(cursor=cursor, cache_mode="refresh"), lambda page: page.resources
        )
        lines = [
            f"{each.uri} ({each.title or each.name}){f': {each.description}' if each.description else ''}"
            for each in resources
        ]
        return ToolResult.success("\n".join(lines) or "There are no resources.")

    async def read(client: Client, arguments: dict[str, Any]) -> ToolResult:
        uri = arguments.get("uri")
        if not isinstance(uri, str):
            return ToolResult.failure("'uri' must be the address of a resource")
        answer = await client.read_resource(uri, cache_mode="refresh")
        parts = [_resource_part(part) for part in answer.contents]
        return ToolResult(_text_of(parts), attachments=_attachments_of(parts))

    make = partial(_RemoteTool, address=address, effect="none", timeout=timeout)
    uri = {"type": "string", "description": "Address of the resource."}
    return [
        make(
            work=list_all,
            name=f"{prefix}list_resources",
            description="Lists the resources that can be read.",
            schema={"type": "object", "properties": {}},
        ),
        make(
            work=read,
            name=f"{prefix}read_resource",
            description="Reads a resource.",
            schema={"type": "object", "properties": {"uri": uri}, "required": ["uri"]},
        ),
    ]


def _prompt_tool(address: ServerAddress, prompt: Prompt, *, name: str, timeout: float | timedelta | None) -> AgentTool:
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
        answer = await client.get_prompt(prompt.name, texts)
        parts = [_content(each.content) for each in answer.messages]
        messages = (f"{each.role}: {_text_of([part])}" for each, part in zip(answer.messages, parts, strict=True))
        return ToolResult("\n\n".join(messages), attachments=_attachments_of(parts))

    description = prompt.description or f"Returns the prompt '{prompt.name}'."
    return _RemoteTool(
        address=address, work=render, name=name, description=description, schema=schema, effect="none", timeout=timeout
    )


def _content(block: ContentBlock) -> str | Attachment:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return _decoded(block.data, "", block.mime_type, block.type)
        case "resource_link":
            return f"[resource {block.uri} ({block.title or block.name})]"
        case "resource":
            return _resource_part(block.resource)


def _resource_part(part: TextResourceContents | BlobResourceContents) -> str | Attachment:
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    uri = str(part.uri)
    return _decoded(getattr(part, "blob", ""), uri.rstrip("/").rpartition("/")[2], part.mime_type, f"resource {uri}")


def _decoded(encoded: str, name: str, media_type: str | None, what: str) -> str | Attachment:
    """Return a content of a server, or a line with the reason why it is refused."""
    try:
        return Attachment.of_bytes(base64.b64decode(encoded, validate=True), name=name or None, media_type=media_type)
    except (binascii.Error, ValidationError) as error:
        return f"[{what}, which cannot be read: {message_of(error)}]"


def _text_of(parts: Sequence[str | Attachment]) -> str:
    return "\n".join(mention(part) if isinstance(part, Attachment) else part for part in parts)


def _attachments_of(parts: Sequence[str | Attachment]) -> tuple[Attachment, ...]:
    return tuple([part for part in parts if isinstance(part, Attachment)])
