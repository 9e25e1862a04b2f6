"""Pydantic's adapters of declared types, one per type and process. Package: execute. Pure: a type in, its adapter out.

Whatever reads, writes or describes a task's typed value asks here, so that all of them take the same types.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import pydantic

__all__ = ["AnswerForm", "adapter_of", "form_of"]

#: Before this, pydantic takes a `TypedDict` only from the backport.
_NEEDS_BACKPORT = sys.version_info < (3, 12)


@functools.lru_cache(maxsize=256)
def adapter_of(annotation: Hashable) -> pydantic.TypeAdapter[object]:
    """Return the adapter of a type; building one costs a hundred parses.

    Raises:
        pydantic.errors.PydanticUserError: pydantic can make nothing of the type.
    """
    return pydantic.TypeAdapter(
        typing.cast("type[object]", _readable(annotation, ()) if _NEEDS_BACKPORT else annotation)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What an answer of a type looks like, as far as its JSON schema says."""

    #: whether its JSON is a string, so that a text without quotes can be one
    is_text: bool = False
    #: whether its JSON is an object, so that nothing else can be one
    is_object: bool = True
    #: texts that it is one of, by their case-folded form
    choices: Mapping[str, str] = field(default_factory=dict[str, str])


@functools.lru_cache(maxsize=256)
def form_of(annotation: Hashable) -> AnswerForm:
    """Return the form of a type's answers."""
    try:
        schema = adapter_of(annotation).json_schema()
    except Exception:  # noqa: BLE001  a type's own hooks may raise anything
        return AnswerForm()
    alternatives = [each for each in _alternatives(schema, schema.get("$defs", {})) if each.get("type") != "null"]
    choices = [text for each in alternatives for text in (*each.get("enum", ()), each.get("const"))]
    return AnswerForm(
        is_text=all(each.get("type") == "string" for each in alternatives),
        is_object=all(each.get("type") == "object" for each in alternatives),
        choices={text.casefold(): text for text in choices if isinstance(text, str)},
    )


def _alternatives(node: typing.Any, definitions: Mapping[str, typing.Any]) -> Iterator[Mapping[str, typing.Any]]:
    while "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    options = (*node.get("anyOf", ()), *node.get("oneOf", ()))
    for option in options:
        yield from _alternatives(option, definitions)
    if not options:
        yield node


def _readable(annotation: typing.Any, within: tuple[object, ...]) -> typing.Any:
    """Return the type with its `typing.TypedDict`s as the backport's; `within` are those that it stands in."""
    if typing.is_typeddict(annotation):
        # One of the backport's is fine, and one that holds itself is for pydantic to judge.
        is_old = type(annotation).__module__ == "typing" and annotation not in within
        return _backport(annotation, within) if is_old else annotation
    arguments = typing.get_args(annotation)
    changed = tuple(_readable(argument, within) for argument in arguments)
    if all(new is old for new, old in zip(changed, arguments, strict=True)):
        return annotation
    origin: typing.Any = typing.get_origin(annotation)
    if origin is types.UnionType:
        return functools.reduce(operator.or_, changed)
    if origin is typing.Annotated or not hasattr(annotation, "copy_with"):
        return origin[changed]
    return annotation.copy_with(changed)


def _backport(annotation: typing.Any, within: tuple[object, ...]) -> typing.Any:
    import typing_extensions  # pydantic's own dependency; only types of this kind need it here

    fields: dict[str, object] = {}
    for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
        field = _readable(hint, (*within, annotation))
        says_so = typing.get_origin(hint) in {typing.Required, typing.NotRequired}
        fields[name] = field if says_so or name in annotation.__required_keys__ else typing.NotRequired[field]
    make: typing.Any = typing_extensions.TypedDict
    rebuilt = make(annotation.__name__, fields)
    rebuilt.__module__, rebuilt.__doc__ = annotation.__module__, annotation.__doc__
    config: object = getattr(annotation, "__pydantic_config__", None)
    if config is not None:
        rebuilt.__pydantic_config__ = config
    return rebuilt
