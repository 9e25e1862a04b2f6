"""HeldPredicates: one run's predicates and conditions, in the process that has its callables.

In: questions of the scheduler, and those that follow a task of this process (S-LOOP-189); outputs as bytes. Out: verdicts; what a
predicate raised as bytes. Must never happen: a predicate that is asked twice because its answer takes longer than a report waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.actors.link.packing import packed_evaluation, unpack_output
from ensemble_ray.execute.questions import EvaluationFailed, FollowingQuestions, HistoryPart
from ensemble_ray.process.threads import USER_ERRORS

if TYPE_CHECKING:
    from ensemble_ray.coordinator.predicates import LocalPredicates
    from ensemble_ray.schedule.instructions import UnitQuestion

__all__ = ["HeldPredicates"]

#: How long the report of a task waits for verdicts, s. A message to and fro takes about 1 ms; of a predicate that takes longer
#: than this nobody notices it, and a run that is cancelled meanwhile hears of its task.
_WAIT_S = 0.01


class HeldPredicates:
    """The predicates of one run."""

    def __init__(self, predicates: LocalPredicates) -> None:
        """Make them of those that are asked here."""
        self._predicates = predicates
        #: asked with a task, and not answered when its report left
        self._open: dict[UnitQuestion, asyncio.Task[bool | EvaluationFailed | None]] = {}
        self._asking = 0

    @property
    def is_asking(self) -> bool:
        """Whether one of them has not answered."""
        return self._asking > 0

    async def holds(
        self, question: UnitQuestion, *, sent_count: int, new: Sequence[HistoryPart[bytes]]
    ) -> bool | EvaluationFailed | None:
        """Ask one, or wait for its answer where it was asked already; None: what was sent before is not here."""
        asked = self._open.pop(question, None)
        answer = None if asked is None else await asyncio.shield(asked)
        return await self._ask(question, sent_count, new) if answer is None else answer

    async def ask_after(self, asks: FollowingQuestions[bytes], output: bytes) -> tuple[bool | EvaluationFailed, ...]:
        """Ask what follows a task, until one holds; return the verdicts that are there in time.

        Args:
            asks: What to ask.
            output: Of the task, packed: a predicate gets a copy, as from another process.
        """
        *earlier, last = asks.new
        sent_count = asks.sent_count
        new: Sequence[HistoryPart[bytes]] = (*earlier, replace(last, outputs=(*last.outputs, output)))
        loop = asyncio.get_running_loop()
        until = loop.time() + _WAIT_S
        verdicts: list[bool | EvaluationFailed] = []
        for question in asks.questions:
            asking = loop.create_task(self._ask(question, sent_count, new))
            done, _ = await asyncio.wait([asking], timeout=max(0.0, until - loop.time()))
            if not done:
                self._open[question] = asking
                break
            verdict = asking.result()
            if verdict is None:
                break  # the scheduler asks, with all that this process lacks
            verdicts.append(verdict)
            if verdict is not False:
                break
            sent_count, new = sent_count + len(new), ()
        return tuple(verdicts)

    def forget(self, unit: str) -> None:
        """Let the history of a unit go that has ended."""
        self._open = {question: asked for question, asked in self._open.items() if question.unit != unit}
        self._predicates.forget(unit)

    async def _ask(
        self, question: UnitQuestion, sent_count: int, new: Sequence[HistoryPart[bytes]]
    ) -> bool | EvaluationFailed | None:
        self._asking += 1
        try:
            parts = [
                HistoryPart(names=part.names, outputs=tuple(map(unpack_output, part.outputs)), is_joined=part.is_joined)
                for part in new
            ]
            answer = await self._predicates.holds(question, sent_count=sent_count, new=parts)
        except USER_ERRORS as error:  # such as an output whose class is not here
            answer = EvaluationFailed.of(error)
        finally:
            self._asking -= 1
        return packed_evaluation(answer) if isinstance(answer, EvaluationFailed) else answer
