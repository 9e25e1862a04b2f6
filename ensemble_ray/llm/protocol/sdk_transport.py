"""The `openai` client as a transport, for organizations, identity providers and custom HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import TYPE_CHECKING, TypeVar, cast
from urllib.parse import parse_qsl

from msgspec import Struct

from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.llm.failures import CallFailure
from ensemble_ray.llm.protocol.endpoint import IDEMPOTENCY_KEY
from ensemble_ray.llm.protocol.transport import Answered, CallFailedError, PerLoop
from ensemble_ray.llm.protocol.wire import AnswerLimits, TooMuchError
from ensemble_ray.process.concurrency import threads

if TYPE_CHECKING:
    from httpx2 import Response
    from openai import APIError, AsyncOpenAI

T = TypeVar("T")


class SdkClients:
    """The clients of one model, one per event loop; they are not pickled."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = dict(options)
        self._clients: PerLoop[tuple[object, AsyncOpenAI]] = PerLoop(close=lambda held: held[1].close())

    async def get(self, connection: Mapping[str, object]) -> AsyncOpenAI:
        """`connection` has the arguments that depend on the environment."""
        held = self._clients.get()
        if held is not None and held[0] == connection:
            return held[1]
        await threads.run(importlib.import_module, "openai")  # it takes a second of CPU
        from openai import AsyncOpenAI, DefaultAioHttpClient

        from ensemble_ray.llm.protocol.sdk_guard import guard  # it imports the package

        options = {**connection, **self._options}
        options["http_client"] = options.get("http_client") or DefaultAioHttpClient()
        guard(options["http_client"])
        # The package checks the user's keywords.
        make = cast("Callable[..., AsyncOpenAI]", AsyncOpenAI)
        return self._clients.put((connection, make(**options)))[1]


class SdkTransport(Struct, frozen=True):
    clients: SdkClients
    connection: Mapping[str, object]
    path: str  # below the base URL

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, limits: AnswerLimits
    ) -> Answered:
        async with self.open_stream(url, body, headers, timeout_s=timeout_s, limits=limits, stream=False) as (
            answered,
            _,
        ):
            return answered

    @contextlib.asynccontextmanager
    async def open_stream(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        limits: AnswerLimits,
        stream: bool = True,
    ) -> AsyncGenerator[tuple[Answered, AsyncIterator[bytes]]]:
        resource, _, query = url.partition("?")
        connection = {"base_url": resource.removesuffix(self.path), "timeout": timeout_s, **self.connection}
        client = await self.clients.get(connection)
        deadline_s = asyncio.get_running_loop().time() + limits.time_s
        with sdk_failures():
            sent = _post(client, f"{self.path}?{query}", body, headers, limits, stream=stream)
            response = await _in_time(sent, deadline_s, limits)
        try:
            pieces = _read(response, deadline_s, limits)
            whole = b"" if stream else b"".join([piece async for piece in pieces])
            yield Answered(response.status_code, response.headers, whole), pieces
        finally:
            await response.aclose()


async def _post(
    client: AsyncOpenAI, resource: str, body: bytes, headers: Mapping[str, str], limits: AnswerLimits, *, stream: bool
) -> Response:
    from httpx2 import Response
    from openai import AsyncStream

    from ensemble_ray.llm.protocol.sdk_guard import guard_answers

    # Other encodings cannot be unpacked with a limit.
    sent = {"Accept-Encoding": "gzip, deflate"}
    if IDEMPOTENCY_KEY in headers and IDEMPOTENCY_KEY not in client.default_headers:
        sent[IDEMPOTENCY_KEY] = headers[IDEMPOTENCY_KEY]
    path, _, query = resource.partition("?")
    with guard_answers(limits, stream=stream):
        # `Response` is returned unchanged, also for a stream.
        answered: object = await client.post(
            path,
            body=json.loads(body),
            cast_to=Response,
            options={"headers": sent, "params": dict(parse_qsl(query, keep_blank_values=True))},
            stream=stream,
            stream_cls=AsyncStream[object],
        )
    return cast("Response", answered)


async def _read(response: Response, deadline_s: float, limits: AnswerLimits) -> AsyncGenerator[bytes]:
    pieces = aiter(response.aiter_bytes())
    with sdk_failures():
        while True:
            try:
                piece = await _in_time(anext(pieces), deadline_s, limits)
            except StopAsyncIteration:
                return
            yield piece


async def _in_time(work: Awaitable[T], deadline_s: float, limits: AnswerLimits) -> T:
    timer = asyncio.timeout_at(deadline_s)
    try:
        async with timer:
            return await work
    except TimeoutError:
        if timer.expired():
            raise TooMuchError(limits.too_late) from None
        raise


@contextlib.contextmanager
def sdk_failures() -> Generator[None]:
    from aiohttp import ClientError
    from openai import APIError

    from ensemble_ray.llm.protocol.sdk_guard import AnswerRefusedError

    # The package does not wrap errors of reading. A user's HTTP client may be of either package.
    packages = (sys.modules.get(name) for name in ("httpx2", "httpx"))
    transport_errors: tuple[type[Exception], ...] = (
        ClientError,
        *(cast("type[Exception]", package.HTTPError) for package in packages if package is not None),
    )
    try:
        yield
    except AnswerRefusedError as refused:
        raise CallFailedError(refused.failure) from None
    except TooMuchError as error:
        raise CallFailedError(CallFailure(status=200, reason=str(error))) from None
    except APIError as error:
        raise CallFailedError(_failure_of(error)) from None
    except transport_errors as error:
        if "Timeout" in type(error).__name__:
            raise CallFailedError(CallFailure(timed_out=True, cause=error)) from error
        flaw = tls_flaw(error)
        reason = flaw or str(error) or type(error).__name__
        raise CallFailedError(CallFailure(reason=reason, cause=error, is_lasting=bool(flaw))) from error


def _failure_of(error: APIError) -> CallFailure:
    """The text of the error may contain a key, so it is not used."""
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    if isinstance(error, APIConnectionError):
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        # The package reports a refused connection as a timeout, so the start of the chain decides. A late connection
        # attempt starts it with the cancellation by aiohttp's timer.
        is_late = isinstance(root, TimeoutError | asyncio.CancelledError)
        if is_late or (root is error and isinstance(error, APITimeoutError)):
            return CallFailure(timed_out=True, cause=error.__cause__)
        flaw = tls_flaw(error)
        reason = flaw or str(root) or type(root).__name__
        return CallFailure(reason=reason, cause=error.__cause__, is_lasting=bool(flaw))
    if isinstance(error, APIStatusError):
        headers = {name.lower(): value for name, value in error.response.headers.items()}
        return CallFailure(status=error.status_code, body=error.response.content, headers=headers)
    return CallFailure(status=200, reason=error.message, is_from_provider=True)
