"""AskedRun: a run that a client waits for. Holds nothing of it but its id.

A client of the OpenAI API knows its request alone. So a run ends with the connection, unless the operator says otherwise or the request has an
`Idempotency-Key`, under which it can be sent again (S-SRV-130). A client of A2A knows the run, which goes on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from anyio import CancelScope
from pydantic import BaseModel

from ensemble_ray.serve.schemas import Refusal, RunStatus
from ensemble_ray.text.answers import split_reasoning
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.messages import Reasoning

if TYPE_CHECKING:
    from starlette.types import Receive

    from ensemble_ray.serve.run_service import RunService
    from ensemble_ray.serve.schemas import NewRun, RunDetail, RunEvent


_BETWEEN_TURNS = "\n\n"


class SaidText:
    """What was said so far."""

    def __init__(self) -> None:
        self._turn = 0
        self._said = ""
        self._is_begun = False

    def add(self, token: str, *, turn: int) -> str:
        """Take a token, and return what to send on.

        Args:
            token: A fragment of the text.
            turn: Which turn of the tool loop it is of.
        """
        before = self._begin(turn) if token else ""
        self._said += token
        return before + token

    def rest(self, answer: str) -> str | None:
        """Return what is left to be sent of the answer; None: what was sent is another text."""
        # Text that was sent is reasoning if a closing tag without an opening one follows it (S-LLM-2).
        for said in (self._said, split_reasoning(self._said)[1]):
            if answer.startswith(said):
                return answer[len(said) :]
        return "" if self._said.strip() == answer.strip() else None

    def _begin(self, turn: int) -> str:
        """Return what parts a turn from the one before."""
        is_new = turn != self._turn
        between = _BETWEEN_TURNS if is_new and self._is_begun else ""
        if is_new:
            self._turn, self._said = turn, ""
        self._is_begun = True
        return between


#: One look at a run lasts so long, s.
_LOOK_S = 600.0
#: A run whose gates are decided waits until what drives it goes on with it; it is looked at so often, s, and so many times.
_DECIDED_LOOK_S, _DECIDED_LOOKS = 0.2, 150
#: Runs that are being ended for clients that went away; a task that nobody refers to may be collected.
_endings: set[asyncio.Task[None]] = set()


class Token(BaseModel):
    """Data of the event of a token, as far as it matters here."""

    token: str
    instance: str | None
    iteration_index: int
    #: whether it is a piece of the model's reasoning
    is_reasoning: bool = False


class DoneTask(BaseModel):
    """Data of the event of a task that is done or failed, as far as it matters here."""

    agent_role: str
    task_description: str


class AskedRun:
    """A run that was accepted, and whether its client has its answer."""

    def __init__(self, service: RunService, run_id: str, *, ends_with_client: bool) -> None:
        """Name the run.

        Args:
            service: Has it.
            run_id: Its id.
            ends_with_client: Whether it is cancelled when its client goes away.
        """
        self.run_id = run_id
        self._service = service
        self._ends_with_client = ends_with_client
        self._is_answered = False

    @classmethod
    async def begin(
        cls, service: RunService, asked: NewRun, *, idempotency_key: str | None, ends_with_client: bool
    ) -> AskedRun:
        """Begin a run, also where the client goes away meanwhile.

        Raises:
            Refusal: as `RunService.start`.
        """
        named = asked.model_copy(update={"run_id": new_run_id()})
        starting = asyncio.ensure_future(service.start(named, idempotency_key=idempotency_key))
        is_ended = ends_with_client and idempotency_key is None
        try:
            taken = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})
            await cls(service, named.run_id or "", ends_with_client=is_ended).leave()
            raise
        return cls(service, taken.run_id, ends_with_client=is_ended)

    async def end(self) -> RunDetail:
        """Return the run when it has ended, or waits for a person."""
        self._is_answered = False
        while True:
            found = await self._service.wait(self.run_id, _LOOK_S)
            if found.status.is_final or found.status is RunStatus.WAITING:
                self._is_answered = True
                return found

    async def end_or_gate(self) -> RunDetail:
        """Return the run when it has ended, or a gate of it is open: one whose gates are all decided is about to go on.

        One that does not go on is returned as it waits, without gates.
        """
        looks_left = _DECIDED_LOOKS
        while True:
            found = await self.end()
            if found.status is not RunStatus.WAITING or found.reviews or not looks_left:
                return found
            looks_left -= 1
            self._is_answered = False
            await asyncio.sleep(_DECIDED_LOOK_S)

    async def end_for(self, receive: Receive, *, or_gate: bool = False) -> RunDetail:
        """Return the run as `end` does.

        Args:
            receive: Says when the client goes away.
            or_gate: Return it as `end_or_gate` does.

        Raises:
            Refusal: the client went away before; nobody reads the answer.
        """
        ending = asyncio.ensure_future(self.end_or_gate() if or_gate else self.end())
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise Refusal(HTTPStatus.REQUEST_TIMEOUT, "CLIENT_GONE", "The client went away", run_id=self.run_id)
            return await ending
        finally:
            ending.cancel()
            leaving.cancel()
            await self.leave()

    async def answer(self, streamed_task: str | None, said: SaidText) -> AsyncGenerator[str | RunDetail]:
        """Yield pieces of the answer and of reasoning (`Reasoning`) while they are said, then the run as `end` does.

        Args:
            streamed_task: Instance of the task whose tokens they are; None: nothing is said before the end.
            said: Takes what was yielded.
        """
        ending = asyncio.ensure_future(self.end())
        try:
            if streamed_task is not None:
                async with aclosing(self._events(ending)) as events:
                    async for event in events:
                        if (token := token_of(event)) is not None and token.instance == streamed_task:
                            if token.is_reasoning:
                                yield Reasoning(token.token)
                            else:
                                yield said.add(token.token, turn=token.iteration_index)
            yield await ending
        finally:
            ending.cancel()

    async def follow(self) -> AsyncGenerator[RunEvent | RunDetail]:
        """Yield what happens in the run from its beginning, then the run as `end` does."""
        ending = asyncio.ensure_future(self.end())
        try:
            async with aclosing(self._events(ending)) as events:
                async for event in events:
                    yield event
            yield await ending
        finally:
            ending.cancel()

    async def leave(self) -> None:
        """Take notice that the client has its answer, or went away; without an answer the run ends."""
        if self._is_answered or not self._ends_with_client:
            return
        # A replica's request is cancelled by Serve itself, at any moment, together with calls that were made for it: a scope does
        # not keep that out. So the call is made by a task of its own, in a context that belongs to no request.
        ending = asyncio.create_task(self._cancel(), context=contextvars.Context())
        _endings.add(ending)
        ending.add_done_callback(_endings.discard)
        with CancelScope(shield=True):
            await asyncio.shield(ending)

    async def _cancel(self) -> None:
        with contextlib.suppress(Refusal):  # it is over, or never began
            await self._service.cancel(self.run_id)

    async def _events(self, ending: asyncio.Future[RunDetail]) -> AsyncGenerator[RunEvent]:
        """Yield what happens until nothing comes any more, or the run waits for a person."""
        async with aclosing(self._service.events(self.run_id)) as events:
            while True:
                step = asyncio.ensure_future(anext(events, None))
                both: set[asyncio.Future[Any]] = {step, ending}
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    if not step.done() and ending.done() and ending.result().status is RunStatus.WAITING:
                        return
                    event = await step
                finally:
                    if not step.done():
                        step.cancel()
                        with CancelScope(shield=True):  # the events cannot be closed while they are asked
                            await asyncio.wait({step})
                if event is None:
                    return
                yield event


def token_of(event: RunEvent) -> Token | None:
    """Return a fragment that a model said; None: the event is of something else."""
    return Token.model_validate(event.data) if event.type == "token" else None


async def _gone(receive: Receive) -> None:
    """Return when the client went away."""
    while (await receive())["type"] != "http.disconnect":
        pass
