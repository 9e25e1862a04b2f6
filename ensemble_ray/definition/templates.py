"""Texts that shall be no templates, and texts that user code made of a template and of data. Package: definition.

What fills in the variables of ordinary templates is in `plan`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from os import PathLike, fspath
from typing import cast

from pydantic import BaseModel

__all__ = ["braced_texts", "escape_data", "escape_template", "fill_inputs", "unescape_template"]

_IN_BRACES = re.compile(r"\{(\w+)\}")
_ESCAPED = re.compile(r"\{\{(\w+)\}\}")
_VARIABLE = re.compile(r"\{\{\w+\}\}|\{(\w+)\}")

#: How many characters before and behind a name in braces tell where it comes from.
_AROUND = 16
#: With so many on one side, those of the other side do not matter: user code may have cut the text there.
_ENOUGH = 4


def escape_template(text: str) -> str:
    """Return the template that resolves to that very text, whatever stands in its braces.

    Examples:
        >>> escape_template("{a} of {1, 2}")
        '{{a}} of {1, 2}'
    """
    return _IN_BRACES.sub(r"{{\1}}", text) if "{" in text else text


def unescape_template(template: str) -> str:
    """Return the text that `escape_template` was given.

    Examples:
        >>> unescape_template("{{a}} of {1, 2}")
        '{a} of {1, 2}'
    """
    return _ESCAPED.sub(r"{\1}", template) if "{" in template else template


def braced_texts(data: object) -> tuple[str, ...]:
    """Return the texts inside of data, such as an item with all that it contains, that have a name in braces.

    Examples:
        >>> braced_texts({"text": "say {a}!", "notes": ["none"]})
        ('say {a}!',)
    """
    return tuple(dict.fromkeys(text for text in _texts_of(data) if "{" in text and _IN_BRACES.search(text)))


def fill_inputs(text: str, inputs: Mapping[str, str], data: Collection[str]) -> str:
    """Put the values of inputs into a text that user code made; what its data has in braces stays (S-MR-203).

    Args:
        text: Made of a template and of data.
        inputs: By name. Other names in braces stay, and so do names in two pairs of braces.
        data: Texts of the data.

    Examples:
        >>> fill_inputs("Put into {language}: a {language} course", {"language": "Czech"}, ["a {language} course"])
        'Put into Czech: a {language} course'
    """
    if not inputs or "{" not in text:
        return text
    names = {found[1] for found in _VARIABLE.finditer(text)} & inputs.keys()
    is_data = _data_finder(text, names, data)
    return _VARIABLE.sub(lambda found: inputs[found[1]] if found[1] in names and not is_data(found) else found[0], text)


def escape_data(text: str, data: Collection[str]) -> str:
    """Return the template that user code made of a template and of data, with what its data has in braces as text (S-MR-203).

    Examples:
        >>> escape_data("Put into {language}: a {language} course", ["a {language} course"])
        'Put into {language}: a {{language}} course'
    """
    if not data or "{" not in text:
        return text
    is_data = _data_finder(text, {found[1] for found in _IN_BRACES.finditer(text)}, data)
    return _IN_BRACES.sub(lambda found: f"{{{found[0]}}}" if is_data(found) else found[0], text)


def _data_finder(text: str, names: Collection[str], data: Collection[str]) -> Callable[[re.Match[str]], bool]:
    """Return what tells whether a name in braces, found in the text, comes from data."""
    places = _places_in(data, names) if names else frozenset()
    shapes = {(None if left is None else len(left), None if right is None else len(right)) for _, left, right in places}

    def is_data(found: re.Match[str]) -> bool:
        before, behind = _around(text, found)
        return any(
            (
                found[1],
                None if left is None else before[max(0, len(before) - left) :],
                None if right is None else behind[:right],
            )
            in places
            for left, right in shapes
        )

    return is_data


def _places_in(data: Iterable[str], names: Collection[str]) -> frozenset[tuple[str, str | None, str | None]]:
    """Return where these names are in braces: each with the characters before and behind it; None: any."""
    places: set[tuple[str, str | None, str | None]] = set()
    for text in data:
        # As user code may show it: as it is, or inside of Python's or JSON's text of a value.
        for form in {text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}:
            for found in _IN_BRACES.finditer(form):
                if found[1] in names:
                    before, behind = _around(form, found)
                    places.add((found[1], before, behind))
                    if len(before) >= _ENOUGH:
                        places.add((found[1], before, None))
                    if len(behind) >= _ENOUGH:
                        places.add((found[1], None, behind))
    return frozenset(places)


def _around(text: str, found: re.Match[str]) -> tuple[str, str]:
    return text[max(0, found.start() - _AROUND) : found.start()], text[found.end() : found.end() + _AROUND]


def _texts_of(data: object) -> Iterator[str]:
    """Yield all texts that a value contains, those inside of its attributes included."""
    #: with whether a value is an attribute: of those, only objects that are data themselves are looked into
    waiting, seen = [(data, False)], set[int]()
    while waiting:
        value, is_attribute = waiting.pop()
        if isinstance(value, str):
            yield value
            continue
        if value is None or isinstance(value, int | float | type) or id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case bytes() | bytearray():
                yield value.decode("utf-8", "replace")
            case PathLike():
                yield str(fspath(cast("PathLike[str]", value)))
            case Mapping():
                pairs = cast("Mapping[object, object]", value).items()
                waiting += [(each, is_attribute) for pair in pairs for each in pair]
            case list() | tuple() | set() | frozenset():
                waiting += [(each, is_attribute) for each in cast("Collection[object]", value)]
            case _ if not is_attribute or is_dataclass(value) or isinstance(value, BaseModel):
                waiting += [(each, True) for each in _attributes_of(value)]
            case _:
                pass


def _attributes_of(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots))
