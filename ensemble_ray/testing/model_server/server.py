"""A server of chat completions and responses with scripted answers, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from http import HTTPStatus
from typing import Literal, Self, TypeAlias, cast

from aiohttp import web

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.testing.model_server.batches import BatchScript, ServedBatch, ServedBatches
from ensemble_ray.testing.model_server.responses import response_bytes, response_chunks
from ensemble_ray.testing.model_server.script import (
    Answer,
    Fault,
    RawAnswer,
    Reply,
    ServedRequest,
    completion_bytes,
    error_bytes,
    reply_of,
    sse_chunks,
)
from ensemble_ray.values.messages import ToolCall


async def reply_with(
    http: web.BaseRequest,
    body: bytes,
    *,
    status: int = 200,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Send a whole answer."""
    response = web.Response(body=body, status=status, content_type=content_type, headers=headers)
    await response.prepare(http)
    await response.write_eof()
    return response


def drop(http: web.BaseRequest, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Cut the connection."""
    if http.transport is not None:
        http.transport.abort()
    return response or web.StreamResponse()  # the library requires a response


Embed: TypeAlias = Callable[[str], Sequence[float]]  # returns the vector of a text
_DIMENSIONS = 64


def is_for_embeddings(path: str) -> bool:
    """Whether a request asks for vectors."""
    return path.partition("?")[0].endswith("/embeddings")


def count_words(text: str) -> Sequence[float]:
    """Return hashed word counts, so that texts with similar words have similar vectors."""
    vector = [0.0] * _DIMENSIONS
    for word in text.lower().split():
        vector[sha256(word.encode()).digest()[0] % _DIMENSIONS] += 1.0
    return vector


def embedding_bytes(request: ServedRequest, embed: Embed) -> bytes:
    """Return vectors in reverse order: clients must use the indices."""
    asked = request.body.get("input")
    texts = [asked] if isinstance(asked, str) else [str(text) for text in cast("Sequence[object]", asked or ())]
    data = [{"object": "embedding", "index": index, "embedding": list(embed(text))} for index, text in enumerate(texts)]
    tokens = sum(len(text.split()) for text in texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json.dumps({"object": "list", "data": data[::-1], "model": request.model, "usage": usage}).encode()


_MOST_UNREAD_BYTES = 2**30  # bytes that a client may leave unread

Script = Answer | Sequence[Answer] | Callable[[ServedRequest], Answer]

_FORMAT_FAULT = Fault(
    status=400, message="Invalid parameter: 'response_format' is not supported with this model.", code="invalid_value"
)

_WRONG_KEY = Fault(status=401, message="Incorrect API key provided.", code="invalid_api_key")


def _echo(request: ServedRequest) -> Answer:
    return f"echo: {request.text}"


def tool_loop(turns: int, *, arguments: str = "{}", text: str = "done") -> Callable[[ServedRequest], Answer]:
    """Return a script that calls the first offered tool until there are `turns` results, then answers."""

    def answer(request: ServedRequest) -> Answer:
        done = sum(message.get("role") == "tool" for message in request.messages)
        if done >= turns or not request.tools:
            return text
        return ToolCall(id=f"call_{done}", name=request.tools[0], arguments=arguments)

    return answer


class ModelServer:
    """A server of chat completions (`/chat/completions`) and of the Responses API (`/responses`) that answers by script.

    Args:
        script: A list of answers, used in order of arrival; a callable that receives each request; one answer for all;
            None echoes the last message. An answer is a text, a `ToolCall` or several, a `ChatResponse`, a `Reply`,
            a `RawAnswer`, or a `Fault`. A request beyond the end of a list is refused with status 400.
        latency_s: Delay of every answer.
        api_key: Refuse requests that do not carry this key.
        models: Refuse requests for other models; None: any model.
        rejects_stream_options: Refuse requests with `stream_options`, as older servers do.
        rejects_response_format: Refuse requests with a `response_format`: True as most servers do (HTTP 400 that names
            the field), or with that fault. Such requests are in `requests` and use no answer of a list. If False, the
            script decides whether to honour or ignore the field.
        keep_requests: Store all requests in `requests`; otherwise the server only counts them.
        embed: Returns the vector of a text, for embedding requests; a callable script may answer them with a `Fault`.
        batches: How batches proceed; see `BatchScript`. Their lines have the answers of the script.
        host: Address to listen on. There is no encryption, so keep it within a network of yours.
        port: Port to listen on; 0 selects a free port.

    Examples:
        >>> with ModelServer(["hello"]) as server:
        ...     server.base_url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        latency_s: float = 0.0,
        api_key: str | None = None,
        models: Sequence[str] | None = None,
        rejects_stream_options: bool = False,
        rejects_response_format: bool | Fault = False,
        keep_requests: bool = True,
        embed: Embed = count_words,
        batches: BatchScript | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._script = _echo if script is None else script
        self._latency_s = latency_s
        self._authorization = None if api_key is None else f"Bearer {api_key}"
        self._models = None if models is None else tuple(models)
        self._rejects_stream_options = rejects_stream_options
        self._format_fault = _FORMAT_FAULT if rejects_response_format is True else rejects_response_format or None
        self._keep_requests = keep_requests
        self._embed = embed
        self._batches = ServedBatches(batches or BatchScript(), self._answer_of_line)
        self._host = host
        self._port = port
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._held: list[asyncio.Event] | None = None
        self._open: set[ServedRequest] = set()
        self._served = 0
        self._refused_formats = 0
        self._arrived = 0
        self._delays_s = self._longest_s = 0.0  # sum and maximum of all delays, s
        self.requests: list[ServedRequest] = []  # in order of arrival
        self.counts: Counter[str] = Counter()  # number of requests by digest of the body
        self.max_in_flight = 0  # largest number of concurrent requests
        self.abandoned = 0  # requests that the client aborted
        self.connections = 0  # number of opened connections

    @property
    def base_url(self) -> str:
        """The value for `OpenAIChatModel(base_url=...)` and `OpenAIResponsesModel(base_url=...)`."""
        return f"http://{self._host}:{self._port}/v1"

    @property
    def batches(self) -> Sequence[ServedBatch]:
        """The batches so far, in order of their creation."""
        return tuple(self._batches.batches)

    @property
    def batch_calls(self) -> Counter[str]:
        """Number of requests of the Batch API: `upload`, `create`, `list`, `get`, `cancel`, `download`."""
        return Counter(self._batches.calls)

    @property
    def held_batch_calls(self) -> int:
        """Number of requests of the Batch API that were never answered, as `BatchScript.holds` says."""
        return self._batches.held

    @property
    def batch_script(self) -> BatchScript:
        """How batches proceed from now on."""
        return self._batches.script

    @batch_script.setter
    def batch_script(self, script: BatchScript) -> None:
        self._batches.script = script

    def finish_batches(self, end: Literal["completed", "expired", "failed", "cancelled"] | None = None) -> None:
        """End all open batches; None: as the script says."""
        self._batches.finish(end)

    @property
    def in_flight(self) -> int:
        """Number of open requests."""
        return len(self._open)

    @property
    def repeated(self) -> int:
        """Number of requests that repeat an earlier body byte for byte."""
        return sum(self.counts.values()) - len(self.counts)

    def requests_by_key(self) -> Counter[str]:
        """Return the number of requests by `Idempotency-Key`; requests without one count under the empty text."""
        return Counter(request.key for request in tuple(self.requests))

    def answered_keys(self) -> frozenset[str]:
        """Return the keys of requests that were answered completely (`ServedRequest.answered_at`)."""
        return frozenset(each.key for each in tuple(self.requests) if each.key and each.answered_at is not None)

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.serve(ready.set)), name="model-server", daemon=True
        )
        self._thread.start()
        if not ready.wait(timeout=30):
            raise IllegalStateError("ModelServer did not start within 30 s")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def stop(self) -> None:
        """Stop listening and cut open connections, without waiting."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop.set)

    async def serve(self, ready: Callable[[], object]) -> None:
        """Listen and answer until stopped; call `ready` once the port is known."""
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        http = web.Server(self._handle, handler_cancellation=True, access_log=None, auto_decompress=False)

        def accept() -> asyncio.Protocol:
            self.connections += 1
            return http()

        # With the default backlog of 100, clients of a fan-out would retry for a second.
        server = await self._loop.create_server(accept, self._host, self._port, backlog=4096)
        self._port = cast("int", server.sockets[0].getsockname()[1])
        ready()
        try:
            await self._stop.wait()
        finally:
            server.close()
            for connection in http.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0)  # the loop closes their sockets in its next round

    def pause(self) -> None:
        """Hold all answers from now on; requests are still read."""
        with self._changed:
            if self._held is None:
                self._held = []

    def resume(self) -> None:
        """Send the held answers, and stop holding new ones."""
        with self._changed:
            held, self._held = self._held or [], None
        for resumed in held:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(resumed.set)

    def wait_in_flight(self, count: int, *, timeout_s: float = 30.0) -> None:
        """Return when that many requests are open at the same time.

        Raises:
            TimeoutError: the count was not reached in time.
        """
        self._wait(lambda: len(self._open) >= count, f"{count} requests in flight", timeout_s)

    def wait_arrived(self, count: int, *, timeout_s: float = 30.0) -> None:
        """Return when that many requests have arrived, answered or not.

        Raises:
            TimeoutError: the count was not reached in time.
        """
        self._wait(lambda: self._arrived >= count, f"{count} requests", timeout_s)

    def wait_served(self, count: int, *, timeout_s: float = 30.0) -> None:
        """Return when that many requests have been answered or abandoned.

        Raises:
            TimeoutError: the count was not reached in time.
        """
        self._wait(lambda: self._served >= count, f"{count} requests served", timeout_s)

    def _wait(self, is_so: Callable[[], bool], what: str, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(is_so, timeout_s):
                raise TimeoutError(
                    f"ModelServer: waited {timeout_s} s for {what}; in flight {len(self._open)}, served {self._served}"
                )

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        if ServedBatches.serves(http.path):
            return await self._answer_batch_call(http)
        if http.method == "GET":
            return self._answer_get(http.path)
        raw = await http.content.read()  # not `http.read()`, which refuses large bodies
        request = ServedRequest(http.raw_path, http.headers, raw, number=self._arrived, arrived_at=time.time())
        with self._changed:
            self._arrived += 1
            self._open.add(request)
            self.max_in_flight = max(self.max_in_flight, len(self._open))
            if self._keep_requests:
                self.requests.append(request)
                self.counts[request.digest] += 1
            self._changed.notify_all()
        try:
            return await self._answer(http, request, self._refusal(request) or self._next_scripted(request))
        except (asyncio.CancelledError, ConnectionError):
            self.abandoned += 1  # the client has gone
            raise
        finally:
            with self._changed:
                self._open.discard(request)
                self._served += 1
                self._changed.notify_all()

    async def _answer_batch_call(self, http: web.BaseRequest) -> web.StreamResponse:
        if self._authorization is not None and http.headers.get("authorization") != self._authorization:
            body = error_bytes(_WRONG_KEY.message, kind="scripted_error", code=_WRONG_KEY.code)
            return await reply_with(http, body, status=_WRONG_KEY.status)
        answered = await self._batches.handle(http)
        with self._changed:
            self._changed.notify_all()
        return drop(http) if answered is None else answered

    def _answer_of_line(self, request: ServedRequest) -> Reply | RawAnswer | Fault:
        with self._changed:
            request.number = self._arrived
            self._arrived += 1
            self._served += 1
            if self._keep_requests:
                self.requests.append(request)
                self.counts[request.digest] += 1
        is_chat = request.is_response or request.path.endswith("/chat/completions")
        refusal = None if is_chat else Fault(status=404, message="Unknown path")
        return refusal or self._refusal_of_request(request) or self._next_scripted(request)

    def wait_batches(self, is_so: Callable[[Sequence[ServedBatch]], bool], *, timeout_s: float = 30.0) -> None:
        """Return when the batches fulfil a condition, which is checked after each call of the Batch API.

        Raises:
            TimeoutError: they did not in time.
        """
        self._wait(lambda: is_so(self.batches), "a condition of its batches", timeout_s)

    def _refusal(self, request: ServedRequest) -> Fault | None:
        if self._authorization is not None and request.headers.get("authorization") != self._authorization:
            return _WRONG_KEY
        is_chat = request.is_response or request.path.partition("?")[0].endswith("/chat/completions")
        if not (is_chat or is_for_embeddings(request.path)):
            return Fault(status=404, message=f"Unknown path {request.path}")
        return self._refusal_of_request(request)

    def _refusal_of_request(self, request: ServedRequest) -> Fault | None:
        if self._models is not None and request.model not in self._models:
            return Fault(status=404, message=f"The model '{request.model}' does not exist", code="model_not_found")
        if self._rejects_stream_options and "stream_options" in request.body:
            return Fault(status=400, message="Unknown parameter: stream_options", code="unknown_parameter")
        if self._format_fault is not None and request.response_format is not None:
            self._refused_formats += 1
            return self._format_fault
        return None

    def _next_scripted(self, request: ServedRequest) -> Reply | RawAnswer | Fault:
        script = self._script
        if is_for_embeddings(request.path) and (script is _echo or not callable(script)):
            return Reply(text="")
        if callable(script):
            try:
                return reply_of(script(request))
            except Exception as error:  # noqa: BLE001  the client receives a script's error, so that the test shows it
                return Fault(status=400, message=f"the script failed: {type(error).__name__}: {error}")
        if isinstance(script, list):
            position = request.number - self._refused_formats
            if position >= len(cast("list[Answer]", script)):
                return Fault(status=400, message=f"the script of {position} answers is used up")
            return reply_of(cast("list[Answer]", script)[position])
        return reply_of(cast("Answer", script))

    async def _answer(
        self, http: web.BaseRequest, request: ServedRequest, answer: Reply | RawAnswer | Fault
    ) -> web.StreamResponse:
        latency_s = self._latency_s + (answer.latency_s if isinstance(answer, Reply) else 0.0)
        self._delays_s += latency_s
        self._longest_s = max(self._longest_s, latency_s)
        if latency_s > 0:
            await asyncio.sleep(latency_s)
        if isinstance(answer, Fault) and answer.kind == "silence":
            await asyncio.Event().wait()
        if http.transport is not None:  # the code below does not wait for the client
            http.transport.set_write_buffer_limits(high=_MOST_UNREAD_BYTES)
        while True:
            with self._changed:  # also during the sending: after `pause` has returned, no answer is in flight
                if self._held is None:
                    if not (isinstance(answer, Reply) and answer.fragment_delay_s > 0):
                        return await self._send(http, request, answer)
                    break
                resumed = asyncio.Event()
                self._held.append(resumed)
            await resumed.wait()
        return await self._send(http, request, answer)

    async def _send(
        self, http: web.BaseRequest, request: ServedRequest, answer: Reply | RawAnswer | Fault
    ) -> web.StreamResponse:
        if isinstance(answer, Fault):
            if answer.kind == "drop":
                return drop(http)
            if answer.kind == "garbage":
                return await reply_with(http, b"<html>this is not a chat completion</html>", content_type="text/html")
            headers = {} if answer.retry_after_s is None else {"retry-after": f"{answer.retry_after_s:g}"}
            body = error_bytes(answer.message, kind="scripted_error", code=answer.code)
            if request.stream and answer.status == HTTPStatus.OK:
                event = b"data: %b\n\n" % body
                return await reply_with(http, event, content_type="text/event-stream", headers=headers)
            return await reply_with(http, body, status=answer.status, headers=headers)
        if isinstance(answer, RawAnswer):
            return await self._send_raw(http, request, answer)
        if request.stream:
            return await self._stream(http, request, answer)
        if http.transport is not None:  # before the client can receive it
            request.answered_at = time.time()
        if is_for_embeddings(request.path):
            return await reply_with(http, embedding_bytes(request, self._embed))
        if request.is_response:
            return await reply_with(http, response_bytes(answer, request))
        return await reply_with(http, completion_bytes(answer, model="scripted", number=request.number))

    async def _send_raw(self, http: web.BaseRequest, request: ServedRequest, answer: RawAnswer) -> web.StreamResponse:
        headers = {"Content-Type": answer.content_type, **answer.headers}
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(http)
        for piece in (answer.body,) if isinstance(answer.body, bytes) else answer.body:
            await response.write(piece)
        request.answered_at = time.time()
        await response.write_eof()
        return response

    async def _stream(self, http: web.BaseRequest, request: ServedRequest, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(http)
        if request.is_response:
            chunks = response_chunks(reply, request)
        else:
            chunks = sse_chunks(reply, model=request.model, number=request.number, with_usage=request.wants_usage)
        for sent, chunk in enumerate(chunks):
            if reply.cut_after is not None and sent >= reply.cut_after:
                return drop(http, response)
            await response.write(chunk)
            if reply.fragment_delay_s > 0:
                await asyncio.sleep(reply.fragment_delay_s)
        request.answered_at = time.time()
        await response.write_eof()
        return response

    def _answer_get(self, path: str) -> web.Response:
        if path.endswith("/models"):
            models = [{"id": name, "object": "model"} for name in self._models or ("scripted",)]
            return web.json_response({"object": "list", "data": models})
        if path.endswith("/stats"):
            stats = self.stats()
            self._longest_s = 0.0
            return web.json_response(stats)
        body = error_bytes(f"Unknown path {path}", kind="not_found")
        return web.Response(body=body, status=404, content_type="application/json")

    def stats(self) -> Mapping[str, int]:
        """Return the counts so far; a server in its own process serves them at `/stats`.

        `longest_delay_ms` covers the requests since the last request of `/stats`.
        """
        return {
            "requests": self._arrived,
            "served": self._served,
            "repeated": self.repeated,
            "abandoned": self.abandoned,
            "max_in_flight": self.max_in_flight,
            "batches": len(self.batches),
            "batch_answers": sum(batch.answered for batch in self.batches),
            "delays_ms": round(self._delays_s * 1e3),
            "longest_delay_ms": round(self._longest_s * 1e3),
        }
