"""Bodies of requests: options, roles of messages, and JSON schemas, adapted to refusals of the endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import Literal, cast

from msgspec import Struct, structs

from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.bodies import CLIENT_ERROR, SERVER_ERROR
from ensemble_ray.llm.failures import CallFailure
from ensemble_ray.llm.protocol.wire import CHAT_COMPLETIONS, ModelApi, encode_request, json_bytes
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.messages import ChatMessage, JsonSchema, Role, ToolSpec

_log = bounded_logger(__name__)

#: `user` prepends the system message to the next user message.
SystemRole = Literal["system", "developer", "user"]

#: How requests use the provider's cache of prompts: marks in texts, a key that sends equal beginnings to the same server.
PromptCache = Literal["breakpoints", "key", "off"]
_OPENAI, _OPENROUTER = "https://api.openai.com/", "https://openrouter.ai/"
_CACHED_CHARACTERS = 4096  # shortest text that providers store: 1,024 tokens
_TASK_HEADING = "\n\n## Task\n"  # ends the part of a prompt that tasks may share (S-TPL-58)

_ROLE_REFUSALS = frozenset({400, 422, 500, 501})  # some servers report an error of their template
_ALTERNATING = re.compile(rb"\broles?\b.{0,40}alternat|alternat.{0,60}\broles?\b|should alternate with", re.DOTALL)
_SYSTEM = re.compile(
    rb"\b(system|developer)\W{0,4}(roles?|messages?|prompts?|instructions?)\b|\broles?\b.{0,60}\b(system|developer)\b"
    rb"|user\W{1,4}(and|or)\W{1,4}assistant|(start|begin) with a user",
    re.DOTALL,
)
_NEGATIVE = re.compile(rb"\bnot\b|n't|cannot|unsupported|invalid|unexpected|unknown|\bonly\b|\bmust\b|\bshould\b")

_MEMBER_REFUSALS = frozenset({400, 404, 422})
_SCHEMA_REFUSALS = frozenset({400, 404, 422, 501})  # a router without a model for schemas answers 404
_SCHEMA_MODE = (b"response_format", b"text.format", b"json_schema", b"structured output")
_INVALID_SCHEMA = b"invalid schema"  # the endpoint supports other schemas

#: Only this library sets these.
_OWN_MEMBERS = frozenset({"messages", "model", "stream", "stream_options", "tools"})
#: Requests without tools must not contain these.
_TOOL_OPTIONS = frozenset({
    "disable_tool_validation", "max_tool_calls", "parallel_tool_calls", "parse_tool_calls", "tool_choice", "tool_stream",
})  # fmt: skip
_FREE_CHOICES = ("auto", "none")

# State of this process, by place: endpoint and model.

_accepted_roles: dict[str, MessageRoles] = {}  # after a refusal of other roles
_refused: set[str] = set()  # places, and places with a schema's digest
_accepting: set[str] = set()


class MessageRoles(Struct, frozen=True, kw_only=True):
    system: SystemRole = "system"
    are_merged: bool = False  # neighbours of the same role become one message

    def arrange(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        arranged: list[ChatMessage] = []
        follows_system = False
        for message in messages:
            is_system = message.role == "system"
            # `Role` does not contain `developer`, but the protocol does.
            sent = replace(message, role=cast("Role", self.system)) if is_system else message
            joins = self.are_merged or (self.system == "user" and (is_system or follows_system))
            last = arranged[-1] if arranged and joins else None
            can_merge = last is not None and last.role == sent.role != "tool" and last.name == sent.name
            if last is not None and can_merge and not (last.tool_calls or sent.tool_calls):
                texts = (last.content, sent.content)
                merged = "\n\n".join(text for text in texts if text)
                arranged[-1] = replace(last, content=merged, attachments=(*last.attachments, *sent.attachments))
            else:
                arranged.append(sent)
            follows_system = is_system
        return arranged


STANDARD_ROLES = MessageRoles()


class RequestForm:
    """A request that is sent under other roles, or without its schema, after a refusal.

    The user's `declared` role of system messages does not change.
    """

    def __init__(
        self,
        encode: Callable[[MessageRoles], bytes],
        place: str,
        declared: SystemRole | None = None,
        offer: SchemaOffer | None = None,
        learn: Callable[[bytes, str], str] | None = None,
    ) -> None:
        """`encode` returns the body for roles; `place` is endpoint and model; `learn` is that of a `ModelApi`."""
        self._encode = encode
        self._place = place
        self._declared = declared
        known = _accepted_roles.get(place, STANDARD_ROLES)
        self._roles = known if declared is None else structs.replace(known, system=declared)
        self._refused_roles: CallFailure | None = None
        self._schema = None if offer is None else _OfferedSchema(offer, place)
        self._learn = learn
        self._learned: set[str] = set()

    @property
    def body(self) -> bytes:
        body = self._encode(self._roles)
        return body if self._schema is None else self._schema.add_to(body)

    def adapt(self, failure: CallFailure) -> bool:
        """Return False if no other form can help."""
        if self._learn is not None and failure.status in _MEMBER_REFUSALS:
            learned = self._learn(_text_of(failure), self._place)
            if learned and learned not in self._learned:  # otherwise it was not sent
                self._learned.add(learned)
                return True
        if self._schema is not None and self._schema.adapt(failure):
            return True
        if not is_refused_role(failure):
            return False
        alternates = self._roles.are_merged or _ALTERNATING.search(_text_of(failure)) is not None
        others = [structs.replace(self._roles, are_merged=alternates)]
        if self._declared is None:
            others.append(structs.replace(others[0], system="user"))
        refused = self._encode(self._roles)
        for roles in others:
            if self._encode(roles) != refused:
                self._roles, self._refused_roles = roles, failure
                if self._schema is not None:
                    self._schema.begin()
                return True
        return False

    def succeed(self) -> None:
        """Note what the endpoint accepted, for later requests."""
        if self._schema is not None:
            self._schema.succeed()
        if self._refused_roles is None:
            return
        if _accepted_roles.get(self._place) != self._roles:
            _accepted_roles[self._place] = self._roles
            changes = ["system messages go into the next user message"] if self._roles.system == "user" else []
            if self._roles.are_merged:
                changes.append("neighbours of the same role are merged")
            _log.info(
                "%s refused the roles of the messages (HTTP %s); from now on %s",
                self._place,
                self._refused_roles.status,
                " and ".join(changes),
            )
        self._refused_roles = None


def is_refused_role(failure: CallFailure) -> bool:
    status = failure.status
    if status is None or (status >= CLIENT_ERROR and status not in _ROLE_REFUSALS):
        return False
    text = _text_of(failure)
    return bool(_ALTERNATING.search(text) or (_SYSTEM.search(text) and _NEGATIVE.search(text)))


def _text_of(failure: CallFailure) -> bytes:
    return failure.body.lower() + failure.reason.lower().encode()


class RequestOptions(Struct, frozen=True):
    always: bytes
    with_tools: bytes = b""
    after_result: bytes = b""  # after the first tool result (S-LLM-26)
    form: bytes = b""  # a member that a `SchemaOffer` brings along
    api: ModelApi = CHAT_COMPLETIONS

    @classmethod
    def of(cls, model: str, options: Mapping[str, object], what: str, *, form: str = "") -> RequestOptions:
        """Options about tools are for requests with tools only (S-LLM-25); the option `form` is kept apart."""
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
        others = {name: value for name, value in options.items() if name not in {*_TOOL_OPTIONS, form}}
        later = {name: value for name, value in about_tools.items() if name != "tool_choice"}
        if (choice := _free_choice(about_tools.get("tool_choice"))) is not None:
            later["tool_choice"] = choice
        apart = {form: options[form]} if options.get(form) else {}
        always, with_tools, after_result, kept = (
            json_bytes(each)[1:-1] for each in ({"model": model, **others}, about_tools, later, apart)
        )
        return cls(always, with_tools, after_result, kept)

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        roles: MessageRoles = STANDARD_ROLES,
        *,
        suffix: bytes = b"",
        origin: str = "",
        has_offer: bool = False,
        cache: PromptCache = "off",
    ) -> bytes:
        """`suffix` has members such as `"stream":true`."""
        about_tools = b""
        if tools and (self.with_tools or self.after_result):
            has_result = any(message.role == "tool" for message in messages)
            about_tools = self.after_result if has_result else self.with_tools
        members = b",".join([each for each in (about_tools, b"" if has_offer else self.form, suffix) if each])
        sent = messages if roles == STANDARD_ROLES else roles.arrange(messages)
        marks = None
        if cache == "breakpoints":
            marks = breakpoints_of(sent, has_tools=bool(tools), marks_results=takes_marked_results(origin))
        elif cache == "key" and (key := cache_key(messages)):
            members = b",".join((members, key)) if members else key
        return encode_request(self.always, sent, tools, suffix=members, origin=origin, api=self.api, breakpoints=marks)


def default_cache(url: str, model: str) -> PromptCache:
    """Return the use of the cache that is safe at an endpoint (S-PRC-21)."""
    if url.startswith(_OPENROUTER) and model.startswith("anthropic/"):
        return "breakpoints"
    return "key" if url.startswith(_OPENAI) else "off"


def takes_marked_results(origin: str) -> bool:
    """Whether an endpoint accepts breakpoints in results of tools; other gateways pass them on as errors."""
    return origin.startswith(_OPENROUTER)


def cache_key(messages: Sequence[ChatMessage]) -> bytes:
    """Return the member `prompt_cache_key`: the same one for all requests with the same system message."""
    first = messages[0].content if messages and messages[0].role == "system" else None
    return b"" if not first else _cache_key(first)


@lru_cache(maxsize=256)
def _cache_key(text: str) -> bytes:
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f'"prompt_cache_key":"ensemble-ray-{digest}"'.encode()


def breakpoints_of(
    messages: Sequence[ChatMessage], *, has_tools: bool, marks_results: bool
) -> Mapping[int, Sequence[int]]:
    """Return where a provider may end a stored beginning: at most four positions, by the place of their message (S-PRC-22).

    After the system message, and so after the tools; after the context of the last prompt; of a tool loop also after that
    prompt and after the last result.
    """
    found: dict[int, list[int]] = {}
    if messages and messages[0].role in ("system", "developer") and messages[0].content:
        found[0] = [len(messages[0].content)]
    prompt = max((place for place, each in enumerate(messages) if each.role == "user" and each.content), default=None)
    if prompt is not None:
        text = messages[prompt].content or ""
        shared = text.find(_TASK_HEADING)
        positions = [shared] if shared >= _CACHED_CHARACTERS else []
        if has_tools:
            positions.append(len(text))
        if positions:
            found[prompt] = positions
    last = len(messages) - 1
    if has_tools and marks_results and messages and messages[last].role == "tool" and messages[last].content:
        found[last] = [len(messages[last].content or "")]
    return found


def _free_choice(choice: object) -> object:
    """Return the choice after the first tool result; None: the default."""
    if not isinstance(choice, dict):
        return choice if choice in _FREE_CHOICES else None
    members = cast("Mapping[str, object]", choice)
    allowed = members.get("allowed_tools")
    if isinstance(allowed, dict):
        # From now on the model may answer; the set of tools stays.
        return {**members, "allowed_tools": {**cast("Mapping[str, object]", allowed), "mode": "auto"}}
    if members.get("type") == "allowed_tools":  # of the Responses API
        return {**members, "mode": "auto"}
    return members if members.get("type") in _FREE_CHOICES else None


class SchemaOffer(Struct, frozen=True, kw_only=True):
    schema: JsonSchema
    is_declared: bool = False  # otherwise the first call decides
    text: Mapping[str, object] | None = None  # of the Responses API: the member that gets the schema as its `format`


class _OfferedSchema:
    def __init__(self, offer: SchemaOffer, place: str) -> None:
        self._offer = offer
        self._place = place
        schema = {"name": offer.schema.name, "schema": offer.schema.schema, "strict": offer.schema.strict}
        self._otherwise = b""
        if offer.text is None:
            self._member = b'"response_format":' + json_bytes({"type": "json_schema", "json_schema": schema})
        else:
            self._member = b'"text":' + json_bytes({**offer.text, "format": {"type": "json_schema", **schema}})
            self._otherwise = b'"text":' + json_bytes(offer.text) if offer.text else b""
        self._name = f"{place} {sha256(self._member).hexdigest()}"
        self._refusal: CallFailure | None = None
        self.begin()

    def begin(self) -> None:
        self._is_sent = self._place not in _refused and self._name not in _refused

    def add_to(self, body: bytes) -> bytes:
        member = self._member if self._is_sent else self._otherwise
        return b"".join((body[:-1], b",", member, b"}")) if member else body

    def adapt(self, failure: CallFailure) -> bool:
        if not self._is_sent or not is_refused_schema(failure):
            return False
        self._is_sent, self._refusal = False, failure
        # A refusal that does not name the mode is explained only by the success of a request without the schema.
        if _names_schema_mode(failure):
            self._note_refusal(failure)
        return True

    def succeed(self) -> None:
        if self._is_sent:
            _accepting.add(self._place)
        elif self._refusal is not None:
            self._note_refusal(self._refusal)

    def _note_refusal(self, refusal: CallFailure) -> None:
        self._refusal = None
        is_particular = self._offer.is_declared or self._place in _accepting or _INVALID_SCHEMA in refusal.body.lower()
        refused = self._name if is_particular else self._place
        if refused not in _refused:
            _refused.add(refused)
            what = "JSON schemas" if refused == self._place else f"the JSON schema of '{self._offer.schema.name}'"
            _log.info(
                "%s does not take %s (HTTP %s); the prompt alone asks for the form", self._place, what, refusal.status
            )


def is_refused_schema(failure: CallFailure) -> bool:
    if failure.error_body.is_bad_generation or failure.error_body.is_out_of_credit:
        return False
    if failure.status in _SCHEMA_REFUSALS:
        return True
    is_explained = failure.status == SERVER_ERROR or (failure.status or SERVER_ERROR) < CLIENT_ERROR
    return is_explained and _names_schema_mode(failure)


def _names_schema_mode(failure: CallFailure) -> bool:
    text = _text_of(failure)
    return any(name in text for name in _SCHEMA_MODE)
