"""A task's tool calls: the agent's own tool set, the record around each call, events, several calls at once.

Package: execute. A call whose result is recorded is not made again (S-DUR-22). What may change the world is on the disk
as begun before it is called (S-DUR-3); its result is in the record before anything depends on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import (
    AgentExecutionError,
    BudgetExhaustedError,
    ExitEarlyError,
    IllegalStateError,
    ValidationError,
)
from ensemble_ray.errors.texts import agent_failure, brief
from ensemble_ray.events import Event, ToolCallEvent
from ensemble_ray.execute.agent.attempts import Attempts
from ensemble_ray.execute.delegation.delegations import Delegations
from ensemble_ray.execute.effects import CallOutcome, ToolEffect
from ensemble_ray.execute.review.gates import ReviewOpenError
from ensemble_ray.execute.review.tool_reviews import ToolReviews, stands_at_gate, tool_reviews
from ensemble_ray.execute.scope import describe_exit
from ensemble_ray.execute.tools.unknown import effect_of, key_of, lost_call, resolve_unknown
from ensemble_ray.facts.effects import SamplingAnswered, ToolIntended, ToolReturned
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger, use_effect_key
from ensemble_ray.process.forks import call_user
from ensemble_ray.tools.call import BATCH_LIMIT_S, call_batch, call_tool, truncate_output
from ensemble_ray.tools.registry import BoundAgentTool, ResolvedTools, expand_providers, resolve_tools
from ensemble_ray.tools.tool import AbstractAgentTool, ContextAgentTool, ToolContext, use_tool_context
from ensemble_ray.tools.waiting import GuardedToolMetrics, TimeLimit
from ensemble_ray.values.ids import effect_name, uuid_of
from ensemble_ray.values.messages import ChatMessage, ChatResponse, TokenUsage, unusual_finish_reason, whole_response

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.tools.cpu import ToolOutcome
    from ensemble_ray.tools.registry import BoundTool
    from ensemble_ray.values.messages import ToolCall, ToolSpec


class ToolSampling:
    """Asks for one call of a tool."""

    def __init__(self, scope: TaskScope, call: str, model: ChatModel) -> None:
        """Belong to a call.

        Args:
            scope: The task.
            call: Name of the call's effect.
            model: The agent's.
        """
        self._scope = scope
        self._call = call
        self._model = model
        self._asked = 0
        #: by name, what the model said in this execution, which `scope.recorded` does not have
        self._given: dict[str, SamplingAnswered] = {}

    def begin_again(self) -> None:
        """Count the questions from the first again: the call is made again, and asks the same ones."""
        self._asked = 0

    async def sample(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        """Ask the model; see `AsksModel`."""
        scope, name = self._scope, f"{self._call}-sampling-{self._asked}"
        self._asked += 1
        digest = _digest(messages)
        answer = self._given.get(name)
        if answer is None or answer.request_digest != digest:
            recorded = scope.find_recorded(name, SamplingAnswered)
            if recorded is not None and recorded.data.request_digest == digest:
                answer = recorded.data
            else:
                answer = await self._send(name, digest, messages)
                await scope.note(name, answer, until=Persistence.COMMITTED)
            self._given[name] = answer
            scope.effects.sampled.append((name, answer))
        usage = TokenUsage(answer.input_tokens, answer.output_tokens)
        return ChatResponse(text=answer.text, usage=usage, finish_reason=answer.finish_reason)

    async def _send(self, name: str, digest: str, messages: Sequence[ChatMessage]) -> SamplingAnswered:
        scope, order = self._scope, self._scope.order
        started_at = 0.0

        async def attempt() -> ChatResponse:
            nonlocal started_at
            started_at = scope.ports.clock.now()
            with use_effect_key(uuid_of(f"{order.run_id}/{name}")):
                return whole_response(await call_user(self._model.chat, list(messages)))

        spending, request, send = scope.ports.spending, None, attempt
        if spending is not None:
            request = spending.request(order.agent_key or order.agent_role, self._model, messages)
            send = partial(request.send, attempt)
        response = await Attempts(scope, self._model).answer(send, lambda: False)
        usage = response.usage or TokenUsage()
        return SamplingAnswered(
            request_digest=digest,
            started_at=started_at,
            latency_s=max(0.0, scope.ports.clock.now() - started_at),
            text=response.text,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            finish_reason=unusual_finish_reason(response),
            estimated_tokens=(request.estimated if request is not None else None) or (),
        )


def _digest(messages: Sequence[ChatMessage]) -> str:
    text = json.dumps([(message.role, message.content) for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()


_log = bounded_logger(__name__)
#: How often one tool may ask the model of one task to try again (S-TOOL-54).
MOST_TRIES = 3


def _effect_of(call: ToolCall, recorded: ToolReturned) -> ToolEffect:
    """Return the result that was recorded."""
    return ToolEffect(
        call=call,
        outcome=cast("CallOutcome", recorded.outcome),
        text=recorded.text,
        started_at=recorded.started_at,
        duration_s=recorded.duration_s,
        structured_output=recorded.structured_output,
        asks_again=recorded.asks_again,
        repairs=recorded.repairs,
    )


def _result_of(effect: ToolEffect) -> ToolReturned:
    """Return a result as it is recorded."""
    return ToolReturned(
        outcome=effect.outcome,
        text=effect.text,
        structured_output=effect.structured_output,
        started_at=effect.started_at,
        duration_s=effect.duration_s,
        asks_again=effect.asks_again,
        repairs=effect.repairs,
    )


_NO_TOOLS = ResolvedTools()


async def _resolve_tools(scope: TaskScope, entries: Sequence[object], reserved: Sequence[str]) -> ResolvedTools:
    # What a provider offers may depend on whether a person can be asked.
    asking = ToolContext(agent_role=scope.order.agent_role, review_handler=tool_reviews(scope, "", ()))
    with use_tool_context(asking):
        return resolve_tools(await expand_providers(entries), reserved=reserved)


class ToolCalls:
    """Resolves and calls the tools of one task."""

    def __init__(
        self, scope: TaskScope, tools: ResolvedTools, delegations: Delegations | None, model: ChatModel | None
    ) -> None:
        self._scope = scope
        self._model = model
        self._order = scope.order
        self._tools = tools
        self._delegations = delegations
        self._metrics = GuardedToolMetrics(scope.ports.tool_metrics)
        #: calls of the turn that have not returned
        self._open = 0
        #: calls (tool, arguments) that the model asks for again knowing that they may have been made in what is lost
        self._warned: set[tuple[str, str]] = set()
        #: how often each tool has asked the model to try again
        self._tries: Counter[str] = Counter()
        #: what the model is told; the library's own tool comes first (S-TOOL-30)
        self.specs: Sequence[ToolSpec] = tools.specs if delegations is None else (delegations.spec, *tools.specs)

    @classmethod
    async def of(cls, scope: TaskScope, agent: Agent) -> ToolCalls:
        """Return the tools of an agent; dynamic providers are asked now, once (S-TOOL-32).

        Raises:
            ValidationError: an entry is no tool, or a name is taken twice (S-ENG-60).
        """
        delegations = Delegations.of(scope, agent)
        reserved = () if delegations is None else (delegations.spec.name,)
        tools = await _resolve_tools(scope, agent.tools, reserved) if agent.tools else _NO_TOOLS
        if delegations is not None and tools.get(delegations.spec.name) is not None:
            raise ValidationError(f"Duplicate tool name: '{delegations.spec.name}'")  # S-TOOL-34
        return cls(scope, tools, delegations, agent.llm)

    def reminder(self) -> str | None:
        """Return what a model is told that wants to finish too early; None: it may."""
        return None if self._delegations is None else self._delegations.reminder()

    async def run(self, calls: Sequence[ToolCall], turn: int) -> list[tuple[ToolEffect, str]]:
        """Run the requests of one turn, several at the same time; effect and text for the model, in request order.

        Raises:
            AgentExecutionError: the batch took longer than its limit (S-TOOL-83).
            AgentExecutionError: a tool is set up wrongly (S-ENG-58).
            ExitEarlyError: a tool ended the run (S-TOOL-85).
            ReviewOpenError: calls wait at open gates; the others are done (S-REV-115).
            UnknownOutcomeError: what was begun before a crash fails the task (S-DUR-24).
        """
        if not calls:
            return []
        resolved = await self._resolve_recorded(calls, turn)
        self._open = len(calls) - len(resolved)
        self._scope.slot.begin(self._open)
        try:
            await self._decide(calls, turn, resolved)
            ended = await call_batch(
                [partial(self._make_end, call, turn, index, resolved.get(index)) for index, call in enumerate(calls)],
                agent_role=self._order.agent_role,
                task_description=self._order.task.description,
                # A worker or a person may take hours; a worker's limit is the ensemble's, a person's is that of the gate.
                limit_s=None if any(map(self._may_take_long, calls)) else BATCH_LIMIT_S,
            )
        except IllegalStateError as error:
            role = self._order.agent_role
            raise AgentExecutionError(agent_failure(role, error), role, self._order.task.description) from error
        except asyncio.CancelledError:  # here, since the calls of a turn are told of it only later
            if self._delegations is not None:
                self._delegations.record_stop()
            raise
        await self._scope.slot.acquire()
        if waiting := [review for each in ended if isinstance(each, ReviewOpenError) for review in each.reviews]:
            raise ReviewOpenError(waiting)
        effects = [each for each in ended if isinstance(each, ToolEffect)]
        for effect in effects:
            self._announce(effect)
        limit = self._scope.context.max_tool_output_length
        return [
            # what we tell of an unknown outcome is no tool's output, and of no use when cut
            (effect, effect.text if effect.outcome == "unknown" else truncate_output(effect.text, limit))
            for effect in effects
        ]

    def turn_ended(self) -> None:
        """Note what a turn's calls gave.

        Raises:
            ManagerStalledError: nothing has been achieved for too many turns.
        """
        if self._delegations is not None:
            self._delegations.turn_ended()

    async def _resolve_recorded(self, calls: Sequence[ToolCall], turn: int) -> dict[int, ToolEffect]:
        """Return what of a turn needs no call, by its index: recorded results, unknown tools, outcomes that stay unknown.

        One after the other, and before any call is made: a person may be asked, and the task may fail.
        """
        resolved: dict[int, ToolEffect] = {}
        warned: set[tuple[str, str]] = set()
        for index, call in enumerate(calls):
            name = effect_name(self._order.instance, turn, f"call-{index}")
            recorded = self._scope.find_recorded(name, ToolReturned)
            if recorded is not None:
                resolved[index] = effect = _effect_of(call, recorded.data)
                self._tries[call.name] += effect.asks_again
                if self._is_behind_loss(recorded):
                    warned.add((call.name, call.arguments))
                continue
            bound = self._tools.get(call.name)
            intent = self._scope.find_recorded(name, ToolIntended)
            if intent is None and bound is not None and (call.name, call.arguments) not in self._warned:
                intent = lost_call(self._scope, name, call.name, call.arguments, bound.effect)
                warned.add((call.name, call.arguments))
            asks_first = bound is not None and bound.asks_first
            if stands_at_gate(self._scope, name, asks_first=asks_first):
                continue  # nothing was done behind it
            if intent is not None and effect_of(intent.data, "none" if bound is None else bound.effect) == "once":
                text = await resolve_unknown(self._scope, intent)
                if text is not None:
                    resolved[index] = await self._make_lost(call, intent, text)
                    continue
            if bound is None and not self._is_delegation(call):
                resolved[index] = self._unknown_tool(call)
        self._warned |= warned  # at the end: what one turn asks for twice was asked for before the model was told
        return resolved

    def _is_behind_loss(self, recorded: Fact) -> bool:
        return self._scope.loss is not None and recorded.seq > self._scope.loss.seq

    def _may_take_long(self, call: ToolCall) -> bool:
        bound = self._tools.get(call.name)
        if isinstance(bound, BoundAgentTool):
            is_asking = isinstance(bound.tool, AbstractAgentTool | ContextAgentTool)
        else:
            is_asking = bound is not None and bound.asks_first
        return self._is_delegation(call) or (is_asking and self._scope.context.review_policy is not None)

    def _is_delegation(self, call: ToolCall) -> bool:
        return self._delegations is not None and call.name == self._delegations.spec.name

    async def _decide(self, calls: Sequence[ToolCall], turn: int, resolved: Mapping[int, ToolEffect]) -> None:
        """Decide all delegations of a turn before the first worker starts (S-SET-45)."""
        if self._delegations is None:
            return
        handed = {index: call for index, call in enumerate(calls) if self._is_delegation(call)}
        await self._delegations.decide(handed, turn)
        for index, call in handed.items():
            if index in resolved:
                name = effect_name(self._order.instance, turn, f"call-{index}")
                await self._delegations.reapply_recorded(call, name, resolved[index])

    async def _make_lost(self, call: ToolCall, intent: Fact[ToolIntended], text: str) -> ToolEffect:
        """Return a call that was begun before a crash, and has an unknown outcome for good."""
        effect = ToolEffect(call=call, outcome="unknown", text=text, started_at=intent.at, duration_s=0.0)
        await self._scope.note(intent.name, _result_of(effect), until=Persistence.COMMITTED)
        return effect

    def _unknown_tool(self, call: ToolCall) -> ToolEffect:
        _log.warning("Agent '%s' asked for unknown tool '%s'", self._order.agent_role, brief(call.name))
        text = f"Error: Unknown tool '{call.name}'"
        now = self._scope.ports.clock.now()
        return ToolEffect(call=call, outcome="failure", text=text, started_at=now, duration_s=0.0)

    async def _make_end(
        self, call: ToolCall, turn: int, index: int, resolved: ToolEffect | None
    ) -> ToolEffect | ReviewOpenError:
        """Return what came of a call, also that it waits at a gate: whatever else ends the turn outranks that."""
        try:
            return await self._call(call, turn, index, resolved)
        except ReviewOpenError as put_down:
            return put_down

    async def _call(self, call: ToolCall, turn: int, index: int, resolved: ToolEffect | None) -> ToolEffect:
        if resolved is not None:
            return resolved
        name = effect_name(self._order.instance, turn, f"call-{index}")
        if self._delegations is not None and self._is_delegation(call):
            return await self._delegate(self._delegations, call, name)
        bound = cast("BoundTool", self._tools.get(call.name))  # unknown ones are settled
        clock = self._scope.ports.clock
        started_at = clock.now()
        # Also when the call is repeated: a process that was replaced is stopped here, before the effect.
        await self._scope.note(
            name,
            ToolIntended(tool_name=call.name, arguments=call.arguments, effect=bound.effect),
            # The tool depends on the answer that asked for it, also one that only reads: it may end this process.
            until=Persistence.COMMITTED if bound.effect == "none" else Persistence.SYNCED,
        )
        context, reviews = self._context(call.name, name)
        try:
            with self._scope.effect_span(name):
                called = await call_tool(bound, call.arguments, context=context)
            outcome = self._bound_retries(call, called)
        except ExitEarlyError as exit_early:
            self._leave(call, name, started_at, exit_early)
            raise
        finally:
            if reviews is not None:
                reviews.close()
            self._open -= 1
            self._scope.slot.end()
        if reviews is not None:
            reviews.check_decided()
        effect = ToolEffect(
            call=call,
            outcome=outcome.outcome,
            text=outcome.text,
            started_at=started_at,
            duration_s=max(0.0, clock.now() - started_at),
            structured_output=outcome.structured_output,
            asks_again=outcome.asks_again,
            repairs=outcome.repairs,
        )
        # The last one waits for all: the next model call depends on them. What may be read again need not wait before.
        is_safe_later = bound.effect == "none" and self._open > 0
        await self._scope.note(
            name, _result_of(effect), until=Persistence.QUEUED if is_safe_later else Persistence.COMMITTED
        )
        return effect

    def _leave(self, call: ToolCall, name: str, started_at: float, exit_early: ExitEarlyError) -> None:
        """Note a call that asks for the end of the run: that end tells of it on record (S-DUR-138), and no event does.

        Not of a budget that is spent: with a larger one the call is made again.
        """
        effects = self._scope.effects
        if isinstance(exit_early, BudgetExhaustedError) or any(effects.leaving):
            return
        effects.leaving = (name, str(exit_early))
        effect = ToolEffect(
            call=call,
            outcome="success",
            text=describe_exit(str(exit_early)),
            started_at=started_at,
            duration_s=max(0.0, self._scope.ports.clock.now() - started_at),
        )
        effects.models[-1].tools.append(effect)

    def _bound_retries(self, call: ToolCall, outcome: ToolOutcome) -> ToolOutcome:
        """Return the outcome; a tool that asks the model to try again too often has failed (S-TOOL-54)."""
        if not outcome.asks_again:
            return outcome
        if self._tries[call.name] < MOST_TRIES:
            self._tries[call.name] += 1
            return outcome
        text = f"Tool error: TryAgain: {outcome.text} (it was tried again {MOST_TRIES} times)"
        return replace(outcome, text=text, outcome="error", asks_again=False)

    async def _delegate(self, delegations: Delegations, call: ToolCall, name: str) -> ToolEffect:
        """Hand work on. There is no intent to note: the decision is on record, and a repetition repeats nothing."""
        try:
            effect, until = await delegations.call(call, name)
        finally:
            self._open -= 1
            self._scope.slot.end()
        await self._scope.note(name, _result_of(effect), until=until)
        return effect

    def _context(self, tool_name: str, effect: str) -> tuple[ToolContext, ToolReviews | None]:
        """Return what a call finds, and the handler of its questions."""
        order = self._order
        limits: list[TimeLimit] = []
        reviews = tool_reviews(self._scope, effect, limits)
        context = ToolContext(
            review_handler=reviews,
            sampler=None if self._model is None else ToolSampling(self._scope, effect, self._model),
            time_limits=limits,
            tool_name=tool_name,
            agent_role=order.agent_role,
            metrics=self._metrics,
            idempotency_key=key_of(self._scope, effect),
            emit=self._emit,
            run_id=order.run_id,
            instance=order.instance,
            task_index=order.index,
            log_truncate_length=self._scope.context.tool_log_truncate_length,
        )
        return context, reviews

    def _emit(self, event: Event) -> None:
        if self._scope.ports.events.wants(type(event)):
            self._scope.ports.events.emit(event)

    def _announce(self, effect: ToolEffect) -> None:
        if self._tools.get(effect.call.name) is None and not self._is_delegation(effect.call):  # S-SET-25
            return
        order = self._order
        self._scope.emit(
            ToolCallEvent,
            lambda: ToolCallEvent(
                tool_name=effect.call.name,
                tool_arguments=effect.call.arguments,
                tool_result=effect.text,
                structured_result=effect.structured_output,
                agent_role=order.agent_role,
                duration=timedelta(seconds=effect.duration_s),
                task_index=order.index,
                outcome="success" if effect.outcome == "success" else "failure",
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
