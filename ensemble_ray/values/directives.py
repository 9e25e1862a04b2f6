"""What people tell a run that goes on: a text for its tasks, or which model these ask. Package: values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from ensemble_ray.errors import ValidationError

__all__ = [
    "LONGEST_DIRECTIVE",
    "Directive",
    "ModelSwitch",
    "RunDirective",
    "add_switch",
    "check_directive",
    "model_for",
]

#: Characters of one directive: it stands in each prompt from then on.
LONGEST_DIRECTIVE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """A text for the tasks of a run that start while it is active."""

    text: str
    #: s from when the run takes it; None: until the run ends
    ttl_s: float | None = None
    #: who gave it; empty: nobody asked who it is
    given_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSwitch:
    """Which model of a run's catalog the tasks ask that start from then on."""

    #: its name in the catalog; None: each agent's own again
    model: str | None
    #: role of the agent whose tasks are meant; None: those of all
    agent: str | None = None
    #: who said so; empty: nobody asked who it is
    given_by: str = ""


#: What a run that goes on may be told.
RunDirective: TypeAlias = Directive | ModelSwitch


def add_switch(switches: Sequence[ModelSwitch], new: ModelSwitch) -> tuple[ModelSwitch, ...]:
    """Return the switches that count when another one was made: it takes the place of those that it covers."""
    kept = (each for each in switches if new.agent is not None and each.agent != new.agent)
    return (*kept, new)


def model_for(switches: Sequence[ModelSwitch], agent_role: str) -> str | None:
    """Return the name of the model that an agent asks; None: its own."""
    meant = [each for each in switches if each.agent in {None, agent_role}]
    return meant[-1].model if meant else None


def check_directive(text: str, ttl: timedelta | float | None, given_by: str = "") -> Directive:
    """Return the directive that a caller gives (S-CTL-4).

    Args:
        text: What tasks are told.
        ttl: How long it is active, a timedelta or seconds; None: until the run ends.
        given_by: Who gives it.

    Raises:
        ValidationError: the text is blank or too long, or the time is not positive.
    """
    if not text.strip():
        raise ValidationError("A directive must have a text")
    if len(text) > LONGEST_DIRECTIVE:
        raise ValidationError(f"A directive may have {LONGEST_DIRECTIVE:,} characters; this one has {len(text):,}")
    ttl_s = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
    if ttl_s is not None and not 0 < ttl_s < float("inf"):
        raise ValidationError(f"ttl must be positive, a timedelta or seconds; was {ttl}")
    return Directive(text=text, ttl_s=None if ttl_s is None else float(ttl_s), given_by=given_by)
