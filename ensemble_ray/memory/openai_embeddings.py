"""`OpenAIEmbeddingModel`: embeddings from any endpoint of the OpenAI protocol."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from datetime import timedelta
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import Struct
from pydantic import SecretStr

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.failures import flaw_of, key_headers, resource_url, shown_url
from ensemble_ray.llm.openai import check_key, check_time_s
from ensemble_ray.llm.protocol.endpoint import Endpoint
from ensemble_ray.llm.protocol.wire import WireError, json_bytes, not_a_completion
from ensemble_ray.memory.embeddings import count_embedding
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.text.foreign_text import estimate_tokens

Embedded = tuple[list[Sequence[float]], int | None]  # vectors, and the tokens that the endpoint counted
_VectorAndTokens = tuple[Sequence[float], int | None]
_REFUSALS = frozenset({400, 413, 422})  # of a request because of one of its texts: too long, not allowed, empty


class TextBatcher(Struct):
    send: Callable[[list[str]], Awaitable[Embedded]]
    most: int  # texts in one request
    _waiting: deque[tuple[str, asyncio.Future[_VectorAndTokens]]] = msgspec.field(
        default_factory=deque[tuple[str, "asyncio.Future[_VectorAndTokens]"]]
    )
    _sending: asyncio.Task[None] | None = None

    async def embed(self, text: str) -> _VectorAndTokens:
        """Return the vector of a text and its share of the request's tokens."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[_VectorAndTokens] = loop.create_future()
        self._waiting.append((text, found))
        if self._sending is None:
            # An empty context: a request may contain texts of several runs.
            self._sending = loop.create_task(self._send_all(), context=Context())
        return await found

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(self.most, len(self._waiting)))]
                batch = [each for each in batch if not each[1].done()]  # without cancelled calls
                if batch and not await self._send_batch(batch):
                    for each in batch:
                        await self._send_batch([each])
        finally:
            self._sending = None

    async def _send_batch(self, batch: Sequence[tuple[str, asyncio.Future[_VectorAndTokens]]]) -> bool:
        """Request vectors. Return False if the endpoint refuses the batch because of one of several texts."""
        texts = [text for text, _ in batch]
        try:
            vectors, tokens = await self.send(texts)
        except Exception as error:  # noqa: BLE001  passed to the callers
            if len(batch) > 1 and getattr(error, "status_code", None) in _REFUSALS:
                return False
            for _, found in batch:
                if not found.done():
                    found.set_exception(error)
            return True
        for (_, found), vector, share in zip(batch, vectors, shares_of(texts, tokens), strict=True):
            if not found.done():
                found.set_result((vector, share))
        return True


def shares_of(texts: Sequence[str], tokens: int | None) -> list[int | None]:
    """Divide the tokens of a request among its texts, by length."""
    if tokens is None:
        return [None] * len(texts)
    total = sum(map(len, texts)) or 1
    shares: list[int | None] = []
    length = given = 0
    for text in texts:
        length += len(text)
        until = tokens * length // total
        shares.append(until - given)
        given = until
    if shares and given < tokens:  # all texts are empty
        shares[-1] = (shares[-1] or 0) + tokens - given
    return shares


_DEFAULT_BASE_URL = "https://api.openai.com/v1"
_TIMEOUT_S = 60.0  # shorter than for chat models


class OpenAIEmbeddingModel:
    """Embeddings from an endpoint: hosted, or your own server. Fulfils `EmbeddingModel`.

    The model can be pickled. It reads the key from the environment at each call, unless `api_key` is passed.

    Args:
        model: Name of the model at the endpoint.
        base_url: URL of the endpoint, often ending in `/v1`; default `OPENAI_BASE_URL`, then OpenAI's own.
        api_key: The key; default `OPENAI_API_KEY`. Never shown.
        timeout: Longest wait for an answer, s or `timedelta`.
        max_retries: How often a failed call is repeated if the provider caused the failure.
        batch_size: Maximum number of texts in one request.
        dimensions: Numbers per vector, for models with a choice; None: the model's default.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | SecretStr | None = None,
        timeout: timedelta | float | None = None,
        max_retries: int = 4,
        batch_size: int = 128,
        dimensions: int | None = None,
    ) -> None:
        if not model.strip():
            raise ValidationError("OpenAIEmbeddingModel model must not be blank")
        if base_url is not None and (flaw := flaw_of(base_url)):
            raise ValidationError(f"OpenAIEmbeddingModel base_url {flaw}")
        for name, value, least in (
            ("max_retries", max_retries, 0),
            ("batch_size", batch_size, 1),
            ("dimensions", dimensions, 1),
        ):
            if value is not None and value < least:
                raise ValidationError(f"OpenAIEmbeddingModel {name} must be >= {least}, got: {value}")
        self.model = model
        self._base_url = base_url
        plain = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key
        self._api_key = None if plain is None else SecretStr(check_key(plain, "OpenAIEmbeddingModel api_key"))
        self._timeout_s = check_time_s(timeout, "OpenAIEmbeddingModel timeout")
        self._max_retries = max_retries
        self._batch_size = batch_size
        self._dimensions = dimensions
        self._batcher = TextBatcher(self._embed_batch, batch_size)

    @property
    def base_url(self) -> str:
        """The URL of calls made now.

        Raises:
            ValidationError: `OPENAI_BASE_URL` is no URL.
        """
        base_url = self._base_url or os.environ.get("OPENAI_BASE_URL", "").strip() or _DEFAULT_BASE_URL
        if flaw := flaw_of(base_url):
            raise ValidationError(f"OpenAIEmbeddingModel OPENAI_BASE_URL {flaw}")
        return base_url

    def check_key(self) -> None:
        """Check that a call from this process has its key.

        Raises:
            ValidationError: The endpoint needs a key, and there is none.
        """
        self._endpoint()

    def embed(self, text: str) -> Sequence[float]:
        """Return the vector of a text. Concurrent calls from several threads share requests.

        Raises:
            openai.APIError: The endpoint cannot be reached, refuses, fails, or returns an invalid answer.
            ValidationError: The endpoint needs a key, and there is none.
        """
        vector, tokens = run_blocking(self._batcher.embed(text))
        count_embedding(estimate_tokens(len(text)) if tokens is None else tokens)
        return vector

    def embed_all(self, texts: Sequence[str]) -> list[Sequence[float]]:
        """Return the vectors of texts, in requests of `batch_size` texts. Raises the errors of `embed`."""
        vectors: list[Sequence[float]] = []
        for start in range(0, len(texts), self._batch_size):
            batch = list(texts[start : start + self._batch_size])
            found, tokens = run_blocking(self._embed_batch(batch))
            count_embedding(estimate_tokens(sum(map(len, batch))) if tokens is None else tokens)
            vectors += found
        return vectors

    async def _embed_batch(self, batch: list[str]) -> Embedded:
        request: dict[str, object] = {"model": self.model, "input": batch, "encoding_format": "float"}
        if self._dimensions is not None:
            request["dimensions"] = self._dimensions
        return await self._endpoint().fetch(json_bytes(request), partial(_parse_answer, count=len(batch)))

    def _endpoint(self) -> Endpoint:
        base_url = self.base_url
        in_environment = check_key(os.environ.get("OPENAI_API_KEY", ""), "The environment variable OPENAI_API_KEY")
        key = in_environment if self._api_key is None else self._api_key.get_secret_value()
        if not key and base_url == _DEFAULT_BASE_URL:
            raise ValidationError(
                f"OpenAIEmbeddingModel('{self.model}'): no API key. Set OPENAI_API_KEY or pass api_key; for an endpoint of your "
                "own, set OPENAI_BASE_URL or pass base_url; for a model on this machine, use embedding_model='local'"
            )
        headers = {"Content-Type": "application/json", "User-Agent": "ensemble-ray", **key_headers(base_url, key)}
        return Endpoint(
            url=resource_url(base_url, "/embeddings"),
            model=self.model,
            key=key,
            headers=headers,
            timeout_s=self._timeout_s or _TIMEOUT_S,
            max_retries=self._max_retries,
        )

    def _keywords(self) -> dict[str, Any]:
        return {
            "base_url": self._base_url,
            "api_key": self._api_key,
            "timeout": self._timeout_s,
            "max_retries": self._max_retries,
            "batch_size": self._batch_size,
            "dimensions": self._dimensions,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenAIEmbeddingModel):
            return NotImplemented
        return self.model == other.model and self._keywords() == other._keywords()

    def __hash__(self) -> int:
        return hash((self.model, self._base_url))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(OpenAIEmbeddingModel, **self._keywords()), (self.model,)

    def __repr__(self) -> str:
        shown = "" if self._base_url is None else f", base_url={shown_url(self._base_url)!r}"
        return f"OpenAIEmbeddingModel({self.model!r}{shown})"


def _parse_answer(body: bytes, count: int) -> Embedded:
    """Return the vectors in the order of the texts, and the tokens."""
    try:
        answer = cast("Mapping[str, Any]", json.loads(body))
        if answer.get("error"):
            raise not_a_completion(answer)
        found = {int(each["index"]): [float(number) for number in each["embedding"]] for each in answer["data"]}
        vectors: list[Sequence[float]] = [found[index] for index in range(count)]
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"the answer has no embedding for each of {count} texts: {type(error).__name__}") from None
    usage = answer.get("usage")
    tokens: object = cast("Mapping[str, object]", usage).get("prompt_tokens") if isinstance(usage, Mapping) else None
    return vectors, tokens if isinstance(tokens, int) and tokens >= 0 else None
