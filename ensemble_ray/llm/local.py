"""`LocalChatModel`: a model file on this machine, no key and no network. Package: llm; fulfils `ChatModel` and streams.

The definition is data; the server is started by the first call that needs it, one per machine and file, and shared.
Requests go to it as to any endpoint of the protocol, over loopback.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.local_engine import server as local_server
from ensemble_ray.llm.local_engine.registry import LocalSpec
from ensemble_ray.llm.local_engine.weights import find_weights
from ensemble_ray.llm.openai import check_time_s
from ensemble_ray.llm.protocol.answer_limits import DEFAULT_ANSWER_TIME_S, AnswerLimits
from ensemble_ray.llm.protocol.endpoint import Endpoint
from ensemble_ray.llm.protocol.request_options import RequestOptions
from ensemble_ray.llm.protocol.schema_offers import SchemaOffer
from ensemble_ray.process.threads import threads
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec

__all__ = ["LocalChatModel"]

#: The queue in front of the slots is on this machine, so a call may wait behind many others.
_DEFAULT_TIMEOUT_S = 3600.0
_STREAMING = b'"stream":true,"stream_options":{"include_usage":true}'


class LocalChatModel:
    """A GGUF model on this machine, by default the embedded one.

    Args:
        path: The model file; None: the embedded model, which `ensemble-ray models install` puts here.
        context_tokens: Context of all slots together; a conversation gets its share.
        slots: Conversations answered at once; more wait in line.
        threads: Threads of the engine; None: half of the CPUs, at least two.
        timeout: Longest wait for an answer, s or `timedelta`; default an hour.
        request_options: Go into every request: `temperature`, `max_tokens`, `response_format`...

    Raises:
        ValidationError: a value cannot work.

    Examples:
        >>> LocalChatModel(max_tokens=64)
        LocalChatModel(max_tokens=64)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        context_tokens: int = 8192,
        slots: int = 4,
        threads: int | None = None,
        timeout: timedelta | float | None = None,
        **request_options: object,
    ) -> None:
        for name, value in (("context_tokens", context_tokens), ("slots", slots), ("threads", threads)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValidationError(f"LocalChatModel {name} must be > 0, got: {value}")
        # Absolute from here on: the process that calls, an actor's say, may stand in another directory.
        self._path = None if path is None else str(Path(path).expanduser().absolute())
        self._context_tokens = context_tokens
        self._slots = slots
        self._threads = threads
        self._timeout_s = check_time_s(timeout, "LocalChatModel timeout")
        self._request_options = dict(request_options)
        self._options = RequestOptions.of("local", self._request_options, "LocalChatModel")

    @property
    def model_name(self) -> str:
        """The model's name: that of its file."""
        return "local" if self._path is None else Path(self._path).stem

    @property
    def provider_name(self) -> str:
        """Who answers: this machine."""
        return "local"

    @property
    def path(self) -> Path:
        """The model file.

        Raises:
            ValidationError: none was given, and the embedded model is not installed.
        """
        if self._path is not None:
            return Path(self._path).resolve()
        found = find_weights()
        if found is None:
            raise ValidationError(
                "llm='local': the embedded model is not installed. Install it: ensemble-ray models install"
            )
        return found.resolve()

    @property
    def request_options(self) -> Mapping[str, object]:
        """What goes into every request."""
        return dict(self._request_options)

    @property
    def spec(self) -> LocalSpec:
        """What its server runs; models with equal ones share it.

        Raises:
            ValidationError: no path was given, and the embedded model is not installed.
        """
        return LocalSpec(
            path=str(self.path),
            context_tokens=self._context_tokens,
            slots=self._slots,
            threads=self._threads or max(2, (os.cpu_count() or 2) // 2),
        )

    @property
    def endpoint_id(self) -> str:
        """What fails together: the server of this file, as it is set up.

        Raises:
            ValidationError: no path was given, and the embedded model is not installed.
        """
        spec = self.spec
        return f"local {spec.path} {spec.slots}x{spec.context_tokens}/{spec.threads}"

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer the conversation; the first call of a machine starts the server.

        Raises:
            ValidationError: the engine, the embedded model or the file is missing; the text names the command.
            IllegalStateError: the server did not start.
            openai.APIError: the server refused the request, as when it is longer than the context.
        """
        endpoint = await self._endpoint()
        return await endpoint.complete(partial(self._options.encode, messages, tools, origin=endpoint.sender))

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer the conversation in the form of that schema, which the engine enforces; raises as `chat` does."""
        if "response_format" in self._request_options:
            return await self.chat(messages)
        endpoint = await self._endpoint()
        offer = SchemaOffer(schema=schema, is_declared=True)
        return await endpoint.complete(partial(self._options.encode, messages, (), origin=endpoint.sender), offer)

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncGenerator[str | ChatResponse]:
        """Fragments of the text as they come, then one `ChatResponse` with the whole; raises as `chat` does."""
        endpoint = await self._endpoint()
        encode = partial(self._options.encode, messages, tools, suffix=_STREAMING, origin=endpoint.sender)
        async with aclosing(endpoint.stream(lambda roles, _: encode(roles))) as parts:
            async for part in parts:
                yield part

    async def _endpoint(self) -> Endpoint:
        spec = self.spec
        address = local_server.find_held(spec)
        if address is None:
            address = await threads.run(local_server.acquire, spec)
        timeout_s = self._timeout_s or _DEFAULT_TIMEOUT_S
        return Endpoint(
            url=f"{address.url}/v1/chat/completions",
            model=Path(spec.path).name,
            key=address.key,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {address.key}"},
            timeout_s=timeout_s,
            limits=AnswerLimits(time_s=max(DEFAULT_ANSWER_TIME_S, timeout_s)),
        )

    def _keywords(self) -> dict[str, object]:
        """Return the arguments that make an equal one."""
        return {
            "path": self._path,
            "context_tokens": self._context_tokens,
            "slots": self._slots,
            "threads": self._threads,
            "timeout": self._timeout_s,
            **self._request_options,
        }

    def __eq__(self, other: object) -> bool:
        return self._keywords() == other._keywords() if isinstance(other, LocalChatModel) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._path, self._context_tokens, self._slots))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._keywords(),))

    def __repr__(self) -> str:
        shown = [] if self._path is None else [repr(self._path)]
        shown += [f"{name}={value!r}" for name, value in self._request_options.items()]
        return f"LocalChatModel({', '.join(shown)})"


def _rebuild(keywords: Mapping[str, Any]) -> LocalChatModel:
    return LocalChatModel(**keywords)
