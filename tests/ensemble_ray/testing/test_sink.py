"""The recording sink."""

from __future__ import annotations

from ensemble_ray import EnsembleStartedEvent, Event, TokenEvent
from ensemble_ray.testing import RecordingSink

STARTED = EnsembleStartedEvent(ensemble_id="e", workflow="sequential", total_tasks=1)
TOKEN = TokenEvent(token="a", agent_role="Writer", task_description="d")  # noqa: S106  a token of text


def test_events_are_kept_in_order_when_emitted() -> None:
    """S-EVT-5: what was emitted is there, unchanged and in order."""
    sink = RecordingSink()
    for event in (STARTED, TOKEN, STARTED):
        sink.emit(event)
    assert sink.events == (STARTED, TOKEN, STARTED)
    assert sink.of(TokenEvent) == (TOKEN,)


def test_only_its_kinds_are_wanted_when_a_sink_names_them() -> None:
    """Types nobody wants are not built."""
    sink = RecordingSink(kinds=[TokenEvent])
    assert sink.wants(TokenEvent)
    assert not sink.wants(Event)
