"""Waiting for what the code of tools and handlers returns: awaitables, and generators item by item."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, MappingView, Sequence
from enum import Enum
from itertools import islice, takewhile
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import to_json

from ensemble_ray.ports import ToolMetrics
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import USER_ERRORS, is_async_callable, threads
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.messages import ChatMessage, ChatResponse
from ensemble_ray.values.task_output import Shown
from ensemble_ray.values.trace import jsonable

#: Items of one result; a generator that yields more may never end.
MOST_ITEMS = 100_000
#: The text of an object whose class defines none: `<Report object at 0x7f...>`, `<function f at 0x7f...>`.
_ADDRESS = re.compile(r"<.* at 0x[0-9A-Fa-f]+>+", re.DOTALL)


class ResultError(TypeError):
    """A tool or a handler returned something that has no text."""


def render_value(value: object, source: str = "A tool") -> str:
    """Text of a tool's return value (S-TOOL-14): strings as they are, None as "", data as JSON, the rest by `str`.

    Args:
        value: What the tool returned.
        source: Who returned it, for the error.

    Raises:
        ResultError: it has no text (S-LLM-47).
    """
    if isinstance(value, Enum):
        value = cast("object", value.value)
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Shown):  # what a run gave: its text, without trace and figures
        return value.text_and_figures()[0]
    if isinstance(value, bytes | bytearray | memoryview):
        return _decode(bytes(value), source)
    is_data = isinstance(value, BaseModel | Mapping | Sequence | set | frozenset | MappingView | Iterator)
    if is_data or _has_fields(value) or hasattr(type(value), "__pydantic_serializer__"):
        return _as_json(value, source)
    return _text_of(value, source)


def name_value(value: object) -> str:
    """Return the text of a value that only its address tells from others: the name of its class (S-LLM-49)."""
    shown = jsonable(value)
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", shown if isinstance(shown, str) else to_json(shown).decode())


def items_of(items: Iterator[object], source: str = "A tool") -> list[object]:
    """Return what an iterator yields.

    Raises:
        ResultError: it yields more than `MOST_ITEMS` items.
    """
    found = list(islice(items, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS:
        raise too_many_items(source)
    return found


def too_many_items(source: str) -> ResultError:
    """Return the error of a result without an end."""
    return ResultError(f"{source} yielded more than {MOST_ITEMS:,} items. Return a list of the items that matter")


def _plain_data(value: object, source: str) -> object:
    """Return a container as the lists and dicts of its JSON, anything else as it is."""
    match value:
        case str() | bytes() | bytearray() | memoryview() | BaseModel():
            return value
        case set() | frozenset():
            return sorted((_plain_data(each, source) for each in cast("set[object]", value)), key=_order)
        case tuple() if hasattr(value, "_asdict"):  # of a `NamedTuple`
            return _plain_data(value._asdict(), source)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        case Mapping():
            return {key: _plain_data(each, source) for key, each in cast("Mapping[object, object]", value).items()}
        case Sequence() | MappingView():
            return [_plain_data(each, source) for each in cast("Sequence[object]", value)]
        case Iterator():
            return _plain_data(items_of(cast("Iterator[object]", value), source), source)
        case _ if _has_fields(value):
            names = [each.name for each in dataclasses.fields(cast("Any", value)) if hasattr(value, each.name)]
            return {name: _plain_data(getattr(value, name), source) for name in names}
        case _ if dataclasses.is_dataclass(type(value)) and not hasattr(type(value), "__pydantic_serializer__"):
            return _text_of(value, source)
        case _:
            return value


def _has_fields(value: object) -> bool:
    """Return whether its fields are its JSON: of a dataclass with neither a text nor a serializer of its own."""
    kind = type(value)
    is_own = kind.__str__ is not object.__str__ or hasattr(kind, "__pydantic_serializer__")
    return dataclasses.is_dataclass(kind) and not is_own


def _order(item: object) -> tuple[bool, float, str]:
    return (False, item, "") if isinstance(item, int | float) else (True, 0, str(item))


def _as_json(value: object, source: str) -> str:
    refused: list[ResultError] = []

    def text_inside(inner: object) -> object:
        try:
            plain = _plain_data(inner, source)  # of a field of a model
            return _text_of(inner, source) if plain is inner else plain
        except ResultError as error:
            refused.append(error)
            raise

    try:
        value = _plain_data(value, source)
        return to_json(value, fallback=text_inside).decode()
    except (ValueError, RecursionError):  # halves of surrogate pairs, bytes that are no text, data that contains itself
        if refused:
            raise refused[0] from None
        return json.dumps(whole_data(jsonable(value)), ensure_ascii=False, separators=(",", ":"))


def _text_of(value: object, source: str) -> str:
    text = str(value)
    if _ADDRESS.fullmatch(text):
        raise ResultError(
            f"{source} returned a {type(value).__name__}, which has no text. "
            "Return a str, a JSON value, a pydantic model or a dataclass, or define __str__"
        )
    return text


def _decode(value: bytes, source: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ResultError(
            f"{source} returned {len(value)} bytes that are no UTF-8 text. Return text, or write a file and return its path"
        ) from error


T = TypeVar("T")


async def call_to_end(function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    """Call a tool's or a handler's code as `call_user` does; what it yields is a list (S-LLM-45, S-LLM-46)."""
    if is_async_callable(function):
        return await collect(function(*args, **kwargs))
    # Items are made in the thread that made their iterator: a `sqlite3.Cursor` belongs to its thread.
    return await collect(await _drain_in_thread(lambda: function(*args, **kwargs)))


async def collect(returned: object) -> object:
    """Return what user code returned: an awaitable's result, and the items of a generator as a list.

    Raises:
        ResultError: it yields items without an end.
    """
    while inspect.isawaitable(returned):
        returned = cast("object", await returned)
    if isinstance(returned, AsyncIterator):
        items: list[object] = []
        async for item in cast("AsyncIterator[object]", returned):
            items.append(item)
            if len(items) > MOST_ITEMS:
                raise too_many_items("A generator")
        return items
    if isinstance(returned, Iterator):
        iterator = cast("object", returned)
        return await _drain_in_thread(lambda: iterator)
    return returned


async def _drain_in_thread(work: Callable[[], object]) -> object:
    """Call it in a thread, and return what it returns; the items of an iterator as a list."""
    is_over = threading.Event()  # a thread cannot be stopped; it ends with the item at which nobody waits any more

    def drain() -> object:
        returned = work()
        if not isinstance(returned, Iterator):
            return returned
        return items_of(takewhile(lambda _: not is_over.is_set(), cast("Iterator[object]", returned)), "A generator")

    try:
        return await threads.run(drain)
    finally:
        is_over.set()


def collect_here(returned: object) -> object:
    """Do what `collect` does, from synchronous code."""
    if inspect.isawaitable(returned) or isinstance(returned, AsyncIterator):
        returned = run_to_end(collect(cast("object", returned)))
    return items_of(cast("Iterator[object]", returned), "A generator") if isinstance(returned, Iterator) else returned


def run_to_end(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable from synchronous code, also where this thread's event loop is busy with the caller."""

    async def awaited() -> T:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    return _in_a_loop_of_its_own(awaited())


def _in_a_loop_of_its_own(coroutine: Coroutine[object, object, T]) -> T:
    outcome: list[T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.append(context.run(asyncio.run, cast("Coroutine[Any, Any, T]", coroutine)))
        except BaseException as error:  # noqa: BLE001  it belongs to the waiting caller
            errors.append(error)

    thread = threading.Thread(target=work, name="ensemble-ray-tool", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


class TimeLimit:
    """Like `asyncio.timeout`, which it is made of, but that it can stand still. For the loop of its call alone."""

    def __init__(self, limit_s: float | None, limits: list[TimeLimit]) -> None:
        """Make one that has not begun.

        Args:
            limit_s: How long what is in its block may take, s; None: as long as it likes.
            limits: Those of the call, to which it belongs while it runs.
        """
        self._timer = asyncio.timeout(limit_s)
        self._limits = limits
        self._pauses = 0
        self._left_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time was up; a `TimeoutError` that the block raised itself is told apart by it."""
        return self._timer.expired()

    def pause(self) -> None:
        """Stand still, until every pause has been ended."""
        self._pauses += 1
        ends_at = self._timer.when()
        if self._pauses == 1 and ends_at is not None:
            self._left_s = max(0.0, ends_at - asyncio.get_running_loop().time())
            self._timer.reschedule(None)
        elif self._pauses == 1:
            self._left_s = -1.0

    def go_on(self) -> None:
        """End a pause."""
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


_log = bounded_logger(__name__)


class NoOpToolMetrics:
    """Counts nothing; the default `ToolMetrics`."""

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Ignore it."""

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Ignore it."""

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Ignore it."""

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Ignore it."""

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Ignore it."""

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Ignore it."""


class GuardedToolMetrics:
    """The user's metrics, as tools see them: nothing is raised. Fulfils `CustomToolMetrics`."""

    def __init__(self, metrics: ToolMetrics) -> None:
        self._metrics = metrics

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """Count a call that succeeded."""
        self._record("increment_success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """Count a call that returned a failure."""
        self._record("increment_failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """Count a call that raised."""
        self._record("increment_error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """Note how long a call took, s."""
        self._record("record_duration", tool_name, agent_role, duration_s)

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        """Count something of the tool's own."""
        self._record("increment_counter", metric, tool_name, dict(tags or {}))

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Note a value of the tool's own."""
        self._record("record_value", metric, tool_name, value, dict(tags or {}))

    def _record(self, method: str, *arguments: object) -> None:
        try:
            record_metric(self._metrics, method, *arguments)
        except USER_ERRORS:
            _log.warning("ToolMetrics failed in %s", method, exc_info=True)


def record_metric(metrics: ToolMetrics, method: str, *arguments: object) -> None:
    """Call a method of the user's metrics; one without methods for what tools count themselves is not asked (S-TM-6)."""
    found: object = getattr(metrics, method, None)
    if found is not None:
        cast("Callable[..., object]", found)(*arguments)


class AsksModel(Protocol):
    """Answers for one call of a tool; the task's budget and the model's rate limit hold."""

    async def sample(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        """Ask the model, on the loop of the call.

        Raises:
            BudgetExhaustedError: the run may spend no more.
        """
        ...
