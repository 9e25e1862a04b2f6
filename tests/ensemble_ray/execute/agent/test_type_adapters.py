"""Adapters of declared types: which types are read."""

from __future__ import annotations

import typing
from typing import Annotated, Optional

import pydantic
import pytest

from ensemble_ray import parse_output
from ensemble_ray.execute.agent.structured import adapter_of, restore_output


class Mayor(typing.TypedDict, total=False):
    """Of the standard library; pydantic takes these only from Python 3.12 on."""

    name: str
    age: int


class Village(Mayor):
    """Adds keys, some of which hold others."""

    people: int
    mayors: list[Mayor]
    first: Mayor | None
    second: Optional[Mayor]  # noqa: UP045  the old form is another class
    third: Annotated[Mayor, "said of it"]
    more: typing.NotRequired[dict[str, Mayor]]


GOOD = '{"people": "7", "mayors": [{"age": "40"}], "first": {"name": "A"}, "second": null, "third": {}}'
VILLAGE = {"people": 7, "mayors": [{"age": 40}], "first": {"name": "A"}, "second": None, "third": {}}


def test_dicts_of_the_standard_library_are_read_with_all_they_hold() -> None:
    """S-OUT-23: required keys and types are checked at every depth."""
    assert parse_output(GOOD, Village).value == VILLAGE
    assert restore_output(VILLAGE, Village).value == VILLAGE
    wrong = parse_output('{"people": 7, "mayors": [{"age": "old"}], "first": null, "second": null}', Village)
    assert wrong.error_message is not None
    assert "'mayors.0.age'" in wrong.error_message
    assert "'third': Field required" in wrong.error_message
    assert "JSON could not be deserialized as Village" in wrong.error_message


def test_configuration_is_kept_when_a_dict_has_one() -> None:
    """S-OUT-22: what forbids other keys still does."""
    closed = typing.TypedDict("closed", {"a": int})  # noqa: UP013  made as its users make it
    closed.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]  pydantic's own way
    assert parse_output('{"a": 1}', closed).is_success
    assert not parse_output('{"a": 1, "b": 2}', closed).is_success


def test_an_adapter_is_made_once_per_type() -> None:
    """Building one costs a hundred parses."""
    assert adapter_of(Village) is adapter_of(Village)
    with pytest.raises(pydantic.errors.PydanticUserError):
        adapter_of(object())  # type: ignore[arg-type]  no type
