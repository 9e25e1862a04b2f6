"""A cluster at work, as studio sees it from a process that has nothing to do with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from ensemble_ray import Ensemble, OpenAIChatModel, RateLimit, RayRuntime, RetryPolicy
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.testing import Fault, ModelServer, ScriptedModel
from tests.browser.gates import Gate
from tests.builders import agent, task
from tests.scenarios.teams import PATIENCE_S

Servers = Callable[..., ModelServer]
HOURLY = RateLimit.of(1, 3600.0)


class Seen:
    """What the page is told."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def until(self, path: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Return what is told when that holds."""
        deadline, told = time.monotonic() + PATIENCE_S, {}
        while time.monotonic() < deadline:
            told = self._client.get(path).json()
            if holds(told):
                return told
            time.sleep(0.2)
        raise AssertionError(told)


def of(role: str, told: dict[str, Any]) -> dict[str, Any]:
    """The process of an agent; empty where it has not begun."""
    for node in told["nodes"]:
        for process in node["processes"]:
            if process["pid"] and any(role in run["agents"] for run in process["runs"]):
                return process
    return {}


def waiting(told: dict[str, Any]) -> list[str]:
    """Steps that wait in processes."""
    every = [process for node in told["nodes"] for process in node["processes"]]
    return [each["step"] for process in every for each in process["in_flight"] if each["since"] is None]


def test_processes_limits_and_breakers_are_seen_while_a_run_goes_on(
    ray_runtime: RayRuntime, model_server: Servers, home: str
) -> None:
    """S-STU-32, S-STU-33, S-STU-34, S-STU-35, S-CLU-104: nobody named the cluster; the run's owner is in it."""
    gate = Gate()
    failing = model_server(lambda _: Fault(status=503, message="down"))
    down = OpenAIChatModel("m", base_url=failing.base_url, api_key="sk-of-a-test")
    held = ScriptedModel(otherwise=gate)
    bob = agent(held, "Bob", isolation="process", max_concurrency=1)
    ann = agent(held, "Ann", isolation="process", rate_limit=HOURLY)
    team = Ensemble(
        tasks=[
            *(task(name, bob, name=name) for name in ("bob-1", "bob-2")),
            *(task(name, ann, name=name) for name in ("ann-1", "ann-2")),
            task("cid", agent(down, "Cid", isolation="process"), name="cid"),
        ],
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        retry=RetryPolicy(first_delay=0, max_delay=0),
    )
    run = team.start(runtime=ray_runtime, run_id="seen")
    server = StudioServer(StoreAddress.of(Path(home)), port=0)
    server.start()
    try:
        with httpx.Client(base_url=f"{server.url}api/studio/", timeout=120, trust_env=False) as client:
            seen = Seen(client)
            told = seen.until(
                "actors",
                lambda told: (
                    all(of(role, told) for role in ("Ann", "Bob", "Cid"))
                    and any(each["queue"] for each in told["limiters"])
                    and any(each["state"] != "closed" for each in told["breakers"])
                    and len(waiting(told)) == 1
                ),
            )
            first = of("Bob", told)
            assert (first["kind"], first["state"], first["restarts"], first["queue"]) == ("agent", "ready", 0, 1)
            assert (first["memory_mb"] > 1, first["scheduler"]) == (True, "scheduler")
            assert sorted(each["step"] for each in first["in_flight"]) == ["bob-1#0", "bob-2#0"]
            (bucket,) = [each for each in told["limiters"] if each["queue"]]
            assert (bucket["requests"], bucket["period_s"], bucket["queue"], bucket["permits"]) == (1, 3600.0, 1, 0)
            assert bucket["agents"] == ["Ann"]
            (breaker,) = [each for each in told["breakers"] if each["state"] != "closed"]
            assert breaker["last_failure"].startswith("HTTP 503")
            kinds = {process["kind"] for node in told["nodes"] for process in node["processes"]}
            assert kinds >= {"scheduler", "agent", "limiter"}
            os.kill(first["pid"], signal.SIGKILL)
            again = seen.until("runs/seen/actors", lambda told: of("Bob", told).get("restarts") == 1)
            second = of("Bob", again)
            assert second["pid"] != first["pid"]
            assert {each["deaths"] for each in second["in_flight"]} == {1}
            assert {run["run_id"] for node in again["nodes"] for p in node["processes"] for run in p["runs"]} == {
                "seen"
            }
            run.cancel()
            gate.open.set()
            assert run.join(PATIENCE_S)
            seen.until("runs/seen/actors", lambda told: not told["nodes"])
    finally:
        gate.open.set()
        server.stop()
