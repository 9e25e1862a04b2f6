"""`OpenAIEmbeddingModel`: any endpoint that gives embeddings by the OpenAI protocol.

The definition holds data only: it pickles, and the key is read when a call is made. The key is never shown.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

from pydantic import SecretStr

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.failures import flaw_of, key_headers, resource_url, shown_url
from ensemble_ray.llm.openai import check_key, check_time_s
from ensemble_ray.llm.protocol.endpoint import Endpoint
from ensemble_ray.llm.protocol.wire import WireError, json_bytes, not_a_completion
from ensemble_ray.memory.embeddings import count_embedding
from ensemble_ray.process.forks import run_blocking
from ensemble_ray.text.foreign_text import estimate_tokens

#: Vectors, and the tokens that the endpoint counted for all of them; None: it counts none.
Embedded = tuple[list[Sequence[float]], int | None]
_Found = tuple[Sequence[float], int | None]
#: Of answers that refuse a request for what is in it: too long, not allowed, no text.
_REFUSALS = frozenset({400, 413, 422})


@dataclass(slots=True)
class TextBatcher:
    """The texts of one model in one process; used on one event loop."""

    #: asks for the vectors of texts
    send: Callable[[list[str]], Awaitable[Embedded]]
    #: texts in one request
    most: int
    _waiting: deque[tuple[str, asyncio.Future[_Found]]] = field(
        default_factory=deque[tuple[str, "asyncio.Future[_Found]"]]
    )
    _sending: asyncio.Task[None] | None = None

    async def embed(self, text: str) -> _Found:
        """Return the vector of a text and its share of the tokens; None where the endpoint counts none.

        Raises:
            openai.APIError: as the request that had the text.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[_Found] = loop.create_future()
        self._waiting.append((text, found))
        if self._sending is None:
            # No context of a caller's: a request may have texts of several runs.
            self._sending = loop.create_task(self._send_all(), context=Context())
        return await found

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(self.most, len(self._waiting)))]
                await self._send_batch([each for each in batch if not each[1].done()])  # who was cancelled has left
        finally:
            self._sending = None

    async def _send_batch(self, batch: Sequence[tuple[str, asyncio.Future[_Found]]]) -> None:
        if not batch:
            return
        texts = [text for text, _ in batch]
        try:
            vectors, tokens = await self.send(texts)
        except Exception as error:  # noqa: BLE001  raised where each text is waited for
            if len(batch) > 1 and getattr(error, "status_code", None) in _REFUSALS:
                for each in batch:
                    await self._send_batch([each])
                return
            for _, found in batch:
                if not found.done():
                    found.set_exception(error)
            return
        for (_, found), vector, share in zip(batch, vectors, shares_of(texts, tokens), strict=True):
            if not found.done():
                found.set_result((vector, share))


def shares_of(texts: Sequence[str], tokens: int | None) -> list[int | None]:
    """Return what each text has of the tokens that were counted for all, by its length; together they are all of them."""
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
    if shares and given < tokens:  # empty texts alone
        shares[-1] = (shares[-1] or 0) + tokens - given
    return shares


_DEFAULT_BASE_URL = "https://api.openai.com/v1"
#: Texts are short, and so are their answers.
_TIMEOUT_S = 60.0


class OpenAIEmbeddingModel:
    """Embeddings from an endpoint: hosted, or a server of your own. Fulfils `EmbeddingModel`.

    Args:
        model: The model's name at the endpoint.
        base_url: Where the protocol begins, often ending in `/v1`; default `OPENAI_BASE_URL`, then OpenAI's own.
        api_key: The key; default `OPENAI_API_KEY`, read when a call is made. Never shown.
        timeout: Longest wait for an answer, s or `timedelta`.
        max_retries: How often a call that failed by the provider's fault is repeated.
        batch_size: Most texts in one request.
        dimensions: Numbers in a vector, for models that let one choose; None: as the model has it.
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
        """Make one; no endpoint is asked.

        Raises:
            ValidationError: a value cannot work.
        """
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

    def check_key(self) -> None:
        """Check that a call from this process would have its key.

        Raises:
            ValidationError: there is none, and the endpoint is one that needs it.
        """
        self._endpoint()

    def embed(self, text: str) -> Sequence[float]:
        """Return the vector of a text. Texts that several threads ask for at the same time share a request.

        Raises:
            openai.APIError: the endpoint cannot be reached, refuses, fails, or answers with something else.
            ValidationError: there is no key, and the endpoint is one that needs it.
        """
        vector, tokens = run_blocking(self._batcher.embed(text))
        count_embedding(estimate_tokens(len(text)) if tokens is None else tokens)
        return vector

    def embed_all(self, texts: Sequence[str]) -> list[Sequence[float]]:
        """Return the vectors of texts, a batch with each request; as `embed` else."""
        vectors: list[Sequence[float]] = []
        for batch in _batches(list(texts), self._batch_size):
            found, tokens = run_blocking(self._embed_batch(batch))
            count_embedding(estimate_tokens(sum(map(len, batch))) if tokens is None else tokens)
            vectors += found
        return vectors

    async def _embed_batch(self, batch: list[str]) -> Embedded:
        """Return vectors, and the tokens that the endpoint counted."""
        asked: dict[str, object] = {"model": self.model, "input": batch, "encoding_format": "float"}
        if self._dimensions is not None:
            asked["dimensions"] = self._dimensions
        return await self._endpoint().fetch(json_bytes(asked), partial(_answer_of, count=len(batch)))

    def _endpoint(self) -> Endpoint:
        base_url = self._base_url or os.environ.get("OPENAI_BASE_URL", "").strip() or _DEFAULT_BASE_URL
        if flaw := flaw_of(base_url):
            raise ValidationError(f"OpenAIEmbeddingModel OPENAI_BASE_URL {flaw}")
        given = self._api_key
        in_environment = check_key(os.environ.get("OPENAI_API_KEY", ""), "The environment variable OPENAI_API_KEY")
        key = in_environment if given is None else given.get_secret_value()
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

    def _keywords(self) -> dict[str, object]:
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
        return (_rebuild, (self.model, self._keywords()))

    def __repr__(self) -> str:
        shown = "" if self._base_url is None else f", base_url={shown_url(self._base_url)!r}"
        return f"OpenAIEmbeddingModel({self.model!r}{shown})"


def _rebuild(model: str, keywords: Mapping[str, Any]) -> OpenAIEmbeddingModel:
    return OpenAIEmbeddingModel(model, **keywords)


def _batches(texts: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _answer_of(body: bytes, count: int) -> Embedded:
    """Return the vectors of an answer, in the order of the texts, and its tokens; None where it has no count.

    Raises:
        WireError: it has not one for each text.
    """
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
