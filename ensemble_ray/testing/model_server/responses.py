"""Scripted answers as bytes of the Responses API, and its requests in the form of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import cast

from ensemble_ray.testing.model_server.script import Reply, ServedRequest, usage_data, words_of

_REASONS = {"length": "max_output_tokens"}
_GOOD_ENDS = frozenset({"stop", "tool_calls"})


def response_bytes(reply: Reply, request: ServedRequest) -> bytes:
    """Return an answer in one piece."""
    return json.dumps(_response(reply, request)).encode()


def response_chunks(reply: Reply, request: ServedRequest) -> Iterator[bytes]:
    """Yield the same answer as server-sent events, one piece per fragment."""
    response = _response(reply, request)
    numbers = count()

    def event(kind: str, **members: object) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": next(numbers), **members}).encode()
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    begun = {**response, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
    waiting = event("response.created", response=begun) + event("response.in_progress", response=begun)
    for place, item in enumerate(cast("list[dict[str, object]]", response["output"])):
        where = {"item_id": item["id"], "output_index": place}
        waiting += event("response.output_item.added", output_index=place, item=_begun(item))
        for kind, members in _deltas(item, reply):
            waiting += event(kind, **where, **members)
            if kind.endswith(".delta"):
                yield waiting
                waiting = b""
        waiting += event("response.output_item.done", output_index=place, item=item)
    if reply.is_ended:
        yield waiting + event(f"response.{response['status']}", response=response)


def _response(reply: Reply, request: ServedRequest) -> dict[str, object]:
    reason = reply.shown_finish_reason
    is_whole = reason in _GOOD_ENDS
    return {
        "id": f"resp_{request.number}",
        "object": "response",
        "created_at": 0,
        "model": "scripted",
        "status": "completed" if is_whole else "incomplete",
        "error": None,
        "incomplete_details": None if is_whole else {"reason": _REASONS.get(reason, reason)},
        "output": list(_items(reply, request)),
        "parallel_tool_calls": True,
        "store": request.body.get("store", True),
        "tool_choice": "auto",
        "tools": [],
        "usage": None if reply.usage is None else _usage(reply),
    }


def _usage(reply: Reply) -> Mapping[str, object]:
    names = {"prompt": "input", "completion": "output"}
    data = {} if reply.usage is None else usage_data(reply.usage)
    parts = ((name.partition("_"), value) for name, value in data.items())
    return {f"{names.get(kind, kind)}_{rest}": value for (kind, _, rest), value in parts}


def _items(reply: Reply, request: ServedRequest) -> Iterator[dict[str, object]]:
    number = request.number
    if reply.reasoning is not None:
        summary = [{"type": "summary_text", "text": reply.reasoning}] if reply.reasoning else []
        is_encrypted = "reasoning.encrypted_content" in cast("Sequence[str]", request.body.get("include") or ())
        more = {"encrypted_content": f"encrypted-{number}"} if is_encrypted else {}
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": summary, **more}
    if reply.text is not None:
        content = [{"type": "output_text", "text": reply.text, "annotations": []}]
        item = {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
        yield {**item, **reply.members}
    for place, call in enumerate(reply.tool_calls):
        yield {
            "type": "function_call",
            "id": f"fc_{number}_{place}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _begun(item: Mapping[str, object]) -> dict[str, object]:
    empty: dict[str, object] = {"content": [], "summary": [], "arguments": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items() if name != "encrypted_content"}


def _deltas(item: Mapping[str, object], reply: Reply) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the events between the first and the last one of an item."""
    if item["type"] == "message":
        part: dict[str, object] = {"type": "output_text", "text": "", "annotations": []}
        yield "response.content_part.added", {"content_index": 0, "part": part}
        for fragment in words_of(reply.text) if reply.fragments is None else reply.fragments:
            yield "response.output_text.delta", {"content_index": 0, "delta": fragment, "logprobs": []}
    elif item["type"] == "function_call":
        arguments = str(item["arguments"])
        middle = len(arguments) // 2
        for fragment in (arguments[:middle], arguments[middle:]):
            yield "response.function_call_arguments.delta", {"delta": fragment}
    elif reply.reasoning:
        yield (
            "response.reasoning_summary_part.added",
            {"summary_index": 0, "part": {"type": "summary_text", "text": ""}},
        )
        for fragment in words_of(reply.reasoning):
            yield "response.reasoning_summary_text.delta", {"summary_index": 0, "delta": fragment}
