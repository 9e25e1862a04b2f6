"""Texts of a team file that may stand in the environment instead: `{env: NAME}`. Package: loader."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator, ValidationInfo

from ensemble_ray.loader.document import Entries
from ensemble_ray.loader.field_types import Text, mapping, require_text
from ensemble_ray.loader.reading import context_of
from ensemble_ray.loader.section import FileSection, key

__all__ = ["Headers", "Variables"]


class _HeaderKey(FileSection):
    called = "a header"
    env: Text = key("Environment variable that holds the value.", is_required=True)


class _VariableKey(_HeaderKey):
    called = "a variable"


def _secret(section: type[_HeaderKey]) -> PlainValidator:
    """Read a text, or `{env: NAME}` for what must not stand in a file."""

    def read(node: object, info: ValidationInfo) -> str:
        if not isinstance(node, Entries):
            return require_text(node)
        return context_of(info).read_key(section.model_validate(node, context=info.context).env)

    return PlainValidator(read, json_schema_input_type=str | section)


Headers = Annotated[
    dict[str, Annotated[str, _secret(_HeaderKey)]], mapping("must be a mapping of header names to values")
]
Variables = Annotated[
    dict[str, Annotated[str, _secret(_VariableKey)]], mapping("must be a mapping of variable names to values")
]
