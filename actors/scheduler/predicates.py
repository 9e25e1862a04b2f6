"""HostedPredicates: a run's predicates and edge conditions, asked in the host of its callables.

Outputs are bytes that nobody here loads; what a predicate raised comes back as bytes, too. A host that was replaced has no
history, and is sent all of it by whoever asks (S-LOOP-54).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray.exceptions

from ensemble_ray.actors.link.background_tasks import BackgroundTasks
from ensemble_ray.actors.link.failures import last_line
from ensemble_ray.actors.link.packing import pack_question, packed_evaluation
from ensemble_ray.execute.questions import EvaluationFailed
from ensemble_ray.process.bounded_log import bounded_logger

if TYPE_CHECKING:
    from ensemble_ray.actors.scheduler.session import RunSession
    from ensemble_ray.execute.questions import HistoryPart
    from ensemble_ray.schedule.instructions import EdgeMatches, UntilHolds

__all__ = ["HostedPredicates"]

_log = bounded_logger(__name__)


class HostedPredicates:
    """The predicates of one run. Fulfils `Predicates` with outputs as bytes."""

    def __init__(self, session: RunSession) -> None:
        """Make them of a run whose submission has predicates."""
        self._session = session
        self._background = BackgroundTasks()

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[bytes]]
    ) -> bool | EvaluationFailed | None:
        """Ask one in its process."""
        body = pack_question(self._session.run_id, question, sent_count, new)

        async def ask(handle: Any) -> bool | EvaluationFailed | None:
            answer: bool | EvaluationFailed | None = await handle.holds_predicate.remote(body)
            return answer

        try:
            return await self._session.ask_callables(ask)
        except RuntimeError as error:
            return packed_evaluation(EvaluationFailed.of(error))

    def forget(self, unit: str) -> None:
        """Let the history of a unit go that has ended; never waits."""
        self._background.start(self._forget(unit))

    async def _forget(self, unit: str) -> None:
        host = self._session.callables_host
        if host is None:
            return
        try:
            await host.handle.forget_history.remote(self._session.run_id, unit)
        except ray.exceptions.RayError as error:  # it is gone, and with it what it kept
            _log.debug("Run %s: the history of '%s' is gone: %s", self._session.run_id, unit, last_line(error))
