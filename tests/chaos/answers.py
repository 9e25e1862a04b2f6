"""What the model of a scenario says.

An answer follows from the request alone, so the same conversation always gets the same answer, whoever asks, and every
answer hangs on everything that came before it: a lost or changed result shows in the last one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from ensemble_ray import TokenUsage, ToolCall
from ensemble_ray.testing import Fault, Reply, ServedRequest
from tests.chaos.teams import UNPAID
from tests.chaos.world import World

__all__ = [
    "answer_in_map_reduce",
    "answer_in_newsroom",
    "answer_of_peers",
    "answer_with_reviews",
    "answer_with_tools",
    "answer_with_units",
    "answer_without_credit",
    "marks_in",
    "plain_answer",
]

#: Longest time of an answer, s; most take less.
_LATENCY_S = 0.06
_STEP = re.compile(r"Step (\w+) of")
_MARK = re.compile(r"<<[^<>]+>>")
#: Items that the model refuses: at once, or after their tools were called.
_REFUSED = {"m5": 0, "m16": 0, "m24": 1, "m27": 0}

#: A role, and the step to ask of it; arguments as they stand, where they are no such thing.
_Ask = tuple[str, str] | str
#: What the manager asks for, turn by turn; in an empty turn it wants to finish. What becomes of each is said behind it.
_AGENDA: Sequence[Sequence[_Ask]] = (
    (
        ("Writer", "w0"),  # refused: stage 1 is open
        ("Researcher", "r1"),
        (" researcher ", "r2"),
        ("Stringer", "x1"),  # fails, and is charged
        ("Printer", "p1"),  # refused: not allowed
        ("Nobody", "n1"),  # nobody of that role
        ("", "n2"),  # an error: no role
        '{"agent_role": "Researcher", ',  # an error: no JSON
        ("Researcher", "libel"),  # a policy rejects it, and it is charged
        ("Researcher", "r4"),  # refused: its cap of 3
    ),
    (
        ("Analyst", "a0"),  # refused: the stringer failed, so stage 1 is open
        ("Stringer", "x2"),
        ("Proofreader", "again"),
    ),
    (
        ("Analyst", "a1"),
        ("Proofreader", "desk"),  # a policy sends it to the analyst, who is charged
        ("Analyst", "a3"),  # refused: its cap of 2
        ("Writer", "w1"),  # refused: stage 2 is open
        ("Proofreader", "again"),  # told that it was done before
    ),
    (),  # reminded: the writer is required
    (
        ("Writer", "w2"),
        ("Writer", "w3"),
        ("Proofreader", "f3"),  # refused: the global cap of 11
    ),
)
#: Whom an agent asks in which step; `p0` is Ada's, and so on, see `teams.peers`.
_PEERS = {"p": ("Ada", "Bob"), "q": ("Bob", "Ada"), "s": ("Ada", "Bob")}


def plain_answer(request: ServedRequest, _world: World) -> Reply:
    """A word that hangs on the prompt; every third is long enough to be kept as a body of its own."""
    return _final(request, [])


def answer_with_tools(request: ServedRequest, world: World) -> Reply:
    """First an effect that must not be repeated, beside a look; then one that may be; then the answer."""
    return _answer_with_tools(request, world, [])


def answer_without_credit(request: ServedRequest, world: World) -> Reply | Fault:
    """The same by the second model of a chain; the first one has no credit."""
    if request.model == UNPAID:
        return Fault(status=429, message="You exceeded your current quota", code="insufficient_quota")
    return answer_with_tools(request, world)


def answer_in_newsroom(request: ServedRequest, world: World) -> Reply:
    """A manager with an agenda; its writer has its texts read by a colleague, and one stringer is of no use at first."""
    if "delegate_task" in request.tools:
        return _answer_of_manager(request)
    step = _step(request)
    if step == "x1":  # more calls than it may make, and more than it may be told so
        return _asking(request, [_tool_call(world, "look_up", f"x1-{number}") for number in range(7)])
    asks = (
        [_delegation(request, "delegate", "task", ("Proofreader", f"{step}f"))] if "delegate" in request.tools else []
    )
    return _answer_with_tools(request, world, asks)


def answer_of_peers(request: ServedRequest, world: World) -> Reply:
    """Each asks the other one, who asks back, who is refused the same; and oneself, and somebody about libel."""
    if "delegate" not in request.tools:
        return _answer_with_tools(request, world, [])
    line, depth = _step(request)[0], int(_step(request)[1])
    me, other = _PEERS[line][depth % 2], _PEERS[line][1 - depth % 2]
    asked: list[_Ask] = [(other, f"{line}{depth + 1}")]
    if depth == 0:
        asked += [("Cyd", f"{line}c"), (me, f"{line}{depth}me")]
    elif depth == 1:
        asked += [("Cyd", "libel")]
    return _answer_with_tools(request, world, [_delegation(request, "delegate", "task", each) for each in asked])


def answer_in_map_reduce(request: ServedRequest, world: World) -> Reply | Fault:
    """A mark for each item, after calls of tools where there are any; a reduce gives the marks that it was given.

    So the last answer tells which items it was made of, and how often each.
    """
    turn, step = _turn(request), _step(request)
    if step == "reduce":
        marks = marks_in(_prompt(request))
        digest = _digest(request, marks)
        usage = TokenUsage(len(_prompt(request)), 6 + int(digest[:2], 16) % 8)
        return Reply(text=" ".join(sorted(marks)), usage=usage, latency_s=_latency_s(digest))
    if _REFUSED.get(step) == turn:
        return Fault(status=400, message=f"{step} is refused")
    if request.tools and turn < 2:
        return _answer_with_tools(request, world, [])
    told = _told(request, but="call_append_line")
    digest = _digest(request, told)
    usage = TokenUsage(len(_prompt(request)), 6 + int(digest[:2], 16) % 8)
    return Reply(text=f"<<{step}:{digest[:8]}>>", usage=usage, latency_s=_latency_s(digest))


def answer_in_big(request: ServedRequest, _world: World) -> Reply:
    """How many items an answer was made of, and the sum of their numbers."""
    prompt = _prompt(request)
    step = _step(request)
    if step == "reduce":
        parts = [part.strip("<>").split(":") for part in marks_in(prompt)]
        return Reply(text=f"<<{sum(int(n) for n, _ in parts)}:{sum(int(total) for _, total in parts)}>>")
    return Reply(text=f"<<1:{step[1:]}>>")


def marks_in(text: str) -> list[str]:
    """The marks of items in a text, in their order, each as often as it is there."""
    return _MARK.findall(text)


def answer_with_units(request: ServedRequest, world: World) -> Reply:
    """The same as with tools; a review sends back what is no second attempt."""
    step = _step(request)
    if step.startswith("review"):
        digest = _digest(request, [])
        is_again = "second attempt" in _prompt(request)
        return Reply(text="APPROVE" if is_again else "RETRY: second attempt", latency_s=_latency_s(digest))
    # A task is done several times, and each time leaves lines of its own.
    return _answer_with_tools(request, world, [], label=f"{step}-{_digest(request, [])[:8]}")


def answer_with_reviews(request: ServedRequest, world: World) -> Reply:
    """The same as with tools; where it can sign, it signs beside the first calls."""
    step = _step(request)
    arguments = json.dumps({"input": f"{world.lines}|{step}"})
    # Of unknown outcome where its process died after the decision, like the other one that is done once.
    asks = (
        [ToolCall(id=f"call_append_line_sign_{step}", name="sign", arguments=arguments)]
        if "sign" in request.tools
        else []
    )
    return _answer_with_tools(request, world, asks)


def _answer_with_tools(request: ServedRequest, world: World, asks: Sequence[ToolCall], *, label: str = "") -> Reply:
    """The same, with delegations among the first calls; no tools, no calls. What lines are called, if not by the step."""
    turn, step = _turn(request), label or _step(request)
    if turn == 0 and request.tools:
        first = _tool_call(world, "append_line", f"{step}-0")
        return _asking(request, [first, *asks, _tool_call(world, "look_up", f"{step}-0")])
    if turn == 1 and request.tools:
        return _asking(request, [_tool_call(world, name, f"{step}-1") for name in ("put", "append_line")])
    # What a tool of unknown outcome told is not the same as what it would have told; the others' results are.
    return _final(request, _told(request, but="call_append_line"))


def _answer_of_manager(request: ServedRequest) -> Reply:
    turn = _turn(request)
    asks = _AGENDA[turn] if turn < len(_AGENDA) else ()
    if asks:
        return _asking(request, [_delegation(request, "delegate_task", "task_description", ask) for ask in asks])
    return _final(request, _told(request))


def _delegation(request: ServedRequest, name: str, text_field: str, ask: _Ask) -> ToolCall:
    if isinstance(ask, str):
        return ToolCall(id=f"call_{name}_{_turn(request)}_broken", name=name, arguments=ask)
    role, step = ask
    # One text is the same each time, so that its asker is told that it repeats itself.
    after = "" if step == "again" else f", after {_digest(request, _told(request, but='call_append_line'))[:8]}"
    arguments = json.dumps({"agent_role": role, text_field: f"Step {step} of the issue{after}"})
    return ToolCall(id=f"call_{name}_{_turn(request)}_{step}", name=name, arguments=arguments)


def _tool_call(world: World, name: str, text: str) -> ToolCall:
    arguments = json.dumps({"path": str(world.lines), "text": text})
    return ToolCall(id=f"call_{name}_{text}", name=name, arguments=arguments)


def _asking(request: ServedRequest, calls: Sequence[ToolCall]) -> Reply:
    return Reply(tool_calls=calls, latency_s=_latency_s(_digest(request, [])))


def _final(request: ServedRequest, told: Sequence[str]) -> Reply:
    digest = _digest(request, told)
    text = f"{_step(request)} is {digest[:16]}"
    if int(digest[:4], 16) % 3 == 0:
        text = f"{text} {'and so on ' * 150}".strip()
    return Reply(text=text, usage=TokenUsage(len(_prompt(request)), len(text)), latency_s=_latency_s(digest))


def _turn(request: ServedRequest) -> int:
    return sum(message.get("role") == "assistant" for message in request.messages)


def _told(request: ServedRequest, *, but: str = "-") -> list[str]:
    """What tools told, without those whose calls' ids begin like that."""
    return [
        str(each.get("content"))
        for each in request.messages
        if each.get("role") == "tool" and not str(each.get("tool_call_id")).startswith(but)
    ]


def _prompt(request: ServedRequest) -> str:
    return next(str(each["content"]) for each in request.messages if each.get("role") == "user")


def _step(request: ServedRequest) -> str:
    found = _STEP.findall(_prompt(request))
    return str(found[-1])


def _digest(request: ServedRequest, told: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([_prompt(request), *told]).encode()).hexdigest()


def _latency_s(digest: str) -> float:
    return _LATENCY_S * int(digest[4:8], 16) / 0xFFFF
