"""Connections to agents of the A2A protocol: the card, a client of it by the official SDK, and what its errors mean.

In: where an agent is. Out: a client of one of its interfaces. Rule: keys go to the hosts that the developer named, and nowhere else.
"""

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
    from a2a.types import AgentCard, Artifact, Message, Part, StreamResponse, Task, TaskStatus
    from a2a.utils.errors import A2AError
    from google.protobuf.struct_pb2 import Value
    from pydantic import JsonValue


#: Extension of a card whose agent takes a message that is sent again for the same task (S-INT-77).
IDEMPOTENT_MESSAGES = "urn:ensemble-ray:a2a:idempotent-messages"

_FORM = "'https://HOST/PATH', under which its card is found"
_WELL_KNOWN = "/.well-known/"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    """One agent: where its card is, and what is sent with every request."""

    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: `HOST` or `HOST:PORT` that the card may name besides the one of the URL
    hosts: frozenset[str] = frozenset()
    #: longest time until a connection stands, s
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
        """Read an address.

        Raises:
            ValidationError: it is no URL, has a password in it, a header is malformed, or a value has another type.
        """
        _check_types(url, headers, hosts)
        parts = _split(url)
        if parts is None:
            raise ValidationError(f"RemoteAgent url must be {_FORM}, got: {url.rpartition('@')[2]!r}")
        if parts.username is not None or parts.password is not None:
            raise ValidationError("RemoteAgent url must be without a name or password: give them in headers")
        if parts.query or parts.fragment:
            raise ValidationError("RemoteAgent url must be without a query or fragment: give keys in headers")
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
        """What it is called by its URL: the last part of the path, else the host."""
        parts = urlsplit(self.url)
        return unquote(parts.path.rstrip("/").rpartition("/")[2]) or parts.hostname or self.url

    def allows(self, url: str) -> bool:
        """Return whether requests may be sent to a URL that the card names."""
        found, own = _split(url), urlsplit(self.url)
        if found is None or (own.scheme == "https" and found.scheme != "https"):
            return False
        if (found.scheme, _host(found)) == (own.scheme, _host(own)):
            return True
        return bool({found.hostname or "", found.netloc} & self.hosts)


def _check_types(url: object, headers: object, hosts: object) -> None:
    """Refuse values of other types; those of headers are not shown.

    Raises:
        ValidationError: there is one.
    """
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
    """Return the parts of a URL; None: it is none of HTTP."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in _PORTS and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return None
    return parts if is_whole else None


def _host(parts: SplitResult) -> tuple[str | None, int | None]:
    return parts.hostname, parts.port or _PORTS.get(parts.scheme)


#: Above it, numbers of JSON have no exact whole ones.
_LARGEST_WHOLE = 2**53


def plain_value(value: Value) -> JsonValue:
    """Return data with whole numbers as such: the protocol's values have one kind of number.

    Raises:
        ValueError: a number in it is infinite or none.
    """
    from google.protobuf.json_format import MessageToDict

    return _with_whole_numbers(cast("JsonValue", MessageToDict(value)))


def _with_whole_numbers(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_WHOLE:
        return int(value)
    return value


#: Names of states, as the protocol has them.
_DONE = "TASK_STATE_COMPLETED"
_CANCELLED = "TASK_STATE_CANCELED"
_OVER = frozenset({_DONE, "TASK_STATE_FAILED", _CANCELLED, "TASK_STATE_REJECTED"})
_ASKING = frozenset({"TASK_STATE_INPUT_REQUIRED", "TASK_STATE_AUTH_REQUIRED"})
#: As version 0.3 has them.
_OLD_OVER = frozenset({"completed", "failed", "canceled", "rejected"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAnswer:
    """How a task of a remote agent ended, or what it asks."""

    text: str
    #: what its data parts say; None: there are none
    data: object = None
    #: why there is no answer; None: there is one
    failure: str | None = None

    @property
    def shown(self) -> str:
        """The answer as text: data where there is nothing else."""
        return self.text if self.text or self.data is None else json.dumps(self.data, ensure_ascii=False)


class RemoteTask:
    """What is known of one task."""

    def __init__(self) -> None:
        self.task_id: str | None = None
        #: whether the agent may have the message, and may have done what it asks for
        self.may_have_begun = False
        self._state = ""
        self._told: Message | None = None
        self._reply: Message | None = None
        self._artifacts: dict[str, list[Part]] = {}

    @property
    def is_settled(self) -> bool:
        """Whether nothing more comes by itself."""
        return self._reply is not None or self._state in _OVER | _ASKING

    @property
    def is_over(self) -> bool:
        """Whether the remote agent works on it no more."""
        return self._reply is not None or self._state in _OVER

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled there."""
        return self._state == _CANCELLED

    def forget(self) -> None:
        """Begin as if nothing had been sent."""
        self.task_id, self.may_have_begun = None, False
        self._state, self._told, self._reply, self._artifacts = "", None, None, {}

    def take(self, told: StreamResponse) -> str:
        """Take what came, and return the text that it adds to the answer."""
        match told.WhichOneof("payload"):
            case "message":
                self._reply = told.message
                return _text_of(told.message.parts)
            case "task":
                return self.take_task(told.task)
            case "status_update":
                self.task_id = told.status_update.task_id
                self._take_status(told.status_update.status)
                return ""
            case "artifact_update":
                self.task_id = told.artifact_update.task_id
                return self._take_artifact(told.artifact_update.artifact, appends=told.artifact_update.append)
            case _:
                return ""

    def take_task(self, task: Task) -> str:
        """Take how a task stands, and return its text where none was told before."""
        is_first = not self._artifacts
        self.task_id = task.id
        self._take_status(task.status)
        self._artifacts = {each.artifact_id: list(each.parts) for each in task.artifacts} or self._artifacts
        return self._text() if is_first else ""

    def answer(self) -> RemoteAnswer:
        """Return what came of it.

        Raises:
            ValueError: it has numbers that JSON has not.
        """
        if self._reply is not None:
            return RemoteAnswer(text=_text_of(self._reply.parts), data=_data_of(self._reply.parts))
        told = "" if self._told is None else _text_of(self._told.parts)
        parts = [part for artifact in self._artifacts.values() for part in artifact]
        text, data = self._text(), _data_of(parts)
        if self._state == _DONE:
            return RemoteAnswer(text=text or ("" if data is not None else told), data=data)
        return RemoteAnswer(text=text, data=data, failure=self._why(told))

    def _why(self, told: str) -> str:
        reason = f": {told}" if told else ""
        match self._state:
            case "TASK_STATE_INPUT_REQUIRED":
                return f"it waits for input on its task '{self.task_id}', which a team cannot give{reason}"
            case "TASK_STATE_AUTH_REQUIRED":
                return f"it wants to be authorised for its task '{self.task_id}'{reason}"
            case "TASK_STATE_FAILED":
                return f"it failed{reason}"
            case "TASK_STATE_CANCELED":
                return f"its task '{self.task_id}' was cancelled there{reason}"
            case "TASK_STATE_REJECTED":
                return f"it refused the task{reason}"
            case _:
                return f"it ended its answer while the task went on{reason}"

    def _take_status(self, status: TaskStatus) -> None:
        from a2a.types import TaskState

        self._state = TaskState.Name(status.state)
        self._told = status.message if status.HasField("message") else None

    def _take_artifact(self, artifact: Artifact, *, appends: bool) -> str:
        known = self._artifacts.get(artifact.artifact_id)
        if appends and known is not None:
            known.extend(artifact.parts)
            return _pieces_of(artifact.parts)
        self._artifacts[artifact.artifact_id] = list(artifact.parts)
        return "" if known is not None else _pieces_of(artifact.parts)

    def _text(self) -> str:
        return "\n\n".join(filter(None, map(_pieces_of, self._artifacts.values())))


def is_final(answer: str) -> bool:
    """Return whether an answer as it came ends its task, or is a message in place of one; False where JSON alone does not show it."""
    try:
        told: object = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    for name in ("result", "task", "statusUpdate"):
        told = _member(told, name) or told
    if _member(told, "message") is not None or _member(told, "kind") == "message":
        return True
    state = _member(_member(told, "status"), "state")
    return isinstance(state, str) and state in _OVER | _OLD_OVER


def _member(value: object, name: str) -> object:
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None


def _pieces_of(parts: Iterable[Part]) -> str:
    """Return the text of an artifact, whose parts are pieces of one text."""
    return "".join(whole_text(part.text) for part in parts if part.WhichOneof("content") == "text")


def _text_of(parts: Iterable[Part]) -> str:
    """Return the text of a message; files are named."""
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
    """Return the data of a message: that of its one data part, or all as a list.

    Raises:
        ValueError: JSON has no such numbers.
    """
    found: list[object] = [plain_value(part.data) for part in parts if part.WhichOneof("content") == "data"]
    return found[0] if len(found) == 1 else found or None


#: The longest wait for an answer that takes no work: the card, or how a task stands, s.
ANSWER_S = 120.0
#: Longest card, answer, stream and body of a failure, bytes after unpacking.
_CARD_BYTES, _ANSWER_BYTES, _STREAM_BYTES, _FAILURE_BYTES = 2**20, 16 * 2**20, 64 * 2**20, 64 * 2**10
_CARD_PATH = "/.well-known/agent-card.json"
#: A lost connection is made again after so long, s, so often in a row.
_AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_INSTALL = "RemoteAgent needs the package a2a-sdk, which is not installed: pip install 'ensemble-ray[a2a]'"
_TRACEPARENT = "traceparent"
#: Statuses that ask for the same request a little later; after the first it may have been taken all the same.
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class RemoteAgentError(Exception):
    """A remote agent gave no answer; `may_be_done`: it may have worked on what it was asked, and nobody knows how far."""

    def __init__(self, text: str, *, may_be_done: bool = False) -> None:
        super().__init__(text)
        self.may_be_done = may_be_done

    def __str__(self) -> str:
        return str(self.args[0])


class Losses:
    """How often an agent was lost in a row."""

    def __init__(self, deadline: float) -> None:
        """Begin with none.

        Args:
            deadline: When the answer is given up, by the clock of the loop.
        """
        self._deadline = deadline
        self._count = 0

    def forget(self) -> None:
        """Take notice that the agent is there."""
        self._count = 0

    async def wait(self) -> bool:
        """Wait a little before the agent is asked again; return False at once where it was lost too often, or no time is left."""
        if self._count >= len(_AGAIN_S):
            return False
        pause_s = _AGAIN_S[self._count]
        if asyncio.get_running_loop().time() + pause_s >= self._deadline:
            return False
        self._count += 1
        await asyncio.sleep(pause_s)
        return True


class NewestAnswer:
    """The newest answer of an agent as it came; of a stream the events that the newest piece is part of."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._is_stream = False

    @property
    def is_final(self) -> bool:
        """Whether it ends the task, or is a message in place of one."""
        text = self._text.decode(errors="replace")
        if not self._is_stream:
            return is_final(text)
        events = re.split(r"\r?\n\r?\n", text)
        return any(is_final("\n".join(re.findall(r"^data: ?(.*?)\r?$", event, re.MULTILINE))) for event in events)

    def begin(self, *, is_stream: bool) -> None:
        """Begin another answer."""
        self._text.clear()
        self._is_stream = is_stream

    def add(self, piece: bytes) -> None:
        """Add a piece; events that ended before it were read."""
        if self._is_stream:
            recent = max(len(self._text) - STEP_BYTES - 3, 0)  # ends before it were found before
            end = max(self._text.rfind(mark, recent) for mark in (b"\n\n", b"\n\r\n"))
            del self._text[: max(end, 0)]
        self._text += piece


# Connecting.


@asynccontextmanager
async def open_http_client(
    address: AgentAddress, timeout_s: float, newest: NewestAnswer | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client of HTTP whose requests are part of the span of the work here (S-INT-37).

    Args:
        address: Where it is used.
        timeout_s: Longest silence within an answer and before it: an agent without streams says nothing until it is done, s.
        newest: Takes the newest answer.

    Raises:
        ToolConfigurationError: the SDK is not installed.
    """
    if importlib.util.find_spec("a2a") is None:
        raise ToolConfigurationError(_INSTALL)
    import httpx

    limits = httpx.Timeout(timeout_s, connect=address.connect_timeout_s)
    span = current_traceparent()
    headers = httpx.Headers({"Accept-Encoding": ACCEPTED_CODINGS, **({_TRACEPARENT: span} if span else {})})
    headers.update(dict(address.headers))  # those of the user win
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
    """Return what an agent says of itself, which is asked once.

    Raises:
        RemoteAgentError: there is no card.
        ToolConfigurationError: the SDK is not installed.
    """
    from a2a.utils.errors import A2AError

    async with open_http_client(address, ANSWER_S) as http:
        try:
            return await _card(address, http)
        except A2AError as error:
            raise _no_card(address, error) from error


async def connect(address: AgentAddress, http: httpx.AsyncClient, losses: Losses) -> Client:
    """Return a client of one of the interfaces that the card names.

    Raises:
        RemoteAgentError: there is no card, or none of its interfaces may be asked, or is understood.
    """
    from a2a.client import ClientConfig, ClientFactory
    from a2a.utils.constants import TransportProtocol

    card = await _patient_card(address, http, losses)
    named = [each.url for each in card.supported_interfaces]
    allowed = [each for each in card.supported_interfaces if address.allows(each.url)]
    if named and not allowed:
        raise RemoteAgentError(
            f"Remote agent {address.url}: its card says that it is asked at [{', '.join(named)}], which is another host. "
            "If that is meant, name the host in hosts=[...]"
        )
    del card.supported_interfaces[:]
    card.supported_interfaces.extend(allowed)
    bindings = [TransportProtocol.JSONRPC.value, TransportProtocol.HTTP_JSON.value]
    config = ClientConfig(
        httpx_client=http,
        streaming=True,
        polling=not card.capabilities.streaming,  # else nobody knows the task while it goes on
        supported_protocol_bindings=bindings,
        accepted_output_modes=["text/plain", "application/json"],
    )
    try:
        return ClientFactory(config).create(card)
    except ValueError as error:
        raise RemoteAgentError(
            f"Remote agent {address.url}: its card names no interface that is understood here: [{', '.join(bindings)}]"
        ) from error


async def _patient_card(address: AgentAddress, http: httpx.AsyncClient, losses: Losses) -> AgentCard:
    """Return the card, also of an agent that is being restarted: asking for it does nothing."""
    from a2a.utils.errors import A2AError

    while True:
        try:
            card = await _card(address, http)
        except A2AError as error:
            if not _is_lost(error) or not await losses.wait():
                raise _no_card(address, error) from error
        else:
            losses.forget()
            return card


async def _card(address: AgentAddress, http: httpx.AsyncClient) -> AgentCard:
    import httpx
    from a2a.client import A2ACardResolver

    limits = httpx.Timeout(ANSWER_S, connect=address.connect_timeout_s)
    with sdk_errors():
        async with asyncio.timeout(ANSWER_S):
            return await A2ACardResolver(http, address.url).get_agent_card(http_kwargs={"timeout": limits})


def _no_card(address: AgentAddress, error: A2AError) -> RemoteAgentError:
    return RemoteAgentError(f"Remote agent {address.url}: its card cannot be read: {cause_of(error)}")


# What errors mean.


@contextmanager
def sdk_errors() -> Generator[None]:
    """Have everything that the SDK raises in the block be an `A2AError`: of an answer that it cannot read it raises what comes."""
    from a2a.client.errors import A2AClientTimeoutError
    from a2a.utils.errors import InvalidAgentResponseError
    from google.protobuf.json_format import ParseError

    try:
        yield
    except TimeoutError as error:
        raise A2AClientTimeoutError("nothing came from it in time") from error
    except (ParseError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "it is nested too deeply" if _is_depth(error) else f"{type(error).__name__}: {message_of(error)}"
        why = message_of(error) if isinstance(error, UnpackingError) else why
        raise InvalidAgentResponseError(f"its answer cannot be read: {why}") from error


def is_too_deep(error: A2AError) -> bool:
    """Return whether the answer is nested beyond what the protocol's messages can hold."""
    return _is_depth(error.__cause__)


def is_beyond_limits(error: A2AError) -> bool:
    """Return whether the same answer would be refused again: it is nested too deeply, or too long."""
    return is_too_deep(error) or isinstance(error.__cause__, UnpackingError)


def _is_depth(error: BaseException | None) -> bool:
    from google.protobuf.json_format import ParseError

    return isinstance(error, RecursionError) or (isinstance(error, ParseError) and "too deep" in str(error))


def is_refusal(error: A2AError) -> bool:
    """Return whether the agent said that it does not do what it was asked."""
    from a2a.client.errors import A2AClientError

    status = _status_of(error)
    if status is not None:
        return status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LATER
    return not (isinstance(error, A2AClientError) or says_nothing_of_the_work(error))


def says_nothing_of_the_work(error: A2AError) -> bool:
    """Return whether it is an answer that leaves open what was done: the agent broke, or what it said cannot be read."""
    from a2a.utils.errors import InternalError, InvalidAgentResponseError

    return isinstance(error, InternalError | InvalidAgentResponseError)


def was_not_taken(error: A2AError) -> bool:
    """Return whether the request certainly began nothing, and may be made again whatever it asks for."""
    import httpx

    if isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return True
    return _status_of(error) in {HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


def cause_of(error: A2AError) -> str:
    """Return what went wrong; the SDK's words for a refusal name the URL with whatever stands in it, its cause's do not."""
    import httpx

    cause = error.__cause__
    if isinstance(cause, httpx.HTTPStatusError):
        status = cause.response.status_code
        return f"HTTP {status} {cause.response.reason_phrase}{_explain(status)}"
    if isinstance(cause, httpx.ConnectTimeout):
        return "no connection in time"
    if flaw := tls_flaw(cause):
        return flaw
    if isinstance(cause, httpx.RequestError):
        return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    return message_of(error)


def _is_lost(error: A2AError) -> bool:
    """Return whether the agent was not there, or asks for the same request later."""
    import httpx

    status = _status_of(error)
    if status is not None:
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _LATER
    return isinstance(error.__cause__, httpx.RequestError) and not tls_flaw(error)


def _status_of(error: A2AError) -> int | None:
    import httpx

    cause = error.__cause__
    return cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None


def _explain(status: int) -> str:
    match status:
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
            return ". It wants a key that it knows: give it in headers"
        case _ if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            return ". Redirects are not followed: give the address that is meant"
        case _:
            return ""
