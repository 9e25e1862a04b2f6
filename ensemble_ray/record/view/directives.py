"""What people told a run, as rows behind its tree and as data. Package: record. Pure. In: what is recorded of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ensemble_ray.facts.directives import DirectiveGiven
from ensemble_ray.record.view.texts import row_text
from ensemble_ray.record.view.tree import TreeRow

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact

__all__ = ["directive_data", "directive_rows", "directives_in"]

#: Characters of a text that are shown.
_TITLE = 200


def directives_in(facts: Iterable[Fact]) -> list[DirectiveGiven]:
    """Return the directives among facts, in order."""
    return [fact.data for fact in facts if isinstance(fact.data, DirectiveGiven)]


def directive_rows(given: Iterable[DirectiveGiven]) -> tuple[TreeRow, ...]:
    """Return a row for each directive: its text, who gave it, and when it expires."""
    return tuple(_row(each) for each in given)


def directive_data(given: Iterable[DirectiveGiven]) -> list[dict[str, object]]:
    """Return directives as JSON data."""
    return [{"text": each.text, "expires_at": _instant(each), "given_by": each.given_by or None} for each in given]


def _row(given: DirectiveGiven) -> TreeRow:
    until = _instant(given)
    details = (row_text(given.given_by, _TITLE), f"until {until}" if until else "")
    title = f"told: {row_text(given.text, _TITLE)}"
    return TreeRow(depth=1, kind="directive", title=title, details=tuple(filter(None, details)))


def _instant(given: DirectiveGiven) -> str | None:
    if given.expires_at is None:
        return None
    return datetime.fromtimestamp(given.expires_at, UTC).isoformat(timespec="seconds")
