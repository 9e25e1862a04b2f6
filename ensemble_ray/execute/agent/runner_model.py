"""An agent's runner as a model. A runner with an unknown outcome is never called again silently (S-INT-54)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Hashable, Mapping, Sequence
from contextlib import aclosing
from typing import cast

from ensemble_ray.definition.agent import Agent, effect_of_runner
from ensemble_ray.errors import AgentExecutionError
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.structured import adapter_of
from ensemble_ray.execute.effects import CallOutcome, ModelEffect
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.execute.tools.unknown import RUNNER, is_unrepeatable, key_of, lost_intent, resolve_unknown
from ensemble_ray.facts.effects import OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.ports import Persistence, RunsTask
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.delegation import TaskAnswer, TaskRequest
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.messages import ChatMessage, ChatResponse, Effect, Reasoning, TokenUsage, ToolSpec

_LONGEST = 280


class RunnerModel:
    def __init__(self, scope: TaskScope, agent: Agent, runner: RunsTask) -> None:
        self._scope = scope
        self._runner = runner
        self._effect: Effect = effect_of_runner(runner, agent.runner_effect)
        self._turn = 0
        self._is_called = False
        self.is_lost = False  # a text replaces the lost answer of a runner that did its work (S-DUR-25)

    @property
    def may_be_repeated(self) -> bool:
        return self._effect != "once"

    def _name(self, turn: int) -> str:
        return effect_name(self._scope.order.instance, turn, RUNNER)

    def recall(self, turn: int) -> None:
        scope, name = self._scope, self._name(turn)
        if (returned := scope.find_recorded(name, ToolReturned)) is not None:
            is_lost = returned.data.is_unknown
        else:  # an earlier process may have ended after a decision, before it noted the return
            decided, intent = scope.find_recorded(name, OutcomeDecided), scope.find_recorded(name, ToolIntended)
            is_lost = (
                decided is not None
                and decided.data.answer == "done"
                and (intent is None or decided.seq > intent.seq)  # None: in a lost part of the record
            )
        if is_lost:
            self.is_lost = scope.effects.is_outcome_unknown = True

    async def settle(self, turn: int) -> ModelEffect | None:
        """Return or raise the recorded end of an earlier call, or decide its outcome; None: call the runner."""
        scope, name = self._scope, self._name(turn)
        returned = scope.find_recorded(name, ToolReturned)
        if returned is not None and returned.data.outcome == "error":
            role, text = scope.order.agent_role, brief(returned.data.text, _LONGEST)
            raise AgentExecutionError(text, role, scope.order.task.description)
        intent = scope.find_recorded(name, ToolIntended) or lost_intent(scope, name, RUNNER, "", self._effect)
        if intent is None or not is_unrepeatable(intent.data, self._effect):
            return None
        lost = await resolve_unknown(scope, intent)
        if lost is None:
            return None
        self.is_lost = scope.effects.is_outcome_unknown = True
        return ModelEffect(started_at=intent.at, latency_s=0.0, response=ChatResponse(text=lost), is_final=True)

    async def begin(self, turn: int) -> None:
        self._turn = turn
        self._is_called = True
        # Also before a repeated call: the journal stops a replaced process before the effect.
        until = Persistence.QUEUED if self._effect == "none" else Persistence.SYNCED
        intent = ToolIntended(tool_name=RUNNER, arguments="", effect=self._effect)
        await self._scope.note(self._name(turn), intent, until=until)

    async def note_return(self, turn: int, effect: ModelEffect) -> None:
        outcome: CallOutcome = "unknown" if self.is_lost else "success"
        await self._note(turn, outcome, "", began=effect.started_at, took_s=effect.latency_s)

    async def note_error(self, text: str, *, began: float) -> None:
        """Note a failed call, unless it was not made, for instance without a budget."""
        if self._is_called:
            await self._note(self._turn, "error", text, began=began, took_s=self._scope.ports.clock.now() - began)

    def note_stop(self, error: BaseException) -> None:
        if self._is_called and isinstance(error, asyncio.CancelledError):
            self._scope.effects.is_outcome_unknown = True

    async def _note(self, turn: int, outcome: CallOutcome, text: str, *, began: float, took_s: float) -> None:
        self._is_called = False
        returned = ToolReturned(outcome=outcome, text=whole_text(text), started_at=began, duration_s=max(0.0, took_s))
        await self._scope.note(self._name(turn), returned)

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Return the whole answer; a runner has its own tools."""
        del tools
        answers = [each async for each in self._call(messages, is_streaming=False) if isinstance(each, ChatResponse)]
        return answers[-1]

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        del tools
        async with aclosing(self._call(messages, is_streaming=True)) as pieces:
            async for piece in pieces:
                yield piece

    async def _call(self, messages: Sequence[ChatMessage], *, is_streaming: bool) -> AsyncGenerator[str | ChatResponse]:
        returned = await call_user(self._runner.run, self._request(messages, is_streaming=is_streaming))
        parts: list[str] = []
        thoughts: list[str] = []
        answer = TaskAnswer()
        async with aclosing(_pieces(returned)) as pieces:
            async for piece in pieces:
                if isinstance(piece, TaskAnswer):
                    answer = piece
                else:
                    (thoughts if isinstance(piece, Reasoning) else parts).append(piece)
                    yield piece
        text, structured = answer.text or "".join(parts), answer.structured_output
        if structured is not None and (self._scope.order.task.output_type is not None or not text.strip()):
            text = structured if isinstance(structured, str) else adapter_of(object).dump_json(structured).decode()
        usage = TokenUsage(answer.input_tokens, answer.output_tokens)
        yield ChatResponse(
            text=text, usage=usage, finish_reason=answer.finish_reason, reasoning="".join(thoughts) or None
        )

    def _request(self, messages: Sequence[ChatMessage], *, is_streaming: bool) -> TaskRequest:
        order = self._scope.order
        task = order.task
        schema: Mapping[str, object] | None = None
        if task.output_type is not None:
            from ensemble_ray.execute.agent.answer_schema import answer_schema  # loads pydantic's generator

            answer = answer_schema(cast("Hashable", task.output_type))
            schema = None if answer is None else answer.schema
        return TaskRequest(
            messages=tuple(messages),
            description=task.description,
            expected_output=task.expected_output,
            agent_role=order.agent_role,
            context_outputs=tuple(order.context),
            output_type=cast("type[object] | None", task.output_type),  # runners use it as a class
            output_schema=schema,
            run_id=order.run_id,
            task=order.key,
            instance=order.instance,
            attempt=self._turn,
            idempotency_key=key_of(self._scope, self._name(self._turn)),
            is_streaming=is_streaming,
        )


async def _pieces(returned: object) -> AsyncGenerator[str | TaskAnswer]:
    if not isinstance(returned, AsyncIterable):
        yield _check(returned)
        return
    try:
        async for piece in cast("AsyncIterable[object]", returned):
            yield _check(piece)
    finally:
        if isinstance(returned, AsyncGenerator):  # still open after a wrong piece
            await returned.aclose()


def _check(piece: object) -> str | TaskAnswer:
    if isinstance(piece, str | TaskAnswer):
        return piece
    raise TypeError(
        f"runner returned {type(piece).__name__} instead of a text, a TaskAnswer, or an async iterator of these"
    )
