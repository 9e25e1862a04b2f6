"""What a step did, as its row tells it: model calls, calls of tools, reviews. Package: studio. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.facts.effects import ModelAnswered, ToolIntended, ToolReturned
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested

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
            state.begin(answer.started_at)
            state.spend("model", answer.started_at, answer.started_at + answer.latency_s)
            state.count(int(answer.input_tokens), int(answer.output_tokens))
            turn = fact.name.rpartition("/")[0]
            for number, call in enumerate(answer.tool_calls):
                if call.name.startswith(_DELEGATING):  # such a call has no intent
                    state.asked[f"{turn}/call-{number}"] = call.name
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


def _apply_result(state: StepState, name: str, result: ToolReturned) -> None:
    state.open_calls.discard(name)
    ended = result.started_at + max(0.0, result.duration_s)
    if name.endswith("/handler"):
        state.spend("other", result.started_at, ended)
        return
    outcome = "skipped" if result.outcome.startswith("skipped") else result.outcome
    state.spend("tool", result.started_at, ended)
    state.call(state.intents.get(name) or state.asked.pop(name, _DELEGATING), outcome, ended)
    state.has_unknown = state.has_unknown or result.is_unknown
