"""The control API on a dashboard's port: runs that a page asks for are shown to the pages, as they want it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import websockets

from ensemble_ray import Ensemble, ProcessControl, WebDashboard
from ensemble_ray.testing import ScriptedModel
from tests.serve.gates import Gate
from tests.serve.teams import INPUTS, pair


@asynccontextmanager
async def page(dashboard: WebDashboard) -> AsyncGenerator[Any]:
    """A page that is connected; gives what sends a message, and what returns the next one of a type."""
    origin = f"http://localhost:{dashboard.actual_port}"
    async with websockets.connect(f"ws://localhost:{dashboard.actual_port}/ws", origin=origin) as socket:  # type: ignore[arg-type]
        assert json.loads(await socket.recv())["type"] == "hello"

        async def ask(message: dict[str, Any] | None, *until: str) -> list[dict[str, Any]]:
            """The messages up to one of these types."""
            if message is not None:
                await socket.send(json.dumps(message))
            found: list[dict[str, Any]] = []
            while not found or found[-1]["type"] not in until:
                found.append(json.loads(await socket.recv()))
            return found

        yield ask


def shown(llm: ScriptedModel) -> tuple[WebDashboard, ProcessControl, Ensemble]:
    """A dashboard, what begins its runs, and the ensemble that they are of."""
    control = ProcessControl(runtime="inline")
    dashboard = WebDashboard(port=0, control=control)
    return dashboard, control, pair(llm).replace(dashboard=dashboard)


async def test_a_run_that_one_page_asks_for_is_shown_to_all() -> None:
    """S-CTL-3, S-CTL-31, S-CTL-35, S-WEB-33: in its order; a page that wants less is sent less, and its own answers in any case."""
    dashboard, control, team = shown(ScriptedModel(otherwise="fine"))
    with dashboard:
        async with page(dashboard) as asking, page(dashboard) as watching:
            (refused,) = await asking({"type": "run_request", "inputs": INPUTS}, "run_ack")
            control.use_template(team)
            await watching({"type": "subscribe", "events": ["task_completed", "ensemble_completed"]}, "subscribe_ack")
            seen = await asking({"type": "run_request", "inputs": INPUTS, "run_id": "first"}, "run_result")
            less = await watching(None, "ensemble_completed")
    assert (refused["status"], refused["error"]["code"]) == ("rejected", "NO_ENSEMBLE")
    assert [each["type"] for each in less] == ["task_completed", "task_completed", "ensemble_completed"]
    types = [each["type"] for each in seen if each["type"] not in {"run_ack", "run_result"}]
    assert (types[0], types[-1]) == ("ensemble_started", "ensemble_completed")
    assert types.count("task_started") == 2
    assert seen[-1]["result"]["raw"] == "fine"


async def test_runs_are_begun_over_http_and_stay_when_the_dashboard_is_started_again() -> None:
    """S-CTL-30, S-CTL-32, S-WEB-3, S-WEB-20, S-WEB-74: beside the dashboard's own routes, with its checks."""
    gate = Gate("fine")
    dashboard, control, team = shown(ScriptedModel(gate, otherwise="fine"))
    control.use_template(team)

    async def ask(method: str, path: str, **fields: Any) -> httpx.Response:
        url = f"http://localhost:{dashboard.actual_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await client.request(method, path, headers={"origin": url, **fields.pop("headers", {})}, **fields)

    with dashboard:
        taken = await ask("POST", "/api/runs", json={"inputs": INPUTS, "run_id": "first"})
        foreign = await ask("POST", "/api/runs", json={"inputs": INPUTS}, headers={"origin": "http://evil.example"})
        await gate.is_asked.wait()
        status = await ask("GET", "/api/status")
    gate.open()
    with dashboard:
        await ask("GET", "/api/runs/first/events")
        ended = await ask("GET", "/api/runs/first")
    assert (taken.status_code, taken.headers["location"]) == (202, "/api/runs/first")
    assert foreign.status_code == 403
    assert status.json()["status"] == "running"
    assert (ended.json()["status"], ended.json()["result"]["raw"]) == ("completed", "fine")
