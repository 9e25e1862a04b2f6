"""`@tool`: the function stays what it was, and carries a mark."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import timedelta

import cloudpickle
import pytest
from pydantic import BaseModel

from ensemble_ray import ValidationError, tool
from ensemble_ray.tools.registry import resolve_tools
from ensemble_ray.tools.tool import FunctionTool, marked_functions, tool_mark


@tool
def word_count(text: str) -> int:
    """Count the words of a text, whatever separates them, however long
    the text may be.

    Args:
        text: Any text.
    """
    return len(text.split())


class Calculator:
    """Some tools, some not."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool("Take away")
    @staticmethod
    def subtract(a: int, b: int) -> int:
        return a - b

    @classmethod
    @tool
    def make(cls, n: int) -> str:
        """Make."""
        return f"{cls.__name__}{n}"

    @tool
    def _hidden(self) -> None:
        """Not public."""

    def plain(self) -> None:
        """No tool."""


class Scientific(Calculator):
    @tool
    def square(self, a: int) -> int:
        """Square."""
        return a * a


def test_mark_has_defaults_when_decorated_bare() -> None:
    """S-TOOL-10, S-SET-34, S-DUR-20: name of the function, summary of the docstring, 300 s, `once`."""
    assert tool_mark(word_count) == FunctionTool(
        name="word_count",
        description="Count the words of a text, whatever separates them, however long the text may be.",
        timeout_s=300.0,
        cpu=False,
        effect="once",
    )


def test_mark_has_what_was_given_when_decorated_with_arguments() -> None:
    """S-TOOL-10, S-SET-34, S-SET-35: description alone, or by keywords; time limit; processor-heavy."""

    @tool("Says hello")
    def hello() -> str:
        return "hello"

    @tool(name="bye", description="Says bye", timeout=timedelta(seconds=2), cpu=True, effect="none")
    def goodbye() -> str:
        """Ignored."""
        return "bye"

    @tool(timeout=None)
    def bare() -> None: ...

    assert tool_mark(hello) == FunctionTool(name="hello", description="Says hello")
    assert tool_mark(goodbye) == FunctionTool(
        name="bye", description="Says bye", timeout_s=2.0, cpu=True, effect="none"
    )
    assert tool_mark(bare) == FunctionTool(name="bare", description="", timeout_s=None)


def test_function_is_called_directly_when_decorated() -> None:
    """S-TOOL-16: functions, methods, static and class methods stay callable as they were."""
    calculator = Scientific()
    assert word_count("a b c") == 3
    assert (calculator.add(1, 2), calculator.subtract(3, 1), calculator.square(3)) == (3, 2, 9)
    assert calculator.make(4) == "Scientific4"


def test_methods_are_found_when_they_are_public_or_inherited() -> None:
    """S-TOOL-12: inherited first, in the order of definition; private and unmarked ones are not tools."""
    assert marked_functions(Scientific) == ("add", "subtract", "make", "square")
    assert marked_functions(Calculator) == ("add", "subtract", "make")
    assert marked_functions(int) == ()


def test_nothing_is_marked_when_it_is_no_decorated_function() -> None:
    """S-TOOL-12: classes, other callables and plain values carry no mark."""
    for other in (Calculator, len, lambda: 1, 5, None, Calculator().plain):
        assert tool_mark(other) is None
    assert tool_mark(Calculator().add) is not None


@pytest.mark.parametrize("name", ["has space", "", "süd"])
def test_decoration_is_refused_when_the_name_cannot_be(name: str) -> None:
    """S-TOOL-4, S-DOM-7, S-DOM-8: at once, with the same text as for any tool."""
    with pytest.raises(ValidationError, match=r"^Tool name "):
        tool(name=name)(word_count)


def test_decoration_is_refused_when_it_cannot_be_marked_or_named() -> None:
    """S-TOOL-10: a lambda has no usable name, a builtin takes no mark, a timeout must be a length of time."""
    with pytest.raises(ValidationError, match="Tool name '<lambda>' must contain only"):
        tool(lambda: 1)
    with pytest.raises(ValidationError, match="@tool needs a function"):
        tool(len)
    with pytest.raises(ValidationError, match="Tool timeout must be > 0"):
        tool(timeout=0)


def test_function_is_the_same_object_when_pickled_by_reference() -> None:
    """S-TOOL-16: a module-level function travels as its name."""
    assert pickle.loads(pickle.dumps(word_count)) is word_count  # noqa: S301  made here


@pytest.mark.program
def test_function_works_elsewhere_when_it_travels_by_value() -> None:
    """S-TOOL-16: from a script to another process, through cloudpickle; mark, schema and code arrive."""
    script = (
        "import cloudpickle, sys\n"
        "from ensemble_ray.tools import tool\n"
        "from ensemble_ray.tools.registry import resolve_tools\n"
        "greeting = 'hello'\n"
        "@tool(timeout=7)\n"
        "def greet(name: str = 'you') -> str:\n"
        "    'Greet.'\n"
        "    return f'{greeting} {name}'\n"
        "resolve_tools([greet])\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(greet))\n"
    )
    data = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout  # noqa: S603  our own text
    greet = pickle.loads(data)  # noqa: S301  written by the script above
    assert greet("there") == "hello there"
    bound = resolve_tools([greet]).get("greet")
    assert bound is not None
    assert (bound.spec.description, bound.timeout_s) == ("Greet.", 7.0)
    assert len(data) < 2000


@pytest.mark.program
def test_tool_of_a_script_keeps_its_types_when_they_are_strings() -> None:
    """S-TOOL-11: a script's function travels without the names that only its annotations use."""
    script = (
        "from __future__ import annotations\n"
        "import sys, cloudpickle\n"
        "from typing import Annotated\n"
        "from pydantic import Field\n"
        "from ensemble_ray.tools.tool import tool\n"
        "@tool\n"
        "def greet(name: Annotated[str, Field(description='Who')]) -> str:\n"
        "    'Greet.'\n"
        "    return f'hello {name}'\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(greet))\n"
    )
    data = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout  # noqa: S603  our own text
    (spec,) = resolve_tools([pickle.loads(data)]).specs  # noqa: S301  written by the script above
    assert spec.parameters["properties"] == {"name": {"type": "string", "description": "Who"}}


def test_local_types_are_known_when_annotations_are_strings() -> None:
    """S-TOOL-11: this file postpones annotations; a nested tool still finds the types of its own scope."""

    class Point(BaseModel):
        x: int

    class Board:
        @tool
        def move(self, to: Point) -> Unknown:  # type: ignore[name-defined]  # noqa: F821  the return type does not matter
            """Move."""
            return to.x

    @tool
    def mark(at: Point) -> int:
        """Mark."""
        return at.x

    specs = resolve_tools([mark, Board()]).specs
    expected = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert specs[0].parameters["properties"] == {"at": expected}
    copy = cloudpickle.loads(cloudpickle.dumps(mark))
    assert resolve_tools([copy]).specs[0].parameters == specs[0].parameters


@pytest.mark.parametrize("effect", ["twice", "", None, 1, ["none"]])
def test_effect_is_refused_when_there_is_none_of_that_name(effect: object) -> None:
    """S-DUR-20."""
    with pytest.raises(ValidationError, match=r"^@tool effect must be one of \[none, idempotent, once\], got: "):
        tool(name="post", effect=effect)  # type: ignore[call-overload]  on purpose
