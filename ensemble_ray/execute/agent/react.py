"""The agent loop of one task as a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union, assert_never

from msgspec import Struct

from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolCall

MAX_STOPS = 3  # answers with calls over the limit before the task fails (S-ENG-43)


class AnswerReceived(Struct, frozen=True, kw_only=True):
    """The model answered."""

    response: ChatResponse


class ToolsReturned(Struct, frozen=True, kw_only=True):
    """The allowed tool calls returned these texts and attachments, in request order."""

    texts: Sequence[str]
    attachments: Sequence[tuple[str, Attachment]] = ()  # (name of the tool, attachment)


class CallModel(Struct, frozen=True, kw_only=True):
    """`turn` counts from 0."""

    turn: int


class CallTools(Struct, frozen=True, kw_only=True):
    """Stopped calls are over the limit and only get the stop text (S-ENG-40, S-ENG-41)."""

    turn: int
    allowed: Sequence[ToolCall]
    stopped: Sequence[ToolCall]
    stop_count: int  # answers with stopped calls so far; one warning each (S-ENG-42)


class Finish(Struct, frozen=True, kw_only=True):
    """Accept this text as the answer."""

    text: str | None


class Fail(Struct, frozen=True, kw_only=True):
    """The agent did not stop calling tools (S-ENG-43)."""

    tool_calls_made: int


StepStimulus = Union[AnswerReceived, ToolsReturned]  # noqa: UP007  a name for the union, also at run time
StepInstruction = Union[CallModel, CallTools, Finish, Fail]  # noqa: UP007


def stop_text(max_iterations: int) -> str:
    return (
        f"STOP: Maximum tool iterations ({max_iterations}) reached. "
        "You must provide your best final answer now based on information gathered so far."
    )


class ReactMachine:
    def __init__(
        self,
        *,
        system_prompt: str,
        user_prompt: str,
        max_iterations: int,
        has_tools: bool,
        history: Sequence[ChatMessage] = (),
        attachments: Sequence[Attachment] = (),
    ) -> None:
        """Start the conversation; `history` are messages before the user prompt (S-DOM-77)."""
        self.messages: list[ChatMessage] = [
            ChatMessage(role="system", content=system_prompt),
            *history,
            ChatMessage(role="user", content=user_prompt, attachments=attachments),
        ]
        self.tool_call_count = 0  # tool calls so far, with stopped ones (S-ENG-40, S-ENG-46)
        self._max_iterations = max_iterations
        self._has_tools = has_tools
        self._turn = 0
        self._stops = 0
        self._calls: tuple[ToolCall, ...] = ()
        self._allowed = 0

    def start(self) -> StepInstruction:
        return CallModel(turn=0)

    def remind(self, text: str) -> StepInstruction:
        self.messages.append(ChatMessage(role="user", content=text))
        self._turn += 1
        return CallModel(turn=self._turn)

    def ask_again(self, text: str, *, answer: str, turn: int) -> StepInstruction:
        """Send a guardrail's text (S-GRD-17). Counters continue; `turn` counts corrections, as in `answer`."""
        self.messages[-1] = ChatMessage(role="assistant", content=answer)
        self._turn = turn - 1
        return self.remind(text)

    def handle(self, stimulus: StepStimulus) -> StepInstruction:
        match stimulus:
            case AnswerReceived(response=response):
                return self._on_answer(response)
            case ToolsReturned(texts=texts, attachments=attachments):
                return self._on_return(texts, attachments)
            case _:
                assert_never(stimulus)

    def _on_answer(self, response: ChatResponse) -> StepInstruction:
        # Without tools, tool calls in the only answer are ignored (S-ENG-31). Else an answer without calls ends the
        # loop (S-ENG-33).
        calls = tuple(response.tool_calls) if self._has_tools else ()
        self.messages.append(
            ChatMessage(
                role="assistant", content=response.text, tool_calls=calls, provider_fields=response.provider_fields
            )
        )
        if not calls:
            return Finish(text=response.text)
        self._calls = calls
        self._allowed = min(max(0, self._max_iterations - self.tool_call_count), len(calls))
        stopped = calls[self._allowed :]
        self.tool_call_count += len(calls)
        self._stops += bool(stopped)  # however many calls are stopped (S-ENG-44)
        return CallTools(turn=self._turn, allowed=calls[: self._allowed], stopped=stopped, stop_count=self._stops)

    def _on_return(
        self, allowed_texts: Sequence[str], attachments: Sequence[tuple[str, Attachment]]
    ) -> StepInstruction:
        if self._stops >= MAX_STOPS:  # without another model call (S-ENG-43)
            return Fail(tool_calls_made=self.tool_call_count)
        stop = stop_text(self._max_iterations)
        texts = [*allowed_texts, *([stop] * (len(self._calls) - self._allowed))]
        for call, text in zip(self._calls, texts, strict=True):
            self.messages.append(ChatMessage(role="tool", content=text, tool_call_id=call.id, name=call.name))
        if attachments:  # most endpoints accept only texts as results of tools
            lines = [f"- {each.name}, from the tool '{name}'" for name, each in attachments]
            text = "\n".join(("Attached, in this order:", *lines))
            files = tuple([each for _, each in attachments])
            self.messages.append(ChatMessage(role="user", content=text, attachments=files))
        self._turn += 1
        return CallModel(turn=self._turn)
