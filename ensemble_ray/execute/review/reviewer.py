"""LocalReviewer: asks a run's handler, in the process that called `run()` (S-REV-49). Package: execute.

Rules:
1. One gate at a time per run, wherever its tasks run (S-REV-17): on a cluster they come here too. Approvals of tools, which
   end no run, are not kept in line with them (S-TOOL-61); a console keeps its own.
2. Once a decision has ended the run nobody is asked any more: what waits goes on unchanged (S-REV-17, S-REV-37).
3. A decision is checked here, where the handler's name is known.
4. A handler that says `is_concurrent` is asked about all gates at once, since its answers come in any order (S-WEB-58). What is open
   there when a decision ends the run goes on unchanged, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import ExitEarlyError, ValidationError
from ensemble_ray.process.threads import call_user
from ensemble_ray.values.reviews import Continue, Edit, ExitEarly, ReviewAnswer, ReviewDecision

if TYPE_CHECKING:
    from ensemble_ray.values.reviews import ReviewRequest

__all__ = ["LocalReviewer"]

#: Who decided where nobody was asked, since the run was ending.
_RUN_ENDING = "(run ending)"


class LocalReviewer:
    """Asks the handler of one run. Fulfils `Reviewer`."""

    def __init__(self, handler: object) -> None:
        self._handler = handler
        self._turn = asyncio.Lock()
        #: set when a decision has ended the run
        self._ending = asyncio.Event()

    async def ask(self, request: ReviewRequest) -> ReviewAnswer:
        """Ask, when it is the request's turn; see `Reviewer`.

        Raises:
            ValidationError: the handler returned no decision.
            BaseException: what the handler raised.
        """
        if not request.ends_run:
            return await self._answer(request)
        if getattr(self._handler, "is_concurrent", False):
            return await self._ask_beside_others(request)
        async with self._turn:
            if self._ending.is_set():
                return ReviewAnswer(decision=Continue(), by=_RUN_ENDING)
            answer = await self._answer(request)
            if isinstance(answer.decision, ExitEarly):
                self._ending.set()
            return answer

    async def _ask_beside_others(self, request: ReviewRequest) -> ReviewAnswer:
        """Ask while other gates are open; the first decision that ends the run answers them all."""
        if self._ending.is_set():
            return ReviewAnswer(decision=Continue(), by=_RUN_ENDING)
        loop = asyncio.get_running_loop()
        asking, ending = loop.create_task(self._answer(request)), loop.create_task(self._ending.wait())
        try:
            await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return ReviewAnswer(decision=Continue(), by=_RUN_ENDING)
            answer = asking.result()
            if isinstance(answer.decision, ExitEarly):
                self._ending.set()
            return answer
        finally:
            asking.cancel()
            ending.cancel()

    async def _answer(self, request: ReviewRequest) -> ReviewAnswer:
        try:
            decision = await self._ask(request)
        except ExitEarlyError as exit_early:
            decision = ExitEarly(timed_out=exit_early.timed_out)
        return ReviewAnswer(decision=decision, by=_name_of(self._handler))

    async def _ask(self, request: ReviewRequest) -> ReviewDecision:
        ask = cast("Callable[[ReviewRequest], object]", getattr(self._handler, "review", self._handler))
        decision = await call_user(ask, request)
        if isinstance(decision, Continue | Edit | ExitEarly):
            return decision
        returned = "None" if decision is None else type(decision).__name__
        raise ValidationError(
            f"Review handler '{_name_of(self._handler)}' returned {returned}, expected a ReviewDecision. Return "
            "ReviewDecision.continue_execution(), .edit(text) or .exit_early()"
        )


def _name_of(handler: object) -> str:
    """Return what records and messages call a handler."""
    return str(getattr(handler, "__name__", type(handler).__name__))
