"""The MCP server of an endpoint: teams as tools, a call as a run of the run service (S-INT-25 to S-INT-29).

In: requests as the SDK read them, each with its caller. Out: the text of a run's output, progress meanwhile, open reviews as forms.
Rules: nothing of a run lives here: what is asked of a client travels with the run's id, and any replica takes its answer. A caller sees
its teams alone, and decides only with the right to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    InputRequiredResult,
    ListToolsResult,
    PaginatedRequestParams,
)

from ensemble_ray.process.config import package_version
from ensemble_ray.serve.mcp_api.asked_team import AskedTeam
from ensemble_ray.serve.mcp_api.tools import tool_of, tools_by_name
from ensemble_ray.serve.rights import caller_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mcp.server import ServerRequestContext
    from starlette.requests import Request

    from ensemble_ray.serve.run_schemas import EnsembleInfo


def build_session_manager(*, max_body_bytes: int) -> StreamableHTTPSessionManager:
    """Return what answers requests, each on its own.

    Args:
        max_body_bytes: The longest body.
    """
    server: Server[dict[str, Any]] = Server(
        "ensemble-ray",
        version=package_version(),
        on_list_tools=_list,
        on_call_tool=_call,
        # Arguments travel in bodies alone; without this the tools are listed anew for each call.
        get_tool_input_schema=lambda _name: None,
    )
    return StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=max_body_bytes)


async def _list(
    context: ServerRequestContext[dict[str, Any]], _params: PaginatedRequestParams | None
) -> ListToolsResult:
    teams = await _teams(_request_of(context))
    return ListToolsResult(tools=[tool_of(name, info) for name, info in teams.items()])


async def _call(
    context: ServerRequestContext[dict[str, Any]], params: CallToolRequestParams
) -> CallToolResult | InputRequiredResult:
    request = _request_of(context)
    teams = await _teams(request)
    info = teams.get(params.name)
    if info is None:
        raise MCPError(INVALID_PARAMS, f"Unknown tool '{params.name[:200]}'. Known: {list(teams)}")
    asked = AskedTeam(context, request, info)
    if params.request_state is None:
        return await asked.begin(params.arguments or {})
    return await asked.go_on(params.request_state, params.input_responses or {})


def _request_of(context: ServerRequestContext[dict[str, Any]]) -> Request:
    """Return the request as it came over HTTP."""
    request: Request | None = context.request
    if request is None:
        raise RuntimeError("a call of a tool came without its HTTP request")
    return request


async def _teams(request: Request) -> Mapping[str, EnsembleInfo]:
    """Return the caller's teams, by the names of their tools."""
    caller = caller_of(request)
    return tools_by_name([each for each in await request.app.state.service.ensembles() if caller.sees(each.name)])
