"""Teams as tools of an MCP server, by the official SDK. Package: cli.

In: teams; requests of a client over standard input. Out: the output's text, or why the run failed; progress meanwhile.
Rules: a call that is cancelled ends its run; so does a client that leaves.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

from ensemble_ray.cli.inputs.arguments import needed_inputs
from ensemble_ray.cli.view.failures import describe_error
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import EnsembleError, IllegalStateError, ValidationError
from ensemble_ray.events import Event, TaskCompleteEvent, TaskFailedEvent
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason

__all__ = ["TeamTools"]

#: How long runs may take to end when the client has left, s.
_RELEASE_S = 15.0
#: Characters of a task's description that a tool's description shows.
_SHOWN = 120


class TeamTools:
    """The tools of a server: one for each team."""

    def __init__(self, *, runtime: str | None = None) -> None:
        self._runtime = runtime
        self._teams: dict[str, Ensemble] = {}
        self._runs: set[asyncio.Task[EnsembleOutput]] = set()

    def add(self, target: str, team: Ensemble) -> None:
        """Offer a team, under the name of its file or attribute.

        Raises:
            ValidationError: another team has that name.
        """
        stem = target.rpartition(":")[2] if ":" in target and not Path(target).suffix else Path(target).stem
        name = re.sub(r"[^A-Za-z0-9_]", "_", stem)
        if name in self._teams:
            raise ValidationError(
                f"Two teams would be the tool '{name}': rename one of the files. The second: {target}"
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
                await server.run(received, sent, server.create_initialization_options())
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
    ) -> CallToolResult:
        team = self._teams.get(params.name)
        if team is None:
            raise MCPError(INVALID_PARAMS, f"Unknown tool '{params.name}'. Known: {list(self._teams)}")
        arguments = params.arguments or {}
        known = _inputs_of(team)
        if spare := [name for name in arguments if name not in known]:
            return _failed(f"Unknown inputs {spare}. Known: {list(known)}")
        # A task of its own: when the call is cancelled, the run needs time to end, which a cancelled scope does not give.
        run = asyncio.create_task(self._run(team, arguments, context))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        try:
            output = await asyncio.shield(run)
        except asyncio.CancelledError:
            run.cancel()
            raise
        except (EnsembleError, IllegalStateError) as error:
            return _failed(describe_error(error))
        if output.exit_reason is not ExitReason.COMPLETED:
            return _failed(f"The run ended early ({output.exit_reason}). It gave so far:\n{output.raw}")
        return CallToolResult(content=[TextContent(text=output.raw)])

    async def _run(
        self, team: Ensemble, inputs: Mapping[str, object], context: ServerRequestContext[dict[str, Any]]
    ) -> EnsembleOutput:
        """Run a team, and tell how many of its tasks are done; cancelled, it ends the run first."""
        done = 0
        # `stream` is a generator, which its own type does not say
        updates = cast("AsyncGenerator[Event | EnsembleOutput]", team.stream(inputs, runtime=self._runtime))
        async with aclosing(updates) as stream:
            async for update in stream:
                match update:
                    case EnsembleOutput():
                        return update
                    case TaskCompleteEvent() | TaskFailedEvent():
                        done += 1
                        text = f"{update.agent_role}: {_cut(update.task_description)}"
                        await context.session.report_progress(done, max(done, update.total_tasks), text)
                    case _:
                        pass
        raise IllegalStateError("the run's events ended before its output")


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
    tasks = "; ".join(_cut(task.description) for task in team.all_tasks)
    return Tool(
        name=name,
        description=f"Runs a team of agents and returns what its last task gave. Its tasks: {tasks}",
        input_schema={
            "type": "object",
            "properties": properties,
            "required": [each for each in properties if each not in team.inputs],
            "additionalProperties": False,
        },
    )


def _failed(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=text)], is_error=True)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
