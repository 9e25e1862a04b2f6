"""A model's options as members of its requests. Package: llm. Pure.

In: the options that a user set. Out: bodies of requests, each with the options that it can have: options about tools are
sent only with tools, and a forced choice of a tool ends with the first tool result (S-LLM-25, S-LLM-26).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.protocol.message_roles import MessageRoles
from ensemble_ray.llm.protocol.wire import encode_request, json_bytes
from ensemble_ray.values.messages import ChatMessage, ToolSpec

__all__ = ["RequestOptions"]

#: Members of the request that are this library's to set.
_OWN_MEMBERS = frozenset({"messages", "model", "stream", "stream_options", "tools"})
#: Options of the protocol, and of servers that speak it, that a request without tools cannot have.
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
#: Choices that leave it to the model whether it calls a tool.
_FREE_CHOICES = ("auto", "none")
_NO_ROLES = MessageRoles()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Encoded members, without braces, by the requests that have them."""

    always: bytes
    with_tools: bytes = b""
    #: with tools, once one of them has answered
    after_result: bytes = b""

    @classmethod
    def of(cls, model: str, options: Mapping[str, object], what: str) -> RequestOptions:
        """Encode options.

        Args:
            model: The model's name in the request.
            options: Options of the user.
            what: How errors name the model's class.

        Raises:
            ValidationError: an option is the library's own, or is not JSON.
        """
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
        roles: MessageRoles = _NO_ROLES,
        *,
        suffix: bytes = b"",
        origin: str = "",
    ) -> bytes:
        """Return the body of a request.

        Args:
            messages: The conversation.
            tools: The tools that are offered.
            roles: The roles that the endpoint accepts.
            suffix: Members of this kind of request, such as `"stream":true`.
            origin: The endpoint and the model that it goes to.
        """
        about_tools = b""
        if tools:
            has_result = any(message.role == "tool" for message in messages)
            about_tools = self.after_result if has_result else self.with_tools
        members = b",".join(part for part in (about_tools, suffix) if part)
        return encode_request(self.always, roles.arrange(messages), tools, suffix=members, origin=origin)


def _free_choice(choice: object) -> object:
    """Return the choice that remains after the first tool result; None: the endpoint's default."""
    if not isinstance(choice, dict):
        return choice if choice in _FREE_CHOICES else None
    members = cast("Mapping[str, object]", choice)
    allowed = members.get("allowed_tools")
    if isinstance(allowed, dict):
        # The model may answer from now on; the other tools stay out of its reach.
        return {**members, "allowed_tools": {**cast("Mapping[str, object]", allowed), "mode": "auto"}}
    return members if members.get("type") in _FREE_CHOICES else None
