"""Which numbers were seen."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray.items.pulling import NumberSet


@settings(max_examples=60)
@given(numbers=st.lists(st.integers(0, 3000) | st.integers(2**64 - 3000, 2**64 - 1), max_size=30))
def test_set_knows_what_was_put_in(numbers: list[int]) -> None:
    """S-MR-130: as a set of Python would, up to the largest hash."""
    found, expected = NumberSet(), set[int]()
    for number in numbers:
        assert (number in found) == (number in expected)
        assert found.add(number) == (number not in expected)
        expected.add(number)
    assert len(found) == len(expected)
    assert all(number in found for number in expected)
    assert (3001 in found) == (3001 in expected)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_number_is_refused_when_it_has_no_place(number: int) -> None:
    """Nothing is cut to 64 bits: two numbers would be taken for one."""
    with pytest.raises(OverflowError):
        NumberSet().add(number)


@pytest.mark.heavy
def test_set_is_small_when_it_has_many() -> None:
    """S-MR-130: some ten bytes for each, in place of a hundred."""
    found = NumberSet()
    numbers = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(50_000)]  # spread like hashes
    tracemalloc.start()
    for number in numbers:
        found.add(number)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 50_000
    assert grown < 750_000
