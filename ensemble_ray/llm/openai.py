"""`OpenAIChatModel`: a model behind any endpoint of the chat-completions protocol.

The `openai` package is loaded only for errors and for `client_options` (decision 0002).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast, get_args

from pydantic import SecretStr

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.failures import CallOrigin, flaw_of, key_headers, provider_of, resource_url, shown_url
from ensemble_ray.llm.protocol.endpoint import DEFAULT_TIMEOUT_S, Endpoint
from ensemble_ray.llm.protocol.request import MessageRoles, RequestForm, RequestOptions, SchemaOffer, SystemRole
from ensemble_ray.llm.protocol.sdk_transport import SdkClients, SdkTransport
from ensemble_ray.llm.protocol.wire import DEFAULT_ANSWER_BYTES, DEFAULT_ANSWER_TIME_S, AnswerLimits
from ensemble_ray.text.foreign_text import header_flaw, header_name_flaw
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec

if TYPE_CHECKING:
    from ensemble_ray.llm.protocol.batches import BatchEndpoint

_DEFAULT_BASE_URL = "https://api.openai.com/v1"
_STREAMING = b'"stream":true'
_STREAMING_WITH_USAGE = b'"stream":true,"stream_options":{"include_usage":true}'


class OpenAIChatModel:
    """A model behind any endpoint of the chat-completions protocol, hosted or your own.

    A model is data: it can be pickled, and each process creates its own client. The key is never shown.

    Args:
        model: The model's name at the endpoint.
        base_url: URL of the API, often ending in `/v1`; default `OPENAI_BASE_URL`, then OpenAI's.
        api_key: The key; default `OPENAI_API_KEY`, which is read for each call.
        timeout: Longest wait for an answer (when streaming, for the next piece), s or `timedelta`; default 600 s.
        max_retries: How often a failed call is retried; None: not at all.
        client_options: Keyword arguments of `openai.AsyncOpenAI`. If set, that client sends the requests.
        max_answer_bytes: Longest answer, uncompressed; default 16 MiB. A stream may have four times as much, since each
            token has an envelope.
        max_answer_time: Longest time of a whole streamed answer, s or `timedelta`; default an hour, or `timeout` if
            that is longer.
        structured_outputs: Whether the endpoint supports JSON schemas, which typed tasks then use; None: the first such
            call decides.
        system_role: The role of system messages: `system`, `developer`, or `user`, which prepends their text to the
            first user message; None: the first refusal of a system message decides.
        request_options: Options of every request: `temperature`, `max_tokens`, `response_format`... `extra_body` is
            merged into the request, `extra_headers` are sent with it, and `extra_query` is added to the URL. Options
            about tools, such as `tool_choice`, are part of requests with tools only.

    Raises:
        ValidationError: a value is invalid.

    Examples:
        >>> OpenAIChatModel("gpt-4o-mini", api_key="sk-1", temperature=0)
        OpenAIChatModel('gpt-4o-mini', temperature=0)
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | SecretStr | None = None,
        timeout: timedelta | float | None = None,
        max_retries: int | None = None,
        client_options: Mapping[str, object] | None = None,
        max_answer_bytes: int | None = None,
        max_answer_time: timedelta | float | None = None,
        structured_outputs: bool | None = None,
        system_role: SystemRole | None = None,
        **request_options: object,
    ) -> None:
        if not isinstance(model, str) or not model.strip():
            raise ValidationError("OpenAIChatModel model must not be blank")
        if base_url is not None:
            _checked_url(base_url, "base_url")
        if max_retries is not None and (not isinstance(max_retries, int) or max_retries < 0):
            raise ValidationError(f"OpenAIChatModel max_retries must be >= 0, got: {max_retries}")
        self._model = model
        self._base_url = base_url
        plain = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key
        self._api_key = None if plain is None else SecretStr(check_key(plain, "OpenAIChatModel api_key"))
        self._timeout_s = check_time_s(timeout, "OpenAIChatModel timeout")
        if max_answer_bytes is not None and (
            not isinstance(max_answer_bytes, int) or isinstance(max_answer_bytes, bool) or max_answer_bytes < 1
        ):
            raise ValidationError(f"OpenAIChatModel max_answer_bytes must be > 0, got: {max_answer_bytes}")
        self._max_answer_bytes = max_answer_bytes
        self._max_answer_s = check_time_s(max_answer_time, "OpenAIChatModel max_answer_time")
        self._max_retries = max_retries
        self._client_options = None if client_options is None else dict(client_options)
        if structured_outputs is not None and not isinstance(structured_outputs, bool):
            raise ValidationError(
                f"OpenAIChatModel structured_outputs must be True, False or None, got: {structured_outputs!r}. An "
                "endpoint's own option of that name goes through extra_body"
            )
        self._structured_outputs = structured_outputs
        if system_role is not None and system_role not in get_args(SystemRole):
            raise ValidationError(
                f"OpenAIChatModel system_role must be 'system', 'developer', 'user' or None, got: {system_role!r}"
            )
        self._system_role: SystemRole | None = system_role
        self._request_options = dict(request_options)
        self._prepare()

    def _prepare(self) -> None:
        options = dict(self._request_options)
        self._extra_headers = _checked_headers(cast("dict[str, str]", options.pop("extra_headers", None) or {}))
        query = options.pop("extra_query", None) or {}
        if not isinstance(query, Mapping):
            raise ValidationError(f"OpenAIChatModel extra_query must be a mapping, got: {type(query).__name__}")
        self._extra_query = cast("Mapping[str, object]", query)
        extra_body = cast("dict[str, object]", options.pop("extra_body", None) or {})
        self._options = RequestOptions.of(self._model, {**options, **extra_body}, "OpenAIChatModel")
        has_form = "response_format" in options or "response_format" in extra_body
        if has_form and self._structured_outputs:
            raise ValidationError(
                "OpenAIChatModel: structured_outputs=True and a response_format of your own exclude each other"
            )
        self._offers_schemas = self._structured_outputs is not False and not has_form
        # Each request passes its base URL. This library retries, because that depends on the body of a failure
        # (S-LLM-24).
        client = {name: value for name, value in (self._client_options or {}).items() if name != "base_url"}
        self._sdk = None if self._client_options is None else SdkClients({**client, "max_retries": 0})
        self._batch_clients: SdkClients | None = None  # made for the first batch
        self._made: tuple[str, str, Endpoint] | None = None  # the last endpoint, with its URL and key
        #: URL and key do not depend on the environment
        self._is_constant = self._base_url is not None and self._api_key is not None
        self._known_id = ""

    @property
    def model(self) -> str:
        """The model's name at the endpoint."""
        return self._model

    @property
    def provider_name(self) -> str:
        """OpenTelemetry's name of the provider, or the host's name."""
        try:
            return provider_of(self.base_url)
        except ValidationError:  # the call raises it
            return ""

    @property
    def base_url(self) -> str:
        """The URL of calls made now.

        Raises:
            ValidationError: `OPENAI_BASE_URL` is no URL.
        """
        if self._base_url is not None:
            return self._base_url
        from_client = (self._client_options or {}).get("base_url")
        if from_client is not None:
            return _checked_url(str(from_client), "client_options base_url")
        from_environment = os.environ.get("OPENAI_BASE_URL", "").strip()
        if from_environment:
            return _checked_url(from_environment, "OPENAI_BASE_URL")
        return _DEFAULT_BASE_URL

    @property
    def declared_url(self) -> str:
        """The URL of calls from every process; empty if `OPENAI_BASE_URL` of the calling process decides."""
        return self._base_url or str((self._client_options or {}).get("base_url") or "")

    @property
    def has_own_key(self) -> bool:
        """Whether it has a key, or another identity, that does not depend on the calling process."""
        return self._api_key is not None or self._client_options is not None

    @property
    def endpoint_id(self) -> str:
        """Base URL, model, and a fingerprint of the key, by which models share a circuit breaker."""
        if not self._known_id or not self._is_constant:
            self._known_id = _endpoint_id(self.base_url, self._model, self._key())
        return self._known_id

    @property
    def request_options(self) -> Mapping[str, object]:
        """Options of every request."""
        return dict(self._request_options)

    def check_key(self) -> None:
        """Raise `ValidationError` if the endpoint needs a key, and this process has none."""
        self._endpoint()

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer the conversation; with `tools`, the answer may contain tool calls.

        Raises:
            openai.APIError: the endpoint cannot be reached, refuses, fails, or sends an unusable answer.
            ValidationError: the endpoint needs a key, and there is none.
        """
        endpoint = self._endpoint()
        return await endpoint.complete(partial(self._options.encode, messages, tools, origin=endpoint.sender))

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer in the form of that schema if the endpoint supports schemas; otherwise, and for errors, see `chat`."""
        if not self._offers_schemas:
            return await self.chat(messages)
        endpoint = self._endpoint()
        encode = partial(self._options.encode, messages, (), origin=endpoint.sender)
        return await endpoint.complete(encode, self._offer(schema))

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncGenerator[str | ChatResponse]:
        """Yield fragments of text and `Reasoning`, then a `ChatResponse` with all of it; errors as for `chat`."""
        endpoint = self._endpoint()
        encode = partial(self._options.encode, messages, tools, origin=endpoint.sender)

        def body(roles: MessageRoles, with_usage: bool) -> bytes:  # noqa: FBT001  the endpoint passes it by position
            return encode(roles, suffix=_STREAMING_WITH_USAGE if with_usage else _STREAMING)

        async with aclosing(endpoint.stream(body)) as parts:
            async for part in parts:
                yield part

    def request_body(self, messages: Sequence[ChatMessage], schema: JsonSchema | None = None) -> bytes:
        """Return the body of a request that `chat`, or `chat_structured`, would send now."""
        endpoint = self._endpoint()
        offer = None if schema is None or not self._offers_schemas else self._offer(schema)
        encode = partial(self._options.encode, messages, (), origin=endpoint.sender)
        return RequestForm(encode, endpoint.sender, self._system_role, offer).body

    def batches(self) -> BatchEndpoint:
        """Return the endpoint's Batch API."""
        from ensemble_ray.llm.protocol.batches import BatchEndpoint

        endpoint, base_url = self._endpoint(), self.base_url
        if self._batch_clients is None:
            self._batch_clients = self._sdk or SdkClients({"max_retries": 0})
        connection = self._connection(endpoint.key, base_url)
        return BatchEndpoint(
            endpoint=endpoint, clients=self._batch_clients, connection=connection, query=self._extra_query
        )

    def _offer(self, schema: JsonSchema) -> SchemaOffer:
        return SchemaOffer(schema=schema, is_declared=self._structured_outputs is True)

    def _endpoint(self) -> Endpoint:
        made = self._made
        if made is not None and self._is_constant:
            return made[2]
        base_url = self.base_url
        key = self._key()
        if made is not None and made[:2] == (base_url, key):
            return made[2]
        # A client with options may have another identity.
        if not key and base_url == _DEFAULT_BASE_URL and self._client_options is None:
            raise ValidationError(
                f"OpenAIChatModel('{self._model}'): no API key. Set OPENAI_API_KEY or pass api_key; for an endpoint of "
                "your own, set OPENAI_BASE_URL or pass base_url; for a model on this machine, use llm='local'"
            )
        headers = {"Content-Type": "application/json", "User-Agent": "ensemble-ray", **self._key_headers(base_url, key)}
        headers.update(self._extra_headers)
        timeout_s = DEFAULT_TIMEOUT_S if self._timeout_s is None else self._timeout_s
        limits = AnswerLimits(
            body_bytes=self._max_answer_bytes or DEFAULT_ANSWER_BYTES,
            time_s=self._max_answer_s or max(DEFAULT_ANSWER_TIME_S, timeout_s),
        )
        retries = (self._client_options or {}).get("max_retries")
        endpoint = Endpoint(
            url=resource_url(base_url, "/chat/completions", self._extra_query),
            model=self._model,
            key=key,
            headers=headers,
            timeout_s=min(timeout_s, limits.time_s),
            max_retries=retries if isinstance(retries, int) else self._max_retries or 0,
            limits=limits,
            system_role=self._system_role,
        )
        if self._sdk is None:
            self._made = (base_url, key, endpoint)
            return endpoint
        return replace(endpoint, transport=SdkTransport(self._sdk, self._connection(key, base_url)))

    def _key(self) -> str:
        if self._api_key is not None:
            return self._api_key.get_secret_value()
        from_client = (self._client_options or {}).get("api_key")
        if from_client is None:
            return check_key(os.environ.get("OPENAI_API_KEY", ""), "The environment variable OPENAI_API_KEY")
        # A function is called by the package for each request.
        return check_key(from_client, "OpenAIChatModel client_options: api_key") if isinstance(from_client, str) else ""

    def _key_headers(self, base_url: str, key: str) -> dict[str, str]:
        own = {name.lower() for name in self._extra_headers}
        return {name: value for name, value in key_headers(base_url, key).items() if name.lower() not in own}

    def _connection(self, key: str, base_url: str) -> Mapping[str, object]:
        connection: dict[str, object] = {}
        if key:
            connection["api_key"] = key
        elif not base_url.startswith(_DEFAULT_BASE_URL):
            connection["api_key"] = "none"  # the package requires one
        # The package sends `Authorization` itself.
        headers = {**self._key_headers(base_url, key), **self._extra_headers}
        if "Authorization" not in self._extra_headers:
            headers.pop("Authorization", None)
        if headers:
            connection["default_headers"] = headers
        return connection

    def _keywords(self) -> dict[str, object]:
        return {
            "base_url": self._base_url,
            "api_key": self._api_key,
            "timeout": self._timeout_s,
            "max_retries": self._max_retries,
            "client_options": self._client_options,
            "max_answer_bytes": self._max_answer_bytes,
            "max_answer_time": self._max_answer_s,
            "structured_outputs": self._structured_outputs,
            "system_role": self._system_role,
            **self._request_options,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenAIChatModel):
            return NotImplemented
        return self._model == other._model and self._keywords() == other._keywords()

    def __hash__(self) -> int:
        return hash((self._model, self._base_url))

    def __reduce__(self) -> tuple[Any, ...]:
        # Each process creates its own client (S-CONV-22).
        return (_rebuild, (self._model, self._keywords()))

    def __repr__(self) -> str:
        shown = [repr(self._model)]
        if self._base_url is not None:
            shown.append(f"base_url={shown_url(self._base_url)!r}")
        if self._structured_outputs is not None:
            shown.append(f"structured_outputs={self._structured_outputs}")
        if self._system_role is not None:
            shown.append(f"system_role={self._system_role!r}")
        # These may contain keys.
        hidden = {"extra_headers", "extra_body", "extra_query"}
        shown += [f"{name}={value!r}" for name, value in self._request_options.items() if name not in hidden]
        return f"OpenAIChatModel({', '.join(shown)})"


@lru_cache(maxsize=256)
def _endpoint_id(base_url: str, model: str, key: str) -> str:
    origin = CallOrigin(url=base_url, model=model, key="", timeout_s=0)
    fingerprint = f" key {hashlib.sha256(key.encode()).hexdigest()[:8]}" if key else ""
    return f"{origin.endpoint.rstrip('/')} {model}{fingerprint}"


def _rebuild(model: str, keywords: Mapping[str, Any]) -> OpenAIChatModel:
    return OpenAIChatModel(model, **keywords)


def check_key(key: str, name: str) -> str:
    """Strip the key; raise if a header cannot contain it (S-LLM-32)."""
    plain = key.strip()
    if flaw := header_flaw(plain):
        raise ValidationError(f"{name} {flaw}. Copy the key again, as one line of letters, digits and signs")
    return plain


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if flaw := header_name_flaw(name):
            raise ValidationError(f"OpenAIChatModel extra_headers: {name!r} {flaw}")
        if not isinstance(value, str):
            raise ValidationError(
                f"OpenAIChatModel extra_headers: '{name}' must be a text, got: {type(value).__name__}"
            )
        checked[name] = value.strip()
        if flaw := header_flaw(checked[name]):
            raise ValidationError(f"OpenAIChatModel extra_headers: '{name}' {flaw}")
    return checked


def check_time_s(timeout: timedelta | float | None, what: str) -> float | None:
    if timeout is None:
        return None
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or timeout_s <= 0:
        raise ValidationError(f"{what} must be > 0, got: {timeout}")
    return float(timeout_s)


def _checked_url(url: str, name: str) -> str:
    flaw = flaw_of(url)
    if flaw:
        raise ValidationError(f"OpenAIChatModel {name} {flaw}")
    return url
