"""The ReAct loop of one task as a machine. Pure: no model, tool, clock or log is touched here.

Rules:
1. Without tools there is exactly one model call; tool requests in its answer are ignored (S-ENG-31).
2. The loop ends at the first response without tool requests; its text is the answer (S-ENG-33).
3. One counter counts tool requests, not model calls, in request order, over-limit ones included (S-ENG-40, S-ENG-46).
4. A request over the limit is not run and gets the stop text (S-ENG-41).
5. An answer with requests over the limit counts as one stop, however many they are (S-ENG-44). At the third stop the task
   fails at once: its stop texts are never sent, no further model call follows (S-ENG-43).
6. An answer that a guardrail wants again stays in the conversation, with the guardrail's words behind it (S-GRD-17); the
   counters go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union, assert_never

from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReceived:
    """The model answered."""

    response: ChatResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsReturned:
    """The texts of the allowed requests, in request order."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallModel:
    """Ask the model with the whole conversation. `turn` counts from 0."""

    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTools:
    """Run these requests; the stopped ones are over the limit and only get the stop text (S-ENG-40, S-ENG-41)."""

    turn: int
    allowed: Sequence[ToolCall]
    stopped: Sequence[ToolCall]
    #: number of answers with stopped requests so far, this one included; one WARN each (S-ENG-42)
    stop_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """This text is the answer."""

    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The agent went on calling tools; end the task (S-ENG-43)."""

    tool_calls_made: int


StepStimulus = Union[AnswerReceived, ToolsReturned]  # noqa: UP007  a name for the union, also at run time
StepInstruction = Union[CallModel, CallTools, Finish, Fail]  # noqa: UP007


#: Answers with requests over the limit after which the task fails (S-ENG-43).
MAX_STOPS = 3


def stop_text(max_iterations: int) -> str:
    """Return the text that a request over the limit gets as its result (S-ENG-41)."""
    return (
        f"STOP: Maximum tool iterations ({max_iterations}) reached. "
        "You must provide your best final answer now based on information gathered so far."
    )


class ReactMachine:
    """Holds the conversation and the counters of one task's loop."""

    def __init__(
        self,
        *,
        system_prompt: str,
        user_prompt: str,
        max_iterations: int,
        has_tools: bool,
        history: Sequence[ChatMessage] = (),
    ) -> None:
        """Begin the conversation; `history` is what was said before it (S-DOM-77)."""
        self.messages: list[ChatMessage] = [
            ChatMessage(role="system", content=system_prompt),
            *history,
            ChatMessage(role="user", content=user_prompt),
        ]
        self._max_iterations = max_iterations
        self._has_tools = has_tools
        self._turn = 0
        self._requests = 0
        self._stops = 0
        self._asked: tuple[ToolCall, ...] = ()
        self._allowed = 0

    @property
    def tool_call_count(self) -> int:
        """Tool requests so far, stopped ones included (S-ENG-46)."""
        return self._requests

    def start(self) -> StepInstruction:
        """Return the first step."""
        return CallModel(turn=0)

    def remind(self, text: str) -> StepInstruction:
        """Tell the model that its answer is not accepted yet, and ask again."""
        self.messages.append(ChatMessage(role="user", content=text))
        self._turn += 1
        return CallModel(turn=self._turn)

    def ask_again(self, text: str, *, answer: str, turn: int) -> StepInstruction:
        """Tell the model why its answer, as it was corrected, is refused, and ask for another one (S-GRD-17).

        Args:
            text: Why.
            answer: What takes the place of the last answer in the conversation.
            turn: Number of the next model call; corrections of the answer have had numbers too.
        """
        self.messages[-1] = ChatMessage(role="assistant", content=answer)
        self._turn = turn - 1
        return self.remind(text)

    def handle(self, stimulus: StepStimulus) -> StepInstruction:
        """Take what happened, give the next step."""
        match stimulus:
            case AnswerReceived():
                return self._on_answer(stimulus)
            case ToolsReturned():
                return self._on_return(stimulus)
            case _:
                assert_never(stimulus)

    def _on_answer(self, stimulus: AnswerReceived) -> StepInstruction:
        response = stimulus.response
        if not self._has_tools or not response.tool_calls:
            self.messages.append(
                ChatMessage(role="assistant", content=response.text, provider_fields=response.provider_fields)
            )
            return Finish(text=response.text)
        self._asked = tuple(response.tool_calls)
        self.messages.append(
            ChatMessage(
                role="assistant",
                content=response.text,
                tool_calls=self._asked,
                provider_fields=response.provider_fields,
            )
        )
        remaining = max(0, self._max_iterations - self._requests)
        self._allowed = min(remaining, len(self._asked))
        stopped = self._asked[self._allowed :]
        self._requests += len(self._asked)
        self._stops += bool(stopped)
        return CallTools(turn=self._turn, allowed=self._asked[: self._allowed], stopped=stopped, stop_count=self._stops)

    def _on_return(self, stimulus: ToolsReturned) -> StepInstruction:
        if self._stops >= MAX_STOPS:
            return Fail(tool_calls_made=self._requests)
        stop = stop_text(self._max_iterations)
        texts = [*stimulus.texts, *([stop] * (len(self._asked) - self._allowed))]
        for call, text in zip(self._asked, texts, strict=True):
            self.messages.append(ChatMessage(role="tool", content=text, tool_call_id=call.id, name=call.name))
        self._turn += 1
        return CallModel(turn=self._turn)
