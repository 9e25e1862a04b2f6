"""Calls through a client of the `openai` package, for models given `client_options`. Room: llm.

The lean path knows keys, URLs and retries; whatever else the package can do (organisations, identity providers, own
transports, headers) is reached through its own client. The request's body is the same; the package's transform of
messages, three quarters of its cost, is passed by, and so is its reading of answers: `sdk_guard` bounds the bytes, and
they are taken apart as on the lean path.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar, cast

from ensemble_ray.llm.answer_limits import AnswerLimits, TooMuchError
from ensemble_ray.llm.loop_resources import PerLoop
from ensemble_ray.llm.openai_endpoint import IDEMPOTENCY_KEY, Endpoint, stream_events
from ensemble_ray.llm.openai_errors import Failure, provider_error
from ensemble_ray.llm.openai_stream import StreamAssembler
from ensemble_ray.llm.openai_transport import CallFailedError, read_to_end
from ensemble_ray.llm.openai_wire import WireError, decode_completion
from ensemble_ray.llm.schema_offers import SchemaOffer
from ensemble_ray.process.context import current_effect_key
from ensemble_ray.process.threads import threads
from ensemble_ray.values.messages import ChatResponse

if TYPE_CHECKING:
    from httpx2 import Response
    from openai import APIError, AsyncOpenAI
    from openai._types import RequestOptions

__all__ = ["SdkClients"]

T = TypeVar("T")

_PATH = "/chat/completions"


class SdkClients:
    """One model's clients, one per event loop, made on first use; a pickled model leaves them behind.

    Args:
        options: Keyword arguments of `AsyncOpenAI`; without `http_client` it gets the package's aiohttp transport.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = dict(options)
        self._clients: PerLoop[tuple[object, AsyncOpenAI]] = PerLoop(close=lambda held: held[1].close())

    async def complete(
        self, body: bytes, endpoint: Endpoint, connection: Mapping[str, object], offer: SchemaOffer | None = None
    ) -> ChatResponse:
        """Return the whole answer.

        Args:
            body: The request as the lean path would send it.
            endpoint: Which one it is, for errors, and the limits of its answers.
            connection: Arguments of the client that the environment may change: key, URL, timeout, retries.
            offer: A schema to hold the answer to, where the endpoint takes schemas.

        Raises:
            openai.APIError: the endpoint cannot be reached, refuses, fails, or answers with something else.
        """
        client = await self._client(connection)
        limits, origin = endpoint.limits, endpoint.origin

        async def send(body: bytes, *, has_schema: bool = False) -> ChatResponse:  # noqa: ARG001  it retries by itself
            return await _sent(client, body, limits)

        try:
            return await (send(body) if offer is None else offer.answer(send, body, origin))
        except CallFailedError as failed:
            error = await provider_error(failed.failure, origin)
        raise error

    async def stream(
        self, body: bytes, endpoint: Endpoint, connection: Mapping[str, object]
    ) -> AsyncGenerator[str | ChatResponse]:
        """Give fragments of the text, then the whole answer.

        Raises:
            openai.APIError: as for `complete`, also in the middle of the stream.
        """
        client = await self._client(connection)
        try:
            async with aclosing(_streamed(client, body, endpoint.limits)) as parts:
                async for part in parts:
                    yield part
        except CallFailedError as failed:
            failure = failed.failure
        else:
            return
        raise await provider_error(failure, endpoint.origin)

    async def _client(self, connection: Mapping[str, object]) -> AsyncOpenAI:
        held = self._clients.get()
        if held is not None and held[0] == connection:
            return held[1]
        await threads.run(importlib.import_module, "openai")  # a second of CPU: not on the loop
        from openai import AsyncOpenAI, DefaultAioHttpClient

        # The keywords are the user's own; the package judges them.
        make = cast("Callable[..., AsyncOpenAI]", AsyncOpenAI)
        options = {**connection, **self._options}
        http_client = options.get("http_client") or DefaultAioHttpClient()
        from ensemble_ray.llm.sdk_guard import guard  # stands on the package, which is loaded by now

        guard(http_client)
        client = make(**{**options, "http_client": http_client})
        return self._clients.put((connection, client))[1]


def _options(client: AsyncOpenAI) -> RequestOptions:
    """Headers of the request: the id of the effect that it is part of (S-DUR-27), a user's own key wins."""
    key = current_effect_key()
    # What else could be unpacked is not bounded.
    headers: dict[str, str] = {"Accept-Encoding": "gzip, deflate"}
    if key and IDEMPOTENCY_KEY not in client.default_headers:
        headers[IDEMPOTENCY_KEY] = key
    return {"headers": headers}


@contextlib.contextmanager
def _told() -> Generator[None]:
    """Turn what the package and its transport raise into failures."""
    from ensemble_ray.llm.sdk_guard import AnswerRefusedError

    try:
        yield
    except AnswerRefusedError as refused:
        raise CallFailedError(refused.failure) from None
    except _api_error() as error:
        raise CallFailedError(_failure_of(error)) from None
    except _transport_errors() as error:
        if "Timeout" in type(error).__name__:
            raise CallFailedError(Failure(timed_out=True, cause=error)) from error
        raise CallFailedError(Failure(reason=str(error) or type(error).__name__, cause=error)) from error
    except (WireError, TooMuchError) as error:
        is_told = isinstance(error, WireError) and error.told_by_provider
        raise CallFailedError(Failure(status=200, reason=str(error), told_by_provider=is_told)) from None


async def _response(client: AsyncOpenAI, body: bytes, limits: AnswerLimits, *, stream: bool) -> Response:
    from httpx2 import Response
    from openai import AsyncStream

    from ensemble_ray.llm.sdk_guard import guarded

    with guarded(limits):
        # Asked for as it is, a response is given as it is, also where a stream is asked for.
        answered: object = await client.post(
            _PATH,
            body=json.loads(body),
            cast_to=Response,
            options=_options(client),
            stream=stream,
            stream_cls=AsyncStream[object],
        )
    return cast("Response", answered)


async def _sent(client: AsyncOpenAI, body: bytes, limits: AnswerLimits) -> ChatResponse:
    with _told():
        response = await _in_time(_response(client, body, limits, stream=False), _deadline_s(limits), limits)
        return decode_completion(response.content, limits)


async def _streamed(client: AsyncOpenAI, body: bytes, limits: AnswerLimits) -> AsyncGenerator[str | ChatResponse]:
    deadline_s = _deadline_s(limits)
    with _told():
        response = await _in_time(_response(client, body, limits, stream=True), deadline_s, limits)
        try:
            pieces = _pieces(response, deadline_s, limits)
            if "event-stream" not in response.headers.get("content-type", ""):
                # The server does not stream; its whole answer is one fragment.
                whole = decode_completion(b"".join([piece async for piece in pieces]), limits)
                if whole.text:
                    yield whole.text
                yield whole
                return
            assembler = StreamAssembler(limits)
            async for data in stream_events(pieces, limits):
                fragment = assembler.feed_data(data)
                if fragment:
                    yield fragment
            yield assembler.finish()
            with contextlib.suppress(*_transport_errors()):
                await read_to_end(pieces)
        finally:
            await response.aclose()


def _deadline_s(limits: AnswerLimits) -> float:
    return asyncio.get_running_loop().time() + limits.time_s


async def _in_time(work: Awaitable[T], deadline_s: float, limits: AnswerLimits) -> T:
    timer = asyncio.timeout_at(deadline_s)
    try:
        async with timer:
            return await work
    except TimeoutError:
        if timer.expired():
            raise TooMuchError(limits.too_late) from None
        raise


async def _pieces(response: Response, deadline_s: float, limits: AnswerLimits) -> AsyncGenerator[bytes]:
    """The pieces of a stream as they come."""
    pieces = aiter(response.aiter_bytes())
    while True:
        try:
            yield await _in_time(anext(pieces), deadline_s, limits)
        except StopAsyncIteration:
            return


def _transport_errors() -> tuple[type[Exception], ...]:
    """What gets past the package: errors of reading a stream, and its transport's own of an answer that is no HTTP."""
    from aiohttp import ClientError

    packages = (sys.modules.get(name) for name in ("httpx2", "httpx"))  # a user's own client may be of either
    return (ClientError, *(cast("type[Exception]", package.HTTPError) for package in packages if package is not None))


def _api_error() -> type[APIError]:
    from openai import APIError

    return APIError


def _failure_of(error: APIError) -> Failure:
    """The package's own error, seen as any other failure: its text may hold a key, ours does not."""
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(error, APIConnectionError):
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        # The package's transport calls a refused connection a timeout; what began the chain tells them apart.
        # A connection that was not made in time ends with the cancellation by which that limit is kept.
        is_late = isinstance(root, TimeoutError | asyncio.CancelledError)
        if is_late or (root is error and isinstance(error, APITimeoutError)):
            return Failure(timed_out=True, cause=error.__cause__)
        return Failure(reason=str(root) or type(root).__name__, cause=error.__cause__)
    if isinstance(error, APIStatusError):
        headers = {name.lower(): value for name, value in error.response.headers.items()}
        return Failure(status=error.status_code, body=error.response.content, headers=headers)
    return Failure(status=200, reason=error.message, told_by_provider=True)
