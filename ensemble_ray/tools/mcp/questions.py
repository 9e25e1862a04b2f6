"""What an MCP server asks back while a call of its tool goes on: a person, or a model.

In: requests of a server, by the SDK's callbacks. Out: what the reviewer of the calling task decided. Rules: a question belongs to the call
that it came in; where that cannot be known, it is refused. What ends the task (an early exit, a gate that stays open) ends the call, and
leaves it as the same error.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.tools.approval import approval_request, ask
from ensemble_ray.values.messages import ChatMessage, ChatResponse
from ensemble_ray.values.reviews import Continue, Edit, ExitEarly

if TYPE_CHECKING:
    from mcp import Client, ClientSession
    from mcp.client.session import ClientRequestContext
    from mcp_types import (
        CreateMessageRequestParams,
        CreateMessageResult,
        ElicitRequestFormParams,
        ElicitRequestParams,
        ElicitResult,
        ErrorData,
    )

    from ensemble_ray.tools.mcp.address import ServerAddress
    from ensemble_ray.tools.tool import ToolContext


FormValue = str | int | float | bool | list[str] | None
_TRUE, _FALSE = frozenset({"true", "yes", "y"}), frozenset({"false", "no", "n"})


def form_prompt(schema: Mapping[str, object]) -> str:
    """Return what a reviewer is told to write."""
    fields = _fields(schema)
    if not fields:
        return "Approve to accept, exit to decline"
    needed, single = _list_needed(schema), _single(schema)
    how = "a JSON object" if single is None else "the value" if len(fields) == 1 else f"{single}, or a JSON object"
    lines = [f"Edit: write {how}. Exit: decline"]
    for name, field in fields.items():
        choices = _choices(field)
        kind = f"one of {choices}" if choices and field.get("type") != "array" else str(field.get("type", "string"))
        if choices and field.get("type") == "array":
            kind = f"some of {choices}"
        notes = [kind, "required" if name in needed else "may be left out"]
        if "default" in field:
            notes.append(f"default {json.dumps(field['default'], ensure_ascii=False)}")
        said = field.get("description") or field.get("title")
        lines.append(f"- {name} ({', '.join(notes)}){f': {said}' if said else ''}")
    return "\n".join(lines)


def approved_values(schema: Mapping[str, object]) -> dict[str, FormValue] | None:
    """Return what an approval means: each field's default, and true for a question that has none; None: it is not enough."""
    values: dict[str, FormValue] = {}
    needed = _list_needed(schema)
    for name, field in _fields(schema).items():
        if "default" in field:
            values[name] = cast("FormValue", field["default"])
        elif field.get("type") == "boolean" and name in needed:
            values[name] = True
        elif name in needed:
            return None
    return values


def read_values(text: str, schema: Mapping[str, object]) -> dict[str, FormValue]:
    """Return what a reviewer wrote: an object of the fields, or the value of the only one that is needed.

    Raises:
        ValidationError: it is neither, or does not fit a field.
    """
    fields = _fields(schema)
    given = _parse(text)
    if not isinstance(given, dict):
        name = _single(schema)
        if name is None:
            raise ValidationError(f"Write a JSON object with the fields {list(fields)}")
        given = {name: _value_of(text.strip(), fields[name])}
    known = cast("Mapping[str, object]", given)
    if spare := [name for name in known if name not in fields]:
        raise ValidationError(f"There are no fields {spare[:5]}. There are: {list(fields)}")
    if missing := [name for name in _list_needed(schema) if name in fields and name not in known]:
        raise ValidationError(f"Fields are missing: {missing}")
    return {name: _check(name, value, fields[name]) for name, value in known.items()}


def _parse(text: str) -> object:
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError):
        return None


def _value_of(text: str, field: Mapping[str, object]) -> object:
    """Return a text as a value of a field; one that fits no other type stays a text."""
    kind = field.get("type", "string")
    if kind == "boolean" and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind == "string":
        return text
    if kind == "array":
        parsed = _parse(text)
        return parsed if isinstance(parsed, list) else [each.strip() for each in text.split(",")]
    parsed = _parse(text)
    return text if parsed is None else parsed


def _check(name: str, value: object, field: Mapping[str, object]) -> FormValue:
    """Return a value that fits its field.

    Raises:
        ValidationError: it does not.
    """
    kind, choices = field.get("type", "string"), _choices(field)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    fits = {
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "number": is_number,
        "integer": is_number and float(cast("float", value)).is_integer(),
        "array": isinstance(value, list) and all(isinstance(each, str) for each in cast("list[object]", value)),
    }.get(str(kind), True)
    if not fits:
        raise ValidationError(f"Field '{name}' must be of the type {kind}, got: {json.dumps(value)[:100]}")
    chosen = cast("Sequence[object]", value) if isinstance(value, list) else [value]
    if choices and any(each not in choices for each in chosen):
        raise ValidationError(f"Field '{name}' must be of {choices}, got: {json.dumps(value)[:100]}")
    return cast("FormValue", value)


def _is_finite(value: float) -> bool:
    """Return whether every server can read a number: not infinity, and no more digits than a float has room for."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _fields(schema: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return {}
    named = cast("Mapping[str, object]", found)
    return {name: cast("Mapping[str, object]", field) for name, field in named.items() if isinstance(field, Mapping)}


def _single(schema: Mapping[str, object]) -> str | None:
    """Return the field that a value alone is for: the only one, or the only one that is required; None: there is none."""
    fields = list(_fields(schema))
    needed = [name for name in _list_needed(schema) if name in fields]
    found = needed if len(fields) > 1 else fields
    return found[0] if len(found) == 1 else None


def _list_needed(schema: Mapping[str, object]) -> Sequence[str]:
    needed = schema.get("required")
    return [str(each) for each in cast("list[object]", needed)] if isinstance(needed, list) else []


def _choices(field: Mapping[str, object]) -> list[str]:
    """Return the texts that a field allows: plain, or each with a title; of a field for several, those of its entries."""
    inner = field.get("items")
    if isinstance(inner, Mapping):
        return _choices(cast("Mapping[str, object]", inner))
    plain = field.get("enum")
    if isinstance(plain, list):
        return [str(each) for each in cast("list[object]", plain)]
    titled = field.get("oneOf", field.get("anyOf"))
    if not isinstance(titled, list):
        return []
    entries = [cast("Mapping[str, object]", each) for each in cast("list[object]", titled) if isinstance(each, Mapping)]
    return [str(each["const"]) for each in entries if "const" in each]


def read_messages(params: CreateMessageRequestParams) -> list[ChatMessage]:
    """Return the conversation.

    Raises:
        ValidationError: it has what is no text, or offers tools.
    """
    if params.tools:
        raise ValidationError("Tools are not offered to the model of the agent: ask without them")
    messages = [ChatMessage(role="system", content=params.system_prompt)] if params.system_prompt else []
    for message in params.messages:
        blocks = message.content if isinstance(message.content, list) else [message.content]
        texts: list[str] = []
        for block in blocks:
            if block.type != "text":
                raise ValidationError(f"The model of the agent is asked with texts alone, got: {block.type}")
            texts.append(block.text)
        messages.append(ChatMessage(role=message.role, content="\n".join(texts)))
    return messages


def sampling_result(response: ChatResponse) -> CreateMessageResult:
    """Return an answer; which model gave it is the user's own matter."""
    from mcp_types import CreateMessageResult, TextContent

    return CreateMessageResult(
        role="assistant",
        content=TextContent(text=response.text or ""),
        model="ensemble-ray",
        stop_reason="maxTokens" if response.finish_reason == "length" else "endTurn",
    )


T = TypeVar("T")

_log = bounded_logger(__name__)
#: How often a reviewer is asked for values that fit the form.
_MOST_TRIES = 3
#: Forms of one call.
_MOST_FORMS = 10
#: The call that this code works for; the SDK keeps it where its transport can tell.
_current: ContextVar[CallQuestions | None] = ContextVar("ensemble_ray_mcp_call", default=None)
#: Calls that go on, by their session.
_open: WeakKeyDictionary[ClientSession, set[CallQuestions]] = WeakKeyDictionary()


@runtime_checkable
class _BeginsAgain(Protocol):
    """Who numbers the questions of a call: its handler, and what asks its model."""

    def begin_again(self) -> None: ...


class CallQuestions:
    """Answers what a server asks during one call."""

    def __init__(self, address: ServerAddress, context: ToolContext) -> None:
        """Belong to a call; made on the loop of its task.

        Args:
            address: The server.
            context: Of the call.
        """
        self._shown = address.shown
        self._max_samples = address.max_samples
        self._samples = self._forms = 0
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] | None = None

    async def answered_during(self, client: Client, work: Callable[[], Awaitable[T]]) -> T:
        """Do the call, and answer what comes meanwhile; one that is made again finds the answers that it had (S-INT-16).

        Raises:
            BaseException: what the reviewer raised, or the call.
        """
        self._samples = self._forms = 0
        for asked in (self._context.review_handler, self._context.sampler):
            if isinstance(asked, _BeginsAgain):
                asked.begin_again()
        async with self._register(client.session) as failure:
            calling = asyncio.ensure_future(work())
            try:
                both: set[asyncio.Future[Any]] = {calling, failure}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    failure.result()
                return await calling
            finally:
                if not calling.done():
                    calling.cancel()
                    await asyncio.wait({calling})

    @asynccontextmanager
    async def _register(self, session: ClientSession) -> AsyncGenerator[asyncio.Future[None]]:
        self._failure = asyncio.get_running_loop().create_future()
        calls = _open.setdefault(session, set())
        calls.add(self)
        token = _current.set(self)
        try:
            yield self._failure
        finally:
            _current.reset(token)
            calls.discard(self)
            self._failure.cancel()

    async def elicit(self, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        """Ask the reviewer of the task."""
        from mcp_types import ElicitResult

        if params.mode == "url":  # what a person enters there is not for a gate, and is recorded nowhere
            _log.warning("MCP server '%s' wants somebody to open a page, which is declined", self._shown)
            return ElicitResult(action="decline")
        self._forms += 1
        if self._context.review_handler is None or self._forms > _MOST_FORMS:
            return ElicitResult(action="cancel")
        return await self._here(self._filled_in(params))

    async def _filled_in(self, params: ElicitRequestFormParams) -> ElicitResult:
        from mcp_types import ElicitResult

        schema, problem = params.requested_schema, ""
        for _ in range(_MOST_TRIES):
            request = approval_request(f"{self._context.tool_name}: {params.message}")
            prompt = form_prompt(schema)
            decision = await ask(
                self._context.review_handler, request.replace(prompt=f"{problem}. {prompt}" if problem else prompt)
            )
            match decision:
                case Edit(revised_output=text):
                    try:
                        return ElicitResult(action="accept", content=read_values(text, schema))
                    except ValidationError as error:
                        problem = str(error)
                case ExitEarly(timed_out=timed_out):
                    return ElicitResult(action="cancel" if timed_out else "decline")
                case Continue():
                    values = approved_values(schema)
                    if values is not None:
                        return ElicitResult(action="accept", content=values)
                    _log.warning("An approval answers no form of MCP server '%s' that needs values", self._shown)
                    return ElicitResult(action="cancel")
                case _:
                    break
        return ElicitResult(action="cancel")

    async def sample(self, params: CreateMessageRequestParams) -> CreateMessageResult | ErrorData:
        """Ask the model of the agent that calls."""
        sampler = self._context.sampler
        if sampler is None:
            return _refusal("This call has no model to ask")
        self._samples += 1
        if self._samples > self._max_samples:
            return _refusal(f"The model was asked {self._max_samples} times in this call, which is the limit")
        try:
            messages = read_messages(params)
        except ValidationError as error:
            return _refusal(str(error))
        answer = await self._here(sampler.sample(messages))
        return sampling_result(answer) if isinstance(answer, ChatResponse) else answer

    async def _here(self, asking: Coroutine[Any, Any, T]) -> T | ErrorData:
        """Ask on the loop of the task; what is raised ends the call."""
        try:
            if asyncio.get_running_loop() is self._loop:
                return await asking
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))
        except Exception as error:  # noqa: BLE001  it leaves by the call, and not by the SDK
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            return _refusal("The call is given up")


async def elicitation_callback(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
    """Answer a server's question to a person."""
    found = _call_of(context.session)
    return _refusal(_UNKNOWN_CALL) if found is None else await found.elicit(params)


async def sampling_callback(
    context: ClientRequestContext, params: CreateMessageRequestParams
) -> CreateMessageResult | ErrorData:
    """Answer a server's question to a model."""
    found = _call_of(context.session)
    return _refusal(_UNKNOWN_CALL) if found is None else await found.sample(params)


_UNKNOWN_CALL = "Several calls go on in this session, and the protocol does not say which one asks. What to do: call one tool at a time"


def _call_of(session: ClientSession) -> CallQuestions | None:
    """Return the call that a question came in; None: that cannot be known."""
    current = _current.get()
    calls = _open.get(session, set())
    if current is not None and current in calls:
        return current
    return next(iter(calls)) if len(calls) == 1 else None


def _refusal(text: str) -> ErrorData:
    from mcp_types import INVALID_REQUEST, ErrorData

    return ErrorData(code=INVALID_REQUEST, message=text)
