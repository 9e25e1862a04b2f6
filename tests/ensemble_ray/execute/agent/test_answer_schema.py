"""JSON schemas of declared types: what they tell an endpoint, and when they are strict."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import typing
import uuid
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic
import pytest
import typing_extensions
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel

from ensemble_ray import JsonSchema, describe_schema, parse_output
from ensemble_ray.execute.agent.answer_schema import answer_schema

T = TypeVar("T")


class Mood(enum.Enum):
    """Choices."""

    GOOD = "good"
    BAD = "bad"


class City(BaseModel):
    """A plain model."""

    model_config = ConfigDict(title="A city")
    name: str = Field(alias="Name", description="Its name", min_length=1, pattern="^[A-Z]")
    people: int = Field(default=0, ge=0)
    mood: Mood | None = None
    founded: dt.date = dt.date(1191, 1, 1)


@dataclasses.dataclass
class Trip:
    """A dataclass with a field that it makes by itself."""

    cities: list[City]
    price: decimal.Decimal
    id: uuid.UUID = dataclasses.field(default_factory=uuid.uuid4)
    length: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.length = len(self.cities)


class Node(BaseModel):
    """Holds its own kind."""

    value: int
    children: list[Node] = []


class Cat(BaseModel):
    """One of two."""

    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    """The other."""

    kind: Literal["dog"]
    tags: set[str]


class Owner(BaseModel):
    """Has one of two, told apart by a field."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Page(BaseModel, Generic[T]):
    """Of anything."""

    item: T


class Village(typing_extensions.TypedDict):
    """Every key is there."""

    name: str


class OldVillage(typing.TypedDict):
    """Of the standard library, one key not always there."""

    name: str
    mayor: typing.NotRequired[str]


class Loose(BaseModel):
    """Takes more than it names."""

    model_config = ConfigDict(extra="allow")
    name: str


class ByName(BaseModel):
    """Read by its own names."""

    model_config = ConfigDict(validate_by_alias=False, validate_by_name=True)
    name: str = Field(alias="Name")


class Choices(BaseModel):
    """Has several names for one field."""

    name: str = Field(validation_alias=AliasChoices("title", "name"))


class Pair(NamedTuple):
    """An array in JSON."""

    a: int


class Odd(BaseModel):
    """Has no JSON schema."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    value: object = Field(default=None, json_schema_extra={"x": 1})
    call: typing.Callable[[], int]


class Plain(BaseModel):
    """Nothing in it."""


def schema_of(kind: object) -> JsonSchema:
    """The schema of a type that has one."""
    schema = answer_schema(kind)  # type: ignore[arg-type]  types are hashable
    assert schema is not None
    return schema


def one(kind: object) -> object:
    """A model with one field of that type."""
    return pydantic.create_model("One", x=(kind, ...))


def test_objects_are_closed_and_whole_when_they_are_described() -> None:
    """S-OUT-42, S-OUT-43, S-OUT-44: all fields required, defaults or not; the form only, no bounds or titles."""
    assert schema_of(City) == JsonSchema(
        name="City",
        schema={
            "type": "object",
            "description": "A plain model.",
            "properties": {
                "Name": {"type": "string", "description": "Its name"},
                "people": {"type": "integer"},
                "mood": {"anyOf": [{"$ref": "#/$defs/Mood"}, {"type": "null"}]},
                "founded": {"type": "string", "format": "date"},
            },
            "required": ["Name", "people", "mood", "founded"],
            "additionalProperties": False,
            "$defs": {"Mood": {"type": "string", "description": "Choices.", "enum": ["good", "bad"]}},
        },
        strict=True,
    )


def test_fields_that_cannot_be_given_are_left_out() -> None:
    """S-OUT-43: an answer in the schema's form is one that the parser takes."""
    schema = schema_of(Trip).schema
    assert list(typing.cast("Mapping[str, object]", schema["properties"])) == ["cities", "price", "id"]
    answer = {"cities": [], "price": 1.5, "id": str(uuid.uuid4())}
    assert parse_output(json.dumps(answer), Trip).is_success


@pytest.mark.parametrize("kind", [City, Trip, Node, Village, OldVillage, ByName, Choices, Loose, Page[City]])
def test_fields_have_the_names_that_the_prompt_shows(kind: type[object]) -> None:
    """S-OUT-43, S-OUT-4: in the same order too."""
    parsed = json.loads(json.dumps(schema_of(kind).schema))
    shown = [line.split('"')[1] for line in describe_schema(kind).splitlines() if line.startswith('  "')]
    assert list(parsed["properties"]) == shown


def test_the_root_is_the_object_itself_when_a_type_holds_its_own_kind() -> None:
    """S-OUT-44, S-OUT-45: inner ones refer to it, and it stays strict."""
    schema = schema_of(Node)
    parsed = json.loads(json.dumps(schema.schema))
    assert (parsed["type"], schema.strict) == ("object", True)
    assert parsed["properties"]["children"] == {"type": "array", "items": {"$ref": "#/$defs/Node"}}
    assert parsed["$defs"]["Node"]["properties"] == parsed["properties"]


def test_alternatives_are_any_of_when_a_field_tells_them_apart() -> None:
    """S-OUT-44, S-OUT-45: with the keyword that all endpoints know; sets are arrays."""
    schema = schema_of(Owner)
    parsed = json.loads(json.dumps(schema.schema))
    assert parsed["properties"]["pet"] == {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
    assert parsed["$defs"]["Dog"]["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    assert schema.strict


@pytest.mark.parametrize("kind", [City, Trip, Node, Owner, Village, Plain, Page[City], ByName, Choices])
def test_a_schema_is_strict_when_all_of_it_is_closed(kind: object) -> None:
    """S-OUT-45."""
    assert schema_of(kind).strict


@pytest.mark.parametrize(
    "kind",
    [
        dict,
        dict[str, int],
        dict[Mood, int],
        OldVillage,
        Loose,
        Page[Loose],
        RootModel[dict[str, int]],
        *(one(kind) for kind in (Any, dict[str, int], list[Any], list, tuple[int, str], Literal["a", 1], Pair)),
        one(dict[Annotated[str, Field(pattern="^a")], int]),
    ],
    ids=str,
)
def test_a_schema_is_not_strict_when_it_leaves_something_open(kind: object) -> None:
    """S-OUT-45, S-OUT-46: free mappings, anything, tuples, keys that may be missing, more fields."""
    schema = schema_of(kind)
    assert not schema.strict
    assert schema.schema["type"] == "object"


def test_values_of_free_mappings_have_their_type() -> None:
    """S-OUT-43: open is what the type leaves open, and no more."""
    assert schema_of(dict[str, int]).schema["additionalProperties"] == {"type": "integer"}
    parsed = json.loads(json.dumps(schema_of(OldVillage).schema))
    assert (parsed["required"], parsed["additionalProperties"]) == (["name"], False)
    assert schema_of(Loose).schema["additionalProperties"] is True


@pytest.mark.parametrize("kind", [Mood, str, Pair, RootModel[list[int]], RootModel[Cat | Dog], Odd, object])
def test_there_is_no_schema_when_the_json_is_no_object(kind: object) -> None:
    """S-OUT-46: nor when the type has none, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer_schema(kind) is None  # type: ignore[arg-type]  types are hashable


def test_the_name_is_one_that_endpoints_take_when_the_type_has_another() -> None:
    """S-OUT-42."""
    assert schema_of(Page[City]).name == "Page_City_"
    assert schema_of(dict[str, int]).name == "dict_str__int_"
    assert len(schema_of(type("N" * 90, (City,), {})).name) == 64
