"""What people told a run, as rows behind its tree and as data. Pure. In: what is recorded of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ensemble_ray.facts.directives import DirectiveFact, DirectiveRecorded, ModelSwitched
from ensemble_ray.record.view.texts import row_text
from ensemble_ray.record.view.tree import TreeRow

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact

#: Characters of a text that are shown.
_TITLE = 200


def directives_in(facts: Iterable[Fact]) -> list[DirectiveFact]:
    """Return what people told the run, among facts, in order."""
    return [fact.data for fact in facts if isinstance(fact.data, DirectiveFact)]


def directive_rows(given: Iterable[DirectiveFact]) -> tuple[TreeRow, ...]:
    """Return a row for each directive: its text, who gave it, and when it expires; and for each choice of a model."""
    return tuple(_row(each) for each in given)


def directive_data(given: Iterable[DirectiveFact]) -> dict[str, list[dict[str, object]]]:
    """Return `directives` and `model_switches` as JSON data, those of which there are any."""
    directives: list[dict[str, object]] = []
    switches: list[dict[str, object]] = []
    for each in given:
        by = each.given_by or None
        if isinstance(each, DirectiveRecorded):
            directives.append({"text": each.text, "expires_at": _instant(each), "given_by": by})
        else:
            switches.append({"model": each.model, "agent": each.agent, "given_by": by})
    found = {"directives": directives, "model_switches": switches}
    return {name: rows for name, rows in found.items() if rows}


def _row(given: DirectiveFact) -> TreeRow:
    if isinstance(given, ModelSwitched):
        whose = "all agents" if given.agent is None else row_text(given.agent, _TITLE)
        chosen = "own" if given.model is None else row_text(given.model, _TITLE)
        by = (row_text(given.given_by, _TITLE),) if given.given_by else ()
        return TreeRow(depth=1, kind="directive", title=f"model of {whose}: {chosen}", details=by)
    until = _instant(given)
    details = tuple(filter(None, (row_text(given.given_by, _TITLE), f"until {until}" if until else "")))
    return TreeRow(depth=1, kind="directive", title=f"told: {row_text(given.text, _TITLE)}", details=details)


def _instant(given: DirectiveRecorded) -> str | None:
    if given.expires_at is None:
        return None
    return datetime.fromtimestamp(given.expires_at, UTC).isoformat(timespec="seconds")
