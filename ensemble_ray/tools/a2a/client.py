"""Call agents of the A2A protocol by the official SDK."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, cast
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from ensemble_ray.errors import ToolConfigurationError, ValidationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.process.context import current_traceparent
from ensemble_ray.text.foreign_text import header_flaw, header_name_flaw, whole_text
from ensemble_ray.text.unpacking import ACCEPTED_CODINGS, STEP_BYTES, UnpackingError, bound_response
from ensemble_ray.tools.tool import (
    AbstractAgentTool,
    ToolResult,
    check_effect,
    check_tool_name,
    make_tool_name,
    timeout_seconds,
)
from ensemble_ray.values.ids import new_run_id, uuid_of
from ensemble_ray.values.messages import Effect

if TYPE_CHECKING:
    import httpx
    from a2a.client import Client
    from a2a.types import AgentCard, Message, Part, SendMessageRequest, StreamResponse, Task, TaskStatus
    from a2a.utils.errors import A2AError
    from google.protobuf.struct_pb2 import Value
    from pydantic import JsonValue


#: extension of agents that map a repeated message to the same task (S-INT-77)
IDEMPOTENT_MESSAGES = "urn:ensemble-ray:a2a:idempotent-messages"
ANSWER_S = 120.0  # without work: the card, or the state of a task

_FORM = "'https://HOST/PATH', under which its card is found"
_WELL_KNOWN = "/.well-known/"
_PORTS = {"http": 80, "https": 443}


class RemoteAgentError(Exception):
    """`may_be_done`: it may have done all or a part of the work."""

    def __init__(self, text: str, *, may_be_done: bool = False) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    hosts: frozenset[str] = frozenset()  # the card may name them, as `HOST` or `HOST:PORT`
    connect_timeout_s: float = 10.0

    @classmethod
    def of(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        hosts: Collection[str] = (),
        connect_timeout_s: float = 10.0,
    ) -> AgentAddress:
        _check_types(url, headers, hosts)
        parts = _split(url)
        if parts is None:
            raise ValidationError(f"RemoteAgent url must be {_FORM}, got: {url.rpartition('@')[2]!r}")
        if parts.username is not None or parts.password is not None:
            raise ValidationError("RemoteAgent url must be without a name or password: pass them in headers")
        if parts.query or parts.fragment:
            raise ValidationError("RemoteAgent url must be without a query or fragment: pass keys in headers")
        for name, value in (headers or {}).items():
            if header_name_flaw(name):
                raise ValidationError(f"RemoteAgent header name is not valid: {name!r}")
            if flaw := header_flaw(value.strip()):
                raise ValidationError(f"RemoteAgent header '{name}' {flaw}")
        return cls(
            url=url.partition(_WELL_KNOWN)[0].rstrip("/"),
            headers=tuple((name, value.strip()) for name, value in (headers or {}).items()),
            hosts=frozenset([hosts] if isinstance(hosts, str) else hosts),
            connect_timeout_s=connect_timeout_s,
        )

    @property
    def name(self) -> str:
        parts = urlsplit(self.url)
        return unquote(parts.path.rstrip("/").rpartition("/")[2]) or parts.hostname or self.url

    def allows(self, url: str) -> bool:
        found, own = _split(url), urlsplit(self.url)
        if found is None or (own.scheme == "https" and found.scheme != "https"):
            return False
        if (found.scheme, _host(found)) == (own.scheme, _host(own)):
            return True
        return bool({found.hostname or "", found.netloc} & self.hosts)


def _check_types(url: object, headers: object, hosts: object) -> None:
    if not isinstance(url, str):
        raise ValidationError(f"RemoteAgent url must be {_FORM}, got: {type(url).__name__}")
    if headers is not None and not isinstance(headers, Mapping):
        raise ValidationError(f"RemoteAgent headers must be a mapping of texts, got: {type(headers).__name__}")
    for name, value in cast("Mapping[object, object]", headers or {}).items():
        if not isinstance(name, str):
            raise ValidationError(f"RemoteAgent header name must be a text, got: {type(name).__name__}")
        if not isinstance(value, str):
            raise ValidationError(f"RemoteAgent header '{name}' must be a text, got: {type(value).__name__}")
    if not isinstance(hosts, Collection) or isinstance(hosts, bytes):
        raise ValidationError(f"RemoteAgent hosts must be a list of texts, got: {type(hosts).__name__}")
    for host in cast("Collection[object]", hosts):
        if not isinstance(host, str):
            raise ValidationError(f"RemoteAgent hosts must be a list of texts, got one of {type(host).__name__}")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in _PORTS and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return None
    return parts if is_valid else None


def _host(parts: SplitResult) -> tuple[str | None, int | None]:
    return parts.hostname, parts.port or _PORTS.get(parts.scheme)


#: after unpacking
_CARD_BYTES, _ANSWER_BYTES, _STREAM_BYTES, _FAILURE_BYTES = 2**20, 16 * 2**20, 64 * 2**20, 64 * 2**10
_CARD_PATH = "/.well-known/agent-card.json"
_AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # pauses before retries
_INSTALL = "RemoteAgent needs the package a2a-sdk, which is not installed: pip install 'ensemble-ray[a2a]'"
_TRACEPARENT = "traceparent"
#: they ask for a retry; a request with the first one may have been processed
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class ConnectionFailures:
    """Counts consecutive failures to reach an agent, until a deadline of the event loop."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._count = 0

    def reset(self) -> None:
        self._count = 0

    async def pause(self) -> bool:
        if self._count >= len(_AGAIN_S):
            return False
        pause_s = _AGAIN_S[self._count]
        if asyncio.get_running_loop().time() + pause_s >= self._deadline:
            return False
        self._count += 1
        await asyncio.sleep(pause_s)
        return True


@asynccontextmanager
async def open_http_client(
    address: AgentAddress, timeout_s: float, newest: NewestAnswer | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    """Open an HTTP client of the current span (S-INT-37); `timeout_s` is the longest silence."""
    if importlib.util.find_spec("a2a") is None:
        raise ToolConfigurationError(_INSTALL)
    import httpx

    limits = httpx.Timeout(timeout_s, connect=address.connect_timeout_s)
    span = current_traceparent()
    headers = httpx.Headers({"Accept-Encoding": ACCEPTED_CODINGS, **({_TRACEPARENT: span} if span else {})})
    headers.update(dict(address.headers))  # they have priority

    async def bound(response: httpx.Response) -> None:
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        max_bytes = _STREAM_BYTES if is_stream else _ANSWER_BYTES
        if response.request.url.path.endswith(_CARD_PATH):
            max_bytes = _CARD_BYTES
        cut_bytes = _FAILURE_BYTES if response.status_code >= HTTPStatus.BAD_REQUEST else None
        answer = newest or NewestAnswer()
        answer.begin(is_stream=is_stream)
        bound_response(response, UnpackingError, max_bytes=max_bytes, cut_bytes=cut_bytes, on_piece=answer.add)

    hooks: dict[str, list[Callable[..., object]]] = {"response": [bound]}
    async with httpx.AsyncClient(headers=headers, timeout=limits, follow_redirects=False, event_hooks=hooks) as http:
        yield http


async def fetch_card(address: AgentAddress) -> AgentCard:
    async with open_http_client(address, ANSWER_S) as http:
        return await _get_card(address, http)


async def connect(address: AgentAddress, http: httpx.AsyncClient, failures: ConnectionFailures) -> Client:
    from a2a.client import ClientConfig, ClientFactory
    from a2a.utils.constants import TransportProtocol

    card = await _get_card(address, http, failures)
    failures.reset()
    named = [each.url for each in card.supported_interfaces]
    allowed = [each for each in card.supported_interfaces if address.allows(each.url)]
    if named and not allowed:
        raise RemoteAgentError(
            f"Remote agent {address.url}: its card names [{', '.join(named)}], which are other hosts. "
            "If they are correct, add them to hosts=[...]"
        )
    del card.supported_interfaces[:]
    card.supported_interfaces.extend(allowed)
    bindings = [TransportProtocol.JSONRPC.value, TransportProtocol.HTTP_JSON.value]
    config = ClientConfig(
        httpx_client=http,
        streaming=True,
        polling=not card.capabilities.streaming,  # otherwise the id of a running task is unknown
        supported_protocol_bindings=bindings,
        accepted_output_modes=["text/plain", "application/json"],
    )
    try:
        return ClientFactory(config).create(card)
    except ValueError as error:
        raise RemoteAgentError(
            f"Remote agent {address.url}: its card names no interface that is understood here: [{', '.join(bindings)}]"
        ) from error


async def _get_card(
    address: AgentAddress, http: httpx.AsyncClient, failures: ConnectionFailures | None = None
) -> AgentCard:
    """Fetch the card, with retries only if `failures` counts them."""
    import httpx
    from a2a.client import A2ACardResolver
    from a2a.utils.errors import A2AError

    limits = httpx.Timeout(ANSWER_S, connect=address.connect_timeout_s)
    while True:
        try:
            with sdk_errors():
                async with asyncio.timeout(ANSWER_S):
                    return await A2ACardResolver(http, address.url).get_agent_card(http_kwargs={"timeout": limits})
        except A2AError as error:  # it may be restarting, and fetching has no effect
            status = _status_of(error)
            is_lost = isinstance(error.__cause__, httpx.RequestError) and not tls_flaw(error)
            if status is not None:
                is_lost = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _LATER
            if failures is None or not is_lost or not await failures.pause():
                why = cause_of(error)
                raise RemoteAgentError(f"Remote agent {address.url}: its card cannot be read: {why}") from error


#: task states of the protocol, and of its version 0.3
_DONE = "TASK_STATE_COMPLETED"
_CANCELLED = "TASK_STATE_CANCELED"
_OVER = frozenset({_DONE, "TASK_STATE_FAILED", _CANCELLED, "TASK_STATE_REJECTED"})
_ASKING = frozenset({"TASK_STATE_INPUT_REQUIRED", "TASK_STATE_AUTH_REQUIRED"})
_FAILURES = {
    "TASK_STATE_INPUT_REQUIRED": "it waits for input on its task '{task}', which a team cannot provide",
    "TASK_STATE_AUTH_REQUIRED": "it wants to be authorised for its task '{task}'",
    "TASK_STATE_FAILED": "it failed",
    "TASK_STATE_CANCELED": "its task '{task}' was cancelled there",
    "TASK_STATE_REJECTED": "it refused the task",
}
_OLD_OVER = frozenset({"completed", "failed", "canceled", "rejected"})
_LARGEST_WHOLE = 2**53  # larger floats may not be whole numbers


class RemoteAnswer(Struct, frozen=True, kw_only=True):
    text: str
    data: object = None  # content of its data parts
    failure: str | None = None  # None: the agent answered

    @property
    def shown(self) -> str:
        return self.text if self.text or self.data is None else json.dumps(self.data, ensure_ascii=False)


class RemoteTask:
    def __init__(self) -> None:
        self.task_id: str | None = None
        #: the agent may have started the work
        self.may_have_begun = False
        self._state = ""
        self._status_message: Message | None = None
        self._reply: Message | None = None
        self._artifacts: dict[str, list[Part]] = {}

    @property
    def is_settled(self) -> bool:
        return self._reply is not None or self._state in _OVER | _ASKING

    @property
    def is_over(self) -> bool:
        return self._reply is not None or self._state in _OVER

    @property
    def is_cancelled(self) -> bool:
        return self._state == _CANCELLED

    def reset(self) -> None:
        self.task_id, self.may_have_begun = None, False
        self._state, self._status_message, self._reply, self._artifacts = "", None, None, {}

    def update(self, response: StreamResponse) -> str:
        """Apply an update; return the text that it adds."""
        match response.WhichOneof("payload"):
            case "message":
                self._reply = response.message
                return _text_of(response.message.parts)
            case "task":
                return self.update_from(response.task)
            case "status_update":
                self.task_id = response.status_update.task_id
                self._set_status(response.status_update.status)
                return ""
            case "artifact_update":
                self.task_id = response.artifact_update.task_id
                artifact = response.artifact_update.artifact
                text = _artifact_text(artifact.parts)
                known = self._artifacts.get(artifact.artifact_id)
                if known is not None and response.artifact_update.append:
                    known.extend(artifact.parts)
                    return text
                self._artifacts[artifact.artifact_id] = list(artifact.parts)
                return text if known is None else ""
            case _:
                return ""

    def update_from(self, task: Task) -> str:
        is_first = not self._artifacts
        self.task_id = task.id
        self._set_status(task.status)
        self._artifacts = {each.artifact_id: list(each.parts) for each in task.artifacts} or self._artifacts
        return self._text() if is_first else ""

    def answer(self) -> RemoteAnswer:
        if self._reply is not None:
            return RemoteAnswer(text=_text_of(self._reply.parts), data=_data_of(self._reply.parts))
        status = "" if self._status_message is None else _text_of(self._status_message.parts)
        parts = [part for artifact in self._artifacts.values() for part in artifact]
        text, data = self._text(), _data_of(parts)
        if self._state == _DONE:
            return RemoteAnswer(text=text or ("" if data is not None else status), data=data)
        reason = f": {status}" if status else ""
        failure = _FAILURES.get(self._state, "it ended its answer before the task ended").format(task=self.task_id)
        return RemoteAnswer(text=text, data=data, failure=f"{failure}{reason}")

    def _set_status(self, status: TaskStatus) -> None:
        from a2a.types import TaskState

        self._state = TaskState.Name(status.state)
        self._status_message = status.message if status.HasField("message") else None

    def _text(self) -> str:
        return "\n\n".join(filter(None, map(_artifact_text, self._artifacts.values())))


def _artifact_text(parts: Iterable[Part]) -> str:
    return "".join(whole_text(part.text) for part in parts if part.WhichOneof("content") == "text")


def _text_of(parts: Iterable[Part]) -> str:
    texts: list[str] = []
    for part in parts:
        match part.WhichOneof("content"):
            case "text":
                texts.append(whole_text(part.text))
            case "url":
                texts.append(f"[file {part.url}]")
            case "raw":
                texts.append(f"[file {part.filename or part.media_type or 'without a name'}, {len(part.raw)} bytes]")
            case _:
                pass
    return "\n\n".join(texts)


def _data_of(parts: Iterable[Part]) -> object:
    """Return the value of the only data part, or a list of several."""
    found: list[object] = [plain_value(part.data) for part in parts if part.WhichOneof("content") == "data"]
    return found[0] if len(found) == 1 else found or None


def plain_value(value: Value) -> JsonValue:
    """Return data as JSON with integers; raise `ValueError` for infinity and NaN."""
    from google.protobuf.json_format import MessageToDict

    return _with_integers(cast("JsonValue", MessageToDict(value)))


def _with_integers(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_WHOLE:
        return int(value)
    return value


class NewestAnswer:
    """The bytes of an agent's newest answer; of a stream, the events around the newest piece."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._is_stream = False

    @property
    def is_final(self) -> bool:
        """Whether it ends the task, or is a message without a task."""
        text = self._text.decode(errors="replace")
        if not self._is_stream:
            return _is_final(text)
        events = re.split(r"\r?\n\r?\n", text)
        return any(_is_final("\n".join(re.findall(r"^data: ?(.*?)\r?$", event, re.MULTILINE))) for event in events)

    def begin(self, *, is_stream: bool) -> None:
        self._text.clear()
        self._is_stream = is_stream

    def add(self, piece: bytes) -> None:
        """Append a piece; drop events that ended before it."""
        if self._is_stream:
            recent = max(len(self._text) - STEP_BYTES - 3, 0)  # earlier ends were found
            end = max(self._text.rfind(mark, recent) for mark in (b"\n\n", b"\n\r\n"))
            del self._text[: max(end, 0)]
        self._text += piece


def _is_final(answer: str) -> bool:
    try:
        found: object = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    for name in ("result", "task", "statusUpdate"):
        found = _member(found, name) or found
    if _member(found, "message") is not None or _member(found, "kind") == "message":
        return True
    state = _member(_member(found, "status"), "state")
    return isinstance(state, str) and state in _OVER | _OLD_OVER


def _member(value: object, name: str) -> object:
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None


@contextmanager
def sdk_errors() -> Generator[None]:
    """Convert the SDK's errors, of many types, to `A2AError`."""
    from a2a.client.errors import A2AClientTimeoutError
    from a2a.utils.errors import InvalidAgentResponseError
    from google.protobuf.json_format import ParseError

    try:
        yield
    except TimeoutError as error:
        raise A2AClientTimeoutError("no answer in time") from error
    except (ParseError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "it is nested too deeply" if is_too_deep(error) else f"{type(error).__name__}: {message_of(error)}"
        why = message_of(error) if isinstance(error, UnpackingError) else why
        raise InvalidAgentResponseError(f"its answer cannot be read: {why}") from error


def is_beyond_limits(error: A2AError) -> bool:
    return is_too_deep(error.__cause__) or isinstance(error.__cause__, UnpackingError)


def is_too_deep(error: BaseException | None) -> bool:
    from google.protobuf.json_format import ParseError

    return isinstance(error, RecursionError) or (isinstance(error, ParseError) and "too deep" in str(error))


def is_refusal(error: A2AError) -> bool:
    from a2a.client.errors import A2AClientError

    status = _status_of(error)
    if status is not None:
        return status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LATER
    return not (isinstance(error, A2AClientError) or has_unknown_outcome(error))


def has_unknown_outcome(error: A2AError) -> bool:
    from a2a.utils.errors import InternalError, InvalidAgentResponseError

    return isinstance(error, InternalError | InvalidAgentResponseError)


def was_not_processed(error: A2AError) -> bool:
    import httpx

    if isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return True
    return _status_of(error) in {HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


def cause_of(error: A2AError) -> str:
    """Return the reason of an error without the URL, which may contain secrets."""
    import httpx

    cause = error.__cause__
    if isinstance(cause, httpx.HTTPStatusError):
        status = cause.response.status_code
        advice = ""
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            advice = ". It requires a valid key: pass it in headers"
        elif HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            advice = ". Redirects are not followed: use the final address"
        return f"HTTP {status} {cause.response.reason_phrase}{advice}"
    if isinstance(cause, httpx.ConnectTimeout):
        return "no connection in time"
    if flaw := tls_flaw(cause):
        return flaw
    if isinstance(cause, httpx.RequestError):
        return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return message_of(error)


def _status_of(error: A2AError) -> int | None:
    import httpx

    cause = error.__cause__
    return cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None


_GRACE_S = 15.0  # after the tool's own limit, which reports more, and its cancellation
_UNKNOWN = (
    "Outcome unknown: {error}. The agent may have finished all, a part or none of the work, and the request was not "
    "repeated. Check the outcome before you call it again. If you cannot check it, do not repeat the call, and say in "
    "your answer that its outcome is unknown."
)


class A2ATool(AbstractAgentTool):
    """Sends its input to an agent of another system and returns its answer; `ValidationError` for invalid arguments.

    Args:
        url: URL of the agent's card, up to `/.well-known/agent-card.json`.
        name: Name for the model; None: `ask_` and the last part of the URL.
        description: Explains to the model when to use the tool; None: a general text.
        headers: Headers of every request; their values are never shown.
        hosts: Further hosts that the card may name.
        effect: With `once`, a message that may have arrived is not sent again.
        timeout: Time limit of one call, s or `timedelta`.
        connect_timeout: Time limit of a connection, s or `timedelta`.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        description: str | None = None,
        headers: Mapping[str, str] | None = None,
        hosts: Collection[str] = (),
        effect: Effect = "once",
        timeout: float | timedelta = 30.0,
        connect_timeout: float | timedelta = 10.0,
    ) -> None:
        self._address = AgentAddress.of(
            url, headers=headers, hosts=hosts, connect_timeout_s=seconds_of(connect_timeout, "connect_timeout")
        )
        self.name = name or f"ask_{make_tool_name(self._address.name)}"
        if problem := check_tool_name(self.name):
            raise ValidationError(f"A2ATool: {problem}")
        general = f"Asks the agent '{self._address.name}' of another system. Say all it must know."
        self.description = description or general
        self.effect = check_effect(effect, "A2ATool")
        self._limit_s = seconds_of(timeout, "timeout")
        self.timeout = self._limit_s + _GRACE_S

    def __repr__(self) -> str:
        return f"A2ATool({self._address.url!r})"

    async def do_execute(self, text: str, /) -> ToolResult:
        message_id = self.context.idempotency_key or new_run_id()
        answering = ask_agent(
            self._address, text, message_id=message_id, may_repeat=self.effect != "once", timeout_s=self._limit_s
        )
        try:
            async with aclosing(answering) as pieces:
                async for piece in pieces:
                    if isinstance(piece, RemoteAnswer):
                        return ToolResult.success(piece.shown, piece.data)
        except RemoteAgentError as error:
            is_unknown = error.may_be_done and self.effect == "once"
            return ToolResult.failure(_UNKNOWN.format(error=error) if is_unknown else str(error))
        except ToolConfigurationError as error:
            return ToolResult.failure(str(error))
        return ToolResult.failure(f"Remote agent {self._address.url} did not answer")


def seconds_of(timeout: float | timedelta, name: str) -> float:
    seconds = timeout_seconds(timeout)
    if seconds is None:
        raise ValidationError(f"RemoteAgent {name} must end")
    return seconds


_SILENCE_S = 120.0  # on a task's stream, which then counts as lost
_FIRST_POLL_S, _LAST_POLL_S = 0.25, 5.0
_CANCEL_S = 10.0  # our own endpoint answers within 5 s
_MOST_RESTARTS = 5
_DEADLINE = "deadline"


async def ask_agent(
    address: AgentAddress, text: str, *, message_id: str, may_repeat: bool, timeout_s: float
) -> AsyncGenerator[str | RemoteAnswer]:
    """Yield pieces of an answer, then all of it. A message that may have arrived is sent again only if `may_repeat`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    call = _AgentCall(address, text, message_id, may_repeat=may_repeat, timeout_s=timeout_s)
    async with aclosing(call.stream(ConnectionFailures(deadline))) as pieces:
        while True:
            # Not around the yield: it must not cancel the code that consumes the pieces.
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise call.failure(f": no answer within {timeout_s:g} s") from None
            if piece is None:
                break
            yield piece
    yield call.answer()


class _AgentCall:
    def __init__(
        self, address: AgentAddress, text: str, message_id: str, *, may_repeat: bool, timeout_s: float
    ) -> None:
        self._address = address
        self._text = text
        self._first_id = self._message_id = message_id
        self._may_repeat = may_repeat
        self._timeout_s = timeout_s
        self._deadline = SystemClock().now() + timeout_s
        self._task = RemoteTask()
        self._newest = NewestAnswer()
        self._restarts = 0

    def answer(self) -> RemoteAnswer:
        try:
            answer = self._task.answer()
        except ValueError as error:
            raise self.failure(f": its answer cannot be read: {error}") from error
        if answer.failure is not None:
            raise RemoteAgentError(f"Remote agent {self._address.url}: {answer.failure}")
        return answer

    def failure(self, text: str, cause: A2AError | None = None) -> RemoteAgentError:
        """Return the error of a call; a final answer that is only nested too deeply is an outcome (S-INT-97)."""
        is_answered = cause is not None and is_too_deep(cause.__cause__) and self._newest.is_final
        may_be_done = self._task.may_have_begun and not is_answered
        return RemoteAgentError(f"Remote agent {self._address.url}{text}", may_be_done=may_be_done)

    async def stream(self, failures: ConnectionFailures) -> AsyncGenerator[str]:
        """Yield pieces of text until the task is settled; finally, cancel it if the agent still works on it."""
        task = self._task
        async with open_http_client(self._address, self._timeout_s, self._newest) as http:
            client = await connect(self._address, http, failures)
            try:
                while not task.is_settled:
                    if task.task_id is not None:
                        await self._poll(client, failures)
                        break
                    async with aclosing(self._send(client, failures)) as pieces:
                        async for piece in pieces:
                            yield piece
            finally:
                if task.task_id is not None and not task.is_over:
                    await _cancel(client, task.task_id)

    async def _send(self, client: Client, failures: ConnectionFailures) -> AsyncGenerator[str]:
        """Send the message and yield the answer's text, until it must be sent again or the connection is lost."""
        from a2a.types import Message, Part, Role, SendMessageRequest
        from a2a.utils.errors import A2AError

        message = Message(message_id=self._message_id, role=Role.ROLE_USER, parts=[Part(text=self._text)])
        request = SendMessageRequest(message=message)
        request.metadata.update({_DEADLINE: datetime.fromtimestamp(self._deadline, UTC).isoformat()})
        task = self._task
        may_have_begun_before, task.may_have_begun = task.may_have_begun, True
        is_first = True
        try:
            async with aclosing(_receive(client, request, task)) as responses:
                async for response in responses:
                    failures.reset()
                    piece = task.update(response)
                    may_restart = is_first and self._may_repeat and self._restarts < _MOST_RESTARTS
                    if may_restart and task.is_cancelled:  # by an earlier run: send the message under another id
                        self._restarts += 1
                        self._message_id = uuid_of(f"{self._first_id}/again-{self._restarts}")
                        task.reset()
                        return
                    is_first = False
                    if piece:
                        yield piece
                    if task.is_settled:  # the stream may stay open (S-INT-98)
                        return
        except A2AError as error:
            await self._handle_failure(error, failures, may_have_begun_before=may_have_begun_before)
        else:
            if task.task_id is None and not task.is_settled:
                raise self.failure(": its answer has neither a task nor a message")

    async def _handle_failure(
        self, error: A2AError, failures: ConnectionFailures, *, may_have_begun_before: bool
    ) -> None:
        task = self._task
        if task.is_settled:
            return
        if task.task_id is None and (is_refusal(error) or was_not_processed(error)):
            task.may_have_begun = may_have_begun_before
        is_final = is_refusal(error) or has_unknown_outcome(error) or (task.may_have_begun and not self._may_repeat)
        if (task.task_id is None and is_final) or not await failures.pause():
            from a2a.client.errors import A2AClientError

            refuses = is_refusal(error) and not isinstance(error, A2AClientError)
            raise self.failure(f"{' refuses' if refuses else ''}: {cause_of(error)}", error) from error

    async def _poll(self, client: Client, failures: ConnectionFailures) -> None:
        from a2a.types import GetTaskRequest
        from a2a.utils.errors import A2AError

        task = self._task
        pause_s = _FIRST_POLL_S
        while True:
            try:
                with sdk_errors():
                    async with asyncio.timeout(ANSWER_S):
                        found = await client.get_task(GetTaskRequest(id=task.task_id or ""))
            except A2AError as error:
                if is_refusal(error) or is_beyond_limits(error) or not await failures.pause():
                    raise self.failure(f" says of its task '{task.task_id}': {cause_of(error)}", error) from error
                continue
            failures.reset()
            task.update_from(found)
            if task.is_settled:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LAST_POLL_S)


async def _receive(client: Client, request: SendMessageRequest, task: RemoteTask) -> AsyncGenerator[StreamResponse]:
    async with aclosing(cast("AsyncGenerator[StreamResponse]", client.send_message(request))) as responses:
        while True:
            with sdk_errors():
                async with asyncio.timeout(None if task.task_id is None else _SILENCE_S):
                    response = await anext(responses, None)
            if response is None:
                return
            yield response


async def _cancel(client: Client, task_id: str) -> None:
    from a2a.types import CancelTaskRequest
    from a2a.utils.errors import A2AError

    async def cancel() -> None:
        with contextlib.suppress(A2AError), sdk_errors():
            async with asyncio.timeout(_CANCEL_S):
                await client.cancel_task(CancelTaskRequest(id=task_id))

    cancelling = asyncio.ensure_future(cancel())
    try:
        await asyncio.shield(cancelling)
    except asyncio.CancelledError:  # finish the short request first
        await cancelling
        raise
