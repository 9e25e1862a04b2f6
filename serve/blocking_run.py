"""A run that a client waits for.

An OpenAI client does not know its run, so the run ends with the connection, unless the operator disables that or an
`Idempotency-Key` allows a retry (S-SRV-130). An A2A client knows its run, so it continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from anyio import CancelScope
from pydantic import BaseModel
from starlette.types import Receive

from ensemble_ray.access.quotas import Account
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import NewRun, Refusal, RunDetail, RunEvent, RunStatus
from ensemble_ray.text.answers import split_reasoning
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.messages import Reasoning

_BETWEEN_TURNS = "\n\n"
_LOOK_S = 600.0
#: Polling for the driver that resumes a decided run: interval, s, and number.
_DECIDED_LOOK_S, _DECIDED_LOOKS = 0.2, 150
#: The event loop only keeps weak references to tasks.
_endings: set[asyncio.Task[None]] = set()


class StreamedText:
    def __init__(self) -> None:
        self._turn = 0
        self._said = ""
        self._is_begun = False

    def add(self, token: str, *, turn: int) -> str:
        """Add a token of a turn of the tool loop; return the text to send."""
        if not token:
            return ""
        separator = ""
        if turn != self._turn:
            separator = _BETWEEN_TURNS if self._is_begun else ""
            self._turn, self._said = turn, ""
        self._is_begun = True
        self._said += token
        return separator + token

    def rest(self, answer: str) -> str | None:
        """Return the part of the answer that was not sent; None: a different text was sent."""
        # It was reasoning if a closing tag without an opening one follows (S-LLM-2).
        for said in (self._said, split_reasoning(self._said)[1]):
            if answer.startswith(said):
                return answer[len(said) :]
        return "" if self._said.strip() == answer.strip() else None


class Token(BaseModel):
    token: str
    instance: str | None
    iteration_index: int
    is_reasoning: bool = False


class DoneTask(BaseModel):
    agent_role: str
    task_description: str


class BlockingRun:
    """An accepted run. `ends_with_client` cancels it if the client disconnects without an answer."""

    def __init__(self, service: RunService, run_id: str, *, ends_with_client: bool) -> None:
        self.run_id = run_id
        self._service = service
        self._ends_with_client = ends_with_client
        self._is_answered = False

    @classmethod
    async def begin(
        cls,
        service: RunService,
        asked: NewRun,
        *,
        idempotency_key: str | None,
        account: Account | None = None,
        ends_with_client: bool,
    ) -> BlockingRun:
        """Start a run. If the client disconnects meanwhile, wait for the start, then leave the run."""
        named = asked.model_copy(update={"run_id": new_run_id()})
        starting = asyncio.ensure_future(service.start(named, idempotency_key=idempotency_key, account=account))
        is_ended = ends_with_client and idempotency_key is None
        try:
            taken = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})
            await cls(service, named.run_id or "", ends_with_client=is_ended).detach()
            raise
        return cls(service, taken.run_id, ends_with_client=is_ended)

    async def end(self) -> RunDetail:
        """Return the run when it has ended or waits for a person."""
        self._is_answered = False
        while True:
            found = await self._service.wait(self.run_id, _LOOK_S)
            if found.status.is_final or found.status is RunStatus.WAITING:
                self._is_answered = True
                return found

    async def end_or_gate(self) -> RunDetail:
        """Return the run when it has ended or has an open gate. A decided run that does not resume in time has none."""
        looks_left = _DECIDED_LOOKS
        while True:
            found = await self.end()
            if found.status is not RunStatus.WAITING or found.reviews or not looks_left:
                return found
            looks_left -= 1
            self._is_answered = False
            await asyncio.sleep(_DECIDED_LOOK_S)

    async def end_for(self, receive: Receive, *, or_gate: bool = False) -> RunDetail:
        ending = asyncio.ensure_future(self.end_or_gate() if or_gate else self.end())

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        leaving = asyncio.ensure_future(leave())
        try:
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise Refusal(HTTPStatus.REQUEST_TIMEOUT, "CLIENT_GONE", "The client went away", run_id=self.run_id)
            return await ending
        finally:
            ending.cancel()
            leaving.cancel()
            await self.detach()

    async def answer(self, streamed_task: str | None, said: StreamedText) -> AsyncGenerator[str | RunDetail]:
        """Yield pieces of the answer and of reasoning (`Reasoning`), then the run as `end` does."""
        if streamed_task is None:
            yield await self.end()
            return
        async with aclosing(self.follow()) as happening:
            async for each in happening:
                if not isinstance(each, RunEvent):
                    yield each
                elif (token := token_of(each)) is not None and token.instance == streamed_task:
                    if token.is_reasoning:
                        yield Reasoning(token.token)
                    else:
                        yield said.add(token.token, turn=token.iteration_index)

    async def follow(self) -> AsyncGenerator[RunEvent | RunDetail]:
        """Yield the events of the run from its start, then the run as `end` does."""
        ending = asyncio.ensure_future(self.end())
        try:
            async with aclosing(self._events(ending)) as events:
                async for event in events:
                    yield event
            yield await ending
        finally:
            ending.cancel()

    async def detach(self) -> None:
        """End the client's wait. An unanswered run that ends with its client is cancelled."""
        if self._is_answered or not self._ends_with_client:
            return

        # Serve can cancel a request with all its calls, in spite of a shielded scope, but not a task with an empty context.
        async def cancel() -> None:
            with contextlib.suppress(Refusal):  # it has ended or did not start
                await self._service.cancel(self.run_id)

        ending = asyncio.create_task(cancel(), context=contextvars.Context())
        _endings.add(ending)
        ending.add_done_callback(_endings.discard)
        with CancelScope(shield=True):
            await asyncio.shield(ending)

    async def _events(self, ending: asyncio.Future[RunDetail]) -> AsyncGenerator[RunEvent]:
        """Yield events until the last one, or until the run waits for a person."""
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
                        with CancelScope(shield=True):  # a generator cannot be closed while it runs
                            await asyncio.wait({step})
                if event is None:
                    return
                yield event


def token_of(event: RunEvent) -> Token | None:
    return Token.model_validate(event.data) if event.type == "token" else None
