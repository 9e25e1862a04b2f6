"""How large a request to a model is. Package: execute. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.text.token_estimate import estimate_tokens

if TYPE_CHECKING:
    from ensemble_ray.values.messages import ChatMessage, ToolSpec

__all__ = ["estimated_input", "request_characters"]


def request_characters(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> int:
    """Characters of the messages of a request, and of its tool descriptions."""
    characters = sum(len(message.content or "") for message in messages)
    characters += sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    fields = (message.provider_fields for message in messages)
    characters += sum(len(each.message) + sum(map(len, each.tool_calls)) for each in fields if each is not None)
    return characters + sum(len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters)) for tool in tools)


def estimated_input(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> int:
    """Input tokens of a request: a token for each four characters of its messages and tool descriptions (S-BUD-2)."""
    return estimate_tokens(request_characters(messages, tools))
