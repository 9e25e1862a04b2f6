"""A task's model calls: events around them, the record, streaming, the errors they become.

A call that the journal has an answer for is not made again; its recorded answer is used. No request is sent before
everything that it depends on is in the record (S-DUR-2).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

from ensemble_ray.definition.fields import Durability
from ensemble_ray.errors import AgentExecutionError, ExitEarlyError
from ensemble_ray.errors.texts import agent_failure, describe
from ensemble_ray.events import LlmIterationCompletedEvent, LlmIterationStartedEvent, TokenEvent
from ensemble_ray.execute.agent.attempts import MOST_REPEATS, Attempts, asked_again, incomplete_text, join_answers
from ensemble_ray.execute.agent.recorded_model import answer_of, effect_of
from ensemble_ray.execute.agent.runner_model import RunnerModel
from ensemble_ray.execute.effects import ModelEffect, capture_messages
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.ports import Persistence, StreamingChatModel, StructuredChatModel
from ensemble_ray.process.context import PermitWait, bounded_logger, use_effect_key, use_permit_wait
from ensemble_ray.process.forks import USER_ERRORS, call_user
from ensemble_ray.text.answers import ReasoningSplitter
from ensemble_ray.text.foreign_text import WholePieces
from ensemble_ray.values.ids import effect_name, uuid_of
from ensemble_ray.values.messages import (
    ChatMessage,
    ChatResponse,
    JsonSchema,
    OnIncomplete,
    Reasoning,
    TokenUsage,
    ToolSpec,
    incomplete_reason,
    whole_response,
)
from ensemble_ray.values.task_output import OutputType
from ensemble_ray.values.trace import CaptureMode

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.scope import TaskScope


_log = bounded_logger(__name__)
#: What came of tool requests that may have left no fact: calls of unknown tools, and calls beyond the limit.
_WITHOUT_FACTS = frozenset({"failure", "skipped_max_iterations"})


class ModelCalls:
    """Makes the model calls of one task, one after the other."""

    def __init__(self, scope: TaskScope, agent: Agent) -> None:
        self._scope = scope
        self._order = scope.order
        self._effects = scope.effects
        #: what answers in place of a model; None: a model does
        self._runner = None if agent.runner is None else RunnerModel(scope, agent, agent.runner)
        self._model = self._runner or agent.llm
        self._on_incomplete: OnIncomplete = agent.on_incomplete or scope.context.on_incomplete
        if self._runner is not None and self._on_incomplete == "retry":
            self._on_incomplete = "fail"  # what it did, it did; nobody but its task asks it again
        self._keeps_reasoning = agent.keep_reasoning
        self._has_warned = False
        self._stream = self._streaming_model(scope.order.is_streaming)
        self._structured = self._structured_form(scope.order.task.output_type)
        self._attempts = Attempts(scope, self._model, may_repeat=self._runner is None or self._runner.may_be_repeated)
        name = _text_of(self._model, "model_name") or _text_of(self._model, "model")
        self._named = name, _text_of(self._model, "provider_name")
        needs_digest = scope.context.durability != Durability.OFF or scope.ports.compare is not None
        #: over the latest request; None: no record has its requests' digests, and none is compared with them
        self._digest = hashlib.sha256() if needs_digest else None
        self._digested = 0
        self._turn = 0
        #: whether the last answer is on its way to the record, and nothing that follows it has been waited for
        self._is_underway = False

    @property
    def is_answer_lost(self) -> bool:
        """Whether the latest answer is lost, and a text that says so stands for it."""
        return self._runner is not None and self._runner.is_lost

    async def call(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], turn: int) -> ChatResponse:
        """Ask with the whole conversation.

        Raises:
            AgentExecutionError: the model failed, or gave something that is no answer (S-ENG-50, S-ENG-57).
        """
        self._turn = turn
        self._announce_start(messages, turn)
        return await self._ask(messages, tools, turn, stream=self._stream)

    async def correct(self, system_prompt: str, prompt: str, turn: int) -> str | None:
        """One correction turn of structured output: two messages, no tools, no streaming (S-OUT-31)."""
        self._turn = turn
        messages = (ChatMessage(role="system", content=system_prompt), ChatMessage(role="user", content=prompt))
        self.begin_anew()
        self._announce_start(messages, turn)
        response = await self._ask(messages, (), turn, stream=None)
        self.capture_answer((*messages, ChatMessage(role="assistant", content=response.text)), is_final=True)
        self.accept()
        return response.text

    def begin_anew(self) -> None:
        """Compute the next request's digest of its whole conversation: messages in its middle may have changed."""
        if self._digest is not None:
            self._digest, self._digested = hashlib.sha256(), 0

    def capture_answer(self, messages: Sequence[ChatMessage], *, is_final: bool) -> None:
        """Say what the last answer was, and capture the conversation as it stands now (S-CAP-11)."""
        effect = self._effects.models[-1]
        effect.is_final = is_final
        if self._scope.context.capture_mode is not CaptureMode.OFF:
            effect.messages = capture_messages(messages)
        order, response, usage = self._order, effect.response, effect.response.usage or TokenUsage()
        self._scope.emit(
            LlmIterationCompletedEvent,
            lambda: LlmIterationCompletedEvent(
                agent_role=order.agent_role,
                task_description=order.task.description,
                iteration_index=self._turn,
                response_type="final_answer" if is_final else "tool_calls",
                response_text=response.text,
                tool_requests=() if is_final else tuple(response.tool_calls),
                input_tokens=max(0, usage.input_tokens),
                output_tokens=max(0, usage.output_tokens),
                latency=timedelta(seconds=effect.latency_s),
                finish_reason=response.finish_reason,
                reasoning=response.reasoning,
                run_id=order.run_id,
                instance=order.instance,
            ),
        )

    def accept(self) -> None:
        """Do with the last answer what is to be done with an incomplete one (S-ENG-37); nothing to a whole one.

        Raises:
            AgentExecutionError: it is not accepted.
        """
        reason = incomplete_reason(self._effects.models[-1].response)
        if reason is None:
            return
        order = self._order
        text = incomplete_text(order.agent_role, reason)
        if self._on_incomplete != "warn":
            raise AgentExecutionError(text, order.agent_role, order.task.description)
        # Of an empty one its own line tells (S-ENG-34).
        if reason != "empty" and not self._has_warned:
            self._has_warned = True
            _log.warning("Task '%s': %s It is used as it is.", order.key, text)

    def describe_cut(self) -> str:
        """Return what was wrong with the last answer if it was cut off; empty where it was whole, or had no text."""
        reason = incomplete_reason(self._effects.models[-1].response) if self._effects.models else None
        return "" if reason in {None, "empty"} else incomplete_text(self._order.agent_role, str(reason))

    def _announce_start(self, messages: Sequence[ChatMessage], turn: int) -> None:
        order = self._order
        self._scope.emit(
            LlmIterationStartedEvent,
            lambda: LlmIterationStartedEvent(
                agent_role=order.agent_role,
                task_description=order.task.description,
                iteration_index=turn,
                messages=tuple(messages),
                run_id=order.run_id,
                instance=order.instance,
            ),
        )

    async def _ask(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        turn: int,
        *,
        stream: StreamingChatModel | None,
    ) -> ChatResponse:
        name = effect_name(self._order.instance, turn)
        request_digest = self._request_digest(messages)
        recorded = self._scope.find_recorded(name, ModelAnswered)
        if recorded is not None:
            compare = self._scope.ports.compare
            if compare is not None:
                compare(name, recorded, request_digest, messages)
            effect = effect_of(recorded.data)
            self._scope.effects.retry_count += effect.retries
            if self._runner is not None:
                self._runner.recall(turn)
        else:
            await self._await_record()
            lost = None if self._runner is None else await self._runner.settle(turn)
            effect = lost or await self._whole(name, messages, tools, stream)
            await self._record(name, request_digest, effect)
            if self._runner is not None:
                await self._runner.note_return(turn, effect)
        effect.model, effect.provider = self._named
        self._effects.models.append(effect)
        return effect.response

    async def _whole(
        self,
        name: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        stream: StreamingChatModel | None,
    ) -> ModelEffect:
        """Ask the model, and where its answer is incomplete and the policy is `retry` ask again (S-ENG-38)."""
        effects = self._scope.effects
        effect = await self._send(name, messages, tools, stream)
        if self._on_incomplete != "retry":
            return effect
        for repeat in range(1, MOST_REPEATS + 1):
            reason = incomplete_reason(effect.response)
            if reason is None:
                break
            _log.warning("Task '%s': %s", self._order.key, asked_again(self._order.agent_role, reason, repeat))
            effects.retry_count += 1
            requests = effects.attempts
            # Not streamed: the pieces that were passed on cannot be taken back.
            again = await self._send(name, messages, tools, None, again=f"/again-{repeat}")
            effect = join_answers(effect, reason, again)
            effects.attempts += requests
        return effect

    async def _send(
        self,
        name: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        stream: StreamingChatModel | None,
        again: str = "",
    ) -> ModelEffect:
        """Ask the model, again if its provider fails; the latency is that of the attempt that was answered.

        `again` tells a repetition of the effect from the first time: an endpoint that keeps answers by key is asked for
        another answer.
        """
        clock = self._scope.ports.clock
        key = uuid_of(f"{self._order.run_id}/{name}{again}")
        started_at, wait = 0.0, PermitWait(clock.now)
        pieces: list[str] = []

        async def attempt() -> ChatResponse:
            nonlocal started_at, wait
            if self._runner is not None:
                await self._runner.begin(self._turn)
            started_at, wait = clock.now(), PermitWait(clock.now)
            # The same for every attempt: it is one effect (S-DUR-27).
            with use_effect_key(key), use_permit_wait(wait), self._scope.effect_span(name):
                if stream is None:
                    return await self._plain(messages, tools)
                return await self._read_stream(stream, messages, tools, pieces)

        spending, request = self._scope.ports.spending, None
        send = attempt
        if spending is not None:
            template = self._order.agent_key or self._order.agent_role
            request = spending.request(template, self._model, messages, tools)
            send = partial(request.send, attempt)
        try:
            response = await self._attempts.answer(send, lambda: bool(pieces))
        except (asyncio.CancelledError, ExitEarlyError) as stopped:
            if self._runner is not None:
                self._runner.note_stop(stopped)
            raise
        except USER_ERRORS as error:
            failure = self._failure(error, is_streaming=stream is not None)
            if self._runner is not None:
                await self._runner.note_error(str(failure), began=started_at)
            raise failure from error
        failed = tuple(self._attempts.failed)
        latency_s = clock.now() - started_at
        return ModelEffect(
            started_at=started_at,
            latency_s=latency_s,
            response=response,
            is_final=True,
            attempts_failed=failed,
            waited_s=wait.waited_s,
            estimated=None if request is None else request.estimated,
        )

    async def _record(self, name: str, request_digest: str, effect: ModelEffect) -> None:
        """Note an answer. What follows waits for it: a tool's intent or result, or the task's own output.

        Only corrections of structured output follow an answer directly.
        """
        is_last = not effect.response.tool_calls and self._order.task.output_type is not None
        self._is_underway = not is_last
        until = Persistence.COMMITTED if is_last else Persistence.QUEUED
        await self._scope.note(name, answer_of(request_digest, effect), until=until)

    async def _await_record(self) -> None:
        """Wait for the last answer's fact where no fact of a tool was waited for since, as when all calls were refused."""
        if self._is_underway and all(tool.outcome in _WITHOUT_FACTS for tool in self._effects.models[-1].tools):
            await self._scope.ports.journal.append((), epoch=self._order.epoch, until=Persistence.COMMITTED)
        self._is_underway = False

    async def _plain(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> ChatResponse:
        # A list of its own per call: a model may keep what it is given.
        if tools:
            response: object = await call_user(self._model.chat, list(messages), tuple(tools))
        elif self._structured is not None:
            model, schema = self._structured
            response = await call_user(model.chat_structured, list(messages), schema)
        else:
            response = await call_user(self._model.chat, list(messages))
        if not isinstance(response, ChatResponse):
            raise TypeError(f"model returned {type(response).__name__} instead of a ChatResponse")
        return whole_response(response, keep_reasoning=self._keeps_reasoning)

    async def _read_stream(
        self,
        model: StreamingChatModel,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        passed_on: list[str],
    ) -> ChatResponse:
        """Return the answer of a stream; its pieces are passed on, and kept in `passed_on`, as they come."""
        turn = self._turn
        closing: ChatResponse | None = None
        said, thought = _Pieces(), _Pieces()
        splitter = None if self._keeps_reasoning else ReasoningSplitter()

        def pass_on(parts: Iterable[tuple[str, bool]]) -> None:
            for part, is_reasoning in parts:
                passed_on.append(part)
                self._emit_token(part, turn, is_reasoning=is_reasoning)

        def split(piece: str) -> Sequence[tuple[str, bool]]:
            return [(piece, False)] if splitter is None else splitter.feed(piece)

        async for piece in model.stream(list(messages), tuple(tools)):
            if isinstance(piece, ChatResponse):
                closing = piece
            elif isinstance(piece, Reasoning):
                pass_on([(thought.add(piece), True)])
            else:
                pass_on(split(said.add(piece)))
        pass_on([(rest, True) for rest in thought.finish()])
        pass_on(part for rest in said.finish() for part in split(rest))
        pass_on([] if splitter is None else splitter.finish())
        response = ChatResponse(text=said.text, reasoning=thought.text)  # S-STR-10
        if closing is not None and self._runner is not None:
            response = closing  # which a structured answer has the JSON of
        elif closing is not None:
            response = replace(closing, text=said.text or closing.text, reasoning=thought.text or closing.reasoning)
        return whole_response(response, keep_reasoning=self._keeps_reasoning)

    def _emit_token(self, token: str, turn: int, *, is_reasoning: bool) -> None:
        order = self._order
        self._scope.emit(
            TokenEvent,
            lambda: TokenEvent(
                token=token,
                agent_role=order.agent_role,
                task_description=order.task.description,
                iteration=turn,
                is_reasoning=is_reasoning,
                run_id=order.run_id,
                instance=order.instance,
            ),
        )

    def _streaming_model(self, is_streaming: bool) -> StreamingChatModel | None:  # noqa: FBT001  a single private flag
        if not is_streaming:
            return None
        if isinstance(self._model, StreamingChatModel):
            return self._model
        _log.warning("Model %s cannot stream; running without streaming", type(self._model).__name__)
        return None

    def _structured_form(self, output_type: OutputType | None) -> tuple[StructuredChatModel, JsonSchema] | None:
        """Whom to hold to which schema where no tools are offered and nothing is streamed (S-OUT-40, S-OUT-41)."""
        if output_type is None or not isinstance(self._model, StructuredChatModel):
            return None
        from ensemble_ray.execute.agent.answer_schema import (
            answer_schema,  # loads pydantic's generator: typed tasks pay
        )

        schema = answer_schema(cast("Hashable", output_type))
        return None if schema is None else (self._model, schema)

    def _failure(self, error: BaseException, *, is_streaming: bool) -> AgentExecutionError:
        role = self._order.agent_role
        text = f"Streaming failed for agent '{role}': {describe(error)}" if is_streaming else agent_failure(role, error)
        return AgentExecutionError(text, role, self._order.task.description)

    def _request_digest(self, messages: Sequence[ChatMessage]) -> str:
        """SHA-256 over the conversation; only new messages are hashed, so a long loop stays linear. "": nobody needs it."""
        digest = self._digest
        if digest is None:
            return ""
        for message in messages[self._digested :]:
            calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
            line = json.dumps((message.role, message.content, calls, message.tool_call_id))
            digest.update(line.encode())
        self._digested = len(messages)
        return digest.hexdigest()


class _Pieces:
    """The pieces of one text of a stream, so far."""

    def __init__(self) -> None:
        self._whole = WholePieces()
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> str:
        self._pieces.append(self._whole.feed(piece))
        return self._pieces[-1]

    def finish(self) -> Sequence[str]:
        """Return what was held back, if anything was."""
        rest = self._whole.finish()
        self._pieces.append(rest)
        return [rest] if rest else []


def _text_of(model: object, name: str) -> str | None:
    """Return what a model says of itself; None: it says nothing."""
    found: object = getattr(model, name, None)
    return found if isinstance(found, str) and found else None
