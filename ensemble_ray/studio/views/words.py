"""Words for people about runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ensemble_ray.values.outputs import ExitReason, RunState

_EXITS: Mapping[ExitReason, str] = {
    ExitReason.COMPLETED: "All of it is done.",
    ExitReason.USER_EXIT_EARLY: "Somebody ended it early, with what was done.",
    ExitReason.TIMEOUT: "Nobody decided at a review in time, so it ended with what was done.",
    ExitReason.ERROR: "It failed.",
    ExitReason.CANCELLED: "Somebody cancelled it.",
    ExitReason.BUDGET_EXHAUSTED: "What it may spend was spent; with a larger budget it goes on.",
    ExitReason.WAITING: "It waits for decisions of people.",
}
_INTERRUPTED = "Nobody works on it any more, and it has not ended; it can be resumed."


def exit_text(reason: ExitReason | None, state: RunState) -> str | None:
    """Return why a run ended, in words; None while it goes on."""
    if state.is_going_on:
        return None
    if state is RunState.INTERRUPTED:
        return _INTERRUPTED
    return None if reason is None else _EXITS[reason]


def wire_status(state: RunState) -> str:
    """Return the endpoint's word for how a run stands (S-SRV-3)."""
    return "accepted" if state is RunState.PENDING else state.value
