"""How `make check` reads the pages."""

from __future__ import annotations

from tests.typing.pages import WRONG, module_of, wrong_of


def test_a_line_of_the_module_is_the_same_line_of_the_page() -> None:
    """S-CONV-38: so that a complaint names its place."""
    lines = module_of(WRONG).splitlines()
    assert {number: line for number, line in enumerate(lines, start=1) if line} == {
        1: "from given import __printed__ as __printed__",
        4: "number = 1",
        10: "text: str = number + len(__printed__)",
    }


def test_a_checker_that_finds_nothing_fails_too() -> None:
    """S-CONV-38."""
    expected = "wrong-page.md:10: error"
    assert wrong_of([f"{expected}: Incompatible types"], expected) == []
    assert wrong_of([], expected) == [f"not found: {expected}"]
    other = "README.md:3: error: No such name"
    assert wrong_of([f"{expected}: Incompatible types", other], expected) == [other]
