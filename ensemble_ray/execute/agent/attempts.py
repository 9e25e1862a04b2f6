"""Attempts at one model answer: retries, repeats of incomplete answers, and the facts of answers."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from msgspec import structs

from ensemble_ray.errors import CircuitOpenError, IllegalStateError
from ensemble_ray.errors.texts import brief
from ensemble_ray.errors.travel import status_of
from ensemble_ray.execute.agent.context_window import estimated_input
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.execute.scope import Spending, TaskScope
from ensemble_ray.facts.effects import MOST_WAITS, ModelAnswered, ModelWait
from ensemble_ray.facts.fact import Fact, require_usable
from ensemble_ray.llm.failures import ProviderFault, backoff_s, fault_of, patience_asked_s
from ensemble_ray.llm.fallback import FILTER_WORDS, Fallback, ModelFailures, When, chain_of
from ensemble_ray.llm.limits.endpoints import EndpointCall
from ensemble_ray.llm.names import NO_NAMES, ModelNames, declared_names, model_names
from ensemble_ray.llm.prices import price_mark
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
        self.model = model  # which is asked
        self.place = 0  # of the model in its chain
        self._label = ""  # begins reasons: the model of a chain
        self._earlier = 0  # failed attempts of other models at the newest answer
        self._is_chained = False
        self._is_left_if_open = False  # whether an open breaker ends the call of this model immediately
        self._template = template or scope.order.agent_key or scope.order.agent_role
        self._policy = scope.context.retry if may_repeat else None
        self.failed: list[str] = []  # reasons of failed attempts at the newest answer
        self.waits: list[ModelWait] = []  # before its last attempt
        self.max_attempts = 0 if self._policy is None else self._policy.max_attempts
        self.estimated: tuple[int, int] | None = None  # (input, output) tokens of the newest answer

    @property
    def names(self) -> ModelNames:
        """The names of the model that answered."""
        return model_names(self.model)

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
        ports, effects, policy = self._scope.ports, self._scope.effects, self._policy
        if not self._is_chained:
            self.failed, self.waits = [], []
            effects.attempts, effects.waits, effects.max_attempts = 0, self.waits, self.max_attempts
        request = None
        if ports.spending is not None:
            request = ports.spending.request(self._template, self.model, messages, tools)
        left_s = 0.0 if policy is None else policy.max_wait.total_seconds()
        endpoint: object = "" if policy is None else getattr(self.model, "endpoint_id", "")
        call = ports.endpoints.open_call(endpoint) if isinstance(endpoint, str) and endpoint else None
        last: BaseException | None = None
        try:
            while True:
                if call is not None and not call.try_begin():  # first, since a waiting attempt holds no permit
                    left_s -= await self._wait_for(call, 0.0 if self._is_left_if_open else left_s, last)
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
        policy, attempt = self._policy, len(self.failed) - self._earlier + 1
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
        self.failed.append(f"{self._label}{_describe(fault)}")
        self._note_wait("retry", self.failed[-1], self._scope.ports.clock.now(), delay_s)
        self._scope.effects.retry_count += 1
        _log.warning(
            "Task '%s': attempt %d of %d at %s failed, again in %.3g s: %s",
            self._scope.order.key,
            attempt,
            policy.max_attempts,
            getattr(self.model, "endpoint_id", "") or type(self.model).__name__,
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


class ChainAttempts(Attempts):
    """Attempts with the models of a chain: an answer begins with the model of the last one (S-FBK-12)."""

    def __init__(
        self,
        scope: TaskScope,
        chain: Fallback,
        *,
        use: Callable[[ChatModel], None] | None = None,
        template: str | None = None,
    ) -> None:
        """`use` receives each further model before it is asked."""
        super().__init__(scope, chain.first_model, template=template)
        self._chain = chain
        self._use = use
        self._is_chained = True
        self._choose(0)

    @property
    def names(self) -> ModelNames:
        return self._chain.names_at(self.place)

    def stay_with(self, names: ModelNames) -> None:
        """Begin with the model of a recorded answer."""
        self._choose(self._chain.find(names))

    async def answer(
        self,
        attempt: Callable[[], Awaitable[ChatResponse]],
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        pieces: Sequence[str] = (),
    ) -> ChatResponse:
        """Make the attempts of one model after the other until one answers (S-FBK-10 to S-FBK-14)."""
        effects = self._scope.effects
        self.failed, self.waits = [], []
        effects.attempts, effects.waits, effects.max_attempts = 0, self.waits, self.max_attempts
        places = await self._places(messages, tools)
        failures = ModelFailures(self._chain)
        refused: list[tuple[TokenUsage, tuple[int, int] | None]] = []  # answers that a content filter cut
        for number, place in enumerate(places, start=1):
            is_last = number == len(places)
            self._choose(place)
            self._earlier, self._is_left_if_open = len(self.failed), not is_last and "breaker" in self._chain.on
            effects.waits = self.waits
            try:
                response = await super().answer(attempt, messages, tools, pieces)
            except Exception as error:
                fault = fault_of(error)
                text = failures.note(place, error if fault is None else _describe(fault))
                if is_last or pieces or self._chain.reason_of(error) is None:
                    failures.raise_all(error)
                    raise
                self._move_on(text, was_asked=not isinstance(error, CircuitOpenError))
            else:
                reason = None if is_last or pieces else self._chain.reason_of_answer(response)
                if reason is None:
                    return self._with_refused(refused, response) if refused else response
                refused.append((response.usage or TokenUsage(), self.estimated))
                self._move_on(failures.note(place, _explain(reason)[0]), was_asked=True)
        raise IllegalStateError("the last model of a chain neither answered nor failed")

    def _with_refused(
        self, refused: Sequence[tuple[TokenUsage, tuple[int, int] | None]], response: ChatResponse
    ) -> ChatResponse:
        """Return the answer with the tokens of the refused ones."""
        usage, self.estimated = _joined([*refused, (response.usage or TokenUsage(), self.estimated)])
        return replace(response, usage=usage)

    async def _places(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Sequence[int]:
        """Return the places of the models to ask, in order, without those that rules leave out (S-FBK-20)."""
        first = 0
        for rule in self._chain.when:
            place = self._chain.place_of(rule)
            if place <= first or not await self._holds(rule, messages, tools):
                continue
            first = place
            if place > self.place:
                now = self._scope.ports.clock.now()
                self._note_wait("rule", f"{rule}: {self._chain.names[place]} is asked", now, 0.0)
        start = max(first, self.place)
        return [start, *(place for place in range(first, len(self._chain.models)) if place != start)]

    async def _holds(self, rule: When, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> bool:
        scope = self._scope
        if rule.tokens_above is not None and estimated_input(messages, tools) <= rule.tokens_above:
            return False
        limit_s = rule.run_time_above_s
        if limit_s is not None and scope.ports.clock.now() - scope.context.began_at <= limit_s:
            return False
        if rule.budget_above is None:
            return True
        spending = scope.ports.spending
        return spending is not None and await spending.account.share_spent() > rule.budget_above

    def _choose(self, place: int) -> None:
        self._label = f"{self._chain.names[place]}: "
        if place == self.place:
            return
        self.place, self.model = place, self._chain.models[place]
        if self._use is not None:
            self._use(self.model)

    def _move_on(self, text: str, *, was_asked: bool) -> None:
        """Record the failure of a model before the next one is asked."""
        if was_asked:
            self.failed.append(text)
            self._scope.effects.retry_count += 1
        self._note_wait("fallback" if was_asked else "skipped", text, self._scope.ports.clock.now(), 0.0)
        _log.warning("Task '%s': the next model of the chain is asked. %s", self._scope.order.key, text)


async def chat(model: ChatModel, messages: Sequence[ChatMessage]) -> ChatResponse:
    return checked_response(await call_user(model.chat, list(messages)))  # the model may keep the list


async def ask_once(
    scope: TaskScope, model: ChatModel, messages: Sequence[ChatMessage], name: str, *, template: str | None = None
) -> tuple[ChatResponse, Attempts, float]:
    """Call a model for an effect outside the agent loop. Return answer, attempts, and start of the last one."""
    started_at, key = 0.0, uuid_of(f"{scope.order.run_id}/{name}")
    messages = scope.clean(messages)

    async def attempt() -> ChatResponse:
        nonlocal started_at
        started_at = scope.ports.clock.now()
        with use_effect_key(key_at(key, attempts.place) if attempts.place else key):
            return await chat(attempts.model, messages)

    chain = chain_of(model)
    if chain is None:
        attempts = Attempts(scope, model, template=template)
    else:
        attempts = ChainAttempts(scope, chain, template=template)
    return scope.clean(await attempts.answer(attempt, messages)), attempts, started_at


def key_at(key: str, place: int) -> str:
    """Return the key of a request to a further model of a chain: endpoints may store answers by key."""
    return uuid_of(f"{key}/model-{place}")


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
_CUT_OFF_ADVICE = "Raise max_tokens of its model, or ask for a shorter answer."
_FILTER_ADVICE = "Reword the task, or ask another model."
#: (word in a provider's reason, problem, advice); the first match counts
_CAUSES = (
    ("length", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("token", "the model's answer was cut off", _CUT_OFF_ADVICE),
    ("context", "the model's answer was cut off: its context is full", "Ask for less at once, or set context_budget."),
    *(
        (word, "the model's answer was cut off by the provider's content filter", _FILTER_ADVICE)
        for word in FILTER_WORDS
    ),
)


def incomplete_text(role: str, reason: str) -> str:
    problem, advice = _explain(reason)
    return f"Agent '{brief(role)}': {problem}. {advice}"


def repeat_text(role: str, reason: str, repeat: int) -> str:
    return f"Agent '{brief(role)}': {_explain(reason)[0]}; asked again ({repeat} of {MOST_REPEATS})"


def join_answers(before: ModelEffect, reason: str, after: ModelEffect) -> ModelEffect:
    """Return the later answer, with the tokens and failed attempts of both."""
    total, estimated = _joined([(each.response.usage or TokenUsage(), each.estimated) for each in (before, after)])
    repeat = ModelWait("repeat", _explain(reason)[0], before.started_at + before.latency_s, 0.0)
    return structs.replace(
        after,
        response=replace(after.response, usage=total),
        attempts_failed=(*before.attempts_failed, _explain(reason)[0], *after.attempts_failed),
        waits=(*before.waits, repeat, *after.waits)[:MOST_WAITS],
        estimated=estimated,
    )


def _joined(
    parts: Sequence[tuple[TokenUsage, tuple[int, int] | None]],
) -> tuple[TokenUsage, tuple[int, int] | None]:
    """Return the sums of the tokens of several answers, and of their estimates if one has an estimate."""
    usages = [usage for usage, _ in parts]
    total = TokenUsage(
        add_tokens(each.input_tokens for each in usages),
        add_tokens(each.output_tokens for each in usages),
        add_tokens(each.reasoning_tokens for each in usages),
        add_tokens(each.cached_tokens for each in usages),
        add_tokens(each.cache_write_tokens for each in usages),
    )
    if all(estimated is None for _, estimated in parts):
        return total, None
    counts = [estimated or (usage.input_tokens, usage.output_tokens) for usage, estimated in parts]
    return total, (sum(count[0] for count in counts), sum(count[1] for count in counts))


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


def declared_model(scope: TaskScope, model: ChatModel, names: ModelNames) -> ModelNames:
    """Return those of a model's `names` that the record has without the answers of a task."""
    if scope.order.agent is not None:  # the task is in no plan
        return scope.context.declared_model
    return NO_NAMES if scope.order.switches else declared_names(model, names)


def answer_of(request_digest: str, effect: ModelEffect, declared: ModelNames) -> ModelAnswered:
    """Return the fact of an answer. It names the model that answered if that is not the `declared` one (S-FBK-41)."""
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
        cached_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        finish_reason=unusual_finish_reason(response),
        provider_fields=response.provider_fields,
        estimated_tokens=effect.estimated or (),
        retries=effect.retries,
        attempts_failed=effect.attempts_failed,
        waits=effect.waits,
        max_attempts=effect.max_attempts,
        waited_s=effect.waited_s,
        model=None if effect.model == declared.model else effect.model,
        provider=None if effect.provider == declared.provider else effect.provider,
        reuse_digest=effect.reuse_digest,
        reused=effect.reused,
        reused_tokens=effect.reused_tokens,
        price=effect.price,
        delivery=effect.delivery,
    )


def effect_of(answer: ModelAnswered) -> ModelEffect:
    response = ChatResponse(
        text=answer.text,
        tool_calls=answer.tool_calls,
        usage=TokenUsage(
            int(answer.input_tokens),
            int(answer.output_tokens),
            int(answer.reasoning_tokens),
            int(answer.cached_tokens),
            int(answer.cache_write_tokens),
        ),
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
        model=answer.model,
        provider=answer.provider,
        reuse_digest=answer.reuse_digest,
        reused=answer.reused,
        reused_tokens=answer.reused_tokens,
        price=answer.price,
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
        estimated: tuple[int, int] | None = None

        async def ask(model: ChatModel) -> ChatResponse:
            nonlocal estimated

            async def attempt() -> ChatResponse:
                nonlocal started_at
                started_at = time.time()
                offered = (tools,) if tools else ()
                with use_permit_wait(wait):
                    return whole_response(await call_user(model.chat, messages, *offered))

            if self._spending is None:
                return await attempt()
            request = self._spending.request("synthesis", model, messages, tools)
            response = await request.send(attempt)
            estimated = request.estimated
            return response

        chain = chain_of(self._model)
        model, response = (self._model, await ask(self._model)) if chain is None else await chain.first_answer(ask)
        names = model_names(model)
        effect = ModelEffect(
            started_at=started_at,
            latency_s=time.time() - started_at,
            response=response,
            is_final=True,
            waited_s=wait.waited_s,
            estimated=estimated,
            model=names.model,
            provider=names.provider,
            price=None if self._spending is None else price_mark(self._spending.costs, model),
        )
        self._store(Fact(run=self._run_id, name=self._name, at=time.time(), data=answer_of("", effect, NO_NAMES)))
        return response
