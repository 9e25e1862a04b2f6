"""What MCP servers answer, as texts for a model. Package: tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemble_ray.tools.tool import ToolResult

if TYPE_CHECKING:
    from mcp_types import (
        BlobResourceContents,
        CallToolResult,
        ContentBlock,
        GetPromptResult,
        ReadResourceResult,
        Resource,
        TextResourceContents,
    )

__all__ = ["prompt_text", "resource_list_text", "resource_text", "result_of"]


def result_of(answer: CallToolResult) -> ToolResult:
    """Return a tool's answer: its texts, else its structured content; what it calls an error is a failure."""
    text = _join(answer.content)
    if not text and answer.structured_content is not None:
        text = json.dumps(answer.structured_content, ensure_ascii=False)
    if answer.is_error:
        return ToolResult.failure(text or "the server gave no reason")
    return ToolResult.success(text, answer.structured_content)


def prompt_text(answer: GetPromptResult) -> str:
    """Return the messages of a prompt, each after its role."""
    return "\n\n".join(f"{message.role}: {_content_text(message.content)}" for message in answer.messages)


def resource_text(answer: ReadResourceResult) -> str:
    """Return the contents of a resource."""
    return "\n".join(_resource_part(part) for part in answer.contents)


def resource_list_text(resources: Iterable[Resource]) -> str:
    """Return a line for each resource: its address, name and description."""
    lines = [
        f"{each.uri} ({each.title or each.name}){f': {each.description}' if each.description else ''}"
        for each in resources
    ]
    return "\n".join(lines) or "There are no resources."


def _join(content: Iterable[ContentBlock]) -> str:
    return "\n".join(_content_text(block) for block in content)


def _content_text(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type}, {block.mime_type}, {_decoded_bytes(block.data)} bytes]"
        case "resource_link":
            return f"[resource {block.uri} ({block.title or block.name})]"
        case "resource":
            return _resource_part(block.resource)


def _resource_part(part: TextResourceContents | BlobResourceContents) -> str:
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    return f"[resource {part.uri}, {part.mime_type or 'bytes'}, {_decoded_bytes(getattr(part, 'blob', ''))} bytes]"


def _decoded_bytes(encoded: str) -> int:
    """Return how many bytes base64 text stands for."""
    return len(encoded) * 3 // 4 - encoded[-2:].count("=")
