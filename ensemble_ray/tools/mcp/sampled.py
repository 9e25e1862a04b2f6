"""A server's request for a model's answer, as a conversation, and the answer in the protocol's form. Package: tools. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.messages import ChatMessage, ChatResponse

if TYPE_CHECKING:
    from mcp_types import CreateMessageRequestParams, CreateMessageResult

__all__ = ["read_messages", "sampling_result"]


def read_messages(params: CreateMessageRequestParams) -> list[ChatMessage]:
    """Return the conversation.

    Raises:
        ValidationError: it has what is no text, or offers tools.
    """
    if params.tools:
        raise ValidationError("Tools are not offered to the model of the agent: ask without them")
    messages = [ChatMessage(role="system", content=params.system_prompt)] if params.system_prompt else []
    for message in params.messages:
        blocks = message.content if isinstance(message.content, list) else [message.content]
        texts: list[str] = []
        for block in blocks:
            if block.type != "text":
                raise ValidationError(f"The model of the agent is asked with texts alone, got: {block.type}")
            texts.append(block.text)
        messages.append(ChatMessage(role=message.role, content="\n".join(texts)))
    return messages


def sampling_result(response: ChatResponse) -> CreateMessageResult:
    """Return an answer; which model gave it is the user's own matter."""
    from mcp_types import CreateMessageResult, TextContent

    return CreateMessageResult(
        role="assistant",
        content=TextContent(text=response.text or ""),
        model="ensemble-ray",
        stop_reason="maxTokens" if response.finish_reason == "length" else "endTurn",
    )
