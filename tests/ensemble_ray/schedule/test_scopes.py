"""Which outputs a context entry gives where tasks run more than once."""

from __future__ import annotations

from ensemble_ray.schedule.instructions import ContextPart
from ensemble_ray.schedule.unit import Scopes, scope_of


def part(*instances: str) -> tuple[ContextPart, ...]:
    """One part."""
    return (ContextPart(instances),)


def test_entry_is_found_in_its_own_iteration_first() -> None:
    """S-LOOP-103: this iteration's writer, and not the one before."""
    scopes = Scopes()
    scopes.put("loop:refine#0", "writer", part("loop:refine#0/writer#0"))
    scopes.put("loop:refine#1", "writer", part("loop:refine#1/writer#0"))
    assert scopes.find("loop:refine#1", "writer") == part("loop:refine#1/writer#0")


def test_entry_is_found_outwards() -> None:
    """S-GRAPH-55: of a step, its graph; then the run."""
    scopes = Scopes()
    scopes.put("", "facts", part("facts#0"))
    scopes.put("graph:triage", "analyze", part("graph:triage#0/analyze#0"))
    inside = "graph:triage#3/loop:refine#1"
    assert scopes.find(inside, "analyze") == part("graph:triage#0/analyze#0")
    assert scopes.find(inside, "facts") == part("facts#0")
    assert scopes.find(inside, "other") is None


def test_phase_sees_what_was_accepted_when_it_started() -> None:
    """S-PHASE-36: a later attempt of a predecessor takes the place of nothing that it was shown."""
    scopes = Scopes()
    scopes.put("phase:a#0", "x", part("phase:a#0/x#0"))
    scopes.enclose("phase:b#0", ["phase:a#0"])
    scopes.put("phase:a#1", "x", part("phase:a#1/x#0"))
    assert scopes.find("phase:b#0", "x") == part("phase:a#0/x#0")
    scopes.drop("phase:b#0")
    assert scopes.find("phase:b#0", "x") is None


def test_newest_stands_last_in_its_scope() -> None:
    """S-PHASE-41: outputs are in the order of completion, each once."""
    scopes = Scopes()
    for key in ("a", "b", "a"):
        scopes.put("", key, part(f"{key}#0"))
    assert list(scopes.own("")) == ["b", "a"]
    scopes.withdraw("", "b")
    assert list(scopes.own("")) == ["a"]
    assert len(scopes) == 1


def test_last_output_of_a_unit_is_that_of_its_last_part() -> None:
    """S-LOOP-100, S-GRAPH-60: what a reviser is shown of a loop."""
    scopes = Scopes()
    scopes.put(
        "graph:g#0", "loop:l", (ContextPart(("w0", "w1"), is_joined=True), ContextPart(("c0", "c1"), is_joined=True))
    )
    assert scopes.last_output("graph:g#0/loop:l#0") == "c1"
    assert scopes.last_output("graph:g#1/loop:l#0") == ""
    assert scope_of("a#0") == ""
