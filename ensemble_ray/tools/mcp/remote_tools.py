"""Tools, resources and prompts of an MCP server, as an agent's tools. Package: tools.

In: what the server lists, and what the model wrote. Out: a `ToolResult`, always.
Rules: a call that may change something is never made twice; one whose outcome nobody knows says so.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pydantic

from ensemble_ray.errors import ToolConfigurationError
from ensemble_ray.events.telemetry.active import use_span
from ensemble_ray.process.context import current_traceparent
from ensemble_ray.tools.foreign_schema import normalise_parameters, rename_properties
from ensemble_ray.tools.mcp.connection import ServerLostError, ask_server
from ensemble_ray.tools.mcp.listing import collect_pages
from ensemble_ray.tools.mcp.questions import CallQuestions
from ensemble_ray.tools.mcp.texts import prompt_text, resource_list_text, resource_text, result_of
from ensemble_ray.tools.registry import log_dropped_keywords
from ensemble_ray.tools.tool import AgentTool, ContextAgentTool, ToolResult, current_tool_context
from ensemble_ray.values.messages import Effect

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import Prompt, RequestParamsMeta, Tool

    from ensemble_ray.tools.mcp.address import ServerAddress

__all__ = ["effect_of_hints", "prompt_tool", "remote_tool", "resource_tools"]

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
