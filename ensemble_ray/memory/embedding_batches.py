"""TextBatcher: brings texts that are to be embedded at the same time into one request. Package: memory.

In: texts, one by one. Out: the vector of each, and its share of the tokens. One request is under way at a time; the texts that
come meanwhile go with the next one, so that a text that comes alone does not wait. Must never happen: a text that fails
because of another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

__all__ = ["Embedded", "TextBatcher", "shares_of"]

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
