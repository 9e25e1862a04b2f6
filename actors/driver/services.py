"""What a run on the cluster asks of its driver, by name. An entry is a handler; whoever adds a service adds an entry.

In: the run as its driver asked for it. Out: handlers that take a request's data and return the answer; what they raise is the
asker's. Must never happen: a service that needs the cluster's answer to answer.
"""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from ensemble_ray.actors.link.packing import packed_evaluation
from ensemble_ray.actors.link.run_memory import MEMORY_SERVICE
from ensemble_ray.actors.link.run_reflections import REFLECTION_SERVICE
from ensemble_ray.coordinator.memory_resets import LocalMemoryResets
from ensemble_ray.definition.durability import OnUnknown
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.review.asking import REVIEW_SERVICE, answer_review
from ensemble_ray.execute.tools.unknown import ask_unknown
from ensemble_ray.execute.tools.unknown_effect import UnknownEffect
from ensemble_ray.process.threads import threads
from ensemble_ray.tools.metrics import record_metric

if TYPE_CHECKING:
    from ensemble_ray.definition.reflection_input import ReflectionInput
    from ensemble_ray.plan.units import LoopUnit
    from ensemble_ray.runs.ports import RunRequest
    from ensemble_ray.values.memory import MemoryNote, MemoryQuery
    from ensemble_ray.values.reflection import TaskReflection

__all__ = ["DriverService", "driver_services"]

#: Takes a request's data, returns the answer.
DriverService: TypeAlias = Callable[[Mapping[str, object]], Awaitable[object]]


def driver_services(run: RunRequest) -> Mapping[str, DriverService]:
    """Return the services of a run's driver, by name."""

    async def count_tool_call(payload: Mapping[str, object]) -> object:
        arguments = cast("Sequence[object]", payload["arguments"])
        return await threads.run(record_metric, run.tool_metrics, str(payload["method"]), *arguments)

    async def ask_about_effect(payload: Mapping[str, object]) -> object:
        how = run.on_unknown
        return await ask_unknown(UnknownEffect.from_dict(payload), None if isinstance(how, OnUnknown) else how)

    async def answer_scripted_model(payload: Mapping[str, object]) -> object:
        from ensemble_ray.testing.scripted import answer_scripted  # only where a scripted model takes part

        return await answer_scripted(payload)

    async def call_held_object(payload: Mapping[str, object]) -> object:
        from ensemble_ray.memory.held import answer_held  # only where a tool of memory takes part

        return await answer_held(payload)

    async def review(payload: Mapping[str, object]) -> object:
        if run.reviewer is None:
            raise IllegalStateError(f"Run {run.run_id} has nobody to ask at its review gates")
        return await answer_review(run.reviewer, payload)

    async def use_memory(payload: Mapping[str, object]) -> object:
        return await _use_memory(run, payload)

    async def use_reflections(payload: Mapping[str, object]) -> object:
        return await _use_reflections(run, payload)

    return {
        "tool_metrics": count_tool_call,
        "unknown_effect": ask_about_effect,
        "scripted_model.chat": answer_scripted_model,
        REVIEW_SERVICE: review,
        MEMORY_SERVICE: use_memory,
        REFLECTION_SERVICE: use_reflections,
        "held_object": call_held_object,
    }


async def _use_memory(run: RunRequest, payload: Mapping[str, object]) -> object:
    """Do what a task or a loop asks of the run's memory."""
    if run.memory is None:
        raise IllegalStateError(f"Run {run.run_id} has no memory")
    asked: object = pickle.loads(cast("bytes", payload["body"]))  # noqa: S301  bytes of our own cluster
    match payload["method"]:
        case "recall":
            return await run.memory.recall(cast("MemoryQuery", asked))
        case "remember":
            return await run.memory.remember(cast("MemoryNote", asked))
        case _:
            failed = await LocalMemoryResets(run.memory).reset(cast("LoopUnit", asked))
            return None if failed is None else packed_evaluation(failed)  # whoever asks loads nothing of the user's


async def _use_reflections(run: RunRequest, payload: Mapping[str, object]) -> object:
    """Do what a task asks of the run's reflections."""
    if run.reflections is None:
        raise IllegalStateError(f"Run {run.run_id} has no store of reflections")
    asked: object = pickle.loads(cast("bytes", payload["body"]))  # noqa: S301  bytes of our own cluster
    match payload["method"]:
        case "recall":
            return await run.reflections.recall(*cast("tuple[str]", asked))
        case "find_prior":
            return await run.reflections.find_prior(*cast("tuple[str]", asked))
        case "store":
            await run.reflections.store(*cast("tuple[str, TaskReflection]", asked))
            return None
        case _:
            return await run.reflections.ask_strategy(*cast("tuple[ReflectionInput]", asked))
