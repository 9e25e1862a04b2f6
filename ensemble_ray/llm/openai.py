"""`OpenAIChatModel`: a model behind any endpoint of the chat-completions protocol.

The `openai` package is loaded only for errors and for `client_options` (decision 0002).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

from pydantic import SecretStr

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.failures import CallOrigin, flaw_of, key_headers, provider_of, resource_url, shown_url
from ensemble_ray.llm.protocol.endpoint import DEFAULT_TIMEOUT_S, Endpoint
from ensemble_ray.llm.protocol.request import (
    MessageRoles,
    PromptCache,
    RequestForm,
    RequestOptions,
    SchemaOffer,
    SystemRole,
    default_cache,
)
from ensemble_ray.llm.protocol.sdk_transport import SdkClients, SdkTransport
from ensemble_ray.llm.protocol.wire import (
    CHAT_COMPLETIONS,
    DEFAULT_ANSWER_BYTES,
    DEFAULT_ANSWER_TIME_S,
    AnswerLimits,
    ModelApi,
)
from ensemble_ray.text.foreign_text import header_flaw, header_name_flaw
from ensemble_ray.values.attachments import AttachmentKind
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
        reads: Kinds of attachments that the model reads, of `image`, `audio` and `file`; None: all are sent, and the endpoint
            decides. Text files are sent as text.
        prompt_cache: Use of the provider's cache of prompts. `breakpoints`: texts are marked where a stored beginning may end,
            which Anthropic's models need behind a gateway; `key`: requests of one agent have a `prompt_cache_key`, which
            sends them to the same server; `off`: neither. None: `key` at OpenAI, `breakpoints` for Anthropic's models at
            OpenRouter, `off` elsewhere.
        request_options: Options of every request: `temperature`, `max_tokens`, `response_format`... `extra_body` is
            merged into the request, `extra_headers` are sent with it, and `extra_query` is added to the URL. Options
            about tools, such as `tool_choice`, are part of requests with tools only.

    Raises:
        ValidationError: a value is invalid.

    Examples:
        >>> OpenAIChatModel("gpt-4o-mini", api_key="sk-1", temperature=0)
        OpenAIChatModel('gpt-4o-mini', temperature=0)
    """

    _NAME: ClassVar[str] = "OpenAIChatModel"
    _API: ClassVar[ModelApi] = CHAT_COMPLETIONS
    _FORM_OPTION: ClassVar[str] = "response_format"
    _text: Mapping[str, object] | None = None  # of the Responses API (`SchemaOffer`)

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
        reads: Collection[AttachmentKind] | None = None,
        prompt_cache: PromptCache | None = None,
        **request_options: object,
    ) -> None:
        if not isinstance(model, str) or not model.strip():
            raise ValidationError(f"{self._NAME} model must not be blank")
        if base_url is not None:
            self._checked_url(base_url, "base_url")
        if max_retries is not None and (not isinstance(max_retries, int) or max_retries < 0):
            raise ValidationError(f"{self._NAME} max_retries must be >= 0, got: {max_retries}")
        self._model = model
        self._base_url = base_url
        plain = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key
        self._api_key = None if plain is None else SecretStr(check_key(plain, f"{self._NAME} api_key"))
        self._timeout_s = check_time_s(timeout, f"{self._NAME} timeout")
        if max_answer_bytes is not None and (
            not isinstance(max_answer_bytes, int) or isinstance(max_answer_bytes, bool) or max_answer_bytes < 1
        ):
            raise ValidationError(f"{self._NAME} max_answer_bytes must be > 0, got: {max_answer_bytes}")
        self._max_answer_bytes = max_answer_bytes
        self._max_answer_s = check_time_s(max_answer_time, f"{self._NAME} max_answer_time")
        self._max_retries = max_retries
        self._client_options = None if client_options is None else dict(client_options)
        if structured_outputs is not None and not isinstance(structured_outputs, bool):
            raise ValidationError(
                f"{self._NAME} structured_outputs must be True, False or None, got: {structured_outputs!r}. An "
                "endpoint's own option of that name goes through extra_body"
            )
        self._structured_outputs = structured_outputs
        if system_role is not None and system_role not in get_args(SystemRole):
            raise ValidationError(
                f"{self._NAME} system_role must be 'system', 'developer', 'user' or None, got: {system_role!r}"
            )
        self._system_role: SystemRole | None = system_role
        self._reads = _checked_reads(self._NAME, reads)
        if prompt_cache is not None and prompt_cache not in get_args(PromptCache):
            raise ValidationError(
                f"{self._NAME} prompt_cache must be 'breakpoints', 'key', 'off' or None, got: {prompt_cache!r}"
            )
        if prompt_cache == "breakpoints" and self._API is not CHAT_COMPLETIONS:
            raise ValidationError(f"{self._NAME} prompt_cache cannot be 'breakpoints': only chat completions have them")
        self._prompt_cache: PromptCache | None = prompt_cache
        self._request_options = dict(request_options)
        self._prepare()

    def _prepare(self) -> None:
        options = dict(self._request_options)
        headers = cast("dict[str, str]", options.pop("extra_headers", None) or {})
        self._extra_headers = _checked_headers(headers, f"{self._NAME} extra_headers")
        query = options.pop("extra_query", None) or {}
        if not isinstance(query, Mapping):
            raise ValidationError(f"{self._NAME} extra_query must be a mapping, got: {type(query).__name__}")
        self._extra_query = cast("Mapping[str, object]", query)
        extra_body = cast("dict[str, object]", options.pop("extra_body", None) or {})
        self._has_own_key = "prompt_cache_key" in options or "prompt_cache_key" in extra_body
        self._options, has_form = self._read_options(options, extra_body)
        if has_form and self._structured_outputs:
            raise ValidationError(
                f"{self._NAME}: structured_outputs=True and a {self._FORM_OPTION} of your own exclude each other"
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

    def _read_options(
        self, options: Mapping[str, object], extra_body: Mapping[str, object]
    ) -> tuple[RequestOptions, bool]:
        """Return the options of requests, and whether they contain a form of answers."""
        given = {**options, **extra_body}
        return RequestOptions.of(self._model, given, self._NAME), "response_format" in given

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
            return self._checked_url(str(from_client), "client_options base_url")
        from_environment = os.environ.get("OPENAI_BASE_URL", "").strip()
        if from_environment:
            return self._checked_url(from_environment, "OPENAI_BASE_URL")
        return _DEFAULT_BASE_URL

    def _checked_url(self, url: str, name: str) -> str:
        if flaw := flaw_of(url):
            raise ValidationError(f"{self._NAME} {name} {flaw}")
        return url

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

    @property
    def reads(self) -> tuple[AttachmentKind, ...] | None:
        """Kinds of attachments that it reads; None: its endpoint decides."""
        return self._reads

    def check_key(self) -> None:
        """Raise `ValidationError` if the endpoint needs a key, and this process has none."""
        self._endpoint()

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer the conversation; with `tools`, the answer may contain tool calls.

        Raises:
            openai.APIError: the endpoint cannot be reached, refuses, fails, or sends an unusable answer.
            ValidationError: the endpoint needs a key, and there is none.
            UnreadableAttachmentError: the endpoint refused an attachment.
        """
        endpoint = self._endpoint()
        encode = partial(self._options.encode, messages, tools, origin=endpoint.sender, cache=endpoint.prompt_cache)
        try:
            return await endpoint.complete(encode)
        except Exception as error:
            self._explain_refusal(error, messages)
            raise

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer in the form of that schema if the endpoint supports schemas; otherwise, and for errors, see `chat`."""
        if not self._offers_schemas:
            return await self.chat(messages)
        endpoint = self._endpoint()
        encode = partial(
            self._options.encode, messages, (), origin=endpoint.sender, has_offer=True, cache=endpoint.prompt_cache
        )
        try:
            return await endpoint.complete(encode, self._offer(schema))
        except Exception as error:
            self._explain_refusal(error, messages)
            raise

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncGenerator[str | ChatResponse]:
        """Yield fragments of text and `Reasoning`, then a `ChatResponse` with all of it; errors as for `chat`."""
        endpoint = self._endpoint()
        encode = partial(self._options.encode, messages, tools, origin=endpoint.sender, cache=endpoint.prompt_cache)

        def body(roles: MessageRoles, with_usage: bool) -> bytes:  # noqa: FBT001  the endpoint passes it by position
            asks_usage = with_usage and self._API is CHAT_COMPLETIONS  # another API always sends it
            return encode(roles, suffix=_STREAMING_WITH_USAGE if asks_usage else _STREAMING)

        async with aclosing(endpoint.stream(body)) as parts:
            try:
                async for part in parts:
                    yield part
            except Exception as error:
                self._explain_refusal(error, messages)
                raise

    def _explain_refusal(self, error: Exception, messages: Sequence[ChatMessage]) -> None:
        """Raise `UnreadableAttachmentError` if the endpoint refused an attachment."""
        if not any(message.attachments for message in messages):
            return
        from ensemble_ray.llm.protocol.attachments import as_refusal, attached_to  # few messages have any

        if (refusal := as_refusal(error, attached_to(messages), self._model)) is not None:
            raise refusal from error

    @property
    def batch_path(self) -> str:
        """The path of its requests in a batch."""
        return self._API.batch_path

    def request_body(self, messages: Sequence[ChatMessage], schema: JsonSchema | None = None) -> bytes:
        """Return the body of a request that `chat`, or `chat_structured`, would send now."""
        endpoint = self._endpoint()
        offer = None if schema is None or not self._offers_schemas else self._offer(schema)
        encode = partial(
            self._options.encode,
            messages,
            (),
            origin=endpoint.sender,
            has_offer=offer is not None,
            cache=endpoint.prompt_cache,
        )
        return RequestForm(encode, endpoint.sender, self._system_role, offer, self._API.learn).body

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
        return SchemaOffer(schema=schema, is_declared=self._structured_outputs is True, text=self._text)

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
                f"{self._NAME}('{self._model}'): no API key. Set OPENAI_API_KEY or pass api_key; for an endpoint of "
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
        cache = self._prompt_cache or default_cache(base_url, self._model)
        if cache == "breakpoints" and self._API is not CHAT_COMPLETIONS:
            cache = "off"
        endpoint = Endpoint(
            url=resource_url(base_url, self._API.path, self._extra_query),
            model=self._model,
            key=key,
            headers=headers,
            timeout_s=min(timeout_s, limits.time_s),
            max_retries=retries if isinstance(retries, int) else self._max_retries or 0,
            limits=limits,
            system_role=self._system_role,
            api=self._API,
            prompt_cache="off" if cache == "key" and self._has_own_key else cache,
        )
        if self._sdk is None:
            self._made = (base_url, key, endpoint)
            return endpoint
        return replace(endpoint, transport=SdkTransport(self._sdk, self._connection(key, base_url), self._API.path))

    def _key(self) -> str:
        if self._api_key is not None:
            return self._api_key.get_secret_value()
        from_client = (self._client_options or {}).get("api_key")
        if from_client is None:
            return check_key(os.environ.get("OPENAI_API_KEY", ""), "The environment variable OPENAI_API_KEY")
        # A function is called by the package for each request.
        return check_key(from_client, f"{self._NAME} client_options: api_key") if isinstance(from_client, str) else ""

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
            "reads": self._reads,
            "prompt_cache": self._prompt_cache,
            **self._request_options,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenAIChatModel):
            return NotImplemented
        is_same = self._model == other._model and self._API is other._API
        return is_same and self._keywords() == other._keywords()

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
        if self._reads is not None:
            shown.append(f"reads={self._reads!r}")
        if self._prompt_cache is not None:
            shown.append(f"prompt_cache={self._prompt_cache!r}")
        # These may contain keys.
        hidden = {"extra_headers", "extra_body", "extra_query"}
        shown += [f"{name}={value!r}" for name, value in self._request_options.items() if name not in hidden]
        return f"{self._NAME}({', '.join(shown)})"


def _checked_reads(owner: str, reads: Collection[AttachmentKind] | None) -> tuple[AttachmentKind, ...] | None:
    if reads is None:
        return None
    known = get_args(AttachmentKind)
    for each in (reads,) if isinstance(reads, str) else reads:
        if each not in known:
            raise ValidationError(f"{owner} reads must be kinds of [{', '.join(known)}], got: {each!r}")
    return cast("tuple[AttachmentKind, ...]", tuple((reads,) if isinstance(reads, str) else reads))


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


def _checked_headers(headers: Mapping[str, str], what: str) -> dict[str, str]:
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if flaw := header_name_flaw(name):
            raise ValidationError(f"{what}: {name!r} {flaw}")
        if not isinstance(value, str):
            raise ValidationError(f"{what}: '{name}' must be a text, got: {type(value).__name__}")
        checked[name] = value.strip()
        if flaw := header_flaw(checked[name]):
            raise ValidationError(f"{what}: '{name}' {flaw}")
    return checked


def check_time_s(timeout: timedelta | float | None, what: str) -> float | None:
    if timeout is None:
        return None
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or timeout_s <= 0:
        raise ValidationError(f"{what} must be > 0, got: {timeout}")
    return float(timeout_s)
