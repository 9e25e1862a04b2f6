"""What a step did, as its row tells it: model calls, calls of tools, reviews. Package: studio. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.facts.effects import ModelAnswered, ToolIntended, ToolReturned
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.values.metrics import add_tokens

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.studio.views.step_state import StepState

__all__ = ["apply_effect"]

#: How the tools are called that hand work on.
_DELEGATING = "delegate"


def apply_effect(state: StepState, fact: Fact) -> None:
    """Take the next fact of a step's work; those that its row does not tell of only say that it began."""
    match fact.data:
        case ModelAnswered() as answer:
            _apply_answer(state, fact.name, answer)
        case SamplingAnswered() as answer:
            state.count(int(answer.input_tokens), int(answer.output_tokens))
        case MemoryRecalled(embedding_tokens=tokens) | MemoryStored(embedding_tokens=tokens):
            state.begin(fact.at)
            state.input_tokens = add_tokens((state.input_tokens, tokens))
        case ToolIntended() as intent:
            state.begin(fact.at)
            state.is_repeated = state.is_repeated or fact.name in state.intents
            state.intents[fact.name] = intent.tool_name
            state.open_calls.add(fact.name)
        case ToolReturned() as result:
            state.begin(result.started_at)
            _apply_result(state, fact.name, result)
        case ReviewRequested():
            state.begin(fact.at)
            state.gates.setdefault(fact.name, fact.at)
            state.status = "waiting"
        case ReviewDecided():
            state.is_reviewed = True
            asked_at = state.gates.pop(fact.name, None)
            if asked_at is not None:
                state.spend("person", asked_at, fact.at)
            if not state.gates and not state.is_ended:
                state.status = "running"
        case _:
            state.begin(fact.at)


def _apply_answer(state: StepState, name: str, answer: ModelAnswered) -> None:
    state.begin(answer.started_at)
    _spend_answer(state, answer)
    state.count(int(answer.input_tokens), int(answer.output_tokens))
    turn = name.rpartition("/")[0]
    for number, call in enumerate(answer.tool_calls):
        if call.name.startswith(_DELEGATING):  # such a call has no intent
            state.asked[f"{turn}/call-{number}"] = call.name


def _spend_answer(state: StepState, answer: ModelAnswered) -> None:
    """Tell the wait for permits of rate limits apart from the time that the model took."""
    asked_at = answer.started_at + min(answer.waited_s, max(0.0, answer.latency_s))
    if answer.waited_s:
        state.spend("rate_limit", answer.started_at, asked_at)
    state.spend("model", asked_at, answer.started_at + answer.latency_s)


def _apply_result(state: StepState, name: str, result: ToolReturned) -> None:
    state.open_calls.discard(name)
    ended = result.started_at + max(0.0, result.duration_s)
    if name.endswith("/handler"):
        state.spend("other", result.started_at, ended)
        return
    if name.endswith("/runner"):  # its answer is told of as that of a model
        state.has_unknown = state.has_unknown or result.is_unknown
        return
    outcome = "skipped" if result.outcome.startswith("skipped") else result.outcome
    state.spend("tool", result.started_at, ended)
    state.call(state.intents.get(name) or state.asked.pop(name, _DELEGATING), outcome, ended)
    state.has_unknown = state.has_unknown or result.is_unknown
