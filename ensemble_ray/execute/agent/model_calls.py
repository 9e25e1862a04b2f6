"""A task's model calls: events, record, streaming, and errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import Durability
from ensemble_ray.errors import AgentExecutionError, ExitEarlyError
from ensemble_ray.errors.texts import agent_failure, describe
from ensemble_ray.events import LlmIterationCompletedEvent, LlmIterationStartedEvent, TokenEvent
from ensemble_ray.events.telemetry.listener import NO_SPAN, effect_span
from ensemble_ray.execute.agent.attempts import (
    MOST_REPEATS,
    Attempts,
    ChainAttempts,
    answer_of,
    checked_response,
    declared_model,
    effect_of,
    incomplete_text,
    join_answers,
    key_at,
    repeat_text,
)
from ensemble_ray.execute.agent.reuse import AnswerReuse
from ensemble_ray.execute.agent.runner_model import RunnerModel
from ensemble_ray.execute.attachments import check_messages, load_messages, without_contents
from ensemble_ray.execute.effects import ModelEffect, capture_messages
from ensemble_ray.execute.redaction import clean_response
from ensemble_ray.execute.scope import FirstRequest, TaskScope
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.llm.fallback import chain_of
from ensemble_ray.llm.names import ModelNames, model_names
from ensemble_ray.llm.prices import price_mark
from ensemble_ray.ports import ChatModel, Persistence, StreamingChatModel, StructuredChatModel
from ensemble_ray.process.concurrency import USER_ERRORS, call_user
from ensemble_ray.process.context import EFFECT_KEY, PERMIT_WAIT, PermitWait, bounded_logger
from ensemble_ray.text.answers import ReasoningSplitter
from ensemble_ray.text.foreign_text import SurrogateJoiner
from ensemble_ray.text.redaction import Redaction, StreamRedaction
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
from ensemble_ray.values.trace import CaptureMode

_log = bounded_logger(__name__)


class ModelCalls:
    def __init__(self, scope: TaskScope, agent: Agent) -> None:
        self._scope = scope
        self._order = scope.order
        self._effects = scope.effects
        self._runner = None if agent.runner is None else RunnerModel(scope, agent, agent.runner)
        self._is_streaming = scope.order.is_streaming
        self._on_incomplete: OnIncomplete = agent.on_incomplete or scope.context.on_incomplete
        if self._runner is not None and self._on_incomplete == "retry":
            self._on_incomplete = "fail"  # a runner may have effects; only its task calls it again
        self._keeps_reasoning = agent.keep_reasoning
        self._redaction = scope.context.redaction
        self._has_warned = False
        model = self._runner or agent.llm
        chain = chain_of(model)
        self._use(model if chain is None else chain.first_model)
        self._chain = None if chain is None else ChainAttempts(scope, chain, use=self._use)
        repeats = self._runner is None or self._runner.may_be_repeated
        self._attempts = self._chain or Attempts(scope, model, may_repeat=repeats)
        self._effects.is_chained = chain is not None
        self._names = model_names(model)
        self._declared = declared_model(scope, model, self._names)
        self._reuse: AnswerReuse | None = None  # None: the task always asks its model
        if scope.order.task.reuse is not None and self._runner is None:
            self._reuse = AnswerReuse(scope, agent.llm, keep_reasoning=agent.keep_reasoning)
        needs_digest = scope.context.durability != Durability.OFF or scope.ports.compare is not None
        #: of the latest request; None: neither recorded nor compared
        self._digest = hashlib.sha256() if needs_digest else None
        self._digested = 0
        self._turn = 0
        #: messages with attachments, by identity: as in the conversation, and with contents
        self._with_content: dict[int, tuple[ChatMessage, ChatMessage]] = {}

    def _use(self, model: ChatModel | RunnerModel) -> None:
        """Send the following requests to a model, as it is able to answer them."""
        self._model = model
        self._stream: StreamingChatModel | None = None
        if self._is_streaming and isinstance(model, StreamingChatModel):
            self._stream = model
        elif self._is_streaming:
            _log.warning("Model %s cannot stream; running without streaming", type(model).__name__)
        self._structured = None if self._order.task.output_type is None else self._structured_model(model)

    @property
    def is_answer_lost(self) -> bool:
        """Whether the latest answer is a text that reports a lost answer."""
        return self._runner is not None and self._runner.is_lost

    async def call(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], turn: int, *, is_streaming: bool = True
    ) -> ChatResponse:
        """Return the recorded or a new answer, or raise `AgentExecutionError` (S-ENG-50, S-ENG-57)."""
        self._turn = turn
        messages = self._scope.clean(messages)  # they are clean already, unless the user's code has made one
        order, name = self._order, effect_name(self._order.instance, turn)
        self._scope.emit(
            LlmIterationStartedEvent,
            lambda: LlmIterationStartedEvent(
                agent_role=order.agent_role,
                task_description=order.task.description,
                iteration_index=turn,
                messages=without_contents(messages),
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
        request_digest = self._request_digest(messages)
        recorded = self._scope.find_recorded(name, ModelAnswered) if self._scope.recorded_facts else None
        if (defer := self._scope.ports.defer) is not None:
            await defer(await self._first_request(name, messages, request_digest, is_recorded=recorded is not None))
        if recorded is not None and recorded.data.delivery and self._on_incomplete == "retry":
            is_whole = incomplete_reason(effect_of(recorded.data).response) is None
            recorded = recorded if is_whole else None  # a call replaces the answer of the batch (S-BAT-33)
        if recorded is None:
            effect = await self._ask(name, messages, tools, request_digest, is_streaming=is_streaming)
        else:
            if (compare := self._scope.ports.compare) is not None:
                compare(name, recorded, request_digest, messages)
            effect = self._recall(recorded.data, request_digest)
        self._effects.models.append(effect)
        return effect.response

    def _recall(self, recorded: ModelAnswered, request_digest: str) -> ModelEffect:
        effect = effect_of(recorded)
        effect.model, effect.provider = effect.model or self._names.model, effect.provider or self._names.provider
        if self._chain is not None:
            self._chain.stay_with(ModelNames(effect.model, effect.provider))
        if effect.delivery and request_digest not in {"", recorded.request_digest}:
            _log.warning(
                "Task '%s': its prompt differs from the one in the batch, which is answered. Its factory must make the "
                "same task each time",
                self._order.key,
            )
        self._effects.retry_count += effect.retries
        if self._runner is not None:
            self._runner.recall(self._turn)
        return effect

    async def _ask(
        self,
        name: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        request_digest: str,
        *,
        is_streaming: bool,
    ) -> ModelEffect:
        """Return the answer of the model, or of an earlier run, and record it."""
        digest, reused = "", None
        lost = None if self._runner is None else await self._runner.settle(self._turn)
        if self._reuse is not None:
            schema = None if self._structured is None else self._structured[1]
            digest = self._reuse.digest(name, request_digest, tools, schema)
            reused = await self._take(self._reuse, digest, self._stream if is_streaming else None)
        if reused is None and [message for message in messages if message.attachments]:
            messages = await self._with_contents(messages)
        effect = lost or reused or await self._send(name, messages, tools, is_streaming=is_streaming)
        if lost is None and self._on_incomplete == "retry":
            effect = await self._complete(effect, name, messages, tools)
        effect.price = price_mark(self._scope.context.cost, self._model)
        ended_at = None if lost is not None else effect.started_at + effect.latency_s
        if reused is None:
            effect.model, effect.provider = self._names if self._chain is None else self._chain.names
            # The digest is of the first model of a chain.
            effect.reuse_digest = digest if (effect.model, effect.provider) == self._names else ""
        # The next request may precede this answer's commit (S-DUR-2).
        await self._scope.note(
            name, answer_of(request_digest, effect, self._declared), until=Persistence.SOON, at=ended_at
        )
        if self._runner is not None:
            await self._runner.note_return(self._turn, effect)
        return effect

    async def _first_request(
        self, name: str, messages: Sequence[ChatMessage], digest: str, *, is_recorded: bool
    ) -> FirstRequest:
        """Return a request for a batch; it has no tools."""
        check_messages(self._model, messages)
        if [message for message in messages if message.attachments]:
            messages = await self._with_contents(messages)
        schema = None if self._structured is None else self._structured[1]
        reuse_digest, reused = "", None
        if self._reuse is not None and not is_recorded:
            reuse_digest = self._reuse.digest(name, digest, (), schema)
            reused = await self._reuse.find(reuse_digest)
        return FirstRequest(
            order=self._order,
            model=self._model,
            messages=tuple(messages),
            schema=schema,
            digest=digest,
            reuse_digest=reuse_digest,
            is_answered=is_recorded or reused is not None,
        )

    async def correct(self, system_prompt: str, prompt: str, turn: int) -> str | None:
        """Request one correction of structured output, without tools and streaming (S-OUT-31)."""
        messages = (ChatMessage(role="system", content=system_prompt), ChatMessage(role="user", content=prompt))
        self.reset_digest()
        response = await self.call(messages, (), turn, is_streaming=False)
        self.accept((*messages, ChatMessage(role="assistant", content=response.text)), is_final=True)
        return response.text

    def reset_digest(self) -> None:
        """Hash all messages again, since earlier ones may have changed."""
        if self._digest is not None:
            self._digest, self._digested = hashlib.sha256(), 0

    def accept(self, messages: Sequence[ChatMessage], *, is_final: bool) -> None:
        """Classify and capture the last answer (S-CAP-11); if incomplete, warn or raise `AgentExecutionError`."""
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
                cached_tokens=max(0, usage.cached_tokens),
                latency=timedelta(seconds=effect.latency_s),
                finish_reason=response.finish_reason,
                reasoning=response.reasoning,
                reused=effect.reused,
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
        reason = incomplete_reason(response)
        if reason is None:
            return
        text = incomplete_text(order.agent_role, reason)
        if self._on_incomplete != "warn":
            raise AgentExecutionError(text, order.agent_role, order.task.description)
        if reason != "empty" and not self._has_warned:
            self._has_warned = True
            _log.warning("Task '%s': %s It is used as it is.", order.key, text)

    def describe_cut(self) -> str:
        """Return the problem of a cut-off last answer, else ""."""
        reason = incomplete_reason(self._effects.models[-1].response) if self._effects.models else None
        return "" if reason in {None, "empty"} else incomplete_text(self._order.agent_role, str(reason))

    async def _take(self, reuse: AnswerReuse, digest: str, stream: StreamingChatModel | None) -> ModelEffect | None:
        """Return an answer of an earlier run; a stream has it as one piece (S-USE-30)."""
        effect = await reuse.find(digest)
        if effect is None:
            return None
        effect.model, effect.provider = effect.model or self._names.model, effect.provider or self._names.provider
        self._effects.attempts, self._effects.waits = 0, ()
        if stream is not None:
            parts = ((effect.response.reasoning, True), (effect.response.text, False))
            self._send_pieces([(text, is_reasoning) for text, is_reasoning in parts if text], [])
        return effect

    async def _complete(
        self, effect: ModelEffect, name: str, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]
    ) -> ModelEffect:
        for repeat in range(1, MOST_REPEATS + 1):
            reason = incomplete_reason(effect.response)
            if reason is None:
                break
            _log.warning("Task '%s': %s", self._order.key, repeat_text(self._order.agent_role, reason, repeat))
            self._effects.retry_count += 1
            requests = self._effects.attempts
            # Pieces of a stream cannot be withdrawn. The name differs, since endpoints may store answers by key.
            again = await self._send(f"{name}/again-{repeat}", messages, tools, is_streaming=False, span=name)
            effect = join_answers(effect, reason, again)
            self._effects.attempts += requests
        return effect

    async def _send(
        self,
        name: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        *,
        is_streaming: bool,
        span: str | None = None,
    ) -> ModelEffect:
        """Call the model with retries. The latency is that of the successful attempt."""
        clock = self._scope.ports.clock
        key = uuid_of(f"{self._order.run_id}/{name}")
        started_at, wait = 0.0, PermitWait(clock.now)
        pieces: list[str] = []

        async def attempt() -> ChatResponse:
            nonlocal started_at
            if self._runner is not None:
                await self._runner.begin(self._turn)
            started_at = clock.now()
            wait.total_s = 0.0
            used_key = EFFECT_KEY.set(key_at(key, self._attempts.place) if self._attempts.place else key)
            used_wait = PERMIT_WAIT.set(wait)
            try:
                tracing = self._scope.context.tracing
                with NO_SPAN if tracing is None else effect_span(tracing, span or name):
                    asked = list(messages)  # the model may keep the list
                    check_messages(self._model, asked)
                    if is_streaming and self._stream is not None:
                        return await self._read_stream(self._stream, messages, tools, pieces)
                    if tools:
                        answer: object = await call_user(self._model.chat, asked, tuple(tools))
                    elif self._structured is None:
                        answer = await call_user(self._model.chat, asked)
                    else:
                        model, schema = self._structured
                        answer = await call_user(model.chat_structured, asked, schema)
                return checked_response(answer, keep_reasoning=self._keeps_reasoning)
            finally:
                EFFECT_KEY.reset(used_key)
                PERMIT_WAIT.reset(used_wait)

        try:
            response = await self._attempts.answer(attempt, messages, tools, pieces)
        except (asyncio.CancelledError, ExitEarlyError) as stopped:
            if self._runner is not None:
                self._runner.note_stop(stopped)
            raise
        except USER_ERRORS as error:
            role = self._order.agent_role
            text = (
                agent_failure(role, error)
                if not is_streaming or self._stream is None
                else f"Streaming failed for agent '{role}': {describe(error)}"
            )
            failure = AgentExecutionError(text, role, self._order.task.description)
            if self._runner is not None:
                await self._runner.note_error(str(failure), began=started_at)
            raise failure from error
        return ModelEffect(
            started_at=started_at,
            latency_s=clock.now() - started_at,
            response=response if self._redaction is None else clean_response(self._redaction, response),
            is_final=True,
            attempts_failed=tuple(self._attempts.failed),
            waits=tuple(self._attempts.waits),
            max_attempts=self._attempts.max_attempts if self._attempts.waits else 0,
            waited_s=wait.waited_s,
            estimated=self._attempts.estimated,
        )

    async def _with_contents(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return the messages with the contents of their attachments."""
        held = self._with_content
        wanted = [message for message in messages if message.attachments]
        new = [message for message in wanted if id(message) not in held]
        loaded = await load_messages(new, self._scope.ports.journal)
        held |= {id(message): (message, whole) for message, whole in zip(new, loaded, strict=True)}
        self._with_content = {id(message): held[id(message)] for message in wanted}
        return [held[id(message)][1] if message.attachments else message for message in messages]

    async def _read_stream(
        self, model: StreamingChatModel, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], sent: list[str]
    ) -> ChatResponse:
        """Return the answer of a stream. Each piece goes to listeners and to `sent` when it arrives."""
        closing: ChatResponse | None = None
        text, reasoning = _StreamedText(), _StreamedText()
        splitter = None if self._keeps_reasoning else ReasoningSplitter()
        cleaned = None if self._redaction is None else _CleanPieces(self._redaction)

        def send(piece: str, *, is_reasoning: bool) -> None:
            parts = [(piece, is_reasoning)] if is_reasoning or splitter is None else splitter.feed(piece)
            self._send_pieces(parts if cleaned is None else cleaned.feed(parts), sent)

        async for piece in model.stream(list(messages), tuple(tools)):
            if isinstance(piece, ChatResponse):
                closing = piece
            elif isinstance(piece, Reasoning):
                send(reasoning.add(piece), is_reasoning=True)
            else:
                send(text.add(piece), is_reasoning=False)
        if rest := reasoning.finish():
            send(rest, is_reasoning=True)
        if rest := text.finish():
            send(rest, is_reasoning=False)
        rests = [] if splitter is None else splitter.finish()
        self._send_pieces(rests if cleaned is None else [*cleaned.feed(rests), *cleaned.finish()], sent)
        response = ChatResponse(text=text.text, reasoning=reasoning.text)  # S-STR-10
        if closing is not None and self._runner is not None:
            response = closing  # contains the JSON of a structured answer
        elif closing is not None:
            response = replace(closing, text=text.text or closing.text, reasoning=reasoning.text or closing.reasoning)
        return whole_response(response, keep_reasoning=self._keeps_reasoning)

    def _send_pieces(self, pieces: Iterable[tuple[str, bool]], sent: list[str]) -> None:
        """Send (text, is_reasoning) to listeners, and add the texts to `sent`."""
        order, turn = self._order, self._turn
        for token, is_reasoning in pieces:
            sent.append(token)
            event = partial(
                TokenEvent,
                token=token,
                agent_role=order.agent_role,
                task_description=order.task.description,
                iteration=turn,
                is_reasoning=is_reasoning,
                run_id=order.run_id,
                instance=order.instance,
            )
            self._scope.emit(TokenEvent, event)

    def _structured_model(self, model: ChatModel | RunnerModel) -> tuple[StructuredChatModel, JsonSchema] | None:
        """Return model and schema for requests without tools and streaming (S-OUT-40, S-OUT-41)."""
        output_type = self._order.task.output_type
        if output_type is None or not isinstance(model, StructuredChatModel):
            return None
        from ensemble_ray.execute.agent.answer_schema import answer_schema  # loads pydantic's generator

        schema = answer_schema(cast("Hashable", output_type))
        return None if schema is None else (model, schema)

    def _request_digest(self, messages: Sequence[ChatMessage]) -> str:
        """Return the SHA-256 of the conversation, or "". Only new messages are hashed, so long loops stay linear."""
        digest = self._digest
        if digest is None:
            return ""
        for message in messages[self._digested :]:
            asked = message.tool_calls
            calls = [(call.id, call.name, call.arguments) for call in asked] if asked else []
            parts: tuple[object, ...] = (message.role, message.content, calls, message.tool_call_id)
            if message.attachments:
                parts += ([(each.kind, each.sha256, each.name) for each in message.attachments],)
            line = json.dumps(parts)
            digest.update(line.encode())
        self._digested = len(messages)
        return digest.hexdigest()


class _CleanPieces:
    """Cleans (text, is_reasoning) of a stream; answer and reasoning apart."""

    def __init__(self, redaction: Redaction) -> None:
        self._streams = {is_reasoning: StreamRedaction(redaction) for is_reasoning in (True, False)}

    def feed(self, pieces: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
        fed = [(self._streams[is_reasoning].feed(text), is_reasoning) for text, is_reasoning in pieces]
        return [each for each in fed if each[0]]

    def finish(self) -> list[tuple[str, bool]]:
        rests = [(stream.finish(), is_reasoning) for is_reasoning, stream in self._streams.items()]
        return [each for each in rests if each[0]]


class _StreamedText:
    """A streamed text; half of a surrogate pair waits for its other half."""

    def __init__(self) -> None:
        self._whole = SurrogateJoiner()
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> str:
        self._pieces.append(self._whole.feed(piece))
        return self._pieces[-1]

    def finish(self) -> str:
        self._pieces.append(self._whole.finish())
        return self._pieces[-1]
