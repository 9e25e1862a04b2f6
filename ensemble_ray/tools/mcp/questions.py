"""What an MCP server asks back while a call of its tool goes on: a person, or a model. Package: tools.

In: requests of a server, by the SDK's callbacks. Out: what the reviewer of the calling task decided. Rules: a question belongs to the call
that it came in; where that cannot be known, it is refused. What ends the task (an early exit, a gate that stays open) ends the call, and
leaves it as the same error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.tools.approval import approval_request, ask
from ensemble_ray.tools.mcp.forms import approved_values, form_prompt, read_values
from ensemble_ray.tools.mcp.sampled import read_messages, sampling_result
from ensemble_ray.values.messages import ChatResponse
from ensemble_ray.values.reviews import Continue, Edit, ExitEarly

if TYPE_CHECKING:
    from mcp import Client, ClientSession
    from mcp.client.session import ClientRequestContext
    from mcp_types import (
        CreateMessageRequestParams,
        CreateMessageResult,
        ElicitRequestFormParams,
        ElicitRequestParams,
        ElicitResult,
        ErrorData,
    )

    from ensemble_ray.tools.mcp.address import ServerAddress
    from ensemble_ray.tools.tool import ToolContext

__all__ = ["CallQuestions", "elicitation_callback", "sampling_callback"]

T = TypeVar("T")

_log = bounded_logger(__name__)
#: How often a reviewer is asked for values that fit the form.
_MOST_TRIES = 3
#: Forms of one call.
_MOST_FORMS = 10
#: The call that this code works for; the SDK keeps it where its transport can tell.
_current: ContextVar[CallQuestions | None] = ContextVar("ensemble_ray_mcp_call", default=None)
#: Calls that go on, by their session.
_open: WeakKeyDictionary[ClientSession, set[CallQuestions]] = WeakKeyDictionary()


@runtime_checkable
class _BeginsAgain(Protocol):
    """Who numbers the questions of a call: its handler, and what asks its model."""

    def begin_again(self) -> None: ...


class CallQuestions:
    """Answers what a server asks during one call."""

    def __init__(self, address: ServerAddress, context: ToolContext) -> None:
        """Belong to a call; made on the loop of its task.

        Args:
            address: The server.
            context: Of the call.
        """
        self._shown = address.shown
        self._max_samples = address.max_samples
        self._samples = self._forms = 0
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] | None = None

    async def answered_during(self, client: Client, work: Callable[[], Awaitable[T]]) -> T:
        """Do the call, and answer what comes meanwhile; one that is made again finds the answers that it had (S-INT-16).

        Raises:
            BaseException: what the reviewer raised, or the call.
        """
        self._samples = self._forms = 0
        for asked in (self._context.review_handler, self._context.sampler):
            if isinstance(asked, _BeginsAgain):
                asked.begin_again()
        async with self._register(client.session) as failure:
            calling = asyncio.ensure_future(work())
            try:
                both: set[asyncio.Future[Any]] = {calling, failure}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    failure.result()
                return await calling
            finally:
                if not calling.done():
                    calling.cancel()
                    await asyncio.wait({calling})

    @asynccontextmanager
    async def _register(self, session: ClientSession) -> AsyncGenerator[asyncio.Future[None]]:
        self._failure = asyncio.get_running_loop().create_future()
        calls = _open.setdefault(session, set())
        calls.add(self)
        token = _current.set(self)
        try:
            yield self._failure
        finally:
            _current.reset(token)
            calls.discard(self)
            self._failure.cancel()

    async def elicit(self, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        """Ask the reviewer of the task."""
        from mcp_types import ElicitResult

        if params.mode == "url":  # what a person enters there is not for a gate, and is recorded nowhere
            _log.warning("MCP server '%s' wants somebody to open a page, which is declined", self._shown)
            return ElicitResult(action="decline")
        self._forms += 1
        if self._context.review_handler is None or self._forms > _MOST_FORMS:
            return ElicitResult(action="cancel")
        return await self._here(self._filled_in(params))

    async def _filled_in(self, params: ElicitRequestFormParams) -> ElicitResult:
        from mcp_types import ElicitResult

        schema, problem = params.requested_schema, ""
        for _ in range(_MOST_TRIES):
            request = approval_request(f"{self._context.tool_name}: {params.message}")
            prompt = form_prompt(schema)
            decision = await ask(
                self._context.review_handler, request.replace(prompt=f"{problem}. {prompt}" if problem else prompt)
            )
            match decision:
                case Edit(revised_output=text):
                    try:
                        return ElicitResult(action="accept", content=read_values(text, schema))
                    except ValidationError as error:
                        problem = str(error)
                case ExitEarly(timed_out=timed_out):
                    return ElicitResult(action="cancel" if timed_out else "decline")
                case Continue():
                    values = approved_values(schema)
                    if values is not None:
                        return ElicitResult(action="accept", content=values)
                    _log.warning("An approval answers no form of MCP server '%s' that needs values", self._shown)
                    return ElicitResult(action="cancel")
                case _:
                    break
        return ElicitResult(action="cancel")

    async def sample(self, params: CreateMessageRequestParams) -> CreateMessageResult | ErrorData:
        """Ask the model of the agent that calls."""
        sampler = self._context.sampler
        if sampler is None:
            return _refusal("This call has no model to ask")
        self._samples += 1
        if self._samples > self._max_samples:
            return _refusal(f"The model was asked {self._max_samples} times in this call, which is the limit")
        try:
            messages = read_messages(params)
        except ValidationError as error:
            return _refusal(str(error))
        answer = await self._here(sampler.sample(messages))
        return sampling_result(answer) if isinstance(answer, ChatResponse) else answer

    async def _here(self, asking: Coroutine[Any, Any, T]) -> T | ErrorData:
        """Ask on the loop of the task; what is raised ends the call."""
        try:
            if asyncio.get_running_loop() is self._loop:
                return await asking
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))
        except Exception as error:  # noqa: BLE001  it leaves by the call, and not by the SDK
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            return _refusal("The call is given up")


async def elicitation_callback(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
    """Answer a server's question to a person."""
    found = _call_of(context.session)
    return _refusal(_UNKNOWN_CALL) if found is None else await found.elicit(params)


async def sampling_callback(
    context: ClientRequestContext, params: CreateMessageRequestParams
) -> CreateMessageResult | ErrorData:
    """Answer a server's question to a model."""
    found = _call_of(context.session)
    return _refusal(_UNKNOWN_CALL) if found is None else await found.sample(params)


_UNKNOWN_CALL = "Several calls go on in this session, and the protocol does not say which one asks. What to do: call one tool at a time"


def _call_of(session: ClientSession) -> CallQuestions | None:
    """Return the call that a question came in; None: that cannot be known."""
    current = _current.get()
    calls = _open.get(session, set())
    if current is not None and current in calls:
        return current
    return next(iter(calls)) if len(calls) == 1 else None


def _refusal(text: str) -> ErrorData:
    from mcp_types import INVALID_REQUEST, ErrorData

    return ErrorData(code=INVALID_REQUEST, message=text)
