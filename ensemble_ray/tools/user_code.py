"""Await, limit and render the results of user code."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MappingView, Sequence
from enum import Enum
from itertools import islice, takewhile
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import to_json

from ensemble_ray.ports import CustomToolMetrics, ToolMetrics
from ensemble_ray.process.concurrency import USER_ERRORS, is_async_callable, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.messages import ChatMessage, ChatResponse
from ensemble_ray.values.task_output import Shown
from ensemble_ray.values.trace import jsonable

MOST_ITEMS = 100_000  # a generator may never end
#: `<Report object at 0x7f...>`
_ADDRESS = re.compile(r"<.* at 0x[0-9A-Fa-f]+>+", re.DOTALL)

T = TypeVar("T")

_log = bounded_logger(__name__)


class ResultError(TypeError):
    """A value without a text."""


async def call_to_end(function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    """Call user code, sync code in a thread; a generator becomes a list (S-LLM-45, S-LLM-46)."""
    if is_async_callable(function):
        return await collect(function(*args, **kwargs))
    # An iterator may belong to its thread, as a `sqlite3.Cursor` does.
    return await collect(await _drain_in_thread(lambda: function(*args, **kwargs)))


async def collect(returned: object) -> object:
    """Await the result; a generator becomes a list, or raises `ResultError` if too long."""
    while inspect.isawaitable(returned):
        returned = cast("object", await returned)
    if isinstance(returned, AsyncIterator):
        items: list[object] = []
        async for item in cast("AsyncIterator[object]", returned):
            items.append(item)
            if len(items) > MOST_ITEMS:
                raise _too_many_items("A generator")
        return items
    if isinstance(returned, Iterator):
        iterator = cast("object", returned)
        return await _drain_in_thread(lambda: iterator)
    return returned


async def _drain_in_thread(work: Callable[[], object]) -> object:
    is_over = threading.Event()  # a thread cannot be stopped, but ends with the next item

    def drain() -> object:
        returned = work()
        if not isinstance(returned, Iterator):
            return returned
        return _list_items(takewhile(lambda _: not is_over.is_set(), cast("Iterator[object]", returned)), "A generator")

    try:
        return await threads.run(drain)
    finally:
        is_over.set()


def collect_here(returned: object) -> object:
    """`collect` for synchronous code."""
    if inspect.isawaitable(returned) or isinstance(returned, AsyncIterator):
        returned = run_to_end(collect(cast("object", returned)))
    if isinstance(returned, Iterator):
        return _list_items(cast("Iterator[object]", returned), "A generator")
    return returned


def run_to_end(awaitable: Awaitable[T]) -> T:
    """Run an awaitable from synchronous code, even on the thread of a running loop."""

    async def awaited() -> T:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    outcome: list[T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.append(context.run(asyncio.run, awaited()))
        except BaseException as error:  # noqa: BLE001  the waiting caller raises it
            errors.append(error)

    thread = threading.Thread(target=work, name="ensemble-ray-tool", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


class TimeLimit:
    """An `asyncio.timeout` that can pause. While its block runs, it is one of the call's `limits`."""

    def __init__(self, limit_s: float | None, limits: list[TimeLimit]) -> None:
        self._timer = asyncio.timeout(limit_s)
        self._limits = limits
        self._pauses = 0
        self._left_s = 0.0

    @property
    def is_over(self) -> bool:
        return self._timer.expired()

    def pause(self) -> None:
        self._pauses += 1
        ends_at = self._timer.when()
        if self._pauses == 1 and ends_at is not None:
            self._left_s = max(0.0, ends_at - asyncio.get_running_loop().time())
            self._timer.reschedule(None)
        elif self._pauses == 1:
            self._left_s = -1.0

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses and self._left_s >= 0 and self in self._limits:
            self._timer.reschedule(asyncio.get_running_loop().time() + self._left_s)

    async def __aenter__(self) -> Self:
        await self._timer.__aenter__()
        self._limits.append(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._limits.remove(self)
        await self._timer.__aexit__(kind, error, where)


def render_value(value: object, source: str = "A tool") -> str:
    """Return a value's text: data as JSON, None as "", others by `str` (S-TOOL-14); or raise `ResultError`."""
    if isinstance(value, Enum):
        value = cast("object", value.value)
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Shown):  # a run's result
        return value.text_and_figures()[0]
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise ResultError(
                f"{source} returned {len(bytes(value))} bytes that are no UTF-8 text. "
                "Return text, or write a file and return its path"
            ) from error
    is_data = isinstance(value, BaseModel | Mapping | Sequence | set | frozenset | MappingView | Iterator)
    if is_data or _is_plain_dataclass(value) or hasattr(type(value), "__pydantic_serializer__"):
        return _to_json(value, source)
    return _str_of(value, source)


def name_value(value: object) -> str:
    """Return a value's text, or the name of its class (S-LLM-49)."""
    shown = jsonable(value)
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", shown if isinstance(shown, str) else to_json(shown).decode())


def _to_json(value: object, source: str) -> str:
    refused: list[ResultError] = []

    def plain_field(inner: object) -> object:
        try:
            plain = _plain_data(inner, source)
            return _str_of(inner, source) if plain is inner else plain
        except ResultError as error:
            refused.append(error)
            raise

    try:
        value = _plain_data(value, source)
        return to_json(value, fallback=plain_field).decode()
    except (ValueError, RecursionError):  # half surrogate pairs, bytes, data that contains itself
        if refused:
            raise refused[0] from None
        return json.dumps(whole_data(jsonable(value)), ensure_ascii=False, separators=(",", ":"))


def _plain_data(value: object, source: str) -> object:
    match value:
        case str() | bytes() | bytearray() | memoryview() | BaseModel():
            return value
        case set() | frozenset():
            items = [_plain_data(each, source) for each in cast("set[object]", value)]
            return sorted(items, key=lambda each: (0, each, "") if isinstance(each, int | float) else (1, 0, str(each)))
        case tuple() if hasattr(value, "_asdict"):
            return _plain_data(value._asdict(), source)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        case Mapping():
            return {key: _plain_data(each, source) for key, each in cast("Mapping[object, object]", value).items()}
        case Sequence() | MappingView():
            return [_plain_data(each, source) for each in cast("Sequence[object]", value)]
        case Iterator():
            return _plain_data(_list_items(cast("Iterator[object]", value), source), source)
        case _ if _is_plain_dataclass(value):
            names = [each.name for each in dataclasses.fields(cast("Any", value)) if hasattr(value, each.name)]
            return {name: _plain_data(getattr(value, name), source) for name in names}
        case _ if dataclasses.is_dataclass(type(value)) and not hasattr(type(value), "__pydantic_serializer__"):
            return _str_of(value, source)
        case _:
            return value


def _is_plain_dataclass(value: object) -> bool:
    kind = type(value)
    is_own = kind.__str__ is not object.__str__ or hasattr(kind, "__pydantic_serializer__")
    return dataclasses.is_dataclass(kind) and not is_own


def _str_of(value: object, source: str) -> str:
    text = str(value)
    if _ADDRESS.fullmatch(text):
        raise ResultError(
            f"{source} returned a {type(value).__name__}, which has no text. "
            "Return a str, a JSON value, a pydantic model or a dataclass, or define __str__"
        )
    return text


def _list_items(items: Iterator[object], source: str) -> list[object]:
    found = list(islice(items, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS:
        raise _too_many_items(source)
    return found


def _too_many_items(source: str) -> ResultError:
    return ResultError(f"{source} yielded more than {MOST_ITEMS:,} items. Return a list of the items that matter")


class NoOpToolMetrics(CustomToolMetrics):
    """The default `ToolMetrics`: counts nothing."""

    def increment_success(self, tool_name: str, agent_role: str) -> None: ...
    def increment_failure(self, tool_name: str, agent_role: str) -> None: ...
    def increment_error(self, tool_name: str, agent_role: str) -> None: ...
    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None: ...
    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None: ...
    def record_value(
        self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None
    ) -> None: ...


class GuardedToolMetrics:
    """The user's metrics, which never raise."""

    def __init__(self, metrics: ToolMetrics) -> None:
        self._metrics = metrics

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        self._record("increment_success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        self._record("increment_failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        self._record("increment_error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        self._record("record_duration", tool_name, agent_role, duration_s)

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        self._record("increment_counter", metric, tool_name, dict(tags or {}))

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._record("record_value", metric, tool_name, value, dict(tags or {}))

    def _record(self, method: str, *arguments: object) -> None:
        try:
            record_metric(self._metrics, method, *arguments)
        except USER_ERRORS:
            _log.warning("ToolMetrics failed in %s", method, exc_info=True)


def record_metric(metrics: ToolMetrics, method: str, *arguments: object) -> None:
    """Call a method of the user's metrics if it exists (S-TM-6)."""
    found: object = getattr(metrics, method, None)
    if found is not None:
        cast("Callable[..., object]", found)(*arguments)


class AsksModel(Protocol):
    """Answers requests within the task's budget and the model's rate limit."""

    async def sample(self, messages: Sequence[ChatMessage]) -> ChatResponse: ...
