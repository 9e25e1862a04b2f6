"""A chat model behind a rate limit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import timedelta

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.ports import ChatModel, Limiter, StreamingChatModel, StructuredChatModel, services
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.process.context import waiting_for_permit
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec
from ensemble_ray.values.value import RateLimit

_DEFAULT_WAIT = timedelta(seconds=30)


class RateLimitedChatModel:
    """A chat model with calls that wait for permits; make one with `of`.

    Pickled copies in any process share one bucket and are equal. It has no blocking `chat`, because a model's client
    belongs to one event loop.

    Args:
        delegate: The model that answers.
        rate_limit: Calls per period.
        wait_timeout: Longest wait for a permit.

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
        self._bucket = new_object_id()  # pickled with the wrapper (S-RATE-20)

    @classmethod
    def of(
        cls, delegate: ChatModel | str, rate_limit: RateLimit, wait_timeout: timedelta | float = _DEFAULT_WAIT
    ) -> RateLimitedChatModel:
        """Return a model with a new limit; it streams if the delegate does.

        Args:
            delegate: A model, or its name as in `Agent.llm`.
            rate_limit: Calls per period.
            wait_timeout: Longest wait for a permit; a number means seconds.

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
        """Return a wrapper of another model that shares the bucket."""
        rebuilt = self.of(delegate, self._rate_limit, self._wait_timeout)
        rebuilt._bucket = self._bucket  # noqa: SLF001  a model of its own class
        return rebuilt

    @property
    def delegate(self) -> ChatModel:
        """The model that answers."""
        return self._delegate

    @property
    def rate_limit(self) -> RateLimit:
        """Calls per period."""
        return self._rate_limit

    @property
    def wait_timeout(self) -> timedelta:
        """Longest wait for a permit."""
        return self._wait_timeout

    @property
    def bucket(self) -> str:
        """Name of the bucket, equal for all copies."""
        return self._bucket

    @property
    def model_name(self) -> str:
        """The delegate's name; empty if it has none."""
        found: object = getattr(self._delegate, "model_name", None) or getattr(self._delegate, "model", "")
        return found if isinstance(found, str) else ""

    @property
    def provider_name(self) -> str:
        """The delegate's provider; empty if it is unknown."""
        found: object = getattr(self._delegate, "provider_name", "")
        return found if isinstance(found, str) else ""

    @property
    def endpoint_id(self) -> str:
        """The delegate's endpoint; empty if it has none."""
        return str(getattr(self._delegate, "endpoint_id", ""))

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Wait for a permit, then ask the model. A failed call has used its permit.

        Raises:
            RateLimitTimeoutError: there was no permit within `wait_timeout`; the model was not called.
        """
        await self._permit()
        # A delegate may have no parameter for tools.
        offered = (tools,) if tools else ()
        return await call_user(self._delegate.chat, messages, *offered)

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer in the form of that schema if the delegate supports schemas; otherwise as `chat`."""
        await self._permit()
        if isinstance(self._delegate, StructuredChatModel):
            return await call_user(self._delegate.chat_structured, messages, schema)
        return await call_user(self._delegate.chat, messages)

    async def _permit(self) -> None:
        scope = services()
        limiter: Limiter = process_limiter() if scope is None else scope.limiter
        with waiting_for_permit():  # a cancelled wait raises `CancelledError` (S-RATE-14)
            await limiter.acquire(self._bucket, self._rate_limit, timeout_s=self._wait_timeout.total_seconds())

    def __eq__(self, other: object) -> bool:
        return self._bucket == other._bucket if isinstance(other, RateLimitedChatModel) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bucket)

    def __repr__(self) -> str:
        per = f"{self._rate_limit.requests} requests per {self._rate_limit.period}"
        return f"RateLimitedChatModel({self._delegate!r}, {per})"


class _RateLimitedStreamingModel(RateLimitedChatModel):
    """`StreamingChatModel` is recognized by the method `stream`."""

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        assert isinstance(self._delegate, StreamingChatModel)  # noqa: S101  `of` chose this class because of it
        await self._permit()
        pieces = self._delegate.stream(messages, tools)
        try:
            async for piece in pieces:
                yield piece
        finally:
            # Otherwise the garbage collector closes it later.
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()


def _resolve(delegate: ChatModel | str) -> ChatModel:
    from ensemble_ray.llm.factory import resolve_llm  # few models have limits

    return resolve_llm(delegate)
