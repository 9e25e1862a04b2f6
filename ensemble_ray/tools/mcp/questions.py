"""Requests of an MCP server during a call of its tool: elicitation (a question to a person) and sampling (to a model).

If the call is unknown, the request is refused. An error that ends the task, such as an early exit, ends the call.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary

from ensemble_ray.errors import UnreadableAttachmentError, ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.tools.approval import approval_request, ask
from ensemble_ray.values.attachments import Attachment
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


T = TypeVar("T")

_log = bounded_logger(__name__)
_MOST_TRIES = 3
_MOST_FORMS = 10
#: the SDK keeps the context if its transport knows the call
_current: ContextVar[CallQuestions | None] = ContextVar("ensemble_ray_mcp_call", default=None)
_open: WeakKeyDictionary[ClientSession, set[CallQuestions]] = WeakKeyDictionary()
_UNKNOWN_CALL = (
    "Several calls are open in this session, and the protocol does not say which one the request belongs to. "
    "What to do: call one tool at a time"
)


@runtime_checkable
class _Restartable(Protocol):
    def restart(self) -> None: ...


class CallQuestions:
    def __init__(self, address: ServerAddress, context: ToolContext) -> None:
        self._shown = address.shown
        self._max_samples = address.max_samples
        self._samples = self._forms = 0
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] | None = None

    async def answered_during(self, client: Client, work: Callable[[], Awaitable[T]]) -> T:
        """Run the call and answer requests until it ends. A repeated call receives its earlier answers (S-INT-16)."""
        self._samples = self._forms = 0
        for answerer in (self._context.review_handler, self._context.sampler):
            if isinstance(answerer, _Restartable):
                answerer.restart()
        failure = self._failure = asyncio.get_running_loop().create_future()
        calls = _open.setdefault(client.session, set())
        calls.add(self)
        token = _current.set(self)
        calling = asyncio.ensure_future(work())
        try:
            both: set[asyncio.Future[Any]] = {calling, failure}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                failure.result()
            return await calling
        finally:
            try:
                if not calling.done():
                    calling.cancel()
                    await asyncio.wait({calling})
            finally:
                _current.reset(token)
                calls.discard(self)
                failure.cancel()

    async def elicit(self, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        from mcp_types import ElicitResult

        if params.mode == "url":  # values of a person must not pass a gate or a record
            _log.warning("MCP server '%s' wants a person to open a page, which is declined", self._shown)
            return ElicitResult(action="decline")
        self._forms += 1
        if self._context.review_handler is None or self._forms > _MOST_FORMS:
            return ElicitResult(action="cancel")
        return await self._on_task_loop(self._fill_in(params))

    async def _fill_in(self, params: ElicitRequestFormParams) -> ElicitResult:
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
        from mcp_types import CreateMessageResult, TextContent

        sampler = self._context.sampler
        if sampler is None:
            return _refusal("This call has no model to ask")
        self._samples += 1
        if self._samples > self._max_samples:
            return _refusal(f"The model was asked {self._max_samples} times in this call, which is the limit")
        try:
            messages = _read_messages(params)
        except ValidationError as error:
            return _refusal(str(error))
        answer = await self._on_task_loop(sampler.sample(messages))
        if not isinstance(answer, ChatResponse):
            return answer
        return CreateMessageResult(
            role="assistant",
            content=TextContent(text=answer.text or ""),
            model="ensemble-ray",  # the server need not know the user's model
            stop_reason="maxTokens" if answer.finish_reason == "length" else "endTurn",
        )

    async def _on_task_loop(self, asking: Coroutine[Any, Any, T]) -> T | ErrorData:
        """Run a question on the loop of the task. Its error ends the call."""
        try:
            if asyncio.get_running_loop() is self._loop:
                return await asking
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))
        except UnreadableAttachmentError as error:
            return _refusal(str(error))
        except Exception as error:  # noqa: BLE001  the call raises it, not the SDK
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            return _refusal("The call is abandoned")


async def elicitation_callback(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
    call = _call_of(context.session)
    return _refusal(_UNKNOWN_CALL) if call is None else await call.elicit(params)


async def sampling_callback(
    context: ClientRequestContext, params: CreateMessageRequestParams
) -> CreateMessageResult | ErrorData:
    call = _call_of(context.session)
    return _refusal(_UNKNOWN_CALL) if call is None else await call.sample(params)


def _call_of(session: ClientSession) -> CallQuestions | None:
    current = _current.get()
    calls = _open.get(session, set())
    if current is not None and current in calls:
        return current
    return next(iter(calls)) if len(calls) == 1 else None


def _refusal(text: str) -> ErrorData:
    from mcp_types import INVALID_REQUEST, ErrorData

    return ErrorData(code=INVALID_REQUEST, message=text)


def _read_messages(params: CreateMessageRequestParams) -> list[ChatMessage]:
    if params.tools:
        raise ValidationError("Tools are not offered to the model of the agent: ask without them")
    messages = [ChatMessage(role="system", content=params.system_prompt)] if params.system_prompt else []
    for message in params.messages:
        blocks = message.content if isinstance(message.content, list) else [message.content]
        texts: list[str] = []
        attachments: list[Attachment] = []
        for block in blocks:
            match block.type:
                case "text":
                    texts.append(block.text)
                case "image" | "audio" if message.role == "user":
                    attachments.append(_decoded(block.data, block.mime_type))
                case kind:
                    raise ValidationError(
                        f"The model of the agent accepts only texts, and images and audio of the user, got: {kind} of the {message.role}"
                    )
        content = "\n".join(texts)
        messages.append(ChatMessage(role=message.role, content=content, attachments=tuple(attachments)))
    return messages


def _decoded(encoded: str, media_type: str) -> Attachment:
    try:
        return Attachment.of_bytes(base64.b64decode(encoded, validate=True), media_type=media_type)
    except binascii.Error as error:
        raise ValidationError(f"The content of type {media_type[:100]} is not base64: {error}") from error


FormValue = str | int | float | bool | list[str] | None
_TRUE, _FALSE = frozenset({"true", "yes", "y"}), frozenset({"false", "no", "n"})


def form_prompt(schema: Mapping[str, object]) -> str:
    fields = _fields(schema)
    if not fields:
        return "Approve to accept, exit to decline"
    needed, single = _required(schema), _single_field(schema)
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
        description = field.get("description") or field.get("title")
        lines.append(f"- {name} ({', '.join(notes)}){f': {description}' if description else ''}")
    return "\n".join(lines)


def approved_values(schema: Mapping[str, object]) -> dict[str, FormValue] | None:
    """Return defaults, and true for required booleans; None if a value is missing."""
    values: dict[str, FormValue] = {}
    needed = _required(schema)
    for name, field in _fields(schema).items():
        if "default" in field:
            values[name] = cast("FormValue", field["default"])
        elif field.get("type") == "boolean" and name in needed:
            values[name] = True
        elif name in needed:
            return None
    return values


def read_values(text: str, schema: Mapping[str, object]) -> dict[str, FormValue]:
    fields = _fields(schema)
    given = _parse(text)
    if not isinstance(given, dict):
        name = _single_field(schema)
        if name is None:
            raise ValidationError(f"Write a JSON object with the fields {list(fields)}")
        given = {name: _value_of(text.strip(), fields[name])}
    known = cast("Mapping[str, object]", given)
    if spare := [name for name in known if name not in fields]:
        raise ValidationError(f"There are no fields {spare[:5]}. There are: {list(fields)}")
    if missing := [name for name in _required(schema) if name in fields and name not in known]:
        raise ValidationError(f"Fields are missing: {missing}")
    return {name: _check(name, value, fields[name]) for name, value in known.items()}


def _parse(text: str) -> object:
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError):
        return None


def _value_of(text: str, field: Mapping[str, object]) -> object:
    kind = field.get("type", "string")
    if kind == "boolean" and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind == "string":
        return text
    parsed = _parse(text)
    if kind == "array":
        return parsed if isinstance(parsed, list) else [each.strip() for each in text.split(",")]
    return text if parsed is None else parsed


def _check(name: str, value: object, field: Mapping[str, object]) -> FormValue:
    kind, choices = field.get("type", "string"), _choices(field)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        is_number = is_number and math.isfinite(cast("float", value))
    except OverflowError:  # exceeds a float
        is_number = False
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


def _fields(schema: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return {}
    named = cast("Mapping[str, object]", found)
    return {name: cast("Mapping[str, object]", field) for name, field in named.items() if isinstance(field, Mapping)}


def _single_field(schema: Mapping[str, object]) -> str | None:
    fields = list(_fields(schema))
    needed = [name for name in _required(schema) if name in fields]
    found = needed if len(fields) > 1 else fields
    return found[0] if len(found) == 1 else None


def _required(schema: Mapping[str, object]) -> Sequence[str]:
    needed = schema.get("required")
    return [str(each) for each in cast("list[object]", needed)] if isinstance(needed, list) else []


def _choices(field: Mapping[str, object]) -> list[str]:
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
