"""A conversation as inputs of a run (S-SRV-101 to S-SRV-105). Pure.

The user's last message is the input as it stands. All others, in their order, are one text for the variable `history`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from pydantic import JsonValue

from ensemble_ray.serve.openai_api.errors import wrong_parameter
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.team import HISTORY_INPUT
from ensemble_ray.text.foreign_text import whole_text

if TYPE_CHECKING:
    from ensemble_ray.serve.openai_api.bodies import MessageBody
    from ensemble_ray.serve.run_schemas import EnsembleInfo

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_USER, _ASSISTANT = "user", "assistant"
_TEXTS = frozenset({"text", "input_text", "output_text"})


def inputs_of(
    messages: Sequence[MessageBody], info: EnsembleInfo, *, place: str, instructions: str | None = None
) -> Mapping[str, JsonValue]:
    """Return the inputs of a run of a team.

    Args:
        messages: The conversation.
        info: The team.
        place: Field of the request that has them.
        instructions: What is said before all of them.

    Raises:
        Refusal: nothing in it is a text of the user, something is no text, or the team cannot be asked by one message.
    """
    said = [(each.role, _text_of(each, f"{place}[{index}]")) for index, each in enumerate(messages)]
    last = max((index for index, (role, _) in enumerate(said) if role == _USER), default=None)
    if last is None:
        raise wrong_parameter(place, f"{place}: there is no message of the user", code="INVALID_REQUEST")
    _, message = said.pop(last)
    if instructions:
        said.insert(0, ("system", instructions))
    history = "\n\n".join(f"{role}: {text}" for role, text in said if text)
    return {_message_input(info): message, **({HISTORY_INPUT: history} if info.chat.takes_history else {})}


def _message_input(info: EnsembleInfo) -> str:
    """Return the variable that takes the message.

    Raises:
        Refusal: there is none, or others would have no value.
    """
    given = {info.chat.input, *({HISTORY_INPUT} if info.chat.takes_history else ())}
    missing = tuple(each for each in info.inputs if each not in given)
    if info.chat.input is not None and not missing:
        return info.chat.input
    if info.chat.input is not None:
        why = f"besides '{info.chat.input}', which takes the message, it needs [{', '.join(missing)}]"
        what = "give these values in the team's 'inputs', or begin the run with POST /runs"
    elif missing:
        why = f"it needs [{', '.join(missing)}], and a message is one value"
        what = "name one with the team's 'chat_input', and give the others values in its 'inputs'"
    else:
        why = "its texts have no variable that could take a message"
        what = "write one such as {message} into them, or name one that has a value with the team's 'chat_input'"
    text = f"The team '{info.name}' cannot be asked as a model: {why}. What to do: {what}"
    raise Refusal(HTTPStatus.BAD_REQUEST, "INPUTS_MISSING", text, missing=missing)


def _text_of(message: MessageBody, place: str) -> str:
    """Return what a message says.

    Raises:
        Refusal: it is no text.
    """
    if message.type != "message" or message.role not in _ROLES:
        what = message.type if message.type != "message" else f"a message of '{message.role}'"
        raise wrong_parameter(
            place, f"{place}: '{what[:60]}' cannot be passed to a team; its tools and what they give are its own"
        )
    if (
        not message.content and message.content != "" and message.role != _ASSISTANT
    ):  # an answer may be calls of tools alone
        raise wrong_parameter(f"{place}.content", f"{place}.content: must be a text", code="INVALID_REQUEST")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(_text_of_part(part, f"{place}.content[{index}]") for index, part in enumerate(message.content))


def _text_of_part(part: Mapping[str, JsonValue], place: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in _TEXTS:
        raise wrong_parameter(place, f"{place}: '{str(kind)[:60]}' cannot be passed to a team; it takes texts alone")
    if not isinstance(text, str):
        raise wrong_parameter(place, f"{place}.text: must be a text", code="INVALID_REQUEST")
    return whole_text(text)
