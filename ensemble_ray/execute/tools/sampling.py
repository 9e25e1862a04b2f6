"""What a tool's server asks the agent's model in the middle of a call, as effects of the task. Package: execute.

In: a conversation. Out: the model's answer, on record before the server has it. Rules: the run's budget is asked before, the model's
rate limit and the retry policy hold, and a call that is made again, after a crash or after its server was lost, finds the answers to the
same questions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ensemble_ray.execute.agent.attempts import Attempts
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import use_effect_key
from ensemble_ray.process.threads import call_user
from ensemble_ray.values.ids import uuid_of
from ensemble_ray.values.messages import (
    ChatMessage,
    ChatResponse,
    TokenUsage,
    unusual_finish_reason,
    whole_response,
)

if TYPE_CHECKING:
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.ports import ChatModel

__all__ = ["ToolSampling"]


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
