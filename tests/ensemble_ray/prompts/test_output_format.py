"""The schema text: one case per kind of type, the whole text compared."""

import datetime as dt
import enum
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Optional, TypeVar

import pydantic
import pytest
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, RootModel, create_model
from pydantic.alias_generators import to_camel
from typing_extensions import TypeAliasType, TypedDict

from ensemble_ray import describe_schema
from ensemble_ray.prompts.output_format import correction_prompt, output_format_section

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    DARK_BLUE = "dark blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Inner(BaseModel):
    x: int
    names: list[str]


@dataclass
class Point:
    x: float
    y: float = 0.0
    length: float = field(init=False, default=0.0)


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: str
    right: int


@dataclass
class Box(Generic[T]):
    content: T


UserId = NewType("UserId", int)
Names = TypeAliasType("Names", list[str])


def shown(kind: Any) -> str:  # whatever may stand behind a field's colon
    """How a field of that type is rendered."""
    text = describe_schema(create_model("Holder", held=(kind, ...)))
    head, tail = '{\n  "held": ', "\n}"
    assert text.startswith(head)
    assert text.endswith(tail)
    return text.removeprefix(head).removesuffix(tail)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (str, '"string"'),
        (int, '"integer"'),
        (float, '"number"'),
        (Decimal, '"number"'),
        (bool, '"boolean"'),
        (Color, '"enum: red, dark blue"'),
        (Level, '"enum: 1, 2"'),
        (Literal["a", "b", 3], '"enum: a, b, 3"'),
        (Literal[Color.RED], '"enum: red"'),
        (list[int], '["integer"]'),
        (set[str], '["string"]'),
        (frozenset[str], '["string"]'),
        (Sequence[bool], '["boolean"]'),
        (tuple[int, ...], '["integer"]'),
        (tuple[int, str], '["integer", "string"]'),
        (list[list[int]], '[["integer"]]'),
        (list, '["any"]'),
        (tuple, '["any"]'),
        (list[Any], '["any"]'),
        (dict[str, int], '{"string": "integer"}'),
        (Mapping[str, list[float]], '{"string": ["number"]}'),
        (dict, '{"key": "value"}'),
        (Optional[int], '"integer"'),  # noqa: UP045  the older spelling is the case
        (int | None, '"integer"'),
        (Annotated[int | None, Field(gt=0)], '"integer"'),
        (UserId, '"integer"'),
        (int | str, '"any"'),
        (Any, '"any"'),
        (object, '"any"'),
        (None, '"any"'),
        (dt.datetime, '"string"'),
        (dt.date, '"string"'),
        (uuid.UUID, '"string"'),
        (Path, '"string"'),
    ],
    ids=str,
)
def test_field_is_rendered_by_its_kind(kind: object, text: str) -> None:
    """S-OUT-2: the table of kinds, Optional as what it wraps; what pydantic reads from a string is a string."""
    assert shown(kind) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Inner, '{\n    "x": "integer",\n    "names": ["string"]\n  }'),
        (Inner | None, '{\n    "x": "integer",\n    "names": ["string"]\n  }'),
        (list[Inner], '[{\n    "x": "integer",\n    "names": ["string"]\n  }]'),
        (dict[str, Point], '{"string": {\n    "x": "number",\n    "y": "number"\n  }}'),
        (Movie, '{\n    "title": "string",\n    "year": "integer"\n  }'),
        (Pair, '{\n    "left": "string",\n    "right": "integer"\n  }'),
        (RootModel[list[int]], '["integer"]'),
    ],
    ids=str,
)
def test_nested_object_is_indented_when_a_field_holds_it(kind: object, text: str) -> None:
    """S-OUT-2: models, dataclasses and their relatives, two spaces per level, within lists and mappings too."""
    assert shown(kind) == text


def test_object_is_shown_like_an_example() -> None:
    """S-OUT-2, S-OUT-3: an indented object, its fields in the order of their declaration."""

    class Report(BaseModel):
        title: str
        pages: int
        author: Inner
        tags: list[str]

    assert describe_schema(Report) == (
        "{\n"
        '  "title": "string",\n'
        '  "pages": "integer",\n'
        '  "author": {\n'
        '    "x": "integer",\n'
        '    "names": ["string"]\n'
        "  },\n"
        '  "tags": ["string"]\n'
        "}"
    )


def test_inherited_fields_come_first_when_a_model_extends_another() -> None:
    """S-OUT-3: declaration order over the whole family."""

    class More(Inner):
        y: int

    assert describe_schema(More) == '{\n  "x": "integer",\n  "names": ["string"],\n  "y": "integer"\n}'


def test_braces_stand_alone_when_there_are_no_fields() -> None:
    """S-OUT-3: `{}`, at the top and inside."""

    class Empty(BaseModel):
        pass

    assert describe_schema(Empty) == "{}"
    assert shown(Empty) == "{}"


class Node(BaseModel):
    child: "Node | None"


class Family(BaseModel):
    children: list["Family"]


def test_objects_end_when_a_model_holds_itself() -> None:
    """S-OUT-3, S-SET-22: levels 0 to 5 are shown, what lies deeper is `object`."""
    text = describe_schema(Node)
    assert text.count('"child"') == 6
    assert text.count('"object"') == 1
    assert '            "child": "object"\n' in text
    assert describe_schema(Family).count('"children"') == 6
    assert '["object"]' in describe_schema(Family)


class TypeAliasTypeOfItself:
    """As a `type` statement's alias that holds itself, which Python 3.11 cannot write."""

    def __init__(self) -> None:
        self.__value__ = list[self]  # type: ignore[valid-type]


TypeAliasTypeOfItself.__name__ = "TypeAliasType"


def test_aliases_end_when_one_holds_itself() -> None:
    """S-OUT-3: a plain alias is what it stands for; recursion without a model ends too."""
    assert shown(Names) == '["string"]'
    holder: type[object] = dataclass(type("Holder", (), {"__annotations__": {"held": TypeAliasTypeOfItself()}}))
    assert describe_schema(holder) == '{\n  "held": [[[[["object"]]]]]\n}'


def test_names_are_those_of_the_json_when_fields_have_aliases() -> None:
    """S-OUT-4: what the parser reads: validation alias, first choice, generated ones; own names where those are read."""

    class Named(BaseModel):
        a: int = Field(alias="plain")
        b: int = Field(validation_alias="read", serialization_alias="written")
        c: int = Field(validation_alias=AliasChoices("first", "second"))
        d: int = Field(validation_alias=AliasPath("path"))
        e: int = Field(validation_alias=AliasPath("deep", "er"))

    assert list(_names(Named)) == ["plain", "read", "first", "path", "e"]

    class Camel(BaseModel):
        model_config = ConfigDict(alias_generator=to_camel)
        long_name: int

    assert list(_names(Camel)) == ["longName"]

    class ByName(BaseModel):
        model_config = ConfigDict(alias_generator=to_camel, validate_by_alias=False, validate_by_name=True)
        long_name: int

    assert list(_names(ByName)) == ["long_name"]

    @pydantic.dataclasses.dataclass
    class Record:
        a: int = pydantic.Field(alias="other")

    assert list(_names(Record)) == ["other"]


def _names(kind: type[object]) -> list[str]:
    return [line.split('"')[1] for line in describe_schema(kind).splitlines()[1:-1]]


def test_generic_dataclass_is_described_when_it_is_the_type() -> None:
    """S-OUT-2: what its parameter is cannot be told."""
    assert describe_schema(Box[int]) == '{\n  "content": "any"\n}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (str, '"string"'),
        (Color, '"enum: red, dark blue"'),
        (dict[str, int], '{"string": "integer"}'),
        (dict, '{"key": "value"}'),
        (Movie, '{\n  "title": "string",\n  "year": "integer"\n}'),
        (RootModel[list[int]], '["integer"]'),
        (dict[str, Node], None),
    ],
    ids=str,
)
def test_type_is_described_when_a_task_accepts_it(kind: type[object], text: str | None) -> None:
    """S-OUT-2, S-DOM-32: strings, enums, mappings and root models are answers too; S-SET-22 holds below them."""
    described = describe_schema(kind)
    assert text is None or described == text
    assert described.count('"child"') in {0, 6}


@pytest.mark.parametrize("kind", [None, type(None)])
def test_type_is_refused_when_no_answer_can_be_one(kind: type[object] | None) -> None:
    """S-OUT-5."""
    with pytest.raises(ValueError, match=r"Cannot describe the schema of None. Pass a type"):
        describe_schema(kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, '"integer"'),
        (list[Color], '["enum: red, dark blue"]'),
        (tuple[int, str], '["integer", "string"]'),
        (int | str, '"integer" or "string"'),
        (dict[str, int] | None, '{"string": "integer"} or null'),
        (Annotated[Color | None, "a"], '"enum: red, dark blue" or null'),
    ],
    ids=str,
)
def test_alternatives_are_described_when_the_type_is_a_union(kind: type[object], text: str) -> None:
    """S-OUT-2, S-OUT-5."""
    assert describe_schema(kind) == text


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (int, "an integer"),
        (bool, "true or false"),
        (float | None, "a number or null"),
        (Color, "one of these: red, dark blue"),
        (Literal["yes", 2], "one of these: yes, 2"),
        (dt.date, "a date in ISO 8601"),
        (int | str, "an integer or plain text"),
    ],
    ids=str,
)
def test_section_asks_for_the_bare_value_when_it_needs_no_json(kind: type[object], wanted: str) -> None:
    """S-LLM-54: small models put no quotes around a word."""
    instruction = f"Respond with ONLY {wanted}: no quotes, no code fences, no explanation, no text before or after it."
    assert output_format_section(kind) == f"## Output Format\n{instruction}"
    assert correction_prompt(kind, problem="p", response="r").endswith(instruction)


def test_section_asks_for_text_when_the_answer_is_one() -> None:
    """S-LLM-54."""
    assert output_format_section(str) == "## Output Format\nRespond with plain text."


def test_section_asks_for_only_json() -> None:
    """S-OUT-1: the heading, the instruction, the schema text, nothing after it."""
    section = output_format_section(Point)
    assert section.startswith("## Output Format\n")
    assert "ONLY valid JSON" in section
    assert "no code fences" in section
    assert "no explanation" in section
    assert section.endswith(describe_schema(Point))


def test_correction_holds_error_response_and_schema() -> None:
    """S-OUT-31: everything that the model needs, since it sees no history."""
    prompt = correction_prompt(Point, problem="'x': Field required", response='{"y": 1}')
    assert prompt.index("'x': Field required") < prompt.index('{"y": 1}') < prompt.index(describe_schema(Point))
    assert "ONLY valid JSON" in prompt
