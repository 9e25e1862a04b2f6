"""Teams as tools of an MCP server, by the official SDK. Package: cli.

In: teams; requests of a client over standard input. Out: the tools, and what calls of them gave.
Rules: a call that is cancelled ends its run; so does a client that leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_PARAMS,
    PARSE_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ErrorData,
    InputRequiredResult,
    JSONRPCError,
    ListToolsResult,
    PaginatedRequestParams,
    Tool,
)

from ensemble_ray.cli.inputs.arguments import needed_inputs
from ensemble_ray.cli.team_call import TeamCall, make_failure
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.tools.mcp.delivery import ReadMessages
from ensemble_ray.tools.tool import make_tool_name
from ensemble_ray.values.outputs import EnsembleOutput

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, WriteStream

__all__ = ["TeamTools"]

#: Characters of a task's description in that of a tool.
_SHOWN = 120

#: How long runs may take to end when the client has left, s.
_RELEASE_S = 15.0


class TeamTools:
    """The tools of a server: one for each team."""

    def __init__(self, *, runtime: str | None = None) -> None:
        self._runtime = runtime
        self._teams: dict[str, Ensemble] = {}
        self._runs: set[asyncio.Task[EnsembleOutput]] = set()

    def add(self, target: str, team: Ensemble) -> None:
        """Offer a team, under its name, else that of its file or attribute.

        Raises:
            ValidationError: another team has that name.
        """
        stem = target.rpartition(":")[2] if ":" in target and not Path(target).suffix else Path(target).stem
        name = make_tool_name(team.name or stem)
        if name in self._teams or not name.strip("_"):  # such as names in other scripts
            name = make_tool_name(stem)
        if name in self._teams:
            raise ValidationError(
                f"Two teams would be the tool '{name}': rename one of the teams. The second: {target}"
            )
        self._teams[name] = team

    async def serve(self) -> None:
        """Answer on standard input and output until the client leaves."""
        server: Server[dict[str, Any]] = Server(
            "ensemble-ray",
            version=version("ensemble-ray"),
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        try:
            async with stdio_server() as (received, sent):
                requests = _AnsweredErrors(received, sent)
                await server.run(requests, sent, server.create_initialization_options())
        finally:
            for run in self._runs:
                run.cancel()
            if self._runs:
                await asyncio.wait(self._runs, timeout=_RELEASE_S)

    async def _list(
        self, _context: ServerRequestContext[dict[str, Any]], _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=[_tool_of(name, team) for name, team in self._teams.items()])

    async def _call(
        self, context: ServerRequestContext[dict[str, Any]], params: CallToolRequestParams
    ) -> CallToolResult | InputRequiredResult:
        team = self._teams.get(params.name)
        if team is None:
            raise MCPError(INVALID_PARAMS, f"Unknown tool '{params.name}'. Known: {list(self._teams)}")
        arguments = params.arguments or {}
        known = _inputs_of(team)
        if spare := [name for name in arguments if name not in known]:
            return make_failure(f"Unknown inputs {spare}. Known: {list(known)}")
        call = TeamCall(team, context, self._runs, runtime=self._runtime)
        if params.request_state is None:
            return await call.begin(arguments)
        return await call.go_on(params.request_state, params.input_responses or {})


class _AnsweredErrors(ReadMessages):
    """Requests of a client; one that cannot be read is answered with the protocol's error (S-INT-89)."""

    def __init__(self, received: ReadStream[SessionMessage | Exception], sent: WriteStream[SessionMessage]) -> None:
        self._received = received
        self._sent = sent

    @property
    def last_context(self) -> object:
        """The sender's context, which the SDK asks for."""
        return getattr(self._received, "last_context", None)

    async def aclose(self) -> None:
        """Close the stream inside."""
        await self._received.aclose()

    async def receive(self) -> SessionMessage | Exception:
        """Return the next request."""
        while isinstance(item := await self._received.receive(), Exception):
            error = ErrorData(code=PARSE_ERROR, message="The line is no JSON-RPC message in UTF-8")
            await self._sent.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=None, error=error)))
        return item


def _inputs_of(team: Ensemble) -> Mapping[str, list[str]]:
    """Return the names of a team's inputs, each with the tasks that use it."""
    return needed_inputs(team.all_tasks)


def _tool_of(name: str, team: Ensemble) -> Tool:
    properties: dict[str, object] = {}
    for each, users in _inputs_of(team).items():
        shown: dict[str, object] = {"type": "string", "description": f"Used by: {', '.join(users)}"}
        if each in team.inputs:
            shown["default"] = str(team.inputs[each])
        properties[each] = shown
    tasks = "; ".join(brief(task.description, _SHOWN) for task in team.all_tasks)
    about = f"Runs a team of agents and returns what its last task gave. Its tasks: {tasks}"
    return Tool(
        name=name,
        title=team.name,
        description=f"{team.description}\n{about}" if team.description else about,
        input_schema={
            "type": "object",
            "properties": properties,
            "required": [each for each in properties if each not in team.inputs],
            "additionalProperties": False,
        },
    )
