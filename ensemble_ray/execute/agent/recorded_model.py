"""Conversion of model answers to facts and back, and a model that records its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.execute.scope import Spending
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact, require_usable
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.context import PermitWait, use_permit_wait
from ensemble_ray.process.forks import call_user
from ensemble_ray.values.messages import (
    ChatMessage,
    ChatResponse,
    TokenUsage,
    ToolSpec,
    unusual_finish_reason,
    whole_response,
)


def answer_of(request_digest: str, effect: ModelEffect) -> ModelAnswered:
    """Return the fact of an answer."""
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
        waited_s=effect.waited_s,
    )


def effect_of(answer: ModelAnswered) -> ModelEffect:
    """Return the answer of a fact."""
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
        waited_s=answer.waited_s,
    )


class RecordedModel:
    """Records the model calls outside of tasks, such as calls of an LLM-based synthesizer (S-SET-46)."""

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
        """Return the next recorded answer, or call the model and record its answer."""
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
