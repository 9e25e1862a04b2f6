"""Bodies of requests: the user's options, the roles of messages, and JSON schemas, adapted to refusals of the endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Literal, Protocol, cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.failures import CallFailure, CallOrigin
from ensemble_ray.llm.protocol.transport import CallFailedError
from ensemble_ray.llm.protocol.wire import encode_request, json_bytes
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, Role, ToolSpec

_log = bounded_logger(__name__)

#: The role of system messages; `user` prepends their text to the next user message.
SystemRole = Literal["system", "developer", "user"]

_CLIENT_ERROR, _SERVER_ERROR = 400, 500
#: Statuses of a refusal of roles; some servers report an error of their template.
_ROLE_REFUSALS = frozenset({400, 422, 500, 501})
_ALTERNATING = re.compile(rb"\broles?\b.{0,40}alternat|alternat.{0,60}\broles?\b|should alternate with", re.DOTALL)
_SYSTEM = re.compile(
    rb"\b(system|developer)\W{0,4}(roles?|messages?|prompts?|instructions?)\b|\broles?\b.{0,60}\b(system|developer)\b"
    rb"|user\W{1,4}(and|or)\W{1,4}assistant|(start|begin) with a user",
    re.DOTALL,
)
_NEGATIVE = re.compile(rb"\bnot\b|n't|cannot|unsupported|invalid|unexpected|unknown|\bonly\b|\bmust\b|\bshould\b")

#: Statuses of a refusal of a schema; 404 is the answer of a router that knows no model with schemas.
_SCHEMA_REFUSALS = frozenset({400, 404, 422, 501})
_SCHEMA_MODE = (b"response_format", b"json_schema", b"structured output")
#: The endpoint supports schemas, but not this one.
_INVALID_SCHEMA = b"invalid schema"

#: Members of the request that only this library sets.
_OWN_MEMBERS = frozenset({"messages", "model", "stream", "stream_options", "tools"})
#: Options that a request without tools must not contain.
_TOOL_OPTIONS = frozenset(
    {
        "disable_tool_validation",
        "max_tool_calls",
        "parallel_tool_calls",
        "parse_tool_calls",
        "tool_choice",
        "tool_stream",
    }
)
_FREE_CHOICES = ("auto", "none")

# State of this process, by place: endpoint and model.

#: roles that the place accepted after a refusal
_accepted_roles: dict[str, MessageRoles] = {}
#: places, and places with a schema's digest, that refused schemas
_refused: set[str] = set()
_accepting: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRoles:
    """The roles that a model accepts."""

    system: SystemRole = "system"
    #: whether neighbours of the same role become one message
    are_merged: bool = False

    def arrange(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        if self == MessageRoles():
            return messages
        arranged: list[ChatMessage] = []
        follows_system = False
        for message in messages:
            is_system = message.role == "system"
            # The protocol has the role `developer`, although `Role` does not.
            sent = replace(message, role=cast("Role", self.system)) if is_system else message
            joins = self.are_merged or (self.system == "user" and (is_system or follows_system))
            last = arranged[-1] if arranged and joins else None
            can_merge = last is not None and last.role == sent.role != "tool" and last.name == sent.name
            if last is not None and can_merge and not (last.tool_calls or sent.tool_calls):
                texts = (last.content, sent.content)
                arranged[-1] = replace(last, content="\n\n".join(text for text in texts if text))
            else:
                arranged.append(sent)
            follows_system = is_system
        return arranged


class RoleSearch:
    """One request, sent under other roles if the endpoint refuses them, except the user's `declared` role."""

    def __init__(
        self, encode: Callable[[MessageRoles], bytes], origin: CallOrigin, declared: SystemRole | None
    ) -> None:
        self._encode = encode
        self._place = f"{origin.endpoint} {origin.model}"
        self._declared = declared
        known = _accepted_roles.get(self._place, MessageRoles())
        self._roles = known if declared is None else replace(known, system=declared)
        self._refusal: CallFailure | None = None

    @property
    def body(self) -> bytes:
        return self._encode(self._roles)

    def adapt(self, failure: CallFailure) -> bool:
        """Choose other roles after a failure; return False if none can help."""
        if not is_refused_role(failure):
            return False
        alternates = self._roles.are_merged or _ALTERNATING.search(_text_of(failure)) is not None
        others = [replace(self._roles, are_merged=alternates)]
        if self._declared is None:
            others.append(replace(others[0], system="user"))
        refused = self.body
        for roles in others:
            if self._encode(roles) != refused:
                self._roles, self._refusal = roles, failure
                return True
        return False

    def succeed(self) -> None:
        if self._refusal is None:
            return
        if _accepted_roles.get(self._place) != self._roles:
            _accepted_roles[self._place] = self._roles
            changes = ["system messages go into the next user message"] if self._roles.system == "user" else []
            if self._roles.are_merged:
                changes.append("neighbours of the same role are merged")
            _log.info(
                "%s refused the roles of the messages (HTTP %s); from now on %s",
                self._place,
                self._refusal.status,
                " and ".join(changes),
            )
        self._refusal = None


def is_refused_role(failure: CallFailure) -> bool:
    status = failure.status
    if status is None or (status >= _CLIENT_ERROR and status not in _ROLE_REFUSALS):
        return False
    text = _text_of(failure)
    return bool(_ALTERNATING.search(text) or (_SYSTEM.search(text) and _NEGATIVE.search(text)))


def _text_of(failure: CallFailure) -> bytes:
    return failure.body.lower() + failure.reason.lower().encode()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    always: bytes
    with_tools: bytes = b""
    #: with tools, after the first tool result (S-LLM-26)
    after_result: bytes = b""

    @classmethod
    def of(cls, model: str, options: Mapping[str, object], what: str) -> RequestOptions:
        """Encode the user's options; those about tools are for requests with tools only (S-LLM-25)."""
        for name in sorted(_OWN_MEMBERS & options.keys()):
            raise ValidationError(f"{what}: '{name}' is set by the library and cannot be a request option")
        for name, value in options.items():
            try:
                json_bytes(value)
            except (TypeError, ValueError):
                raise ValidationError(
                    f"{what}: request option '{name}' must be JSON, got: {type(value).__name__}"
                ) from None
        about_tools = {name: value for name, value in options.items() if name in _TOOL_OPTIONS}
        others = {name: value for name, value in options.items() if name not in _TOOL_OPTIONS}
        later = {name: value for name, value in about_tools.items() if name != "tool_choice"}
        if (choice := _free_choice(about_tools.get("tool_choice"))) is not None:
            later["tool_choice"] = choice
        return cls(json_bytes({"model": model, **others})[1:-1], json_bytes(about_tools)[1:-1], json_bytes(later)[1:-1])

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        roles: MessageRoles = MessageRoles(),
        *,
        suffix: bytes = b"",
        origin: str = "",
    ) -> bytes:
        """Return the body of a request; `suffix` has members of this kind of request, such as `"stream":true`."""
        about_tools = b""
        if tools:
            has_result = any(message.role == "tool" for message in messages)
            about_tools = self.after_result if has_result else self.with_tools
        members = b",".join(part for part in (about_tools, suffix) if part)
        return encode_request(self.always, roles.arrange(messages), tools, suffix=members, origin=origin)


def _free_choice(choice: object) -> object:
    """Return the choice after the first tool result; None: the endpoint's default."""
    if not isinstance(choice, dict):
        return choice if choice in _FREE_CHOICES else None
    members = cast("Mapping[str, object]", choice)
    allowed = members.get("allowed_tools")
    if isinstance(allowed, dict):
        # From now on the model may answer; the set of tools stays.
        return {**members, "allowed_tools": {**cast("Mapping[str, object]", allowed), "mode": "auto"}}
    return members if members.get("type") in _FREE_CHOICES else None


class Send(Protocol):
    """Sends a request and returns the answer. With `has_schema`, it does not retry after a refusal of the schema."""

    async def __call__(self, body: bytes, *, has_schema: bool = False) -> ChatResponse: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaOffer:
    schema: JsonSchema
    #: the user says that the endpoint supports schemas; otherwise the first call decides
    is_declared: bool = False

    async def answer(self, send: Send, body: bytes, origin: CallOrigin) -> ChatResponse:
        """Return the answer to the request with the schema, or without it if the endpoint refuses the schema."""
        endpoint = f"{origin.endpoint} {origin.model}"
        schema = {"name": self.schema.name, "schema": self.schema.schema, "strict": self.schema.strict}
        member = b'"response_format":' + json_bytes({"type": "json_schema", "json_schema": schema})
        this_schema = f"{endpoint} {sha256(member).hexdigest()}"
        if endpoint in _refused or this_schema in _refused:
            return await send(body)
        try:
            response = await send(b"".join((body[:-1], b",", member, b"}")), has_schema=True)
        except CallFailedError as failed:
            refusal = failed.failure
            if not is_refused_schema(refusal):
                raise
        else:
            _accepting.add(endpoint)
            return response
        is_particular = self.is_declared or endpoint in _accepting or _INVALID_SCHEMA in refusal.body.lower()
        refused = this_schema if is_particular else endpoint
        # If the refusal does not name the mode, only the success of a request without the schema shows the reason.
        plain = None if _names_schema_mode(refusal) else await send(body)
        if refused not in _refused:
            _refused.add(refused)
            what = "JSON schemas" if refused == endpoint else f"the JSON schema of '{self.schema.name}'"
            _log.info(
                "%s does not take %s (HTTP %s); the prompt alone asks for the form", endpoint, what, refusal.status
            )
        return await send(body) if plain is None else plain


def is_refused_schema(failure: CallFailure) -> bool:
    if failure.error_body.is_bad_generation or failure.error_body.is_out_of_credit:
        return False
    if failure.status in _SCHEMA_REFUSALS:
        return True
    is_explained = failure.status == _SERVER_ERROR or (failure.status or _SERVER_ERROR) < _CLIENT_ERROR
    return is_explained and _names_schema_mode(failure)


def _names_schema_mode(failure: CallFailure) -> bool:
    text = _text_of(failure)
    return any(name in text for name in _SCHEMA_MODE)
