"""Connect to agents of the A2A protocol by the official SDK: addresses, cards, clients, task states and errors."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, cast
from urllib.parse import SplitResult, unquote, urlsplit

from ensemble_ray.errors import ToolConfigurationError, ValidationError, message_of
from ensemble_ray.errors.bodies import tls_flaw
from ensemble_ray.process.context import current_traceparent
from ensemble_ray.text.foreign_text import header_flaw, header_name_flaw, whole_text
from ensemble_ray.text.unpacking import ACCEPTED_CODINGS, STEP_BYTES, UnpackingError, bound_response

if TYPE_CHECKING:
    import httpx
    from a2a.client import Client
    from a2a.types import AgentCard, Message, Part, StreamResponse, Task, TaskStatus
    from a2a.utils.errors import A2AError
    from google.protobuf.struct_pb2 import Value
    from pydantic import JsonValue


#: Card extension of agents that map a repeated message to the same task (S-INT-77).
IDEMPOTENT_MESSAGES = "urn:ensemble-ray:a2a:idempotent-messages"
#: Time limit of an answer without work: the card, or the state of a task, s.
ANSWER_S = 120.0

_FORM = "'https://HOST/PATH', under which its card is found"
_WELL_KNOWN = "/.well-known/"
_PORTS = {"http": 80, "https": 443}


class RemoteAgentError(Exception):
    """A remote agent did not answer. `may_be_done`: it may have done all or a part of the work."""

    def __init__(self, text: str, *, may_be_done: bool = False) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: further hosts that the card may name: `HOST` or `HOST:PORT`
    hosts: frozenset[str] = frozenset()
    #: time limit of a connection, s
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
        """Parse an address; raise `ValidationError` if it is invalid."""
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
        """The last part of the URL's path, else its host."""
        parts = urlsplit(self.url)
        return unquote(parts.path.rstrip("/").rpartition("/")[2]) or parts.hostname or self.url

    def allows(self, url: str) -> bool:
        """Return whether requests, with their keys, may be sent to a URL of the card."""
        found, own = _split(url), urlsplit(self.url)
        if found is None or (own.scheme == "https" and found.scheme != "https"):
            return False
        if (found.scheme, _host(found)) == (own.scheme, _host(own)):
            return True
        return bool({found.hostname or "", found.netloc} & self.hosts)


def _check_types(url: object, headers: object, hosts: object) -> None:
    """Raise `ValidationError` for a wrong type; values of headers are not shown."""
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


# --- connections ---

#: Size limits after unpacking: card, answer, stream, and body of a failure, bytes.
_CARD_BYTES, _ANSWER_BYTES, _STREAM_BYTES, _FAILURE_BYTES = 2**20, 16 * 2**20, 64 * 2**20, 64 * 2**10
_CARD_PATH = "/.well-known/agent-card.json"
#: Pauses before the retries after consecutive connection failures, s.
_AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_INSTALL = "RemoteAgent needs the package a2a-sdk, which is not installed: pip install 'ensemble-ray[a2a]'"
_TRACEPARENT = "traceparent"
#: Statuses that ask for a retry. A request with the first one may have been processed.
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class ConnectionFailures:
    """Counts consecutive failures to reach an agent, until a deadline by the clock of the event loop."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._count = 0

    def reset(self) -> None:
        self._count = 0

    async def pause(self) -> bool:
        """Pause before the next attempt; return False without a pause if there are no attempts or no time left."""
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
    """Open an HTTP client whose requests belong to the current span (S-INT-37).

    `timeout_s` is the longest silence before and within an answer. An agent without streaming is silent until it is done.
    """
    if importlib.util.find_spec("a2a") is None:
        raise ToolConfigurationError(_INSTALL)
    import httpx

    limits = httpx.Timeout(timeout_s, connect=address.connect_timeout_s)
    span = current_traceparent()
    headers = httpx.Headers({"Accept-Encoding": ACCEPTED_CODINGS, **({_TRACEPARENT: span} if span else {})})
    headers.update(dict(address.headers))  # the user's headers have priority
    hooks: dict[str, list[Callable[..., object]]] = {"response": [partial(_bound, newest or NewestAnswer())]}
    async with httpx.AsyncClient(headers=headers, timeout=limits, follow_redirects=False, event_hooks=hooks) as http:
        yield http


async def _bound(newest: NewestAnswer, response: httpx.Response) -> None:
    is_failure = response.status_code >= HTTPStatus.BAD_REQUEST
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    max_bytes = _ANSWER_BYTES
    if response.request.url.path.endswith(_CARD_PATH):
        max_bytes = _CARD_BYTES
    elif is_stream:
        max_bytes = _STREAM_BYTES
    cut_bytes = _FAILURE_BYTES if is_failure else None
    newest.begin(is_stream=is_stream)
    bound_response(response, UnpackingError, max_bytes=max_bytes, cut_bytes=cut_bytes, on_piece=newest.add)


async def fetch_card(address: AgentAddress) -> AgentCard:
    """Return the card of an agent, without retries."""
    from a2a.utils.errors import A2AError

    async with open_http_client(address, ANSWER_S) as http:
        try:
            return await _get_card(address, http)
        except A2AError as error:
            raise _no_card(address, error) from error


async def connect(address: AgentAddress, http: httpx.AsyncClient, failures: ConnectionFailures) -> Client:
    """Return a client for an interface of the agent's card that is allowed and supported."""
    from a2a.client import ClientConfig, ClientFactory
    from a2a.utils.constants import TransportProtocol
    from a2a.utils.errors import A2AError

    while True:
        try:
            card = await _get_card(address, http)
            break
        except A2AError as error:  # the agent may be restarting, and fetching the card has no effect
            if not _is_lost(error) or not await failures.pause():
                raise _no_card(address, error) from error
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


async def _get_card(address: AgentAddress, http: httpx.AsyncClient) -> AgentCard:
    import httpx
    from a2a.client import A2ACardResolver

    limits = httpx.Timeout(ANSWER_S, connect=address.connect_timeout_s)
    with sdk_errors():
        async with asyncio.timeout(ANSWER_S):
            return await A2ACardResolver(http, address.url).get_agent_card(http_kwargs={"timeout": limits})


def _no_card(address: AgentAddress, error: A2AError) -> RemoteAgentError:
    return RemoteAgentError(f"Remote agent {address.url}: its card cannot be read: {cause_of(error)}")


# --- tasks and answers ---

#: Names of task states in the protocol, and the final ones in its version 0.3.
_DONE = "TASK_STATE_COMPLETED"
_CANCELLED = "TASK_STATE_CANCELED"
_OVER = frozenset({_DONE, "TASK_STATE_FAILED", _CANCELLED, "TASK_STATE_REJECTED"})
_ASKING = frozenset({"TASK_STATE_INPUT_REQUIRED", "TASK_STATE_AUTH_REQUIRED"})
_OLD_OVER = frozenset({"completed", "failed", "canceled", "rejected"})
#: A float above it may not represent a whole number exactly.
_LARGEST_WHOLE = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAnswer:
    """The answer of a remote agent, or the reason why there is none."""

    text: str
    #: content of its data parts; None: there are none
    data: object = None
    #: None: the agent answered
    failure: str | None = None

    @property
    def shown(self) -> str:
        return self.text if self.text or self.data is None else json.dumps(self.data, ensure_ascii=False)


class RemoteTask:
    def __init__(self) -> None:
        self.task_id: str | None = None
        #: whether the agent may have received the message and started the work
        self.may_have_begun = False
        self._state = ""
        self._status_message: Message | None = None
        self._reply: Message | None = None
        self._artifacts: dict[str, list[Part]] = {}

    @property
    def is_settled(self) -> bool:
        """Whether the agent sends no further update by itself."""
        return self._reply is not None or self._state in _OVER | _ASKING

    @property
    def is_over(self) -> bool:
        """Whether the remote agent has stopped its work on the task."""
        return self._reply is not None or self._state in _OVER

    @property
    def is_cancelled(self) -> bool:
        return self._state == _CANCELLED

    def reset(self) -> None:
        self.task_id, self.may_have_begun = None, False
        self._state, self._status_message, self._reply, self._artifacts = "", None, None, {}

    def update(self, response: StreamResponse) -> str:
        """Apply an update; return the text that it adds to the answer."""
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
                artifact, text = (
                    response.artifact_update.artifact,
                    _artifact_text(response.artifact_update.artifact.parts),
                )
                known = self._artifacts.get(artifact.artifact_id)
                if known is not None and response.artifact_update.append:
                    known.extend(artifact.parts)
                    return text
                self._artifacts[artifact.artifact_id] = list(artifact.parts)
                return text if known is None else ""
            case _:
                return ""

    def update_from(self, task: Task) -> str:
        """Apply the complete state of the task; return its text, unless parts of it were returned before."""
        is_first = not self._artifacts
        self.task_id = task.id
        self._set_status(task.status)
        self._artifacts = {each.artifact_id: list(each.parts) for each in task.artifacts} or self._artifacts
        return self._text() if is_first else ""

    def answer(self) -> RemoteAnswer:
        """Return the answer; raise `ValueError` if it contains numbers that JSON lacks."""
        if self._reply is not None:
            return RemoteAnswer(text=_text_of(self._reply.parts), data=_data_of(self._reply.parts))
        status = "" if self._status_message is None else _text_of(self._status_message.parts)
        parts = [part for artifact in self._artifacts.values() for part in artifact]
        text, data = self._text(), _data_of(parts)
        if self._state == _DONE:
            return RemoteAnswer(text=text or ("" if data is not None else status), data=data)
        reason = f": {status}" if status else ""
        match self._state:
            case "TASK_STATE_INPUT_REQUIRED":
                failure = f"it waits for input on its task '{self.task_id}', which a team cannot provide"
            case "TASK_STATE_AUTH_REQUIRED":
                failure = f"it wants to be authorised for its task '{self.task_id}'"
            case "TASK_STATE_FAILED":
                failure = "it failed"
            case "TASK_STATE_CANCELED":
                failure = f"its task '{self.task_id}' was cancelled there"
            case "TASK_STATE_REJECTED":
                failure = "it refused the task"
            case _:
                failure = "it ended its answer before the task ended"
        return RemoteAnswer(text=text, data=data, failure=f"{failure}{reason}")

    def _set_status(self, status: TaskStatus) -> None:
        from a2a.types import TaskState

        self._state = TaskState.Name(status.state)
        self._status_message = status.message if status.HasField("message") else None

    def _text(self) -> str:
        return "\n\n".join(filter(None, map(_artifact_text, self._artifacts.values())))


def _artifact_text(parts: Iterable[Part]) -> str:
    """Return the text of an artifact, whose parts are pieces of one text."""
    return "".join(whole_text(part.text) for part in parts if part.WhichOneof("content") == "text")


def _text_of(parts: Iterable[Part]) -> str:
    """Return the text of a message, with the names of its files."""
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
    """Return the data of a message: the value of its only data part, or a list of several; None without data."""
    found: list[object] = [plain_value(part.data) for part in parts if part.WhichOneof("content") == "data"]
    return found[0] if len(found) == 1 else found or None


def plain_value(value: Value) -> JsonValue:
    """Return data as JSON with integers, which the protocol's values lack; raise `ValueError` for infinity and NaN."""
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
    """The bytes of the newest answer of an agent; of a stream, the events around the newest piece."""

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
        """Append a piece; drop events that ended before it, which the SDK has read."""
        if self._is_stream:
            recent = max(len(self._text) - STEP_BYTES - 3, 0)  # earlier ends were found with an earlier piece
            end = max(self._text.rfind(mark, recent) for mark in (b"\n\n", b"\n\r\n"))
            del self._text[: max(end, 0)]
        self._text += piece


def _is_final(answer: str) -> bool:
    """Return whether an answer ends its task or is a message; False if its JSON does not show it."""
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


# --- errors of the SDK ---


@contextmanager
def sdk_errors() -> Generator[None]:
    """Convert all errors of the SDK to `A2AError`. For an unreadable answer it raises errors of many types."""
    from a2a.client.errors import A2AClientTimeoutError
    from a2a.utils.errors import InvalidAgentResponseError
    from google.protobuf.json_format import ParseError

    try:
        yield
    except TimeoutError as error:
        raise A2AClientTimeoutError("no answer in time") from error
    except (ParseError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "it is nested too deeply" if _is_depth(error) else f"{type(error).__name__}: {message_of(error)}"
        why = message_of(error) if isinstance(error, UnpackingError) else why
        raise InvalidAgentResponseError(f"its answer cannot be read: {why}") from error


def is_too_deep(error: A2AError) -> bool:
    """Return whether the answer is nested more deeply than the protocol's messages allow."""
    return _is_depth(error.__cause__)


def is_beyond_limits(error: A2AError) -> bool:
    """Return whether the answer is nested too deeply or too long: a retry has no use."""
    return is_too_deep(error) or isinstance(error.__cause__, UnpackingError)


def _is_depth(error: BaseException | None) -> bool:
    from google.protobuf.json_format import ParseError

    return isinstance(error, RecursionError) or (isinstance(error, ParseError) and "too deep" in str(error))


def is_refusal(error: A2AError) -> bool:
    from a2a.client.errors import A2AClientError

    status = _status_of(error)
    if status is not None:
        return status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LATER
    return not (isinstance(error, A2AClientError) or has_unknown_outcome(error))


def has_unknown_outcome(error: A2AError) -> bool:
    """Return whether the agent answered with an internal error or an unreadable answer: the work may be done."""
    from a2a.utils.errors import InternalError, InvalidAgentResponseError

    return isinstance(error, InternalError | InvalidAgentResponseError)


def was_not_processed(error: A2AError) -> bool:
    """Return whether the request certainly had no effect, so that any request can be repeated."""
    import httpx

    if isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return True
    return _status_of(error) in {HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


def cause_of(error: A2AError) -> str:
    """Return the reason of an error without the URL, which may contain secrets and is part of the SDK's own texts."""
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


def _is_lost(error: A2AError) -> bool:
    """Return whether the agent was not reachable, or asks for a retry."""
    import httpx

    status = _status_of(error)
    if status is not None:
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _LATER
    return isinstance(error.__cause__, httpx.RequestError) and not tls_flaw(error)


def _status_of(error: A2AError) -> int | None:
    import httpx

    cause = error.__cause__
    return cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None
