"""Words for people about runs. Package: studio. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from ensemble_ray.facts.lenient import as_mapping, as_text
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = ["exit_text", "team_name", "wire_status"]

#: Roles that stand for a team's name.
_ROLES = 4
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


def team_name(origin: str, header: PlanRecorded | None = None) -> str:
    """Return what a run's team is called: a file's name, or `module:attribute`; else the roles of its first agents.

    Args:
        origin: Where its definition came from; empty: from a program.
        header: The run's first fact, where it was read.
    """
    if origin or header is None:
        return PurePath(origin).name if "/" in origin else origin
    roles = (as_text(as_mapping(agent).get("role")) for agent in header.agents or ())
    return ", ".join([role for role in dict.fromkeys(roles) if role][:_ROLES])
