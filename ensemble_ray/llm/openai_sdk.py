"""Calls through a client of the `openai` package, for models given `client_options`. Room: llm.

The lean path knows keys, URLs and retries; whatever else the package can do (organisations, identity providers, own
transports, headers) is reached through its own client. The request's body is the same; the package's transform of
messages, three quarters of its cost, is passed by.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from ensemble_ray.context import current_effect_key
from ensemble_ray.llm.loop_resources import PerLoop
from ensemble_ray.llm.openai_endpoint import IDEMPOTENCY_KEY
from ensemble_ray.llm.openai_errors import Failure, Origin, provider_error
from ensemble_ray.llm.openai_transport import CallFailedError
from ensemble_ray.llm.openai_wire import StreamAssembler, WireError, completion_of
from ensemble_ray.llm.schema_offers import SchemaOffer
from ensemble_ray.messages import ChatResponse
from ensemble_ray.threads import threads

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI
    from openai._types import RequestOptions

__all__ = ["SdkClients"]

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
        self, body: bytes, origin: Origin, connection: Mapping[str, object], offer: SchemaOffer | None = None
    ) -> ChatResponse:
        """The whole answer.

        Args:
            body: The request as the lean path would send it.
            origin: Which call it is, for errors.
            connection: Arguments of the client that the environment may change: key, URL, timeout, retries.
            offer: A schema to hold the answer to, where the endpoint takes schemas.

        Raises:
            openai.APIError: the endpoint cannot be reached, refuses, fails, or answers with something else.
        """
        client = await self._client(connection)

        async def send(body: bytes, *, has_schema: bool = False) -> ChatResponse:  # noqa: ARG001  it retries by itself
            return await _sent(client, body)

        try:
            return await (send(body) if offer is None else offer.answer(send, body, origin))
        except CallFailedError as failed:
            error = await provider_error(failed.failure, origin)
        raise error

    async def stream(
        self, body: bytes, origin: Origin, connection: Mapping[str, object]
    ) -> AsyncGenerator[str | ChatResponse]:
        """Fragments of the text, then the whole answer.

        Raises:
            openai.APIError: as for `complete`, also in the middle of the stream.
        """
        client = await self._client(connection)
        assembler = StreamAssembler()
        try:
            async with aclosing(_chunks(client, body)) as chunks:
                async for chunk in chunks:
                    fragment = assembler.feed(chunk)
                    if fragment:
                        yield fragment
            yield assembler.finish()
        except WireError as error:
            failure = Failure(status=200, reason=str(error), told_by_provider=error.told_by_provider)
        except _api_error() as error:
            failure = _failure_of(error)
        else:
            return
        raise await provider_error(failure, origin)

    async def _client(self, connection: Mapping[str, object]) -> AsyncOpenAI:
        held = self._clients.get()
        if held is not None and held[0] == connection:
            return held[1]
        await threads.run(importlib.import_module, "openai")  # a second of CPU: not on the loop
        from openai import AsyncOpenAI, DefaultAioHttpClient

        # The keywords are the user's own; the package judges them.
        make = cast("Callable[..., AsyncOpenAI]", AsyncOpenAI)
        options = {**connection, **self._options}
        client = make(**{**options, "http_client": options.get("http_client") or DefaultAioHttpClient()})
        return self._clients.put((connection, client))[1]


def _options(client: AsyncOpenAI) -> RequestOptions:
    """The id of the effect that the request is part of, as a header (S-DUR-27); a user's own key wins."""
    key = current_effect_key()
    return {"headers": {IDEMPOTENCY_KEY: key}} if key and IDEMPOTENCY_KEY not in client.default_headers else {}


async def _sent(client: AsyncOpenAI, body: bytes) -> ChatResponse:
    try:
        return completion_of(await client.post(_PATH, body=json.loads(body), cast_to=object, options=_options(client)))
    except WireError as error:
        failure = Failure(status=200, reason=str(error), told_by_provider=error.told_by_provider)
    except _api_error() as error:
        failure = _failure_of(error)
    raise CallFailedError(failure)


async def _chunks(client: AsyncOpenAI, body: bytes) -> AsyncGenerator[object]:
    from openai import AsyncStream

    stream = await client.post(
        _PATH,
        body=json.loads(body),
        cast_to=object,
        options=_options(client),
        stream=True,
        stream_cls=AsyncStream[object],
    )
    try:
        async for chunk in cast("AsyncIterator[object]", stream):
            yield chunk
    finally:
        await stream.close()


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
