"""CallableHost: one process with one copy of a run's own callables: handlers, guardrails, delegation policies (S-SET-31).

It also runs the handler tasks themselves, since all they do is call one of these. The scheduler runs no user code.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from actors.link.fed_wire import MoreCallables, TaskCallables
from actors.link.handles import as_bytes
from actors.link.wire import load_callables
from actors.worker.agent import AgentActor, refuse
from ensemble_ray.error_travel import Chain
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.execute.callables import Callables, LocalCallables
from ensemble_ray.threads import USER_ERRORS

__all__ = ["CallableHost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldTask:
    """The callables of one task."""

    handler: object
    input_guardrails: tuple[object, ...]
    output_guardrails: tuple[object, ...]


class _HeldTasks(Mapping[str, _HeldTask]):
    """Tasks of a run whose tasks are made while it goes on; what they share is one object (S-SET-31)."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}
        self._things: dict[str, object] = {}
        self._tasks: dict[str, TaskCallables] = {}

    def learn(self, more: MoreCallables) -> None:
        """Take what is new, and forget what is needed no longer. What cannot be loaded is found when it is asked."""
        for key in more.done_tasks:
            self._tasks.pop(key, None)
        for name in more.done_bodies:
            self._bodies.pop(name, None)
            self._things.pop(name, None)
        for name, body in more.bodies.items():
            self._bodies.setdefault(name, body)
        self._tasks.update(more.tasks)

    def __getitem__(self, key: str) -> _HeldTask:
        callables = self._tasks[key]
        return _HeldTask(
            handler=self._loaded(callables.handler) if callables.handler else None,
            input_guardrails=tuple(self._loaded(name) for name in callables.input_guardrails),
            output_guardrails=tuple(self._loaded(name) for name in callables.output_guardrails),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def _loaded(self, name: str) -> object:
        if name not in self._things:
            try:
                self._things[name] = cast("object", pickle.loads(self._bodies[name]))  # noqa: S301  our own driver's bytes
            except Exception as error:
                raise ValidationError(
                    f"A handler or guardrail cannot be loaded in a worker process: {message_of(error)}. "
                    "Install the module it comes from on every node, or use runtime='inline'"
                ) from error
        return self._things[name]


class CallableHost(AgentActor):
    """Hosts the callables of one run."""

    def __init__(self, house: str) -> None:
        super().__init__(house)
        #: of runs whose tasks are made while they go on
        self._fed: dict[str, _HeldTasks] = {}
        self._held: dict[str, asyncio.Future[LocalCallables]] = {}

    async def hold(self, run_id: str, body: bytes) -> None:
        """Load the callables that are asked here.

        Raises:
            ValidationError: they cannot be loaded in this process.
        """
        held = self._awaited(run_id)
        try:
            cargo = load_callables(body)
            held.set_result(LocalCallables(cargo.tasks, cargo.policies))
        except Exception as error:
            refusal = ValidationError(
                f"The run's handlers, guardrails and delegation policies cannot be loaded in a worker process: {message_of(error)}. "
                "Install the modules they come from on every node, or use runtime='inline'"
            )
            refuse(held, refusal)
            refuse(self._binding(run_id), refusal)  # no `bind` will follow
            raise refusal from error

    async def hold_more(self, run_id: str, more: MoreCallables) -> None:
        """Take the callables of tasks that were made just now."""
        if run_id not in self._fed:
            tasks = self._fed[run_id] = _HeldTasks()
            self._awaited(run_id).set_result(LocalCallables(tasks))
        self._fed[run_id].learn(more)

    async def evaluate(self, run_id: str, path: str, argument: bytes) -> bytes:
        """Call one; gives `(value, None)` or `(None, error)` as bytes."""
        try:
            # An agent's process may ask before the scheduler's message with the callables has come.
            held = await asyncio.shield(self._awaited(run_id))
            value = await held.evaluate(path, pickle.loads(argument))  # noqa: S301  our own cluster's bytes
            return as_bytes((value, None))
        except USER_ERRORS as error:  # it belongs to the asking task; `sys.exit` in a guardrail ends no process
            return as_bytes((None, Chain(error)))

    async def release(self, run_id: str) -> bool:
        """Forget a run and its callables."""
        self._fed.pop(run_id, None)
        held = self._held.pop(run_id, None)
        if held is not None:
            held.cancel()
        return await super().release(run_id)

    def _awaited(self, run_id: str) -> asyncio.Future[LocalCallables]:
        """The callables of a run, when they have come."""
        if run_id not in self._held:
            self._held[run_id] = asyncio.get_running_loop().create_future()
        return self._held[run_id]

    def _callables_of(self, run_id: str, host: Any) -> Callables:  # noqa: ARG002  this process is the host
        """Handler tasks that run here ask the callables here."""
        return self._held[run_id].result()
