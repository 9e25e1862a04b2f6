"""Which run a text means, and what to say of an id that is taken. Pure; one rule for every store.

In: what a user wrote, and the ids that there are. Out: one id. Never: a guess between several.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.outputs import RunState

_STANDING = {
    RunState.COMPLETED: "is finished: choose another run_id",
    RunState.FAILED: "has failed: choose another run_id",
    RunState.CANCELLED: "was cancelled: resume it, or choose another run_id",
    RunState.WAITING: "waits for reviews: decide them and resume it, or choose another run_id",
    RunState.BUDGET_EXHAUSTED: "spent its budget: resume it with a larger one, or choose another run_id",
}
_INTERRUPTED = "was interrupted: resume it, or choose another run_id"


def describe_conflict(run_id: str, state: RunState) -> str:
    """Return what to tell somebody who wants to begin a run of an id that nobody owns and that has recorded something."""
    return f"Run '{run_id}' {_STANDING.get(state, _INTERRUPTED)}"


def chosen_id(text: str, known: Sequence[str], newest: Callable[[], Sequence[str]], location: str) -> str:
    """Return the run of that id, the only one whose id begins so, or the newest for `latest`.

    Args:
        text: What a user wrote.
        known: All ids.
        newest: Gives them with the newest first; only asked where that matters.
        location: Where they are, for people.

    Raises:
        ValidationError: there is none, or several; the message names the nearest.
    """
    if text in known:
        return text
    if not known:
        asked = "There are" if text == "latest" else f"Unknown run '{text}': there are"
        raise ValidationError(f"{asked} no runs in {location}")
    if text == "latest":
        return newest()[0]
    begins = sorted(each for each in known if text and each.startswith(text))
    if len(begins) == 1:
        return begins[0]
    if begins:
        raise ValidationError(f"Several runs begin with '{text}': [{', '.join(begins[:5])}]")
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.5)
    shown = near or list(newest())[:3]
    raise ValidationError(
        f"Unknown run '{text}' in {location}. {'Nearest' if near else 'Newest'}: [{', '.join(shown)}]"
    )
