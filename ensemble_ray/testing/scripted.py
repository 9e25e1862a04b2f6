"""A scripted model, a manual clock and a recording event sink.

A pickled model is a handle that calls the owning process through the `DriverServices` port.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import inspect
import itertools
import os
import pickle
import re
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar, cast

from msgspec import Struct

from ensemble_ray.errors import IllegalStateError, message_of
from ensemble_ray.errors.travel import ErrorChain
from ensemble_ray.events import Event
from ensemble_ray.ports import services
from ensemble_ray.process.concurrency import call_user, new_lock
from ensemble_ray.testing.model_server.script import Reply, ServedRequest
from ensemble_ray.values.attachments import Attachment, AttachmentKind, File
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.messages import (
    ChatMessage,
    ChatResponse,
    ProviderFields,
    Reasoning,
    TokenUsage,
    ToolCall,
    ToolSpec,
)

_WORDS = re.compile(r"\S+\s*|\s+")
SERVICE = "scripted_model.chat"  # service name for calls of handles
_Scripted = tuple[ChatResponse, Sequence[str] | None]  # a response, and the fragments of its text; None: words

T = TypeVar("T")


class ScriptedCall(Struct, frozen=True, kw_only=True):
    """One call that a scripted model received."""

    number: int  # in order of arrival, from 0
    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSpec]

    @property
    def text(self) -> str:
        """Text of the last message."""
        return (self.messages[-1].content or "") if self.messages else ""

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Attachments of all messages, in order, with their contents."""
        return tuple([each for message in self.messages for each in message.attachments])


_Raised = BaseException | type[BaseException]
ScriptEntry = str | ToolCall | Sequence[ToolCall] | ChatResponse | Reply | _Raised | Callable[[ScriptedCall], object]


class ScriptedModel:
    """A model that answers from a script, for tests of agent teams without any model.

    Each call uses the next entry: a text, a `ToolCall` or several, a `ChatResponse`, a `Reply` (to control its
    streaming), an exception to raise, or a callable that receives the `ScriptedCall` and returns one of these (it may
    be async). The order of parallel calls is not fixed: use one callable for all of them.

    Args:
        entries: The script, in order.
        otherwise: Answers every call after the last entry; without it such a call fails.
        reads: Kinds of attachments that it reads, of `image`, `audio` and `file`.

    Examples:
        >>> import asyncio
        >>> model = ScriptedModel("first", "second")
        >>> asyncio.run(model.chat([ChatMessage("user", "hello")])).text
        'first'
        >>> model.calls[0].text
        'hello'
    """

    def __init__(
        self, *entries: ScriptEntry, otherwise: ScriptEntry | None = None, reads: Collection[AttachmentKind] = ()
    ) -> None:
        self.reads = tuple(reads)
        self._entries = entries
        self._otherwise = otherwise
        self._calls: list[ScriptedCall] = []
        self._lock = new_lock()
        self._id = new_object_id()
        self.process_id = os.getpid()  # owner of the script
        _doubles[self._id] = self

    @property
    def calls(self) -> tuple[ScriptedCall, ...]:
        """All calls so far from all processes, in order of arrival."""
        with self._lock:
            return tuple(self._calls)

    @property
    def remaining(self) -> int:
        """Number of unused entries."""
        with self._lock:
            return max(0, len(self._entries) - len(self._calls))

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer with the next entry.

        Raises:
            IllegalStateError: the script is used up.
        """
        return (await self.reply(messages, tools))[0]

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Yield the next entry as fragments (words, or the fragments of a `Reply`), then the whole response.

        Raises:
            IllegalStateError: the script is used up.
        """
        async for part in _parts(*await self.reply(messages, tools)):
            yield part

    async def reply(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> _Scripted:
        """Return the response of the next entry, and the fragments of its text; None: words."""
        with self._lock:
            call = ScriptedCall(number=len(self._calls), messages=tuple(messages), tools=tuple(tools))
            self._calls.append(call)
        if call.number < len(self._entries):
            entry: object = self._entries[call.number]
        elif self._otherwise is not None:
            entry = self._otherwise
        else:
            raise IllegalStateError(
                f"ScriptedModel: the script of {len(self._entries)} entries is used up; "
                f"call {call.number + 1} asks: {call.text[:200]!r}"
            )
        return await _resolve(entry, call)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_double_or_handle, (self._id, self.reads))

    def __repr__(self) -> str:
        return f"ScriptedModel({len(self._entries)} entries, {len(self._calls)} calls)"


class ScriptedModelHandle(Struct, frozen=True):
    """A scripted model of another process."""

    double_id: str
    reads: tuple[AttachmentKind, ...] = ()

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Call the owner of the script."""
        return (await self._ask(messages, tools))[0]

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Call the owner of the script; the fragments arrive together."""
        async for part in _parts(*await self._ask(messages, tools)):
            yield part

    async def _ask(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> _Scripted:
        here = services()
        if here is None or here.driver is None:
            raise IllegalStateError("ScriptedModel: this copy is outside the run of the process that owns the script")
        payload = {
            "id": self.double_id,
            "messages": [
                {
                    **asdict(replace(message, attachments=())),
                    "attachments": [_packed(each) for each in message.attachments],
                }
                for message in messages
            ],
            "tools": [
                {"name": each.name, "description": each.description, "parameters": each.parameters} for each in tools
            ],
        }
        return _reply_from(cast("Mapping[str, Any]", await here.driver.ask(SERVICE, payload)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_double_or_handle, (self.double_id, self.reads))


async def answer_scripted(payload: Mapping[str, object]) -> Mapping[str, object]:
    """Answer a handle's call; the Ray runtime calls it for `SERVICE`."""
    double = live_double(str(payload["id"]))
    if double is None:
        gone = "ScriptedModel: its owner has let go of it; keep a reference for as long as the run lasts"
        return {"error": _error_data(IllegalStateError(gone))}
    try:
        messages = [
            _rebuild(ChatMessage, {**data, "attachments": tuple([_unpacked(each) for each in data["attachments"]])})
            for data in cast("Sequence[Mapping[str, Any]]", payload["messages"])
        ]
        tools = [ToolSpec(**data) for data in cast("Sequence[dict[str, Any]]", payload["tools"])]
        response, fragments = await double.reply(messages, tools)
    except Exception as error:  # noqa: BLE001  the caller receives any error of the script
        return {"error": _error_data(error)}
    return {"response": asdict(response), "fragments": None if fragments is None else list(fragments)}


#: weak: a test's model ends with the test
_doubles: weakref.WeakValueDictionary[str, ScriptedModel] = weakref.WeakValueDictionary()


def live_double(double_id: str) -> ScriptedModel | None:
    """Return the scripted model of that id if this process owns it and it is alive."""
    double = _doubles.get(double_id)
    # A forked child inherits the table, but not the script.
    return double if double is not None and double.process_id == os.getpid() else None


def has_live_doubles() -> bool:
    """Whether a runtime must listen for calls of handles."""
    return any(live_double(double_id) is not None for double_id in list(_doubles))


def _double_or_handle(double_id: str, reads: tuple[AttachmentKind, ...] = ()) -> ScriptedModel | ScriptedModelHandle:
    """Rebuild a pickled model: the model itself in its process, a handle elsewhere."""
    return live_double(double_id) or ScriptedModelHandle(double_id, reads)


async def _resolve(entry: object, call: ScriptedCall) -> _Scripted:
    if isinstance(entry, BaseException) or (isinstance(entry, type) and issubclass(entry, BaseException)):
        raise entry
    if isinstance(entry, str):
        return ChatResponse(entry), None
    if isinstance(entry, Reply):
        if entry.members or not entry.is_ended or entry.cut_after is not None:
            raise IllegalStateError(
                "ScriptedModel: a Reply with members, cut_after or is_ended=False needs a ModelServer; "
                "a ChatResponse can have provider_fields, or the finish_reason 'stream_cut'"
            )
        calls = tuple(entry.tool_calls)
        return ChatResponse(entry.text, calls, entry.usage, entry.finish_reason, entry.reasoning), entry.fragments
    if isinstance(entry, ToolCall):
        return ChatResponse(tool_calls=(entry,)), None
    if isinstance(entry, ChatResponse):
        return replace(entry, tool_calls=tuple(entry.tool_calls)), None
    if callable(entry):
        returned = await call_user(cast("Callable[[ScriptedCall], object | Awaitable[object]]", entry), call)
        return await _resolve(await returned if inspect.isawaitable(returned) else returned, call)
    if isinstance(entry, Sequence) and all(isinstance(item, ToolCall) for item in cast("Sequence[object]", entry)):
        return ChatResponse(tool_calls=tuple(cast("Sequence[ToolCall]", entry))), None
    raise IllegalStateError(f"ScriptedModel: cannot answer with a {type(entry).__name__}")


async def _parts(response: ChatResponse, fragments: Sequence[str] | None) -> AsyncIterator[str | ChatResponse]:
    thoughts = [Reasoning(each) for each in _WORDS.findall(response.reasoning or "")]
    for fragment in (*thoughts, *(_WORDS.findall(response.text or "") if fragments is None else fragments)):
        yield fragment
        await asyncio.sleep(0)
    yield response


def _rebuild(kind: Callable[..., T], data: Mapping[str, Any]) -> T:
    calls = tuple(ToolCall(**each) for each in data["tool_calls"])
    fields = data["provider_fields"]
    known = None if fields is None else ProviderFields(**fields)
    return kind(**{**data, "tool_calls": calls, "provider_fields": known})


def _packed(attachment: Attachment) -> dict[str, object]:
    return {**attachment.to_json(), "content": base64.b64encode(attachment.require_data()).decode()}


def _unpacked(data: Mapping[str, Any]) -> Attachment:
    return Attachment.from_json(data).with_data(base64.b64decode(data["content"]))


def _error_data(error: Exception) -> Mapping[str, str]:
    return {"text": message_of(error), "pickled": base64.b64encode(pickle.dumps(ErrorChain(error))).decode()}


def _reply_from(data: Mapping[str, Any]) -> _Scripted:
    """Raise the owner's error, or a `RuntimeError` if it cannot be unpickled here."""
    failed = data.get("error")
    if failed is not None:
        try:
            # Trusted: the bytes come from the process that started this one.
            error = pickle.loads(base64.b64decode(failed["pickled"]))  # noqa: S301
        except Exception as missing:
            raise RuntimeError(failed["text"]) from missing
        raise error
    response = cast("Mapping[str, Any]", data["response"])
    usage = None if response["usage"] is None else TokenUsage(**response["usage"])
    return _rebuild(ChatResponse, {**response, "usage": usage}), data["fragments"]


def assert_attached(call: ScriptedCall | ServedRequest, *expected: Attachment | bytes | str | os.PathLike[str]) -> None:
    """Assert that a `ScriptedCall` or a `ServedRequest` has these attachments, in this order; contents are compared.

    Args:
        call: The call that a double received.
        expected: Attachments with contents or hashes, bytes, or paths.

    Raises:
        AssertionError: the call has others. The message lists both.
    """
    wanted = [each if isinstance(each, Attachment) and each.is_read else _read(each) for each in expected]
    if [each.sha256 for each in wanted] != [each.sha256 for each in call.attachments]:
        shown = ", ".join(map(repr, call.attachments)) or "none"
        raise AssertionError(f"attachments of the call: {shown}; expected: {', '.join(map(repr, wanted)) or 'none'}")


def _read(expected: Attachment | bytes | str | os.PathLike[str]) -> Attachment:
    return expected.read() if isinstance(expected, Attachment) else File(expected).read()


class ManualClock:
    """A `Clock` that changes its time only by `advance`.

    Sleepers wake in order of their due time, on the loop that they sleep on. `advance` is thread-safe.

    Args:
        start: Initial Unix time, s.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the Unix time of this clock, s."""
        return self._now

    @property
    def sleepers(self) -> int:
        """Number of coroutines that wait for this clock."""
        with self._lock:
            return sum(not future.done() for _, _, _, future in self._sleepers)

    async def sleep(self, delay_s: float) -> None:
        """Return when the clock has advanced by the delay; immediately for a delay of 0 or less."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            heapq.heappush(self._sleepers, (self._now + delay_s, next(self._order), loop, future))
        await future

    def advance(self, by_s: float) -> None:
        """Advance the time and wake all due sleepers.

        Raises:
            ValueError: `by_s` is negative.
        """
        if by_s < 0:
            raise ValueError(f"by_s must be >= 0, got: {by_s}")
        with self._lock:
            self._now += by_s
            due = []
            while self._sleepers and self._sleepers[0][0] <= self._now:
                due.append(heapq.heappop(self._sleepers))

        def wake(sleeper: asyncio.Future[None]) -> None:
            if not sleeper.done():
                sleeper.set_result(None)

        for _, _, loop, future in due:
            loop.call_soon_threadsafe(wake, future)


E = TypeVar("E", bound=Event)


class RecordingSink:
    """A `RunEventSink` that stores every event in order.

    Args:
        kinds: The event types that it accepts; None: all.
    """

    def __init__(self, kinds: Collection[type[Event]] | None = None) -> None:
        self._kinds = None if kinds is None else frozenset(kinds)
        self._lock = threading.Lock()
        self._events: list[Event] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in order."""
        with self._lock:
            return tuple(self._events)

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether that type is among the kinds."""
        return self._kinds is None or event_type in self._kinds

    def emit(self, event: Event) -> None:
        """Store one event."""
        with self._lock:
            self._events.append(event)

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return immediately: emitted events are already stored."""

    def of(self, event_type: type[E]) -> tuple[E, ...]:
        """Return the events of one type, in order."""
        return tuple(event for event in self.events if isinstance(event, event_type))
