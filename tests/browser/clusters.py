"""A local Ray at work, for pictures: agents that wait for a model, a limit that is full, an endpoint that fails, a process that died."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import ray

from ensemble_ray import Agent, Ensemble, OpenAIChatModel, RateLimit, RayRuntime, RetryPolicy, Task
from ensemble_ray.actors.driver.cluster import describe_cluster
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.testing import Fault, ModelServer
from ensemble_ray.values.metrics import ProcessDescription

__all__ = ["ClusterAtWork"]

_PATIENCE_S = 60.0


class ClusterAtWork:
    """Runs that go on until it is left."""

    def __init__(self, home: Path) -> None:
        """Choose where the runs are recorded."""
        self._home = home
        self._gate = threading.Event()
        self._slow = ModelServer(self._answer)
        self._down = ModelServer(lambda _: Fault(status=503, message="overloaded"))

    def _answer(self, _: object) -> str:
        self._gate.wait(600)
        return "Done."

    def __enter__(self) -> Self:
        """Begin the runs; kill a process; return when another has its place and the endpoint is not asked any more."""
        self._slow.__enter__()
        self._down.__enter__()
        runtime = RayRuntime(home=self._home, init_options={"num_cpus": 4})
        slow = OpenAIChatModel("large", base_url=self._slow.base_url, api_key="sk-none")
        down = OpenAIChatModel("spare", base_url=self._down.base_url, api_key="sk-none")

        def agent(role: str, model: OpenAIChatModel = slow, **more: object) -> Agent:
            return Agent(**{"role": role, "goal": f"{role} well", "llm": model, **more})  # type: ignore[arg-type]

        def tasks(who: Agent, *names: str) -> list[Task]:
            return [Task(name=name, description=name, expected_output="a text", agent=who) for name in names]

        limit = RateLimit.of(2, 3600.0)
        market = [
            *tasks(agent("Researcher", max_concurrency=2), "find-prices", "find-rivals", "find-laws"),
            *tasks(agent("Analyst", rate_limit=limit), "compare-prices", "compare-rivals", "compare-laws"),
            *tasks(agent("Translator", down), "translate", "translate-back"),
        ]
        retry = RetryPolicy(first_delay=0, max_delay=0)
        options = {"workflow": "parallel", "parallel_error_strategy": "continue_on_error", "retry": retry}
        self._runs = [
            Ensemble(tasks=market, **options).start(runtime=runtime, run_id="market-letter-47"),  # type: ignore[arg-type]
            Ensemble(tasks=tasks(agent("Writer"), "outline", "draft"), **options).start(  # type: ignore[arg-type]
                runtime=runtime, run_id="harbour-review"
            ),
        ]
        victim = _wait_for("Researcher")
        os.kill(victim, signal.SIGKILL)
        _wait_for("Researcher", other_than=victim)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the runs, and Ray."""
        for run in self._runs:
            run.cancel()
        self._gate.set()
        for run in self._runs:
            run.join(_PATIENCE_S)
        self._slow.__exit__(kind, error, trace)
        self._down.__exit__(kind, error, trace)
        ray.shutdown()


def _wait_for(role: str, *, other_than: int | None = None) -> int:
    """Return the number of the process that an agent lives in."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if ray.is_initialized():
            for process in _processes():
                has_it = any(role in run.agents for run in process.runs)
                if has_it and process.pid not in {None, other_than} and process.tasks:
                    return int(process.pid or 0)
        time.sleep(0.3)
    raise TimeoutError(role)


def _processes() -> list[ProcessDescription]:
    return [process for actor in run_blocking(describe_cluster()).actors for process in actor.processes]
