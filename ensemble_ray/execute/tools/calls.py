"""Tool calls of a task: tool set, record, events, and parallel calls."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.errors import (
    AgentExecutionError,
    BudgetExhaustedError,
    ExitEarlyError,
    IllegalStateError,
    ValidationError,
)
from ensemble_ray.errors.texts import agent_failure, brief
from ensemble_ray.events import ToolCallEvent
from ensemble_ray.events.telemetry.listener import effect_span
from ensemble_ray.execute.agent.attempts import ask_once, declared_model
from ensemble_ray.execute.attachments import check_readable, store_results
from ensemble_ray.execute.delegation.delegations import Delegations
from ensemble_ray.execute.effects import CallOutcome, ToolEffect
from ensemble_ray.execute.review.gates import ReviewOpenError, ToolReviews, can_repeat_at_gate, tool_reviews
from ensemble_ray.execute.scope import TaskScope, describe_exit
from ensemble_ray.execute.tools.unknown import is_unrepeatable, key_of, lost_intent, resolve_unknown
from ensemble_ray.facts.effects import SamplingAnswered, ToolIntended, ToolReturned
from ensemble_ray.llm.names import added_names, model_names
from ensemble_ray.llm.prices import price_mark
from ensemble_ray.ports import ChatModel, Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.run_context import CURRENT_RUN, OUTSIDE_RUN
from ensemble_ray.tools.call import BATCH_LIMIT_S, call_batch, call_tool, truncate_output
from ensemble_ray.tools.registry import BoundAgentTool, BoundTool, ResolvedTools, expand_providers, resolve_tools
from ensemble_ray.tools.tool import (
    AbstractAgentTool,
    ContextAgentTool,
    ToolContext,
    ToolOutcome,
    mention,
    use_tool_context,
)
from ensemble_ray.tools.user_code import GuardedToolMetrics, TimeLimit
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.messages import (
    ChatMessage,
    ChatResponse,
    TokenUsage,
    ToolCall,
    ToolSpec,
    unusual_finish_reason,
)

_log = bounded_logger(__name__)
MOST_TRIES = 3  # most times that one tool may ask the model to try again (S-TOOL-54)
_NO_TOOLS = ResolvedTools()


class ToolCalls:
    def __init__(
        self, scope: TaskScope, tools: ResolvedTools, delegations: Delegations | None, model: ChatModel | None
    ) -> None:
        self._scope = scope
        self._model = model
        self._order = scope.order
        self._tools = tools
        self.delegations = delegations
        self._metrics = GuardedToolMetrics(scope.ports.tool_metrics)
        self._open = 0
        self._warned: set[tuple[str, str]] = set()  # possibly lost ones that the model was warned of
        self._tries: Counter[str] = Counter()  # requests of each tool to try again
        #: visible to the model; the delegation tool comes first (S-TOOL-30)
        self.specs: Sequence[ToolSpec] = tools.specs if delegations is None else (delegations.spec, *tools.specs)

    @classmethod
    async def of(cls, scope: TaskScope, agent: Agent) -> ToolCalls:
        """Return the tools of an agent; dynamic providers are expanded once (S-TOOL-32)."""
        delegations = Delegations.of(scope, agent)
        reserved = () if delegations is None else (delegations.spec.name,)
        tools = _NO_TOOLS
        if agent.tools:
            reviews = tool_reviews(scope, "", ())
            context = ToolContext(
                agent_role=scope.order.agent_role, review_handler=reviews, run=CURRENT_RUN.get(OUTSIDE_RUN)
            )
            with use_tool_context(context):
                tools = resolve_tools(await expand_providers(agent.tools), reserved=reserved)
        if delegations is not None and tools.get(delegations.spec.name) is not None:
            raise ValidationError(f"Duplicate tool name: '{delegations.spec.name}'")  # S-ENG-60, S-TOOL-34
        return cls(scope, tools, delegations, agent.llm)

    async def run(self, calls: Sequence[ToolCall], turn: int) -> list[tuple[ToolEffect, str]]:
        """Run a turn's calls in parallel; return (effect, text for the model) in order. May end the run."""
        if not calls:
            return []
        resolved = await self._resolve_recorded(calls, turn)

        async def call_to_gate(index: int, call: ToolCall) -> ToolEffect | ReviewOpenError:
            try:
                return resolved.get(index) or await self._call(
                    call, effect_name(self._order.instance, turn, f"call-{index}")
                )
            except ReviewOpenError as suspended:  # other errors of the turn have precedence
                return suspended

        self._open = len(calls) - len(resolved)
        self._scope.slot.begin(self._open)
        try:
            await self._decide_delegations(calls, turn, resolved)
            ended = await call_batch(
                [partial(call_to_gate, index, call) for index, call in enumerate(calls)],
                agent_role=self._order.agent_role,
                task_description=self._order.task.description,
                # Workers and persons have their own limits (S-TOOL-83).
                limit_s=None if any(map(self._is_delegation, calls)) or self._may_ask(calls) else BATCH_LIMIT_S,
            )
        except IllegalStateError as error:  # a tool is configured wrongly (S-ENG-58)
            role = self._order.agent_role
            raise AgentExecutionError(agent_failure(role, error), role, self._order.task.description) from error
        except asyncio.CancelledError:  # the calls themselves are cancelled only later
            if self.delegations is not None:
                self.delegations.record_stop()
            raise
        await self._scope.slot.acquire()
        if waiting := [review for each in ended if isinstance(each, ReviewOpenError) for review in each.reviews]:
            raise ReviewOpenError(waiting)
        effects = [each for each in ended if isinstance(each, ToolEffect)]
        for effect in effects:
            self._announce(effect)
        limit = self._scope.context.max_tool_output_length
        return [
            (effect, effect.text if effect.outcome == "unknown" else truncate_output(effect.text, limit))
            for effect in effects
        ]

    async def _resolve_recorded(self, calls: Sequence[ToolCall], turn: int) -> dict[int, ToolEffect]:
        """Return calls to skip, by index: recorded results (S-DUR-22), unknown tools, unknown outcomes.

        They are resolved before any call: a person may have to decide, and the task may fail.
        """
        resolved: dict[int, ToolEffect] = {}
        warned: set[tuple[str, str]] = set()
        for index, call in enumerate(calls):
            name = effect_name(self._order.instance, turn, f"call-{index}")
            recorded = self._scope.find_recorded(name, ToolReturned)
            if recorded is not None:
                resolved[index] = effect = _recorded_effect(call, recorded.data)
                self._tries[call.name] += effect.asks_again
                if self._scope.loss is not None and recorded.seq > self._scope.loss.seq:
                    warned.add((call.name, call.arguments))
                continue
            bound = self._tools.get(call.name)
            intent = self._scope.find_recorded(name, ToolIntended)
            if intent is None and bound is not None and (call.name, call.arguments) not in self._warned:
                intent = lost_intent(self._scope, name, call.name, call.arguments, bound.effect)
                warned.add((call.name, call.arguments))
            if can_repeat_at_gate(self._scope, name, asks_first=bound is not None and bound.asks_first):
                continue
            if intent is not None and is_unrepeatable(intent.data, "none" if bound is None else bound.effect):
                text = await resolve_unknown(self._scope, intent)
                if text is not None:
                    effect = ToolEffect(call=call, outcome="unknown", text=text, started_at=intent.at, duration_s=0.0)
                    await self._scope.note(name, _result_of(effect), until=Persistence.COMMITTED)
                    resolved[index] = effect
                    continue
            if bound is None and not self._is_delegation(call):
                _log.warning("Agent '%s' asked for unknown tool '%s'", self._order.agent_role, brief(call.name))
                text, now = f"Error: Unknown tool '{call.name}'", self._scope.ports.clock.now()
                resolved[index] = ToolEffect(call=call, outcome="failure", text=text, started_at=now, duration_s=0.0)
        self._warned |= warned  # now, since the model requests all calls of a turn before it is warned
        return resolved

    async def _decide_delegations(
        self, calls: Sequence[ToolCall], turn: int, resolved: Mapping[int, ToolEffect]
    ) -> None:
        """Decide all delegations of a turn before the first worker starts (S-SET-45)."""
        if self.delegations is None:
            return
        delegated = {index: call for index, call in enumerate(calls) if self._is_delegation(call)}
        await self.delegations.decisions.make(delegated, turn)
        for index, call in delegated.items():
            if index in resolved:
                name = effect_name(self._order.instance, turn, f"call-{index}")
                await self.delegations.reapply_recorded(call, name, resolved[index])

    def _is_delegation(self, call: ToolCall) -> bool:
        return self.delegations is not None and call.name == self.delegations.spec.name

    def _may_ask(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether a tool of these calls may ask a reviewer."""
        if self._scope.context.review_policy is None:
            return False
        return any(
            isinstance(bound.tool, AbstractAgentTool | ContextAgentTool)
            if isinstance(bound, BoundAgentTool)
            else bound is not None and bound.asks_first
            for bound in [self._tools.get(call.name) for call in calls]
        )

    async def _call(self, call: ToolCall, name: str) -> ToolEffect:
        if self.delegations is not None and self._is_delegation(call):
            try:  # without an intent, since the decision is recorded
                effect, until = await self.delegations.call(call, name)
            finally:
                self._open -= 1
                self._scope.slot.end()
            await self._scope.note(name, _result_of(effect), until=until)
            return effect
        bound = cast("BoundTool", self._tools.get(call.name))  # calls of unknown tools are resolved
        clock = self._scope.ports.clock
        started_at = clock.now()
        context, reviews = self._context(call.name, name)
        try:
            # Also before a repeated call: the journal stops a replaced process (S-DUR-3). A read's intent shares the
            # commit of its result.
            await self._scope.note(
                name,
                ToolIntended(tool_name=call.name, arguments=call.arguments, effect=bound.effect),
                until=Persistence.SOON if bound.effect == "none" else Persistence.SYNCED,
            )
            with effect_span(self._scope.context.tracing, name):
                outcome = self._bound_tries(call, await call_tool(bound, call.arguments, context=context))
            if outcome.attachments:
                outcome = await self._store_attachments(outcome)
        except ExitEarlyError as exit_early:
            self._note_exit(call, name, started_at, exit_early)
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
            log=outcome.log,
            attachments=outcome.attachments,
        )
        is_read = bound.effect == "none"  # the next model call may precede the commit of a read
        can_wait = is_read and (self._open > 0 or not self._scope.ports.events.wants(ToolCallEvent))
        await self._scope.note(name, _result_of(effect), until=Persistence.SOON if can_wait else Persistence.COMMITTED)
        return effect

    async def _store_attachments(self, outcome: ToolOutcome) -> ToolOutcome:
        """Store them under their hashes before the result is recorded (S-ATT-62)."""
        try:
            kept, others = await store_results(outcome.attachments, self._model, self._scope.ports.journal)
        except ValidationError as error:
            return replace(outcome, text=f"Tool error: {error}", outcome="error", attachments=())
        lines = [f"{mention(each)} was left out: the model does not read {each.kind} attachments" for each in others]
        return replace(outcome, text="\n".join([outcome.text, *lines]), attachments=kept)

    def _note_exit(self, call: ToolCall, name: str, started_at: float, exit_early: ExitEarlyError) -> None:
        """Keep a call that ended the run (S-DUR-138), except for its budget: that call is repeated."""
        effects = self._scope.effects
        if isinstance(exit_early, BudgetExhaustedError) or any(effects.early_exit):
            return
        effects.early_exit = (name, str(exit_early))
        effect = ToolEffect(
            call=call,
            outcome="success",
            text=describe_exit(str(exit_early)),
            started_at=started_at,
            duration_s=max(0.0, self._scope.ports.clock.now() - started_at),
        )
        effects.models[-1].tools.append(effect)

    def _bound_tries(self, call: ToolCall, outcome: ToolOutcome) -> ToolOutcome:
        if not outcome.asks_again:
            return outcome
        if self._tries[call.name] < MOST_TRIES:
            self._tries[call.name] += 1
            return outcome
        text = f"Tool error: TryAgain: {outcome.text} (it was tried again {MOST_TRIES} times)"
        return replace(outcome, text=text, outcome="error", asks_again=False)

    def _context(self, tool_name: str, effect: str) -> tuple[ToolContext, ToolReviews | None]:
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
            emit=lambda event: self._scope.emit(type(event), lambda: event),
            run_id=order.run_id,
            instance=order.instance,
            task_index=order.index,
            log_truncate_length=self._scope.context.tool_log_truncate_length,
            run=CURRENT_RUN.get(OUTSIDE_RUN),
        )
        return context, reviews

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


def _recorded_effect(call: ToolCall, recorded: ToolReturned) -> ToolEffect:
    return ToolEffect(
        call=call,
        outcome=cast("CallOutcome", recorded.outcome),
        text=recorded.text,
        started_at=recorded.started_at,
        duration_s=recorded.duration_s,
        structured_output=recorded.structured_output,
        asks_again=recorded.asks_again,
        repairs=recorded.repairs,
        log=recorded.log,
        attachments=recorded.attachments,
    )


def _result_of(effect: ToolEffect) -> ToolReturned:
    return ToolReturned(
        outcome=effect.outcome,
        text=effect.text,
        structured_output=effect.structured_output,
        started_at=effect.started_at,
        duration_s=effect.duration_s,
        asks_again=effect.asks_again,
        repairs=effect.repairs,
        log=effect.log,
        attachments=effect.attachments,
    )


class ToolSampling:
    """Calls the agent's model for the server of one tool call. Implements `AsksModel`."""

    def __init__(self, scope: TaskScope, call: str, model: ChatModel) -> None:
        self._scope = scope
        self._call = call
        self._model = model
        self._asked = 0
        self._answers: dict[str, SamplingAnswered] = {}  # of this process, by name

    def restart(self) -> None:
        """Restart the numbering for a repeated call."""
        self._asked = 0

    async def sample(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        scope, name = self._scope, f"{self._call}-sampling-{self._asked}"
        self._asked += 1
        parts: list[tuple[object, ...]] = []
        for each in messages:
            check_readable(self._model, each.attachments)
            parts.append((each.role, each.content, *(one.sha256 for one in each.attachments)))
        request = json.dumps(parts)
        digest = hashlib.sha256(request.encode()).hexdigest()
        answer = self._answers.get(name)
        if answer is None or answer.request_digest != digest:
            recorded = scope.find_recorded(name, SamplingAnswered)
            if recorded is not None and recorded.data.request_digest == digest:
                answer = recorded.data
            else:
                answer = await self._send(name, digest, messages)
                await scope.note(name, answer, until=Persistence.COMMITTED)
            self._answers[name] = answer
            scope.effects.sampled.append((name, answer))
        usage = TokenUsage(answer.input_tokens, answer.output_tokens)
        return ChatResponse(text=answer.text, usage=usage, finish_reason=answer.finish_reason)

    async def _send(self, name: str, digest: str, messages: Sequence[ChatMessage]) -> SamplingAnswered:
        response, attempts, started_at = await ask_once(self._scope, self._model, messages, name)
        usage = response.usage or TokenUsage()
        declared = declared_model(self._scope, self._model, model_names(self._model))
        names = added_names(attempts.names, declared)
        return SamplingAnswered(
            request_digest=digest,
            started_at=started_at,
            latency_s=max(0.0, self._scope.ports.clock.now() - started_at),
            text=response.text,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            finish_reason=unusual_finish_reason(response),
            estimated_tokens=attempts.estimated or (),
            model=names.model,
            provider=names.provider,
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            price=price_mark(self._scope.context.cost, attempts.model),
        )
