"""Requests for the caches of providers: what comes first, breakpoints, and keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import ChatMessage, OpenAIChatModel, ToolCall, ToolSpec, ValidationError
from ensemble_ray.llm.protocol.request import (
    MessageRoles,
    PromptCache,
    RequestOptions,
    default_cache,
    takes_marked_results,
)

MARK = {"type": "ephemeral"}
OPENROUTER = "https://openrouter.ai/api/v1 m"
LONG = "A rule of the house. " * 200
SYSTEM = ChatMessage("system", "You are A.")
PROMPT = ChatMessage("user", f"## Context\n{LONG}\n\n## Task\nSay it")
TOOLS = [ToolSpec("look", "Look")]
OPTIONS = RequestOptions.of("m", {}, "a test")


def sent(
    messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = (), cache: PromptCache = "breakpoints", **more: Any
) -> dict[str, Any]:
    """A request's body."""
    body: dict[str, Any] = json.loads(OPTIONS.encode(messages, tools, cache=cache, **more))
    return body


def contents(body: dict[str, Any]) -> list[object]:
    """The contents of its messages."""
    return [message["content"] for message in body["messages"]]


def marked(text: str) -> dict[str, object]:
    """A part before a breakpoint."""
    return {"type": "text", "text": text, "cache_control": MARK}


def plain(text: str) -> dict[str, object]:
    """A part without one."""
    return {"type": "text", "text": text}


def test_shared_part_of_a_prompt_ends_with_a_breakpoint() -> None:
    """S-PRC-22: the system message too; the item comes after them, unmarked."""
    shared, own = f"## Context\n{LONG}", "\n\n## Task\nSay it"
    assert contents(sent([SYSTEM, PROMPT])) == [[marked("You are A.")], [marked(shared), plain(own)]]
    short = ChatMessage("user", "## Context\nshort\n\n## Task\nSay it")
    assert contents(sent([SYSTEM, short])) == [[marked("You are A.")], short.content]


def test_tool_loop_has_breakpoints_that_move_with_it() -> None:
    """S-PRC-22: after the prompt, and at OpenRouter after the last result; at most four."""
    asked = ChatMessage("assistant", None, (ToolCall("c1", "look"),))
    loop = [SYSTEM, PROMPT, asked, ChatMessage("tool", "seen", tool_call_id="c1")]
    assert PROMPT.content is not None
    split = len("## Context\n" + LONG)
    prompt = [marked(PROMPT.content[:split]), marked(PROMPT.content[split:])]
    first = [[marked("You are A.")], prompt, None]
    assert contents(sent(loop, TOOLS)) == [*first, "seen"]
    body = sent(loop, TOOLS, origin=OPENROUTER)
    assert contents(body) == [*first, [marked("seen")]]
    assert json.dumps(body).count("cache_control") == 4
    longer = [*loop, asked, ChatMessage("tool", "again", tool_call_id="c1")]
    assert contents(sent(longer, TOOLS, origin=OPENROUTER)) == [*first, "seen", None, [marked("again")]]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text()), max_size=6), st.booleans())
def test_breakpoints_change_no_text(said: list[tuple[Any, str]], has_tools: bool) -> None:  # noqa: FBT001  a case
    """S-PRC-22."""
    messages = [SYSTEM, *(ChatMessage(role, text) for role, text in said)]
    tools = TOOLS if has_tools else []
    body, before = sent(messages, tools, origin=OPENROUTER), sent(messages, tools, "off")
    joined = [
        "".join(part["text"] for part in content) if isinstance(content, list) else content
        for content in contents(body)
    ]
    assert joined == contents(before)
    assert json.dumps(body).count("cache_control") <= 4


def test_breakpoints_follow_the_roles_of_messages() -> None:
    """S-PRC-22, S-LLM-28: a system message may become part of the prompt."""
    assert contents(sent([SYSTEM, PROMPT], roles=MessageRoles(system="developer")))[0] == [marked("You are A.")]
    (joined,) = contents(sent([SYSTEM, PROMPT], roles=MessageRoles(system="user")))
    assert joined == [marked(f"You are A.\n\n## Context\n{LONG}"), plain("\n\n## Task\nSay it")]


def test_key_is_that_of_the_system_message() -> None:
    """S-PRC-21: for all its requests; without one there is no key."""
    keys = [
        sent(messages, cache="key").get("prompt_cache_key")
        for messages in ([SYSTEM, PROMPT], [SYSTEM], [ChatMessage("system", "You are B.")], [PROMPT])
    ]
    assert keys[0] == keys[1] != keys[2]
    assert str(keys[0]).startswith("ensemble-ray-")
    assert "A" not in str(keys[0])
    assert keys[3] is None
    assert sent([SYSTEM, PROMPT], cache="key") == {
        **sent([SYSTEM, PROMPT], cache="off"),
        "prompt_cache_key": keys[0],
    }


@pytest.mark.parametrize(
    ("url", "model", "cache"),
    [
        ("https://api.openai.com/v1/chat/completions", "gpt-5", "key"),
        ("https://openrouter.ai/api/v1/chat/completions", "anthropic/claude-sonnet-4.5", "breakpoints"),
        ("https://openrouter.ai/api/v1/chat/completions", "openai/gpt-5", "off"),
        ("https://api.anthropic.com/v1/chat/completions", "claude-sonnet-4-5", "off"),
        ("https://team.openai.azure.com/openai/v1/chat/completions", "gpt-5", "off"),
        ("http://127.0.0.1:8000/v1/chat/completions", "anthropic/claude-sonnet-4.5", "off"),
        ("https://api.openai.com.example.com/v1/chat/completions", "gpt-5", "off"),
    ],
)
def test_default_is_safe_at_each_endpoint(url: str, model: str, cache: PromptCache) -> None:
    """S-PRC-21, S-PRC-22."""
    assert default_cache(url, model) == cache
    assert takes_marked_results(url) is url.startswith("https://openrouter.ai/")


def test_other_values_are_refused() -> None:
    """S-PRC-21; it is part of the model's text, and of its copies."""
    with pytest.raises(ValidationError, match="prompt_cache must be 'breakpoints', 'key', 'off' or None, got: 'yes'"):
        OpenAIChatModel("m", prompt_cache="yes")  # type: ignore[arg-type]  what is refused
    assert repr(OpenAIChatModel("m", prompt_cache="off")) == "OpenAIChatModel('m', prompt_cache='off')"
    assert OpenAIChatModel("m", prompt_cache="off") != OpenAIChatModel("m")


@pytest.mark.program
def test_requests_are_the_same_in_every_process() -> None:
    """S-PRC-20: whatever the hashes of texts are there."""
    program = """
from typing import Literal
from pydantic import BaseModel
from ensemble_ray import Agent, Ensemble, Task, tool
from ensemble_ray.llm.protocol.request import RequestOptions
from ensemble_ray.testing import ScriptedModel
class Place(BaseModel):
    name: str
    kind: Literal["city", "river"] = "city"
@tool
def look(place: Place, near: set[str], limit: int = 3, labels: dict[str, int] | None = None) -> str:
    '''Look at a place.'''
    return ""
model = ScriptedModel('{"name": "Bern"}')
agent = Agent("A", "g", llm=model, tools=[look])
Ensemble(Task("Say it", "x", agent=agent, output_type=Place)).run(runtime="inline", durability="off")
(call,) = model.calls
assert call.tools
print(RequestOptions.of("m", {"temperature": 0}, "a test").encode(call.messages, call.tools))
"""
    bodies = {
        subprocess.run(  # noqa: S603  our own program
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }
    assert len(bodies) == 1
