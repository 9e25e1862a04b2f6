"""Entries, scopes and policies of eviction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import EvictionPolicy, MemoryEntry, MemoryScope, Task, ValidationError

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def entry(content: str, age_s: float = 0.0) -> MemoryEntry:
    """An entry that was stored that long ago."""
    return MemoryEntry(content=content, stored_at=NOW - timedelta(seconds=age_s))


def test_an_entry_has_a_time_in_utc_and_metadata_by_name() -> None:
    """S-MEM-10: content, structured content, an aware time in UTC, metadata."""
    found = MemoryEntry(
        content="text",
        structured_content={"a": 1},
        stored_at=datetime(2026, 5, 1, 14, tzinfo=timezone(timedelta(hours=2))),
        metadata={"agent_role": "Writer"},
    )
    assert found.stored_at == NOW
    assert found.stored_at is not None
    assert found.stored_at.tzinfo is UTC
    assert found.get_meta("agent_role") == "Writer"
    assert found.get_meta("nothing") is None
    assert found.structured_content == {"a": 1}


def test_an_entry_made_by_hand_is_of_now() -> None:
    """S-MEM-10: the time may be left out."""
    found = MemoryEntry(content="text").stored_at
    assert found is not None
    assert abs(found - datetime.now(UTC)) < timedelta(minutes=1)


def test_an_entry_without_content_is_refused() -> None:
    """S-MEM-33: the text of a missing content."""
    with pytest.raises(ValidationError, match=r"^MemoryEntry content must not be None$"):
        MemoryEntry(content=None)  # type: ignore[arg-type]  what is refused


def test_the_metadata_of_an_entry_is_a_copy() -> None:
    """S-MEM-10, S-CONV-5: what the caller changes later does not change the entry."""
    given_metadata = {"a": "b"}
    found = MemoryEntry(content="x", metadata=given_metadata)
    given_metadata["a"] = "c"
    assert found.get_meta("a") == "b"


@pytest.mark.parametrize("n", [0, -3])
def test_a_policy_that_keeps_no_entry_is_refused(n: int) -> None:
    """S-MEM-80: n <= 0."""
    with pytest.raises(ValueError, match=rf"^keep_last_entries n must be > 0, got: {n}$"):
        EvictionPolicy.keep_last_entries(n)


@given(st.lists(st.integers()), st.integers(min_value=1, max_value=20))
def test_the_last_entries_are_kept(numbers: list[int], n: int) -> None:
    """S-MEM-80, S-MEM-82: the last n, in their order; the list that is given stays as it is."""
    entries = [entry(str(number)) for number in numbers]
    before = list(entries)
    assert list(EvictionPolicy.keep_last_entries(n).apply(entries)) == entries[max(0, len(entries) - n) :]
    assert entries == before


def test_only_young_entries_are_kept() -> None:
    """S-MEM-81: strictly later than now - d; an entry without a time is dropped."""
    policy = EvictionPolicy.keep_entries_within(timedelta(seconds=10), now=lambda: NOW)
    entries = [
        entry("old", 11),
        entry("at the edge", 10),
        MemoryEntry(content="no time", stored_at=None),
        entry("young", 9.9),
    ]
    assert [each.content for each in policy.apply(entries)] == ["young"]


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(), "keep_entries_within duration must be positive, got: 0:00:00"),
        (timedelta(seconds=-1), "keep_entries_within duration must be positive, got: -1 day, 23:59:59"),
        (0, "keep_entries_within duration must be positive, got: 0:00:00"),
        (None, "keep_entries_within duration must not be None"),
    ],
)
def test_a_policy_for_no_time_is_refused(duration: timedelta | float | None, text: str) -> None:
    """S-MEM-81: zero, negative, None."""
    with pytest.raises(ValueError, match=f"^{text}$"):
        EvictionPolicy.keep_entries_within(duration)


class _Longest(EvictionPolicy):
    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        return [max(entries, key=lambda each: len(each.content))] if entries else []


def test_a_policy_of_ones_own_is_a_class() -> None:
    """S-MEM-82: custom policies are allowed."""
    assert [each.content for each in _Longest().apply([entry("a"), entry("long"), entry("b")])] == ["long"]


def test_a_scope_has_a_name_and_at_most_one_limit() -> None:
    """S-MEM-70, S-MEM-71."""
    assert MemoryScope.of("notes") == MemoryScope(name="notes")
    assert MemoryScope.of("notes").policy is None
    assert MemoryScope(name="a", keep_last_entries=2).policy == EvictionPolicy.keep_last_entries(2)
    assert MemoryScope(name="a", keep_entries_within=60).policy == EvictionPolicy.keep_entries_within(60)
    with pytest.raises(ValidationError, match="both keep_last_entries and keep_entries_within"):
        MemoryScope(name="a", keep_last_entries=1, keep_entries_within=60)


@pytest.mark.parametrize("name", ["", "  ", None])
def test_a_scope_without_a_name_is_refused(name: str | None) -> None:
    """S-MEM-70: blank."""
    with pytest.raises(ValidationError, match=r"^MemoryScope name must not be None or blank$"):
        MemoryScope.of(name)  # type: ignore[arg-type]  what is refused


def test_the_limits_of_a_scope_are_those_of_the_policies() -> None:
    """S-MEM-71: as in S-MEM-80 and S-MEM-81."""
    with pytest.raises(ValidationError, match=r"^keep_last_entries n must be > 0, got: 0$"):
        MemoryScope(name="a", keep_last_entries=0)
    with pytest.raises(ValidationError, match=r"^keep_entries_within duration must be positive, got: 0:00:00$"):
        MemoryScope(name="a", keep_entries_within=0)


def test_a_task_takes_names_and_scopes() -> None:
    """S-MEM-72: one or several, in order."""
    kept = MemoryScope(name="b", keep_last_entries=1)

    def scopes(given_scopes: object) -> list[str]:
        task = Task(description="d", expected_output="e", memory_scopes=given_scopes)  # type: ignore[arg-type]  all forms
        return [scope.name for scope in task.memory_scopes]

    assert scopes("a") == ["a"]
    assert scopes(kept) == ["b"]
    assert scopes(["c", kept, "a"]) == ["c", "b", "a"]
    assert scopes(None) == []


@pytest.mark.parametrize(
    ("scopes", "text"),
    [
        (["a", MemoryScope.of("a")], "Task memory_scopes has scope 'a' more than once"),
        (["a", 5], r"Task memory_scopes\[1\] must be a name or a MemoryScope, got: int"),
        (5, r"Task memory_scopes\[0\] must be a name or a MemoryScope, got: int"),
        ([" "], "MemoryScope name must not be None or blank"),
    ],
)
def test_scopes_that_mean_nothing_are_refused(scopes: object, text: str) -> None:
    """S-MEM-72: a name that is there twice, and what is no scope."""
    with pytest.raises(ValidationError, match=f"^{text}$"):
        Task(description="d", expected_output="e", memory_scopes=scopes)  # type: ignore[arg-type]  what is refused
