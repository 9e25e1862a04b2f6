"""The runner of an agent, as a task's model calls ask a model.

In: a conversation. Out: the runner's answer. Each asking is an effect as a handler is: its intent is recorded before, its
return after. Must never happen: a runner that is silently asked again what it may have done (S-INT-54).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Hashable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from ensemble_ray.definition.agent import effect_of_runner
from ensemble_ray.errors import AgentExecutionError
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.structured import adapter_of
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.execute.tools.unknown import RUNNER, effect_of, key_of, lost_call, resolve_unknown
from ensemble_ray.facts.effects import OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.ports import Persistence
from ensemble_ray.process.forks import call_user
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.delegation import TaskAnswer, TaskRequest
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.messages import ChatMessage, ChatResponse, Reasoning, TokenUsage, ToolSpec
from ensemble_ray.values.task_output import OutputType

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.effects import CallOutcome
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.ports import RunsTask
    from ensemble_ray.values.messages import Effect

#: Characters of a failure's text.
_LONGEST = 280


class RunnerModel:
    """Asks one agent's runner for one task, one answer after the other."""

    def __init__(self, scope: TaskScope, agent: Agent, runner: RunsTask) -> None:
        self._scope = scope
        self._runner = runner
        self._effect: Effect = effect_of_runner(runner, agent.runner_effect)
        self._turn = 0
        self._is_asked = False
        #: whether the answer is lost, and stands for work that was done all the same (S-DUR-25)
        self.is_lost = False

    @property
    def may_be_repeated(self) -> bool:
        """Whether a request may be made again when it failed."""
        return self._effect != "once"

    def _name(self, turn: int) -> str:
        return effect_name(self._scope.order.instance, turn, RUNNER)

    # The record.

    def recall(self, turn: int) -> None:
        """Say whether the recorded answer of that turn is one that was lost."""
        scope, name = self._scope, self._name(turn)
        returned = scope.find_recorded(name, ToolReturned)
        is_lost = self._was_confirmed(name) if returned is None else returned.data.is_unknown
        if is_lost:
            self.is_lost = scope.effects.is_outcome_unknown = True

    def _was_confirmed(self, name: str) -> bool:
        """Return whether the latest asking was confirmed as done: a process that ended in between noted no return of it."""
        decided = self._scope.find_recorded(name, OutcomeDecided)
        intent = self._scope.find_recorded(name, ToolIntended)  # none: it is in a part of the record that is lost
        return decided is not None and decided.data.answer == "done" and (intent is None or decided.seq > intent.seq)

    async def settle(self, turn: int) -> ModelEffect | None:
        """Return what stands for the answer of a runner that was asked before a crash; None: it is to be asked.

        Raises:
            AgentExecutionError: it failed then.
            UnknownOutcomeError: nobody knows whether it did its work.
        """
        scope, name = self._scope, self._name(turn)
        returned = scope.find_recorded(name, ToolReturned)
        if returned is not None and returned.data.outcome == "error":
            role, text = scope.order.agent_role, brief(returned.data.text, _LONGEST)
            raise AgentExecutionError(text, role, scope.order.task.description)
        intent = scope.find_recorded(name, ToolIntended) or lost_call(scope, name, RUNNER, "", self._effect)
        if intent is None or effect_of(intent.data, self._effect) != "once":
            return None
        lost = await resolve_unknown(scope, intent)
        if lost is None:
            return None
        self.is_lost = scope.effects.is_outcome_unknown = True
        return ModelEffect(started_at=intent.at, latency_s=0.0, response=ChatResponse(text=lost), is_final=True)

    async def begin(self, turn: int) -> None:
        """Note that the runner is about to be asked."""
        self._turn = turn
        # Also when it is asked again: a process that was replaced is stopped here, before the effect.
        until = Persistence.QUEUED if self._effect == "none" else Persistence.SYNCED
        intent = ToolIntended(tool_name=RUNNER, arguments="", effect=self._effect)
        self._is_asked = True
        await self._scope.note(self._name(turn), intent, until=until)

    async def note_return(self, turn: int, effect: ModelEffect) -> None:
        """Note that it answered; what it said is recorded as the answer of a model is."""
        outcome: CallOutcome = "unknown" if self.is_lost else "success"
        await self._note(turn, outcome, "", began=effect.started_at, took_s=effect.latency_s)

    async def note_error(self, text: str, *, began: float) -> None:
        """Note that it failed, unless it was not asked: its budget may have been spent before."""
        if self._is_asked:
            await self._note(self._turn, "error", text, began=began, took_s=self._scope.ports.clock.now() - began)

    def note_stop(self, error: BaseException) -> None:
        """Say that an asking was stopped: what is recorded of it says that it might have been done."""
        if self._is_asked and isinstance(error, asyncio.CancelledError):
            self._scope.effects.is_outcome_unknown = True

    async def _note(self, turn: int, outcome: CallOutcome, text: str, *, began: float, took_s: float) -> None:
        self._is_asked = False
        returned = ToolReturned(outcome=outcome, text=whole_text(text), started_at=began, duration_s=max(0.0, took_s))
        await self._scope.note(self._name(turn), returned)

    # Asking.

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Return the whole answer.

        Raises:
            TypeError: the runner gave something that is no answer.
        """
        del tools  # a runner has its own
        answers = [each async for each in self._ask(messages, is_streaming=False) if isinstance(each, ChatResponse)]
        return answers[-1]

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Give the pieces of the answer as they come, then the whole of it.

        Raises:
            TypeError: the runner gave something that is no answer.
        """
        del tools
        async with aclosing(self._ask(messages, is_streaming=True)) as pieces:
            async for piece in pieces:
                yield piece

    async def _ask(self, messages: Sequence[ChatMessage], *, is_streaming: bool) -> AsyncGenerator[str | ChatResponse]:
        returned = await call_user(self._runner.run, self._request(messages, is_streaming=is_streaming))
        parts: list[str] = []
        thoughts: list[str] = []
        last: TaskAnswer | None = None
        async with aclosing(_pieces(returned)) as pieces:
            async for piece in pieces:
                if isinstance(piece, TaskAnswer):
                    last = piece
                else:
                    (thoughts if isinstance(piece, Reasoning) else parts).append(piece)
                    yield piece
        yield self._response("".join(parts), last or TaskAnswer(), "".join(thoughts))

    def _request(self, messages: Sequence[ChatMessage], *, is_streaming: bool) -> TaskRequest:
        order = self._scope.order
        task = order.task
        return TaskRequest(
            messages=tuple(messages),
            description=task.description,
            expected_output=task.expected_output,
            agent_role=order.agent_role,
            context_outputs=tuple(order.context),
            output_type=cast("type[object] | None", task.output_type),  # runners pass it on as a class
            output_schema=None if task.output_type is None else _schema_of(task.output_type),
            run_id=order.run_id,
            task=order.key,
            instance=order.instance,
            attempt=self._turn,
            idempotency_key=key_of(self._scope, self._name(self._turn)),
            is_streaming=is_streaming,
        )

    def _response(self, pieces: str, answer: TaskAnswer, reasoning: str) -> ChatResponse:
        text, structured = answer.text or pieces, answer.structured_output
        if structured is not None and (self._scope.order.task.output_type is not None or not text.strip()):
            text = structured if isinstance(structured, str) else adapter_of(object).dump_json(structured).decode()
        usage = TokenUsage(answer.input_tokens, answer.output_tokens)
        return ChatResponse(text=text, usage=usage, finish_reason=answer.finish_reason, reasoning=reasoning or None)


async def _pieces(returned: object) -> AsyncGenerator[str | TaskAnswer]:
    """Give what a runner returned, piece by piece.

    Raises:
        TypeError: it is no answer.
    """
    if not isinstance(returned, AsyncIterable):
        yield _check(returned)
        return
    try:
        async for piece in cast("AsyncIterable[object]", returned):
            yield _check(piece)
    finally:
        if isinstance(returned, AsyncGenerator):  # one that gave something else is not at its end
            await returned.aclose()


def _check(piece: object) -> str | TaskAnswer:
    if isinstance(piece, str | TaskAnswer):
        return piece
    raise TypeError(
        f"runner returned {type(piece).__name__} instead of a text, a TaskAnswer, or an async iterator of these"
    )


def _schema_of(output_type: OutputType) -> Mapping[str, object] | None:
    from ensemble_ray.execute.agent.answer_schema import answer_schema  # loads pydantic's generator: typed tasks pay

    schema = answer_schema(cast("Hashable", output_type))
    return None if schema is None else schema.schema
