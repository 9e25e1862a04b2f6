"""Answers of earlier runs that replace the requests of a task with `reuse`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import cast

from ensemble_ray.errors import RecordError
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.agent.attempts import effect_of
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.ids import effect_name
from ensemble_ray.values.messages import JsonSchema, TokenUsage, ToolSpec, incomplete_reason
from ensemble_ray.values.task_output import full_name
from ensemble_ray.values.trace import jsonable

_log = bounded_logger(__name__)
#: Options that may contain keys, and options with such names. A changed key is no other request.
_HIDDEN = frozenset({"extra_headers"})
_SECRET_ENDINGS = ("key", "secret", "password", "authorization", "token")
_NAMES = ("model", "model_name", "provider_name", "base_url")


class AnswerReuse:
    """Finds recorded answers to the requests of one task."""

    def __init__(self, scope: TaskScope, model: object, *, keep_reasoning: bool) -> None:
        self._scope = scope
        self._model = f"{json.dumps(model_identity(model), sort_keys=True)} {keep_reasoning}"
        self._tools: Sequence[ToolSpec] = ()
        self._listed = "[]"  # the tools as text

    def digest(self, name: str, conversation: str, tools: Sequence[ToolSpec], schema: JsonSchema | None) -> str:
        """Return the SHA-256 of a request (S-USE-10). `conversation` is the digest of its messages."""
        if tools is not self._tools:
            rows = [(each.name, each.description, jsonable(each.parameters)) for each in tools]
            self._tools, self._listed = tools, json.dumps(rows, sort_keys=True)
        form = "" if schema is None or tools else json.dumps(jsonable(schema.schema), sort_keys=True)
        parts = (conversation, _repetition(name), self._model, self._listed, form)
        return sha256(json.dumps(parts).encode()).hexdigest()

    async def find(self, digest: str) -> ModelEffect | None:
        """Return the answer of an earlier run; None: ask the model."""
        ports, age = self._scope.ports, self._scope.order.task.reuse
        if ports.answers is None or age is None or self._scope.context.is_fork:
            return None
        began = ports.clock.now()
        try:
            found = await ports.answers.find_answer(
                digest, since=began - age.total_seconds(), run_id=self._scope.order.run_id
            )
        except RecordError as error:
            _log.warning(
                "Task '%s' asks its model, since stored answers cannot be read: %s",
                self._scope.order.key,
                brief(str(error)),
            )
            return None
        if found is None:
            return None
        effect = effect_of(found.data)
        usage = effect.response.usage or TokenUsage()
        return ModelEffect(
            started_at=began,
            latency_s=ports.clock.now() - began,
            response=replace(effect.response, usage=TokenUsage(0, 0, 0)),  # the run of the answer has paid for it
            is_final=True,
            model=effect.model,
            provider=effect.provider,
            reuse_digest=digest,
            reused=found.run,
            reused_tokens=(usage.input_tokens, usage.output_tokens),
        )


async def offer_answers(scope: TaskScope) -> None:
    """Offer the new answers of an accepted output to later runs (S-USE-20)."""
    answers, instance = scope.ports.answers, scope.order.instance
    offered = [
        (model.reuse_digest, effect_name(instance, turn), model.started_at + model.latency_s)
        for turn, model in enumerate(scope.effects.models)
        if model.reuse_digest and not model.reused and incomplete_reason(model.response) is None
    ]
    if answers is None or not offered:
        return
    try:
        await answers.offer_answers(scope.order.run_id, offered)
    except RecordError as error:
        _log.warning("Task '%s': later runs cannot reuse its answers: %s", scope.order.key, brief(str(error)))


def model_identity(model: object) -> dict[str, object]:
    """Return all that a model adds to its requests, without keys and headers (S-USE-11)."""
    # A rate limit changes no request, and a chain asks its first model first.
    while (inner := getattr(model, "delegate", None) or getattr(model, "first_model", None)) is not None:
        model = inner
    data: dict[str, object] = {"class": full_name(type(model))}
    data |= {name: value for name in _NAMES if (value := getattr(model, name, None)) is not None}
    options = getattr(model, "request_options", None)
    if isinstance(options, Mapping):
        data["options"] = {
            name: value
            for name, value in cast("Mapping[str, object]", options).items()
            if name not in _HIDDEN and not name.lower().endswith(_SECRET_ENDINGS)
        }
    return cast("dict[str, object]", jsonable(data))


def _repetition(name: str) -> str:
    """Return which repetition of its task a model call belongs to: its name without keys and first occurrences.

    Examples:
        >>> _repetition("map-17#0/0/model"), _repetition("loop:refine#2/writer#0/1/model")
        ('0/model', '#2/1/model')
    """
    parts = (part.rpartition("#") for part in name.split("/"))
    return "/".join(mark + number for _, mark, number in parts if (mark, number) != ("#", "0"))
