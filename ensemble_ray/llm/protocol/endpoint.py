"""Calls of one endpoint of a protocol of models, with retries and errors of the provider."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, TypeVar

from msgspec.structs import replace

from ensemble_ray.errors.bodies import read_error_body
from ensemble_ray.llm.failures import CallFailure, CallOrigin, build_provider_error, delay_before_retry
from ensemble_ray.llm.protocol import transport as lean_transport
from ensemble_ray.llm.protocol.request import (
    MessageRoles,
    PromptCache,
    RequestForm,
    SchemaOffer,
    SystemRole,
    is_refused_role,
)
from ensemble_ray.llm.protocol.transport import Answered, CallFailedError, read_to_end
from ensemble_ray.llm.protocol.wire import (
    CHAT_COMPLETIONS,
    ERROR_BODY_BYTES,
    AnswerFailedError,
    AnswerLimits,
    Assembler,
    ModelApi,
    SseParser,
    TooMuchError,
    WireError,
    begin_of_body,
    is_event_stream,
)
from ensemble_ray.process.context import EFFECT_KEY
from ensemble_ray.process.context import TRACEPARENT as SPAN
from ensemble_ray.values.messages import ChatResponse, Reasoning

DEFAULT_TIMEOUT_S = 600.0
IDEMPOTENCY_KEY = "Idempotency-Key"
TRACEPARENT = "traceparent"
_without_usage: set[str] = set()  # URLs that refused `stream_options`

R = TypeVar("R")


class Transport(Protocol):
    """The default is the module `transport`."""

    def post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, limits: AnswerLimits
    ) -> Awaitable[Answered]: ...

    def open_stream(
        self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, limits: AnswerLimits
    ) -> contextlib.AbstractAsyncContextManager[tuple[Answered, AsyncIterator[bytes]]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The target of one call; it depends on the environment."""

    url: str
    model: str
    key: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S
    max_retries: int = 0
    limits: AnswerLimits = field(default_factory=AnswerLimits)
    transport: Transport = lean_transport
    system_role: SystemRole | None = None  # None: the first refusal decides
    api: ModelApi = CHAT_COMPLETIONS
    prompt_cache: PromptCache = "off"
    origin: CallOrigin = field(init=False)
    sender: str = field(init=False)  # as `ProviderFields.origin`

    def __post_init__(self) -> None:
        path = self.api.path
        origin = CallOrigin(url=self.url, model=self.model, key=self.key, timeout_s=self.timeout_s, path=path)
        object.__setattr__(self, "origin", origin)
        # What an endpoint accepts, and what it sends, depends on the protocol.
        place = origin.endpoint if self.api is CHAT_COMPLETIONS else f"{origin.endpoint}{path}"
        object.__setattr__(self, "sender", f"{place} {self.model}")

    def complete(
        self, encode: Callable[[MessageRoles], bytes], offer: SchemaOffer | None = None
    ) -> Awaitable[ChatResponse]:
        """Return the answer, or raise an `openai.APIError`. `encode` returns the body for message roles."""
        return self._call(RequestForm(encode, self.sender, self.system_role, offer, self.api.learn), self.decode)

    def fetch(self, body: bytes, read: Callable[[bytes], R]) -> Awaitable[R]:
        """Return the answer of another resource; `read` decodes it, or raises `WireError`."""
        return self._call(RequestForm(lambda _roles: body, self.sender), read)

    async def _call(self, form: RequestForm, read: Callable[[bytes], R]) -> R:
        """Send the request in other forms after refusals, and again after failures."""
        attempt = 0
        while True:
            attempt += 1
            try:
                answered = await self.transport.post(
                    self.url, form.body, self._sent_headers(), timeout_s=self.timeout_s, limits=self.limits
                )
            except CallFailedError as failed:
                failure = failed.failure
            else:
                refusal = answered.failure
                if refusal is None:
                    try:
                        response = read(answered.body)
                    except (WireError, TooMuchError) as error:
                        refusal = _unusable(answered, error)
                    else:
                        form.succeed()
                        return response
                failure = refusal
            if form.adapt(failure):
                attempt = 0
                continue
            delay_s = self._delay(failure, attempt)
            if delay_s is None:
                break
            await asyncio.sleep(delay_s)
        # Outside `except`, so that the internal error is not its context.
        raise await build_provider_error(failure, self.origin)

    async def stream(self, body_with: Callable[[MessageRoles, bool], bytes]) -> AsyncGenerator[str | ChatResponse]:
        """Yield fragments, then the whole answer. `body_with` takes the roles, and whether to request usage."""
        attempt = 0
        form = RequestForm(
            lambda roles: body_with(roles, self.url not in _without_usage),
            self.sender,
            self.system_role,
            learn=self.api.learn,
        )
        while True:
            attempt += 1
            requests_usage = self.url not in _without_usage
            has_begun = False
            try:
                async with contextlib.aclosing(self._stream(form.body)) as parts:
                    async for part in parts:
                        has_begun = True
                        form.succeed()
                        yield part
            except CallFailedError as failed:
                failure = failed.failure
                if not has_begun and form.adapt(failure):
                    continue
                if requests_usage and failure.status in {400, 422} and b"stream_options" in failure.body:
                    _without_usage.add(self.url)
                    continue
                delay_s = None if has_begun else self._delay(failure, attempt)
                if delay_s is None:
                    error = await build_provider_error(failure, self.origin)
                    break
                await asyncio.sleep(delay_s)
            else:
                return
        raise error

    def _sent_headers(self) -> Mapping[str, str]:
        """Add the ids of effect (S-DUR-27) and span (S-INT-37), unless the user has set these headers."""
        key, span = EFFECT_KEY.get(), SPAN.get()
        if not key and not span:
            return self.headers
        sent = {IDEMPOTENCY_KEY: key} if key else {}
        return {**sent, **({TRACEPARENT: span} if span else {}), **self.headers}

    def decode(self, body: bytes) -> ChatResponse:
        if not is_event_stream(begin_of_body(body)):
            return self.api.decode(body, self.limits, self.sender)
        assembler, parser = self.api.assembler(self.limits, self.sender), SseParser(self.limits)
        for data in chain(parser.feed(body), parser.finish()):
            assembler.feed_data(data)
            if assembler.is_ended:
                break
        return assembler.finish()

    async def _stream(self, body: bytes) -> AsyncGenerator[str | ChatResponse]:
        async with self.transport.open_stream(
            self.url, body, self._sent_headers(), timeout_s=self.timeout_s, limits=self.limits
        ) as (head, received):
            if head.failure is not None:
                raise CallFailedError(head.failure)
            answered = head
            try:
                answered, pieces = await self._read_whole(head, received)
                if answered.body:
                    whole = self.decode(answered.body)
                    if whole.reasoning:
                        yield Reasoning(whole.reasoning)
                    if whole.text:
                        yield whole.text
                    yield whole
                    return
                assembler = self.api.assembler(self.limits, self.sender)
                async for data in _stream_events(pieces, self.limits, assembler):
                    fragment = assembler.feed_data(data)
                    if assembler.reasoning_fragment:
                        yield Reasoning(assembler.reasoning_fragment)
                    if fragment:
                        yield fragment
                yield assembler.finish()
                await read_to_end(pieces)
            except (WireError, TooMuchError) as error:
                raise CallFailedError(_unusable(answered, error)) from error

    async def _read_whole(
        self, answered: Answered, pieces: AsyncIterator[bytes]
    ) -> tuple[Answered, AsyncIterator[bytes]]:
        """Return the body unless it is an event stream (S-LLM-12), else its pieces."""
        begin, is_stream = b"", None
        async for piece in pieces:
            begin = begin_of_body(begin + piece)
            is_stream = is_event_stream(begin)
            if is_stream is not None:
                break
        if is_stream:

            async def whole_stream() -> AsyncGenerator[bytes]:
                yield begin
                async for piece in pieces:
                    yield piece

            return answered, whole_stream()
        received = bytearray(begin)
        self.limits.check_body(len(received))
        async for piece in pieces:
            received += piece
            self.limits.check_body(len(received))
        return replace(answered, body=bytes(received)), pieces

    def _delay(self, failure: CallFailure, attempt: int) -> float | None:
        is_final = failure.is_lasting or failure.error_body.is_out_of_credit or is_refused_role(failure)
        if attempt > self.max_retries or is_final:
            return None
        jitter = random.random()  # noqa: S311  spreads load, keeps no secret
        # After an unparsable output of the model, a retry may succeed for any status.
        status = None if failure.error_body.is_bad_generation else failure.status
        return delay_before_retry(
            status, attempt=attempt, retry_after=failure.retry_after, jitter=jitter, now=time.time()
        )


async def _stream_events(
    pieces: AsyncIterator[bytes], limits: AnswerLimits, assembler: Assembler
) -> AsyncIterator[bytes]:
    """Yield events until the assembler, which the caller feeds, has the whole answer."""
    parser = SseParser(limits)
    async for received in pieces:
        for data in parser.feed(received):
            yield data
            if assembler.is_ended:
                return
    for data in parser.finish():
        yield data


def _unusable(answered: Answered, error: WireError | TooMuchError) -> CallFailure:
    """A provider's error inside a successful answer may name another status."""
    if isinstance(error, AnswerFailedError):
        return CallFailure(reason=str(error), is_broken_off=True)
    provider_error = error.provider_error if isinstance(error, WireError) else b""
    body = (provider_error or answered.body)[:ERROR_BODY_BYTES]
    named = read_error_body(body).status if provider_error else None
    return CallFailure(
        status=named or answered.status,
        http_status=None if named is None else answered.status,
        body=body,
        headers={name.lower(): value for name, value in answered.headers.items()},
        reason=str(error),
        is_from_provider=bool(provider_error),
    )
