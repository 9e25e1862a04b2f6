"""Attempts at one answer of a model: retries after provider failures, and repeats of incomplete answers."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from ensemble_ray.definition.run_options import RetryPolicy
from ensemble_ray.errors import CircuitOpenError
from ensemble_ray.errors.texts import brief
from ensemble_ray.errors.travel import status_of
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.llm.failures import ProviderFault, backoff_s, fault_of, patience_asked_s
from ensemble_ray.llm.limits.endpoints import EndpointCall
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import call_user
from ensemble_ray.values.messages import STREAM_CUT, ChatMessage, ChatResponse, TokenUsage, ToolSpec, whole_response
from ensemble_ray.values.metrics import add_tokens

_log = bounded_logger(__name__)


class Attempts:
    """Makes the attempts of one task's model calls, one answer after the other."""

    def __init__(
        self, scope: TaskScope, model: ChatModel, *, template: str | None = None, may_repeat: bool = True
    ) -> None:
        self._scope = scope
        self._model = model
        #: kind of agent, for the run's budget
        self._template = template or scope.order.agent_key or scope.order.agent_role
        self._policy = scope.context.retry if may_repeat else None
        #: reasons of the failed attempts at the newest answer
        self.failed: list[str] = []
        #: (input, output) tokens of the newest answer that the budget counted, if the provider did not
        self.estimated: tuple[int, int] | None = None

    async def answer(
        self,
        attempt: Callable[[], Awaitable[ChatResponse]],
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        has_begun: Callable[[], bool] = lambda: False,
    ) -> ChatResponse:
        """Make attempts until there is an answer, or the policy allows no more of them; then raise the last error.

        There is no retry after a refusal, an error of user code, or a part of the answer (`has_begun`; S-DUR-61). If the
        endpoint's circuit breaker is open longer than the policy waits, `CircuitOpenError` is raised.
        """
        self.failed = []
        spending, request, send = self._scope.ports.spending, None, attempt
        if spending is not None:
            request = spending.request(self._template, self._model, messages, tools)
            send = partial(request.send, attempt)
        response = await self._send(send, has_begun)
        self.estimated = None if request is None else request.estimated
        return response

    async def _send(self, send: Callable[[], Awaitable[ChatResponse]], has_begun: Callable[[], bool]) -> ChatResponse:
        self._scope.effects.attempts = 0
        if self._policy is None:
            self._scope.effects.attempts = 1
            return await send()
        # A model without an endpoint id shares no breaker with others.
        endpoint: object = getattr(self._model, "endpoint_id", "")
        call = self._scope.ports.endpoints.open_call(endpoint) if isinstance(endpoint, str) and endpoint else None
        try:
            return await self._repeat(self._policy, call, send, has_begun)
        finally:
            if call is not None:
                call.end()

    async def _repeat(
        self,
        policy: RetryPolicy,
        call: EndpointCall | None,
        send: Callable[[], Awaitable[ChatResponse]],
        has_begun: Callable[[], bool],
    ) -> ChatResponse:
        left_s = policy.max_wait.total_seconds()
        last: BaseException | None = None
        try:
            while True:
                # The endpoint's breaker and limit come first. A waiting attempt holds no permit.
                if call is not None and not call.try_begin():
                    try:
                        left_s -= await call.wait(left_s)
                    except CircuitOpenError as is_open:
                        raise is_open from last
                self._scope.effects.attempts += 1
                try:
                    response = await send()
                except BaseException as error:
                    fault = fault_of(error)
                    if call is not None:
                        _report(call, error, fault)
                    delay_s = None if fault is None or has_begun() else self._delay(policy, fault, left_s)
                    if fault is None or delay_s is None:
                        raise
                    self._note_retry(policy, fault, delay_s)
                    last = error
                else:
                    if call is not None:
                        call.record_answer()
                    return response
                await self._scope.ports.clock.sleep(delay_s)
                left_s -= delay_s
        finally:
            del last  # break the cycle: its traceback refers to this frame

    def _delay(self, policy: RetryPolicy, fault: ProviderFault, left_s: float) -> float | None:
        """Return the time to wait before the next attempt; None: there is none (S-DUR-62)."""
        attempt = len(self.failed) + 1
        if attempt >= policy.max_attempts:
            return None
        delay_s = patience_asked_s(fault.retry_after, self._scope.ports.clock.now())
        if delay_s is None:
            delay_s = backoff_s(
                attempt,
                first_s=policy.first_delay.total_seconds(),
                longest_s=policy.max_delay.total_seconds(),
                jitter=random.random(),  # noqa: S311  spreads load
            )
        return delay_s if delay_s <= left_s else None

    def _note_retry(self, policy: RetryPolicy, fault: ProviderFault, delay_s: float) -> None:
        """Count and log a retry (S-DUR-66)."""
        self.failed.append(_describe(fault))
        self._scope.effects.retry_count += 1
        _log.warning(
            "Task '%s': attempt %d of %d at %s failed, again in %.3g s: %s",
            self._scope.order.key,
            len(self.failed),
            policy.max_attempts,
            getattr(self._model, "endpoint_id", "") or type(self._model).__name__,
            delay_s,
            _describe(fault),
        )


async def chat(
    model: ChatModel, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = (), *, keep_reasoning: bool = False
) -> ChatResponse:
    """Call a model once, and check its answer."""
    offered = (tuple(tools),) if tools else ()
    response: object = await call_user(model.chat, list(messages), *offered)  # the model may keep the list
    return checked_response(response, keep_reasoning=keep_reasoning)


def checked_response(response: object, *, keep_reasoning: bool = False) -> ChatResponse:
    if not isinstance(response, ChatResponse):
        raise TypeError(f"model returned {type(response).__name__} instead of a ChatResponse")
    return whole_response(response, keep_reasoning=keep_reasoning)


def _report(call: EndpointCall, error: BaseException, fault: ProviderFault | None) -> None:
    """Report a failed attempt to the endpoint's breaker and limit."""
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


# Incomplete answers.

#: Most repeats of a request after incomplete answers.
MOST_REPEATS = 2
#: Words in providers' reasons for their content filters.
_FILTERS = ("filter", "safety", "sensitive", "refus", "guardrail", "block", "prohibit", "recitation", "spii")
_CUT_OFF_ADVICE = "Raise max_tokens of its model, or ask for a shorter answer."
_FILTER_ADVICE = "Reword the task, or ask another model."
#: (word in a provider's reason, problem, advice); the first word that occurs counts
_CAUSES = (
    ("length", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("token", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("context", "the model's answer was cut off: its context is full", "Ask for less at once, or set context_budget."),
    *((word, "the model's answer was cut off by the provider's content filter", _FILTER_ADVICE) for word in _FILTERS),
)


def incomplete_text(role: str, reason: str) -> str:
    """Return the problem of an incomplete answer, with advice."""
    problem, advice = _explain(reason)
    return f"Agent '{brief(role)}': {problem}. {advice}"


def repeat_text(role: str, reason: str, repeat: int) -> str:
    """Return the log line of a repeated request."""
    return f"Agent '{brief(role)}': {_explain(reason)[0]}; asked again ({repeat} of {MOST_REPEATS})"


def join_answers(before: ModelEffect, reason: str, after: ModelEffect) -> ModelEffect:
    """Return the later of two answers to one request, with the tokens and failed attempts of both."""
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
    return replace(
        after,
        response=replace(after.response, usage=total),
        attempts_failed=(*before.attempts_failed, _explain(reason)[0], *after.attempts_failed),
        estimated=estimated,
    )


def _explain(reason: str) -> tuple[str, str]:
    """Return the problem of an incomplete answer, and advice."""
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
