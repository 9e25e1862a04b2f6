"""RayRuntime: the `Runtime` port on a cluster. Runs in the driver: pickles, submits, listens, answers.

It creates only the detached scheduler; the scheduler makes every other actor.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import cloudpickle
import ray
import ray.exceptions

from actors import spawn
from actors.connection import LOCAL, check_version, connection_id, join_or_start
from actors.event_hub import Page, Request
from actors.failures import last_line, ours
from actors.preflight import dump
from actors.wire import AgentCargo, RunPackage, unpack_output, unpack_result
from ensemble_ray.config import home_directory
from ensemble_ray.errors import EnsembleError, IllegalStateError, message_of, portable
from ensemble_ray.execute.conductor import Conducted
from ensemble_ray.execute.orders import RunOutcome, TaskResult
from ensemble_ray.inline import outcome_of
from ensemble_ray.loop import bridge, run_blocking
from ensemble_ray.threads import USER_ERRORS, threads

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.definition.task import Task
    from ensemble_ray.events import Event
    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.runtime import RunRequest

__all__ = ["RayRuntime"]

_log = logging.getLogger(__name__)
#: How long one poll waits for events, s.
_POLL_S = 10.0
#: Pause before a hub that could not be reached is asked again, s.
_RETRY_S = 0.5


class RayRuntime:
    """Runs on Ray: on a cluster that is there, or on a local one that lives until this process ends (S-SET-42)."""

    def __init__(
        self,
        address: str | None = None,
        *,
        record: bool = True,
        home: Path | None = None,
        init_options: Mapping[str, object] | None = None,
    ) -> None:
        """Make one; nothing is started before the first run.

        Args:
            address: Cluster to join; default `RAY_ADDRESS`, else a local instance is started.
            record: Keep each run's record on disk; else in memory only.
            home: Directory of the records on the cluster's nodes; default: this process's.
            init_options: More arguments for `ray.init`.
        """
        self._address = address
        self._record = record
        self.home = home
        self._init_options = dict(init_options or {})
        self._scheduler: Any = None
        self._connected_as = ""
        self._starting: asyncio.Lock | None = None
        self._keeps_warm = False

    async def submit(self, request: RunRequest) -> RayRun:
        """Begin a run on the cluster.

        Raises:
            ValidationError: something that must travel cannot (S-CONV-34).
            RunExistsError: a run of that id is running there.
        """
        package = self._package(request)
        scheduler = await self._connected()
        try:
            hub = await scheduler.submit.remote(package)
        except ray.exceptions.RayError as error:
            self._scheduler = None  # the next run looks for it anew
            raise ours(error, request.run_id) from None
        run = RayRun(request, scheduler, hub)
        run.attend()
        return run

    async def close(self) -> None:
        """End the agent processes that are kept for the next run; a cluster is left as it is."""
        self._keeps_warm = False
        if self._scheduler is not None and ray.is_initialized():
            try:
                await self._scheduler.cool.remote()
            except ray.exceptions.RayError as error:
                _log.warning("The scheduler cannot be reached; its processes end with it: %s", last_line(error))

    async def __aenter__(self) -> Self:
        self._keeps_warm = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await bridge(self.close())

    def __enter__(self) -> Self:
        self._keeps_warm = True
        return self

    def __exit__(self, *_: object) -> None:
        run_blocking(self.close())

    # Connecting.

    async def _connected(self) -> Any:
        """The scheduler's handle; the first caller starts what is not there."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            # A handle is good for one connection; `ray.shutdown` and another `ray.init` make it useless.
            if self._scheduler is None or connection_id() != self._connected_as:
                scheduler = await threads.run(self._connect)
                await check_version(scheduler)
                self._scheduler, self._connected_as = scheduler, connection_id()
        return self._scheduler

    def _connect(self) -> Any:
        """Join or start a cluster, in a thread; gives the scheduler's handle."""
        address = self._address or os.environ.get("RAY_ADDRESS", "").strip() or LOCAL
        if join_or_start(address, self._init_options) and address == LOCAL:
            # Nobody else uses it, and starting the next run's processes would cost a second each.
            self._keeps_warm = True
        return spawn.scheduler()

    # Packing.

    def _package(self, request: RunRequest) -> RunPackage:
        planned = request.planned
        synthesized = {entry.key for entry in planned.plan.agents if entry.is_synthesized}
        bare: dict[str, bytes] = {}
        for key, task in planned.tasks.items():
            bare[key] = dump(_without_callables(task), f"Task '{key}'")
        guardrails = {
            key: (len(task.input_guardrails), len(task.output_guardrails))
            for key, task in planned.tasks.items()
            if task.input_guardrails or task.output_guardrails
        }
        called = {key: task for key, task in planned.tasks.items() if task.handler is not None or key in guardrails}
        home = None
        if self._record:
            home = str((self.home or home_directory()).resolve())
        return RunPackage(
            run_id=request.run_id,
            plan=planned.plan,
            frame=request.frame,
            header=request.header,
            earlier=request.earlier,
            agents=[_cargo(key, agent, key in synthesized) for key, agent in planned.agents.items()],
            tasks=bare,
            guardrails=guardrails,
            callables=_callables(called) if called else None,
            home=home,
            is_attended=bool(request.frame.interest) or request.frame.has_tool_metrics or _has_doubles(planned),
            keeps_warm=self._keeps_warm or (self._scheduler is None and not ray.is_initialized() and not self._joins()),
        )

    def _joins(self) -> bool:
        return bool(self._address or os.environ.get("RAY_ADDRESS", "").strip())


def _without_callables(task: Task) -> Task:
    if task.handler is None and not task.input_guardrails and not task.output_guardrails:
        return task
    return task.model_copy(update={"handler": None, "input_guardrails": (), "output_guardrails": ()})


def _callables(tasks: Mapping[str, Task]) -> bytes:
    for key, task in tasks.items():
        for kind in ("handler", "input_guardrails", "output_guardrails"):
            dump(getattr(task, kind), f"Task '{key}' -> {kind}")
    return dump(dict(tasks), "Tasks with handlers or guardrails")


def _cargo(key: str, agent: Agent, is_synthesized: bool) -> AgentCargo:  # noqa: FBT001  a single private flag
    body = dump(agent, f"Agent '{agent.role}'")
    kind = hashlib.sha256(dump((agent.llm, agent.tools), f"Agent '{agent.role}'")).hexdigest()
    return AgentCargo(
        key=key,
        body=body,
        kind=kind,
        isolation=agent.isolation,
        replicas=agent.replicas,
        is_synthesized=is_synthesized,
    )


def _has_doubles(planned: Planned) -> bool:
    """Whether scripted models of this process take part; their calls come back here."""
    import sys

    scripted = sys.modules.get("ensemble_ray.testing.scripted")
    return scripted is not None and bool(planned.agents) and scripted.has_live_doubles()


class RayRun:
    """A run on the cluster, seen from its driver."""

    def __init__(self, request: RunRequest, scheduler: Any, hub: Any) -> None:
        self.run_id = request.run_id
        self._request = request
        self._scheduler = scheduler
        self._hub = hub
        self._cursor = 0
        self._hub_life = ""
        self._attending: asyncio.Task[None] | None = None
        self._is_leaving = False
        #: answers that somebody in the run waits for
        self._answers: set[asyncio.Task[None]] = set()
        #: what this process was told, such as counts for the user's metrics
        self._told: set[asyncio.Task[None]] = set()

    def attend(self) -> None:
        """Listen for events and answer requests until the run ends."""
        if self._hub is not None:
            self._attending = asyncio.get_running_loop().create_task(self._attend())

    async def wait(self) -> RunOutcome:
        """Return when the run ended and all its events were handed on.

        Raises:
            EnsembleError: the scheduler's process died, or the cluster did.
        """
        try:
            ended: Conducted[bytes, bytes] = await self._scheduler.wait.remote(self.run_id)
        except ray.exceptions.RayError as error:
            raise ours(error, self.run_id) from None
        finally:
            await self._leave()
        self._scheduler.forget.remote(self.run_id)
        try:
            return outcome_of(self.run_id, _opened(ended))
        except Exception as error:
            unreadable = EnsembleError(
                f"Run {self.run_id}: its results cannot be loaded in this process: {message_of(error)}. "
                "Install the module they come from here too, or use runtime='inline'"
            )
            unreadable.run_id = self.run_id
            raise unreadable from error

    async def cancel(self) -> None:
        """Ask the run to end; of a scheduler that is gone `wait` tells."""
        try:
            await self._scheduler.cancel.remote(self.run_id)
        except ray.exceptions.RayError as error:
            _log.warning("Run %s: the scheduler cannot be reached: %s", self.run_id, last_line(error))

    async def _leave(self) -> None:
        """Take what is still in the hub, and answer no more."""
        if self._attending is None:
            return
        self._is_leaving = True
        try:
            # Woken, not cancelled: a page that is on its way has requests that nobody could take again.
            await self._hub.publish.remote(self.run_id, [])
            await asyncio.wait([self._attending])
            while self._take(await self._hub.poll.remote(self.run_id, self._cursor, 0.0, attends=True)):
                pass
            for answer in self._answers:
                answer.cancel()  # the run has ended: whoever asked is gone
            if self._told:
                await asyncio.wait(self._told, timeout=5)
            await self._hub.desert.remote(self.run_id)
        except ray.exceptions.RayError as error:
            _log.warning("Run %s: the event hub cannot be reached; its last events are lost: %s", self.run_id, error)

    async def _attend(self) -> None:
        while not self._is_leaving:
            try:
                page: Page = await self._hub.poll.remote(self.run_id, self._cursor, _POLL_S, attends=True)
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: the event hub cannot be reached; events are lost: %s", self.run_id, error)
                await asyncio.sleep(_RETRY_S)  # it is started again; whoever asks something in the run waits for us
            else:
                self._take(page)

    def _take(self, page: Page) -> bool:
        """Hand on what a page brought; whether there may be more."""
        is_new_hub = bool(self._hub_life) and page.life != self._hub_life
        self._hub_life = page.life
        self._cursor = 0 if is_new_hub else page.cursor
        for body in () if is_new_hub else page.events:
            self._emit(body)
        for asked in page.requests:
            job = asyncio.get_running_loop().create_task(self._serve(asked))
            jobs = self._told if asked.number is None else self._answers
            jobs.add(job)
            job.add_done_callback(jobs.discard)
        return is_new_hub or bool(page.events or page.requests)

    def _emit(self, body: bytes) -> None:
        try:
            event = cast("Event", pickle.loads(body))  # noqa: S301  bytes of our own cluster
        except Exception as error:  # noqa: BLE001  one event that cannot be loaded here must not end the listening
            _log.warning("Run %s: an event cannot be loaded in this process: %s", self.run_id, message_of(error))
        else:
            self._request.events.emit(event)

    async def _serve(self, asked: Request) -> None:
        """Do what only the driver can, and answer."""
        try:
            body = cloudpickle.dumps(await self._service(asked.name, asked.payload))
        except USER_ERRORS as error:  # it belongs to whoever asked
            body = cloudpickle.dumps(portable(error))
        if asked.number is not None:
            try:
                await self._hub.answer.remote(self.run_id, {asked.number: body})
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: an answer is lost with the event hub: %s", self.run_id, last_line(error))

    async def _service(self, name: str, payload: Mapping[str, object]) -> object:
        if name == "tool_metrics":
            method = getattr(self._request.tool_metrics, str(payload["method"]))
            return await threads.run(method, *cast("Sequence[object]", payload["arguments"]))
        if name.startswith("scripted_model."):
            from ensemble_ray.testing.scripted import answer_scripted

            return await answer_scripted(payload)
        raise IllegalStateError(f"The driver has no service '{name}'")


def _opened(ended: Conducted[bytes, bytes]) -> Conducted[TaskOutput, TaskResult]:
    """The outcome with its outputs loaded."""
    from ensemble_ray.execute.conductor import Failed

    return Conducted(
        state=ended.state,
        exit_reason=ended.exit_reason,
        started_at=ended.started_at,
        completed_at=ended.completed_at,
        completed=[(key, unpack_output(body)) for key, body in ended.completed],
        failures=[
            Failed(
                key=failed.key,
                at=failed.at,
                failure=unpack_result(failed.failure),
                completed_before=failed.completed_before,
            )
            for failed in ended.failures
        ],
        unfinished=[unpack_result(body) for body in ended.unfinished],
    )
