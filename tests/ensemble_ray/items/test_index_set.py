"""Which items were seen."""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray.items.pulling import IndexSet


@settings(max_examples=60)
@given(indices=st.lists(st.integers(0, 70) | st.integers(0, 10**18) | st.integers(520_000, 530_000), max_size=12))
def test_set_knows_what_was_put_in(indices: list[int]) -> None:
    """S-MR-126, S-MR-130: as a set of Python would, also indices that are far out."""
    found, expected = IndexSet(), set[int]()
    for index in indices:
        assert (index in found) == (index in expected)
        assert found.add(index) == (index not in expected)
        expected.add(index)
    assert len(found) == len(expected)
    assert all(index in found for index in expected)
    assert (71 in found) == (71 in expected)


def test_set_is_small_when_it_has_many() -> None:
    """S-MR-130: a bit for each."""
    found = IndexSet()
    tracemalloc.start()
    for index in range(30_000):
        found.add(index)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 9_000
