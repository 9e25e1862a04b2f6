"""`/capabilities` and `/tools/{name}/invoke`: what is there, and one call of a tool (S-SRV-205 to S-SRV-207)."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import FAILURES, answer
from ensemble_ray.serve.capability_schemas import Capabilities, ToolCallBody, ToolReply
from ensemble_ray.serve.rights import CallerDependency
from ensemble_ray.serve.routes.service import ServiceDependency

capabilities_router: APIRouter = APIRouter(tags=["capabilities"], responses=FAILURES)


@capabilities_router.get("/capabilities", response_model=Capabilities)
async def get_capabilities(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the tools that can be called, and the models and tasks of the teams."""
    caller.check(Right.READ)
    found = await service.capabilities()
    tasks = [each for each in found.tasks if caller.sees(each.ensemble)]
    models = [each for each in found.models if caller.sees(each.ensemble)]
    return answer(found.model_copy(update={"tasks": tasks, "models": models}))


@capabilities_router.post("/tools/{name}/invoke", response_model=ToolReply)
async def post_tool_call(
    name: str, body: ToolCallBody, service: ServiceDependency, caller: CallerDependency
) -> JSONResponse:
    """Call a tool once, outside of any run."""
    caller.check(Right.ADMIN)
    return answer(await service.invoke_tool(name, body))
