"""Trace context: what a `traceparent` says, and ids that follow from names."""

from __future__ import annotations

import pytest

from ensemble_ray.values.trace import RunTracing, TraceParent, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceParent(TRACE, SPAN)),
        (f" 00-{TRACE}-{SPAN}-00 ", TraceParent(TRACE, SPAN, is_sampled=False)),
        (f"cc-{TRACE}-{SPAN}-03-more", TraceParent(TRACE, SPAN)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_traceparent_is_read_as_w3c_says(text: str, found: TraceParent | None) -> None:
    """S-INT-38: a wrong one is none; of a later version the known part counts."""
    assert parse_traceparent(text) == found
    if found is not None:
        assert parse_traceparent(str(found)) == found


def test_ids_follow_from_names() -> None:
    """S-INT-36: another process finds the same; a run that goes on has another span, and its calls have not."""
    first, again = RunTracing(run_id="r"), RunTracing(run_id="r", beginning=1)
    assert (first.trace_id, first.run_span()) == (RunTracing(run_id="r").trace_id, again.run_span(0))
    assert first.trace_id == again.trace_id != RunTracing(run_id="s").trace_id
    assert first.run_span() != again.run_span()
    assert first.execution_span("a#0") != again.execution_span("a#0")
    assert first.effect_span("a#0/0/model") == again.effect_span("a#0/0/model")
    asked = RunTracing(run_id="r", caller=TraceParent(TRACE, SPAN, is_sampled=False), is_sampled=False)
    assert asked.traceparent(asked.run_span()) == f"00-{TRACE}-{first.run_span()}-00"
