"""CallableHost: one process with one copy of a run's own callables: handlers, guardrails, delegation policies (S-SET-31).

It also runs the handler tasks themselves, since all they do is call one of these. The scheduler runs no user code.
"""

from __future__ import annotations

import asyncio
from typing import Any

from actors.agent import AgentActor, refuse
from actors.handles import as_bytes
from actors.wire import load_callables
from ensemble_ray.errors import ValidationError, message_of, portable
from ensemble_ray.execute.callables import Callables, LocalCallables
from ensemble_ray.threads import USER_ERRORS

__all__ = ["CallableHost"]


class CallableHost(AgentActor):
    """Hosts the callables of one run."""

    def __init__(self, house: str) -> None:
        super().__init__(house)
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

    async def evaluate(self, run_id: str, path: str, argument: bytes) -> bytes:
        """Call one; gives `(value, None)` or `(None, error)` as bytes."""
        import pickle

        try:
            # An agent's process may ask before the scheduler's message with the callables has come.
            held = await asyncio.shield(self._awaited(run_id))
            value = await held.evaluate(path, pickle.loads(argument))  # noqa: S301  our own cluster's bytes
            return as_bytes((value, None))
        except USER_ERRORS as error:  # it belongs to the asking task; `sys.exit` in a guardrail ends no process
            return as_bytes((None, portable(error)))

    async def release(self, run_id: str) -> bool:
        """Forget a run and its callables."""
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
