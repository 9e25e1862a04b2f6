"""A model behind a rate limit. Package: llm; fulfils the `ChatModel` port, and streams if the model behind it does.

In: a conversation. Out: the answer of the model behind it, unchanged. Must never happen: a call of that model without
a permit, or a second bucket for the same wrapper: the bucket's name is made at construction and travels with it, so
a pickled copy, in whatever process, is a handle to the one bucket (S-RATE-20).

There is no blocking form of `chat`: a model's client belongs to one event loop, and a private loop per call would give
it another. Synchronous code that asks a limited model does so through the loop, where a cancelled wait is a
`CancelledError` (S-RATE-14).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.ports import ChatModel, StreamingChatModel, StructuredChatModel, services
from ensemble_ray.process.context import waiting_for_permit
from ensemble_ray.process.forks import call_user
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec
from ensemble_ray.values.value import RateLimit

if TYPE_CHECKING:
    from ensemble_ray.ports import Limiter


_DEFAULT_WAIT = timedelta(seconds=30)


class RateLimitedChatModel:
    """A chat model whose calls wait for permits; make one with `of`.

    Whoever holds it, or a pickled copy of it, draws from one bucket. Wrappers are equal when their bucket is the same.

    Args:
        delegate: The model behind it.
        rate_limit: How many calls may begin in which time.
        wait_timeout: How long a call waits for its permit.

    Examples:
        >>> from ensemble_ray.values.value import RateLimit
        >>> from ensemble_ray.testing import ScriptedModel
        >>> model = RateLimitedChatModel.of(ScriptedModel("hello"), RateLimit.per_minute(60))
        >>> model.wait_timeout
        datetime.timedelta(seconds=30)
    """

    def __init__(self, delegate: ChatModel, rate_limit: RateLimit, wait_timeout: timedelta = _DEFAULT_WAIT) -> None:
        self._delegate = _resolve(delegate)
        self._rate_limit = rate_limit
        self._wait_timeout = wait_timeout
        self._bucket = new_object_id()

    @classmethod
    def of(
        cls,
        delegate: ChatModel | str,
        rate_limit: RateLimit,
        wait_timeout: timedelta | float = _DEFAULT_WAIT,
    ) -> RateLimitedChatModel:
        """Put a model behind a limit of its own; it streams if the model does.

        Args:
            delegate: A model, or its name as in `Agent.llm`.
            rate_limit: How many calls may begin in which time.
            wait_timeout: How long a call waits for its permit; a number means seconds.

        Raises:
            ValueError: an argument is None.
            ValidationError: the model's name is unknown, or the timeout is negative.
        """
        arguments = {"delegate": delegate, "rate_limit": rate_limit, "wait_timeout": wait_timeout}
        for name, value in arguments.items():
            if value is None:
                raise ValueError(f"RateLimitedChatModel {name} must not be None")
        model = _resolve(delegate)
        wait = timedelta(seconds=wait_timeout) if isinstance(wait_timeout, int | float) else wait_timeout
        if wait < timedelta():
            raise ValidationError(f"RateLimitedChatModel wait_timeout must not be negative, got: {wait}")
        kind = _RateLimitedStreamingModel if isinstance(model, StreamingChatModel) else RateLimitedChatModel
        return kind(model, rate_limit, wait)

    def around(self, delegate: ChatModel) -> RateLimitedChatModel:
        """Return another model behind the same limit: calls of both draw from one bucket."""
        rebuilt = self.of(delegate, self._rate_limit, self._wait_timeout)
        rebuilt._bucket = self._bucket  # noqa: SLF001  a model of its own class
        return rebuilt

    @property
    def delegate(self) -> ChatModel:
        """The model behind it."""
        return self._delegate

    @property
    def rate_limit(self) -> RateLimit:
        """How many calls may begin in which time."""
        return self._rate_limit

    @property
    def wait_timeout(self) -> timedelta:
        """How long a call waits for its permit."""
        return self._wait_timeout

    @property
    def bucket(self) -> str:
        """Name of the bucket, the same for all copies of this wrapper."""
        return self._bucket

    @property
    def model_name(self) -> str:
        """The name of the model behind it; empty: it has none."""
        found: object = getattr(self._delegate, "model_name", None) or getattr(self._delegate, "model", "")
        return found if isinstance(found, str) else ""

    @property
    def provider_name(self) -> str:
        """Who answers; empty: the model behind it does not say."""
        found: object = getattr(self._delegate, "provider_name", "")
        return found if isinstance(found, str) else ""

    @property
    def endpoint_id(self) -> str:
        """That of the model behind it; empty where it has none."""
        return str(getattr(self._delegate, "endpoint_id", ""))

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Wait for a permit, then ask the model. A call that fails has used its permit.

        Raises:
            RateLimitTimeoutError: no permit came within `wait_timeout`; the model was not asked.
        """
        await self._permit()
        # No tools: asked without them, as a model is that has no limit.
        offered = (tools,) if tools else ()
        return await call_user(self._delegate.chat, messages, *offered)

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """As `chat`, in the form of that schema if the model behind it can be held to one.

        Raises:
            RateLimitTimeoutError: no permit came within `wait_timeout`; the model was not asked.
        """
        await self._permit()
        if isinstance(self._delegate, StructuredChatModel):
            return await call_user(self._delegate.chat_structured, messages, schema)
        return await call_user(self._delegate.chat, messages)

    async def _permit(self) -> None:
        here = services()
        limiter: Limiter = process_limiter() if here is None else here.limiter
        with waiting_for_permit():
            await limiter.acquire(self._bucket, self._rate_limit, timeout_s=self._wait_timeout.total_seconds())

    def __eq__(self, other: object) -> bool:
        return self._bucket == other._bucket if isinstance(other, RateLimitedChatModel) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bucket)

    def __repr__(self) -> str:
        per = f"{self._rate_limit.requests} requests per {self._rate_limit.period}"
        return f"RateLimitedChatModel({self._delegate!r}, {per})"


class _RateLimitedStreamingModel(RateLimitedChatModel):
    """With `stream`; a class of its own, since having the method is what makes a `StreamingChatModel`."""

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Wait for a permit, then pass the model's stream through as it comes (S-RATE-22).

        Raises:
            RateLimitTimeoutError: no permit came within `wait_timeout`; the model was not asked.
        """
        assert isinstance(self._delegate, StreamingChatModel)  # noqa: S101  `of` chose this class because of it
        await self._permit()
        pieces = self._delegate.stream(messages, tools)
        try:
            async for piece in pieces:
                yield piece
        finally:
            # Whoever leaves this stream early leaves the model's too, at once and not when it is collected.
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()


def _resolve(delegate: ChatModel | str) -> ChatModel:
    from ensemble_ray.llm.factory import resolve_llm  # few models have limits

    return resolve_llm(delegate)
