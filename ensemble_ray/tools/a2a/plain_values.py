"""Values of the A2A protocol as JSON data. Package: tools. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Value
    from pydantic import JsonValue

__all__ = ["plain_value"]

#: Above it, numbers of JSON have no exact whole ones.
_LARGEST_WHOLE = 2**53


def plain_value(value: Value) -> JsonValue:
    """Return data with whole numbers as such: the protocol's values have one kind of number.

    Raises:
        ValueError: a number in it is infinite or none.
    """
    from google.protobuf.json_format import MessageToDict

    return _with_whole_numbers(cast("JsonValue", MessageToDict(value)))


def _with_whole_numbers(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_WHOLE:
        return int(value)
    return value
