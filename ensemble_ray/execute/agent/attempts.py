"""Attempts at one answer of a model: repeated when the provider fails, as the run's policy allows.

In: a call to make. Out: its answer, or the error of the last attempt. Each attempt asks its endpoint's breaker and limit
first, and takes a permit of its rate limit by itself; waiting holds neither. Must never happen: a second attempt after
a refusal, after an error of user code, or of a stream that has begun (S-DUR-61).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.errors import CircuitOpenError
from ensemble_ray.errors.texts import brief
from ensemble_ray.errors.travel import status_of
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.llm.failures import ProviderFault, backoff_s, fault_of, patience_asked_s
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.messages import STREAM_CUT, TokenUsage
from ensemble_ray.values.metrics import add_tokens

if TYPE_CHECKING:
    from ensemble_ray.definition.run_options import RetryPolicy
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.llm.limits.endpoints import Visit
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.values.messages import ChatResponse


_log = bounded_logger(__name__)


class Attempts:
    """Makes the attempts of one task's model calls, one answer after the other."""

    def __init__(self, scope: TaskScope, model: ChatModel, *, may_repeat: bool = True) -> None:
        self._scope = scope
        self._model = model
        self._policy = scope.context.retry if may_repeat else None
        #: of the newest answer: why each attempt before it failed
        self.failed: list[str] = []

    async def answer(self, send: Callable[[], Awaitable[ChatResponse]], has_begun: Callable[[], bool]) -> ChatResponse:
        """Ask until there is an answer, or no further attempt is allowed.

        Args:
            send: Makes one attempt.
            has_begun: Whether a part of the answer has been passed on already.

        Raises:
            CircuitOpenError: the endpoint fails for everybody, and the policy's patience is used up.
        """
        self.failed = []
        self._scope.effects.attempts = 0
        if self._policy is None:
            self._scope.effects.attempts = 1
            return await send()
        visit = self._visit()
        try:
            return await self._repeat(self._policy, visit, send, has_begun)
        finally:
            if visit is not None:
                visit.end()

    def _visit(self) -> Visit | None:
        """None for a model that does not say which endpoint it asks: there is nothing to know of others' failures."""
        endpoint: object = getattr(self._model, "endpoint_id", "")
        return self._scope.ports.endpoints.visit(endpoint) if isinstance(endpoint, str) and endpoint else None

    async def _repeat(
        self,
        policy: RetryPolicy,
        visit: Visit | None,
        send: Callable[[], Awaitable[ChatResponse]],
        has_begun: Callable[[], bool],
    ) -> ChatResponse:
        left_s = policy.max_wait.total_seconds()
        last: BaseException | None = None
        try:
            while True:
                if visit is not None and not visit.try_go():
                    left_s -= await _wait(visit, left_s, last)
                self._scope.effects.attempts += 1
                try:
                    response = await send()
                except BaseException as error:
                    fault = fault_of(error)
                    _notify(visit, error, fault)
                    delay_s = None if fault is None or has_begun() else self._delay(policy, fault, left_s)
                    if fault is None or delay_s is None:
                        raise
                    self._note(policy, fault, delay_s)
                    last = error
                else:
                    if visit is not None:
                        visit.record_answer()
                    return response
                await self._scope.ports.clock.sleep(delay_s)
                left_s -= delay_s
        finally:
            del last  # its traceback holds this frame

    def _delay(self, policy: RetryPolicy, fault: ProviderFault, left_s: float) -> float | None:
        """How long to wait before the next attempt; None: there is none (S-DUR-62)."""
        attempt = len(self.failed) + 1
        if attempt >= policy.max_attempts:
            return None
        delay_s = patience_asked_s(fault.retry_after, self._scope.ports.clock.now())
        if delay_s is None:
            delay_s = backoff_s(
                attempt,
                first_s=policy.first_delay.total_seconds(),
                longest_s=policy.max_delay.total_seconds(),
                jitter=random.random(),  # noqa: S311  spreads load, keeps no secret
            )
        return delay_s if delay_s <= left_s else None

    def _note(self, policy: RetryPolicy, fault: ProviderFault, delay_s: float) -> None:
        """Count a retry, and say so (S-DUR-66)."""
        self.failed.append(_brief(fault))
        self._scope.effects.retry_count += 1
        order = self._scope.order
        _log.warning(
            "Task '%s': attempt %d of %d at %s failed, again in %.3g s: %s",
            order.key,
            len(self.failed),
            policy.max_attempts,
            getattr(self._model, "endpoint_id", "") or type(self._model).__name__,
            delay_s,
            _brief(fault),
        )


async def _wait(visit: Visit, patience_s: float, last: BaseException | None) -> float:
    try:
        return await visit.wait(patience_s)
    except CircuitOpenError as is_open:
        raise is_open from last


def _notify(visit: Visit | None, error: BaseException, fault: ProviderFault | None) -> None:
    """Let the endpoint's breaker and limit know what came of an attempt."""
    if visit is None:
        return
    if fault is None or fault.is_bad_generation:
        # A refusal shows that somebody is there; a cancelled call shows nothing, nor does a mistake in a model's code.
        report = visit.leave if status_of(error) is None else visit.record_answer
        report()
    elif fault.is_refusal_for_now:
        visit.record_refusal()
    else:
        visit.record_failure(_brief(fault), ago_s=fault.ago_s)


def _brief(fault: ProviderFault) -> str:
    return f"{fault.what}: {brief(fault.text)}"


#: Further requests for an answer that is not accepted.
MOST_REPEATS = 2
#: How providers name their content filters.
_FILTERS = ("filter", "safety", "sensitive", "refus", "guardrail", "block", "prohibit", "recitation", "spii")
_CUT_OFF_ADVICE = "Raise max_tokens of its model, or ask for a shorter answer."
_FILTER_ADVICE = "Reword the task, or ask another model."
#: Words in the reasons of the providers, each with what it means and what to do; the first that is found counts.
_CAUSES = (
    ("length", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("token", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("context", "the model's answer was cut off: its context is full", "Ask for less at once, or set context_budget."),
    *((word, "the model's answer was cut off by the provider's content filter", _FILTER_ADVICE) for word in _FILTERS),
)
_EMPTY_ADVICE = "Reword the task, raise max_tokens of its model, or ask another model."
_STREAM_ADVICE = (
    "The endpoint or a proxy on the way ended it early. Set on_incomplete='retry' to ask again, or stream=False."
)
_OTHER_ADVICE = "The provider's documentation explains the reason. Set on_incomplete='retry' to ask again."


def incomplete_text(role: str, reason: str) -> str:
    """Return what is wrong with an answer and what to do about it."""
    what, advice = _explain(reason)
    return f"Agent '{brief(role)}': {what}. {advice}"


def asked_again(role: str, reason: str, repeat: int) -> str:
    """Return the log line of a further request."""
    return f"Agent '{brief(role)}': {_explain(reason)[0]}; asked again ({repeat} of {MOST_REPEATS})"


def join_answers(before: ModelEffect, reason: str, after: ModelEffect) -> ModelEffect:
    """Return the later of two answers to one request, with what both of them took."""
    usage = (before.response.usage or TokenUsage(), after.response.usage or TokenUsage())
    spent = TokenUsage(
        add_tokens(each.input_tokens for each in usage),
        add_tokens(each.output_tokens for each in usage),
        add_tokens(each.reasoning_tokens for each in usage),
    )
    failed = (*before.attempts_failed, _explain(reason)[0], *after.attempts_failed)
    return replace(
        after,
        response=replace(after.response, usage=spent),
        attempts_failed=failed,
        estimated=_add_estimates(before, after),
    )


def _explain(reason: str) -> tuple[str, str]:
    """Return what is wrong with an answer, and what to do about it."""
    if reason == "empty":
        return "the model's answer is empty", _EMPTY_ADVICE
    if reason == STREAM_CUT:
        return f"the stream of the model's answer ended before the answer did ('{STREAM_CUT}')", _STREAM_ADVICE
    other = "the model stopped for an unknown reason", _OTHER_ADVICE
    what, advice = next(((what, advice) for word, what, advice in _CAUSES if word in reason), other)
    return f"{what} (finish_reason '{reason}')", advice


def _add_estimates(before: ModelEffect, after: ModelEffect) -> tuple[int, int] | None:
    """Return what a budget counted for both; None where the provider counted all of it."""
    if before.estimated is None and after.estimated is None:
        return None
    first, second = (_count_tokens(effect) for effect in (before, after))
    return first[0] + second[0], first[1] + second[1]


def _count_tokens(effect: ModelEffect) -> tuple[int, int]:
    if effect.estimated is not None:
        return effect.estimated
    usage = effect.response.usage or TokenUsage()
    return usage.input_tokens, usage.output_tokens
