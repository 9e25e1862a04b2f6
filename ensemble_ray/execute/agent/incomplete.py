"""Incomplete answers: what is said of them; how several requests for one answer appear as one. Package: execute. Pure.

Rules:
1. An answer is incomplete where it comes to no good end, or where it is empty (S-ENG-36).
2. One that is not accepted is asked for again `MOST_REPEATS` times at most, with the same conversation (S-ENG-38).
3. What all requests for an answer spent is spent: tokens are added up.
"""

from __future__ import annotations

from dataclasses import replace

from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.values.messages import STREAM_CUT, TokenUsage
from ensemble_ray.values.metrics import add_tokens

__all__ = ["MOST_REPEATS", "asked_again", "incomplete_text", "join_answers"]

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
    other = "the model's answer came to no good end", _OTHER_ADVICE
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
