"""The Batch API of an endpoint: files of requests, batches, and the lines of their answers.

The `openai` client sends the requests: they are few, and it uploads and downloads files piece by piece.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.llm.failures import CallFailure, build_provider_error
from ensemble_ray.llm.protocol.endpoint import IDEMPOTENCY_KEY, Endpoint
from ensemble_ray.llm.protocol.sdk_transport import SdkClients, sdk_failures
from ensemble_ray.llm.protocol.transport import CallFailedError
from ensemble_ray.llm.protocol.wire import AnswerLimits, WireError, json_bytes, parse_json
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.messages import ChatResponse

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import Batch

T = TypeVar("T")

KEY = "ensemble_ray_batch"  # of the metadata, by which a batch is found again
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_SHOWN = 200  # characters of a provider's text
_PAGE = 100  # batches per page of a list
_MOST_PAGES = 1_000
_SLACK_S = 3_600  # the clocks of provider and caller may differ
_FILE_BYTES = 2**31  # of an output file; a stream may have four times as much


class ProviderBatch(Struct, frozen=True, kw_only=True):
    """A batch as the provider describes it."""

    id: str
    status: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str = ""
    error_file: str = ""
    problems: tuple[tuple[str, str], ...] = ()  # (code, message) of a failed validation

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def is_over_queue_limit(self) -> bool:
        """Whether too many tokens wait in other batches, so that a later attempt may succeed."""
        return self.status == "failed" and any("token_limit" in code for code, _ in self.problems)


class BatchLine(Struct, frozen=True):
    """A line of an output or error file."""

    custom_id: str
    response: ChatResponse | None = None
    problem: str = ""  # why there is no usable answer


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEndpoint:
    """The Batch API behind one model. Each method raises an `openai.APIError`."""

    endpoint: Endpoint
    clients: SdkClients
    connection: Mapping[str, object] = field(repr=False)  # with the key
    query: Mapping[str, object]

    async def upload(self, name: str, file: IO[bytes]) -> str:
        """Upload the requests, and return the id of the file."""

        async def send(client: AsyncOpenAI) -> str:
            file.seek(0)
            return (await client.files.create(file=(name, file), purpose="batch", extra_query=self.query)).id

        return await self._call(send)

    async def create(self, file_id: str, *, key: str, window: str, metadata: Mapping[str, str]) -> ProviderBatch:
        """Create the batch of a file. `key` is part of its metadata."""

        async def send(client: AsyncOpenAI) -> ProviderBatch:
            return _described(
                await client.batches.create(
                    input_file_id=file_id,
                    endpoint=cast("Any", self.endpoint.api.batch_path),
                    completion_window=cast("Any", window),  # the package knows one of the windows
                    metadata={**metadata, KEY: key},
                    extra_query=self.query,
                    extra_headers={IDEMPOTENCY_KEY: key},
                )
            )

        return await self._call(send)

    async def get(self, batch_id: str) -> ProviderBatch:
        async def send(client: AsyncOpenAI) -> ProviderBatch:
            return _described(await client.batches.retrieve(batch_id, extra_query=self.query))

        return await self._call(send)

    async def cancel(self, batch_id: str) -> ProviderBatch:
        async def send(client: AsyncOpenAI) -> ProviderBatch:
            return _described(await client.batches.cancel(batch_id, extra_query=self.query))

        return await self._call(send)

    async def find(self, key: str, *, since: float) -> ProviderBatch | None:
        """Return the batch with that key in its metadata, unless it is older than `since`, Unix time, s."""

        async def search(client: AsyncOpenAI) -> ProviderBatch | None:
            after: dict[str, str] = {}
            for _ in range(_MOST_PAGES):
                page = await client.batches.list(limit=_PAGE, extra_query={**self.query, **after})
                listed = page.data  # newest first
                for batch in listed:
                    if (batch.metadata or {}).get(KEY) == key:
                        return _described(batch)
                if not listed or not page.has_more or listed[-1].created_at < since - _SLACK_S:
                    return None
                after = {"after": listed[-1].id}
            return None

        return await self._call(search)

    async def lines(self, file_id: str) -> AsyncGenerator[BatchLine]:
        """Yield the lines of an output or error file as they arrive; a line that is no JSON object has no id."""
        rest = bytearray()
        async with contextlib.aclosing(self._pieces(file_id)) as pieces:
            async for piece in pieces:
                rest += piece
                if b"\n" in piece:
                    *whole, last = rest.split(b"\n")
                    rest = bytearray(last)
                    for line in whole:
                        if line.strip():
                            yield self.read_line(bytes(line))
                if len(rest) > 2 * self.endpoint.limits.body_bytes:
                    failure = CallFailure(status=200, reason="its file has a line that is longer than any answer")
                    raise await build_provider_error(failure, self.endpoint.origin)
        if rest.strip():
            yield self.read_line(bytes(rest))

    def read_line(self, line: bytes) -> BatchLine:
        try:
            data = parse_json(line, "the line")
        except WireError as error:
            return BatchLine("", problem=str(error))
        if not isinstance(data, dict):
            return BatchLine("", problem="the line is not a JSON object")
        entry = cast("Mapping[str, Any]", data)
        custom_id = str(entry.get("custom_id") or "")
        answered: object = entry.get("response")
        if isinstance(answered, dict):
            response = cast("Mapping[str, Any]", answered)
            status: object = response.get("status_code")
            if status == 200:  # noqa: PLR2004  HTTP
                try:
                    return BatchLine(custom_id, self.endpoint.decode(json_bytes(response.get("body"))))
                except (ValueError, RecursionError) as error:  # no answer of the protocol
                    return BatchLine(custom_id, problem=str(error))
            return BatchLine(custom_id, problem=one_line(f"HTTP {status}", _SHOWN))
        failure: object = entry.get("error")
        code: object = cast("Mapping[str, Any]", failure).get("code") if isinstance(failure, dict) else None
        return BatchLine(custom_id, problem=one_line(str(code or "the line has no response"), _SHOWN))

    async def _pieces(self, file_id: str) -> AsyncGenerator[bytes]:
        client = await self.clients.get(self._connection())
        try:
            with sdk_failures():
                async with contextlib.AsyncExitStack() as stack:
                    opened = client.files.with_streaming_response.content(file_id, extra_query=self.query)
                    with self._guarded(is_file=True):  # the head decides about the body
                        response = await stack.enter_async_context(opened)
                    async for piece in response.iter_bytes():
                        yield piece
        except CallFailedError as failed:
            failure = failed.failure
        else:
            return
        raise await build_provider_error(failure, self.endpoint.origin)

    async def _call(self, send: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
        client = await self.clients.get(self._connection())
        try:
            with self._guarded(is_file=False), sdk_failures():
                async with asyncio.timeout(self.endpoint.limits.time_s):
                    return await send(client)
        except CallFailedError as failed:
            failure = failed.failure
        except TimeoutError as error:
            failure = CallFailure(timed_out=True, cause=error)
        # Outside `except`, so that the internal error is not its context.
        raise await build_provider_error(failure, self.endpoint.origin)

    def _connection(self) -> Mapping[str, object]:
        base_url = self.endpoint.url.partition("?")[0].removesuffix(self.endpoint.api.path)
        return {"base_url": base_url, "timeout": self.endpoint.timeout_s, **self.connection}

    def _guarded(self, *, is_file: bool) -> contextlib.AbstractContextManager[None]:
        from ensemble_ray.llm.protocol.sdk_guard import guard_answers  # it imports the package

        limits = replace(self.endpoint.limits, body_bytes=_FILE_BYTES) if is_file else AnswerLimits()
        return guard_answers(limits, stream=is_file)


def request_line(custom_id: str, path: str, body: bytes) -> bytes:
    """Return the line of a file of requests, with its end."""
    head = json_bytes({"custom_id": custom_id, "method": "POST", "url": path})
    return b"".join((head[:-1], b',"body":', body, b"}\n"))


def _described(batch: Batch) -> ProviderBatch:
    counts, errors = batch.request_counts, batch.errors
    return ProviderBatch(
        id=batch.id,
        status=one_line(str(batch.status), _SHOWN),
        total=0 if counts is None else counts.total,
        completed=0 if counts is None else counts.completed,
        failed=0 if counts is None else counts.failed,
        output_file=batch.output_file_id or "",
        error_file=batch.error_file_id or "",
        problems=tuple(
            (one_line(each.code or "", _SHOWN), one_line(each.message or "", _SHOWN))
            for each in (() if errors is None else errors.data or ())
        ),
    )
