"""Attempts at one model answer: retries, repeats of incomplete answers, and the facts of answers."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ensemble_ray.errors import CircuitOpenError
from ensemble_ray.errors.texts import brief
from ensemble_ray.errors.travel import status_of
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.execute.scope import Spending, TaskScope
from ensemble_ray.facts.effects import MOST_WAITS, ModelAnswered, ModelWait
from ensemble_ray.facts.fact import Fact, require_usable
from ensemble_ray.llm.failures import ProviderFault, backoff_s, fault_of, patience_asked_s
from ensemble_ray.llm.limits.endpoints import EndpointCall
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.process.context import PermitWait, bounded_logger, use_effect_key, use_permit_wait
from ensemble_ray.values.ids import uuid_of
from ensemble_ray.values.messages import (
    STREAM_CUT,
    ChatMessage,
    ChatResponse,
    TokenUsage,
    ToolSpec,
    unusual_finish_reason,
    whole_response,
)
from ensemble_ray.values.metrics import add_tokens

_log = bounded_logger(__name__)
_SHORTEST_S = 0.001  # of a wait for the limit of calls in flight


class Attempts:
    """Makes the attempts of one task's model calls, one answer after the other."""

    def __init__(
        self, scope: TaskScope, model: ChatModel, *, template: str | None = None, may_repeat: bool = True
    ) -> None:
        self._scope = scope
        self._model = model
        self._template = template or scope.order.agent_key or scope.order.agent_role
        self._policy = scope.context.retry if may_repeat else None
        self.failed: list[str] = []  # reasons of failed attempts at the newest answer
        self.waits: list[ModelWait] = []  # before its last attempt
        self.max_attempts = 0 if self._policy is None else self._policy.max_attempts
        self.estimated: tuple[int, int] | None = None  # (input, output) tokens of the newest answer

    async def answer(
        self,
        attempt: Callable[[], Awaitable[ChatResponse]],
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        pieces: Sequence[str] = (),
    ) -> ChatResponse:
        """Make attempts until there is an answer, or raise the last error, or `CircuitOpenError`.

        No retry follows a refusal, an error of user code, or a partial answer in `pieces` (S-DUR-61).
        """
        self.failed, self.waits = [], []
        ports, effects, policy = self._scope.ports, self._scope.effects, self._policy
        effects.attempts, effects.waits, effects.max_attempts = 0, self.waits, self.max_attempts
        request = None
        if ports.spending is not None:
            request = ports.spending.request(self._template, self._model, messages, tools)
        left_s = 0.0 if policy is None else policy.max_wait.total_seconds()
        endpoint: object = "" if policy is None else getattr(self._model, "endpoint_id", "")
        call = ports.endpoints.open_call(endpoint) if isinstance(endpoint, str) and endpoint else None
        last: BaseException | None = None
        try:
            while True:
                if call is not None and not call.try_begin():  # first, since a waiting attempt holds no permit
                    left_s -= await self._wait_for(call, left_s, last)
                effects.attempts += 1
                try:
                    response = await (attempt() if request is None else request.send(attempt))
                except BaseException as error:
                    delay_s = self._delay_after(error, call, left_s, has_begun=bool(pieces))
                    if delay_s is None:
                        raise
                    last = error
                else:
                    if call is not None:
                        call.record_answer()
                    break
                await ports.clock.sleep(delay_s)
                left_s -= delay_s
        finally:
            del last  # break the cycle: its traceback refers to this frame
            if call is not None:
                call.end()
        self.estimated = None if request is None else request.estimated
        effects.waits = ()
        return response

    def _delay_after(
        self, error: BaseException, call: EndpointCall | None, left_s: float, *, has_begun: bool
    ) -> float | None:
        """Report a failed attempt; return the wait before the next one, None: no further attempt (S-DUR-62)."""
        policy, attempt = self._policy, len(self.failed) + 1
        fault = None if policy is None else fault_of(error)
        if call is not None:
            _report(call, error, fault)
        if policy is None or fault is None or has_begun or attempt >= policy.max_attempts:
            return None
        delay_s = patience_asked_s(fault.retry_after, self._scope.ports.clock.now())
        if delay_s is None:
            delay_s = backoff_s(
                attempt,
                first_s=policy.first_delay.total_seconds(),
                longest_s=policy.max_delay.total_seconds(),
                jitter=random.random(),  # noqa: S311  spreads load
            )
        if delay_s > left_s:
            return None
        self.failed.append(_describe(fault))
        self._note_wait("retry", self.failed[-1], self._scope.ports.clock.now(), delay_s)
        self._scope.effects.retry_count += 1
        _log.warning(
            "Task '%s': attempt %d of %d at %s failed, again in %.3g s: %s",
            self._scope.order.key,
            attempt,
            policy.max_attempts,
            getattr(self._model, "endpoint_id", "") or type(self._model).__name__,
            delay_s,
            self.failed[-1],
        )
        return delay_s

    async def _wait_for(self, call: EndpointCall, patience_s: float, last: BaseException | None) -> float:
        """Wait until a call of the endpoint may begin; return the part of the wait that its breaker caused, s."""
        clock = self._scope.ports.clock
        began, breaker_s = clock.now(), patience_s
        try:
            breaker_s = await call.wait(patience_s)
        except CircuitOpenError as is_open:
            raise is_open from last
        finally:
            if breaker_s:
                self._note_wait("breaker", f"circuit breaker open: {call.last_failure}", began, breaker_s)
            if (limit_s := clock.now() - began - breaker_s) >= _SHORTEST_S:
                self._note_wait("limit", "limit of calls in flight after HTTP 429", began, limit_s)
        return breaker_s

    def _note_wait(self, cause: str, reason: str, at: float, wait_s: float) -> None:
        if len(self.waits) < MOST_WAITS:
            self.waits.append(ModelWait(cause, reason, at, wait_s))


async def chat(model: ChatModel, messages: Sequence[ChatMessage]) -> ChatResponse:
    return checked_response(await call_user(model.chat, list(messages)))  # the model may keep the list


async def ask_once(
    scope: TaskScope, model: ChatModel, messages: Sequence[ChatMessage], name: str, *, template: str | None = None
) -> tuple[ChatResponse, Attempts, float]:
    """Call a model for an effect outside the agent loop. Return answer, attempts, and start of the last one."""
    started_at, key = 0.0, uuid_of(f"{scope.order.run_id}/{name}")

    async def attempt() -> ChatResponse:
        nonlocal started_at
        started_at = scope.ports.clock.now()
        with use_effect_key(key):
            return await chat(model, messages)

    attempts = Attempts(scope, model, template=template)
    return await attempts.answer(attempt, messages), attempts, started_at


def checked_response(response: object, *, keep_reasoning: bool = False) -> ChatResponse:
    if not isinstance(response, ChatResponse):
        raise TypeError(f"model returned {type(response).__name__} instead of a ChatResponse")
    return whole_response(response, keep_reasoning=keep_reasoning)


def _report(call: EndpointCall, error: BaseException, fault: ProviderFault | None) -> None:
    if fault is None or fault.is_bad_generation:
        # A refusal is an answer of the endpoint. A cancelled call, or an error of a model's code, is none.
        report = call.abandon if status_of(error) is None else call.record_answer
        report()
    elif fault.is_refusal_for_now:
        call.record_refusal()
    else:
        call.record_failure(_describe(fault), ago_s=fault.ago_s)


def _describe(fault: ProviderFault) -> str:
    return f"{fault.what}: {brief(fault.text)}"


MOST_REPEATS = 2
#: Words of content filters in providers' reasons.
_FILTERS = ("filter", "safety", "sensitive", "refus", "guardrail", "block", "prohibit", "recitation", "spii")
_CUT_OFF_ADVICE = "Raise max_tokens of its model, or ask for a shorter answer."
_FILTER_ADVICE = "Reword the task, or ask another model."
#: (word in a provider's reason, problem, advice); the first match counts
_CAUSES = (
    ("length", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("token", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("context", "the model's answer was cut off: its context is full", "Ask for less at once, or set context_budget."),
    *((word, "the model's answer was cut off by the provider's content filter", _FILTER_ADVICE) for word in _FILTERS),
)


def incomplete_text(role: str, reason: str) -> str:
    problem, advice = _explain(reason)
    return f"Agent '{brief(role)}': {problem}. {advice}"


def repeat_text(role: str, reason: str, repeat: int) -> str:
    return f"Agent '{brief(role)}': {_explain(reason)[0]}; asked again ({repeat} of {MOST_REPEATS})"


def join_answers(before: ModelEffect, reason: str, after: ModelEffect) -> ModelEffect:
    """Return the later answer, with the tokens and failed attempts of both."""
    usage = (before.response.usage or TokenUsage(), after.response.usage or TokenUsage())
    total = TokenUsage(
        add_tokens(each.input_tokens for each in usage),
        add_tokens(each.output_tokens for each in usage),
        add_tokens(each.reasoning_tokens for each in usage),
    )
    estimated = None
    if before.estimated is not None or after.estimated is not None:
        counts = [
            effect.estimated or (count.input_tokens, count.output_tokens)
            for effect, count in zip((before, after), usage, strict=True)
        ]
        estimated = (counts[0][0] + counts[1][0], counts[0][1] + counts[1][1])
    repeat = ModelWait("repeat", _explain(reason)[0], before.started_at + before.latency_s, 0.0)
    return replace(
        after,
        response=replace(after.response, usage=total),
        attempts_failed=(*before.attempts_failed, _explain(reason)[0], *after.attempts_failed),
        waits=(*before.waits, repeat, *after.waits)[:MOST_WAITS],
        estimated=estimated,
    )


def _explain(reason: str) -> tuple[str, str]:
    if reason == "empty":
        advice = "Reword the task, raise max_tokens of its model, or ask another model."
        return "the model's answer is empty", advice
    if reason == STREAM_CUT:
        advice = "The endpoint or a proxy on the way ended it early. Set on_incomplete='retry' to ask again, or stream=False."
        return f"the stream of the model's answer ended before the answer did ('{STREAM_CUT}')", advice
    for word, problem, advice in _CAUSES:
        if word in reason:
            return f"{problem} (finish_reason '{reason}')", advice
    advice = "The provider's documentation explains the reason. Set on_incomplete='retry' to ask again."
    return f"the model stopped for an unknown reason (finish_reason '{reason}')", advice


def answer_of(request_digest: str, effect: ModelEffect) -> ModelAnswered:
    response = effect.response
    usage = response.usage or TokenUsage()
    return ModelAnswered(
        request_digest=request_digest,
        started_at=effect.started_at,
        latency_s=effect.latency_s,
        text=response.text,
        tool_calls=tuple(response.tool_calls),
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        reasoning=response.reasoning,
        reasoning_tokens=usage.reasoning_tokens,
        finish_reason=unusual_finish_reason(response),
        provider_fields=response.provider_fields,
        estimated_tokens=effect.estimated or (),
        retries=effect.retries,
        attempts_failed=effect.attempts_failed,
        waits=effect.waits,
        max_attempts=effect.max_attempts,
        waited_s=effect.waited_s,
        delivery=effect.delivery,
    )


def effect_of(answer: ModelAnswered) -> ModelEffect:
    response = ChatResponse(
        text=answer.text,
        tool_calls=answer.tool_calls,
        usage=TokenUsage(int(answer.input_tokens), int(answer.output_tokens), int(answer.reasoning_tokens)),
        finish_reason=answer.finish_reason,
        reasoning=answer.reasoning,
        provider_fields=answer.provider_fields,
    )
    return ModelEffect(
        started_at=answer.started_at,
        latency_s=answer.latency_s,
        response=response,
        is_final=True,
        attempts_failed=answer.attempts_failed,
        waits=answer.waits,
        max_attempts=answer.max_attempts,
        waited_s=answer.waited_s,
        delivery=answer.delivery,
    )


class RecordedModel:
    """Records model calls outside of tasks, such as calls of a synthesizer (S-SET-46)."""

    def __init__(
        self,
        model: ChatModel,
        run_id: str,
        name: str,
        store: Callable[[Fact], object],
        *,
        recorded: Sequence[Fact[ModelAnswered]] = (),
        spending: Spending | None = None,
    ) -> None:
        """Wrap a model; `store` receives its facts. The `recorded` answers of a resumed run replace its first calls."""
        self._model = model
        self._run_id = run_id
        self._name = name
        self._store = store
        self._recorded = iter(recorded)
        self._spending = spending

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        if (fact := next(self._recorded, None)) is not None:
            return effect_of(require_usable(fact).data).response
        started_at, wait = 0.0, PermitWait(time.time)

        async def attempt() -> ChatResponse:
            nonlocal started_at
            started_at = time.time()
            offered = (tools,) if tools else ()
            with use_permit_wait(wait):
                return whole_response(await call_user(self._model.chat, messages, *offered))

        estimated: tuple[int, int] | None = None
        if self._spending is None:
            response = await attempt()
        else:
            request = self._spending.request("synthesis", self._model, messages, tools)
            response = await request.send(attempt)
            estimated = request.estimated
        effect = ModelEffect(
            started_at=started_at,
            latency_s=time.time() - started_at,
            response=response,
            is_final=True,
            waited_s=wait.waited_s,
            estimated=estimated,
        )
        self._store(Fact(run=self._run_id, name=self._name, at=time.time(), data=answer_of("", effect)))
        return response
