"""The model of the golden teams: it answers by who asks for what and how often it was asked, so also runs that go on.

In: conversations. Out: answers, a note of each question, and a stop at the points where a run is to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble_ray import ChatResponse, TokenUsage, ToolCall
from ensemble_ray.testing import Fault, ScriptedCall, ScriptedModel

#: Environment variables: points where a run stays until its process is killed, and the folder that says it got there.
HOLD, MARKS = "GOLDEN_HOLD", "GOLDEN_MARKS"
#: Environment variable: address of the server that the team `provider` asks.
SERVER = "GOLDEN_SERVER"
#: What models were asked in this process, as `ROLE|TASK|TURN`, in order of arrival.
ASKED: list[str] = []
#: Tools, handlers and policies that were called in this process.
CALLED: list[str] = []
_OTHER_ANSWERS: dict[str, object] = {}


@contextlib.contextmanager
def other_answers(answers: Mapping[str, object]) -> Generator[None]:
    """Let models answer otherwise for a while, by `ROLE|TASK|TURN`."""
    _OTHER_ANSWERS.update(answers)
    try:
        yield
    finally:
        _OTHER_ANSWERS.clear()


def is_held(point: str) -> bool:
    """Return whether a run is to stay at that point; then it is noted that it got there."""
    if point not in os.environ.get(HOLD, "").split(";"):
        return False
    (Path(os.environ[MARKS]) / point.replace("/", "_")).touch()
    return True


def pass_by(name: str) -> None:
    """Note that a tool was called, and stay there where it is held."""
    CALLED.append(name)
    while is_held(name):
        time.sleep(1)


def _tool_call(name: str, number: int = 0, **arguments: object) -> ToolCall:
    return ToolCall(id=f"{name}-{number}", name=name, arguments=json.dumps(arguments))


def _hand(role: str, text: str, number: int = 0) -> ToolCall:
    return _tool_call("delegate_task", number, agent_role=role, task_description=text)


def _ask(role: str, text: str, number: int = 0) -> ToolCall:
    return _tool_call("delegate", number, agent_role=role, task=text)


_GOOD = '{"name": "Bern", "people": 140000}'
_MADE = '{"role": "Historian", "goal": "Know the past", "background": "Years in archives"}'
#: What models answer, by role and task, turn by turn; what is not here is answered with a text that says what was asked.
_ANSWERS: Mapping[str, Sequence[object]] = {
    "Researcher|Research tides": ["The moon pulls the sea. " * 70],
    "Digger|errors b": [ValueError("no answer for b")],
    "Manager|Get these tasks done by your agents:": [
        [_hand("Writer", "too early"), _hand("Digger", "dig", 1)],
        [_hand("Digger", "dig again"), _hand("Writer", "write", 1), _hand("Writer", "forbidden", 2)],
        "It is done",
    ],
    "Asker|Ask around": [_ask("Digger", "dig"), [_ask("Nobody", "x"), _ask("Payer", "forbidden", 1)], "asked"],
    "Digger|dig": [_ask("Payer", "pay"), "gold"],
    "Payer|pay": [_tool_call("pay", amount="5"), "done"],
    "Reviewer|Review it": ["rude words", "kind words"],
    "Geographer|Describe a city": ["A city, you say"],
    "Geographer|": [_GOOD],
    "|Tell of Rome": [_MADE],
    "|Tell of Athens": [_MADE],
    "Worker|Use tools": [
        [_tool_call("search", text="kelp"), _tool_call("stamp", 1, text="kelp"), _tool_call("calculator", 2, input="2 + 3")],
        [_tool_call("breaks"), _tool_call("book", 1, day="monday"), _tool_call("unknown_tool", 2)],
        [_tool_call("pay", amount="7")],
        "all used",
    ],
    "Clerk|Leave": [_tool_call("leave"), "never"],
    "Buyer|Order tea": [_tool_call("order", item="tea"), "ordered"],
    "Clerk|Count for children": [_tool_call("calculator", input="20 + 3"), "23"],
    "Judge|Judge it": ["RETRY: say more"],
    "Payer|Go left": [_tool_call("pay", amount="3"), "left done"],
    "Mapper|map 3": [ValueError("no answer for 3")],
    "Reader|Read all of ['one', 'two']": [_tool_call("search", text="all"), "read"],
}  # fmt: skip


def _question(messages: Sequence[tuple[str, str]]) -> str:
    """Return `ROLE|TASK|TURN` of a conversation."""
    texts = [text for role, text in messages if role == "system"]
    first = texts[0].partition("\n")[0] if texts else ""
    role = first.removeprefix("You are ").partition(",")[0].partition(".")[0]
    users = [text for each, text in messages if each == "user"]
    described = users[0].partition("## Task\n")[2].partition("\n")[0] if users else ""
    turn = sum(each == "assistant" for each, _ in messages)
    return f"{role}|{described}|{turn}"


def _answer_to(question: str) -> object:
    if question in _OTHER_ANSWERS:
        return _OTHER_ANSWERS[question]
    about, _, turn = question.rpartition("|")
    answers = _ANSWERS.get(about, ())
    if int(turn) < len(answers):
        return answers[int(turn)]
    return f"{about.partition('|')[2]} ({turn})"


async def _answer(call: ScriptedCall) -> object:
    question = _question([(message.role, message.content or "") for message in call.messages])
    ASKED.append(question)
    while is_held(question):  # noqa: ASYNC110  for ever
        await asyncio.sleep(1)
    found = _answer_to(question)
    usage = TokenUsage(300, 100) if "|spend " in question else TokenUsage(40, 10)
    if isinstance(found, str):
        return ChatResponse(found, usage=usage)
    if isinstance(found, ToolCall):
        return ChatResponse(None, (found,), usage)
    if isinstance(found, list):
        return ChatResponse("", tuple(found), usage)
    return found


def serve_answer(request: Any) -> Any:
    """Answer a request of the team `provider`; what a `ModelServer` of the tests is started with."""
    question = _question([(str(each.get("role")), str(each.get("content") or "")) for each in request.messages])
    ASKED.append(question)
    return Fault(kind="silence") if is_held(question) else _answer_to(question)


def model() -> ScriptedModel:
    """Return a model that answers so."""
    return ScriptedModel(otherwise=_answer)
