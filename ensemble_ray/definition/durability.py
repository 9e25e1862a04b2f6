"""The words that choose what a run records, and what becomes of an effect whose outcome nobody knows. Package: definition."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Durability", "OnUnknown"]


class Durability(StrEnum):
    """How safe a run's facts are before it goes on."""

    #: committed before the next step depends on them; nothing recorded is ever repeated
    EFFECTS = "effects"
    #: committed within 200 ms, and at the run's end; a crash may repeat what was not committed yet
    RUN = "run"
    #: nothing is written; the run cannot be looked at later, nor resumed
    OFF = "off"


class OnUnknown(StrEnum):
    """What becomes of a tool call that was begun before a crash and has no recorded result."""

    #: the model is told that the outcome is unknown, and decides
    TELL_MODEL = "tell_model"
    #: the task fails
    FAIL = "fail"
    #: a person is asked at the terminal
    ASK = "ask"
