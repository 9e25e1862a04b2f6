"""What people told a run while it went on, which tasks were told, and which models were chosen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ensemble_ray.facts.fact import FactData, Key
from ensemble_ray.facts.shapes import INSTANT, TEXT, list_of, optional


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveRecorded(FactData):
    """A person gave a run a directive; tasks that start later are told."""

    KIND: ClassVar = "directive"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "text": Key(TEXT, "", is_needed=True),
        "expires_at": Key(optional(INSTANT), is_optional=True),
        "given_by": Key(TEXT, "", is_optional=True),
    }

    text: str
    #: Unix time, s; tasks that start then or later are not told; None: it does not expire
    expires_at: float | None = None
    #: empty: nobody asked who it is
    given_by: str = ""

    def is_active(self, at: float) -> bool:
        """Return whether a task that starts at that time is told."""
        return self.expires_at is None or at < self.expires_at


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectivesShown(FactData):
    """The directives that a task's prompt shows; it shows them again where the task goes on."""

    KIND: ClassVar = "directives_shown"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"texts": Key(list_of(TEXT), (), is_needed=True, read=tuple, write=list)}

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSwitched(FactData):
    """A person chose the model that tasks ask which start later."""

    KIND: ClassVar = "model_switched"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "model": Key(optional(TEXT), is_needed=True),
        "agent": Key(optional(TEXT), is_optional=True),
        "given_by": Key(TEXT, "", is_optional=True),
    }

    #: its name in the run's catalog; None: each agent's own again
    model: str | None
    #: role of the agent whose tasks are meant; None: those of all
    agent: str | None = None
    #: empty: nobody asked who it is
    given_by: str = ""


#: What people told a run, in its record.
DirectiveFact: TypeAlias = DirectiveRecorded | ModelSwitched
