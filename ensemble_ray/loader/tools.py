"""Tools in a team file: a built-in one by name, or user code as `module:attribute`. Room: loader.

`calculator`, `file_read: {base_dir: ./data}`, `module:function`, `module:Class: {argument: value}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.loader.document import Entries, Items, Located, Scalar
from ensemble_ray.loader.kinds import (
    BAD,
    FLAG,
    NUMBER,
    PATH,
    REFERENCE_PATTERN,
    TEXT,
    WHOLE,
    Field,
    Kind,
    Reading,
    choice,
    given,
    list_of,
    plain,
    read_fields,
)
from ensemble_ray.loader.models import key_from_environment
from ensemble_ray.loader.problems import known_names, suggestion
from ensemble_ray.loader.provenance import Expected
from ensemble_ray.loader.references import is_reference
from ensemble_ray.values.messages import JsonValue

__all__ = ["BUILT_IN", "TOOL", "BuiltIn", "tool_schema"]


def _named_texts(one: str) -> Kind:
    """Values by name: text, or `{env: NAME}` for what must not stand in a file."""
    return Kind(read=lambda reading, node, where: _read_named_texts(reading, node, where, one), schema=_NAMED_TEXTS)


def _read_named_texts(reading: Reading, node: Located, where: str, one: str) -> object:
    if not isinstance(node, Entries):
        return reading.refuse(node, where, f"must be a mapping of {one} names to values")
    texts: dict[str, object] = {}
    for name, entry in node.entries.items():
        inside = f"{where}.{name}"
        if isinstance(entry.value, Entries):
            found = read_fields(
                reading, entry.value, {"env": Field(kind=TEXT, is_required=True)}, inside, what=f"a {one}"
            )
            if found is None:
                return BAD
            texts[name] = key_from_environment(reading, entry.value, str(found["env"]), inside)
        else:
            texts[name] = TEXT.read(reading, entry.value, inside)
    return texts if all(given(value) for value in texts.values()) else BAD


_NAMED_TEXTS: Mapping[str, JsonValue] = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"env": {"type": "string"}},
                "required": ["env"],
                "additionalProperties": False,
            },
        ]
    },
}


def _read_inherit(reading: Reading, node: Located, where: str) -> object:
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.value
    if isinstance(node, Items):
        return list_of(TEXT).read(reading, node, where)
    return reading.refuse(node, where, "must be true, false, or a list of names of variables")


_INHERIT = Kind(
    read=_read_inherit, schema={"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string"}}]}
)
_BASE_DIR = Field(
    kind=PATH, is_required=True, doc="An existing directory; paths are relative to this file's directory."
)
_NAME = Field(kind=TEXT, is_required=True, doc="What the model calls it by.")
_DESCRIPTION = Field(kind=TEXT, is_required=True, doc="What the model is told of it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A built-in tool."""

    #: in `ensemble_ray.tools`
    class_name: str
    doc: str
    parameters: Mapping[str, Field]

    @property
    def is_bare(self) -> bool:
        """Whether the name alone is enough."""
        return not any(field.is_required for field in self.parameters.values())


#: Built-in tools by the name that models know them by.
BUILT_IN: Mapping[str, BuiltIn] = {
    "calculator": BuiltIn(class_name="CalculatorTool", doc="Works out arithmetic.", parameters={}),
    "datetime": BuiltIn(class_name="DateTimeTool", doc="Tells and reckons with dates and times.", parameters={}),
    "json_parser": BuiltIn(class_name="JsonParserTool", doc="Takes a value out of a JSON text.", parameters={}),
    "file_read": BuiltIn(
        class_name="FileReadTool",
        doc="Reads text files below a directory.",
        parameters={"base_dir": _BASE_DIR, "max_bytes": Field(kind=WHOLE, doc="Larger files are refused.")},
    ),
    "file_write": BuiltIn(
        class_name="FileWriteTool", doc="Writes text files below a directory.", parameters={"base_dir": _BASE_DIR}
    ),
    "web_scrape": BuiltIn(
        class_name="WebScraperTool",
        doc="Fetches a web page and gives its text.",
        parameters={
            "max_content_length": Field(kind=WHOLE, doc="Longest text given, characters."),
            "allow_private_hosts": Field(kind=FLAG, doc="Whether hosts of the local network may be fetched from."),
        },
    ),
    "web_search": BuiltIn(
        class_name="WebSearchTool",
        doc="Searches the web through a service.",
        parameters={
            "provider": Field(kind=choice(("tavily", "serpapi"), "provider"), is_required=True, doc="The service."),
            "api_key_env": Field(
                kind=TEXT, doc="Variable that holds its key; default TAVILY_API_KEY or SERPAPI_API_KEY."
            ),
        },
    ),
    "http": BuiltIn(
        class_name="HttpAgentTool",
        doc="Sends the model's input to one HTTP address.",
        parameters={
            "name": _NAME,
            "description": _DESCRIPTION,
            "url": Field(kind=TEXT, is_required=True, doc="The address."),
            "method": Field(kind=TEXT, doc="POST unless told."),
            "headers": Field(
                kind=_named_texts("header"), doc="Headers: text, or {env: NAME} for what must not stand in a file."
            ),
            "timeout": Field(kind=NUMBER, doc="Seconds."),
            "max_response_bytes": Field(kind=WHOLE, doc="Larger answers are refused."),
        },
    ),
    "process": BuiltIn(
        class_name="ProcessAgentTool",
        doc="Runs one program with the model's input on its standard input.",
        parameters={
            "name": _NAME,
            "description": _DESCRIPTION,
            "command": Field(kind=list_of(TEXT), is_required=True, doc="The program and its arguments; no shell."),
            "timeout": Field(kind=NUMBER, doc="Seconds."),
            "max_output_bytes": Field(kind=WHOLE, doc="That much of each stream is kept."),
            "environment": Field(
                kind=_named_texts("variable"),
                doc="Variables that the program gets: text, or {env: NAME} for what must not stand in a file.",
            ),
            "inherit": Field(
                kind=_INHERIT,
                doc="Names of further variables that it gets of this process; true: all, keys of models too.",
            ),
        },
    ),
}


def _read(reading: Reading, node: Located, where: str) -> object:
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return _tool(reading, node, node.value.strip(), None, where)
    if isinstance(node, Entries) and len(node.entries) == 1:
        name, entry = next(iter(node.entries.items()))
        is_empty = isinstance(entry.value, Scalar) and entry.value.value is None
        return _tool(reading, node, name.strip(), None if is_empty else entry.value, f"{where}.{name}")
    text = "must be the name of a built-in tool, module:attribute, or one of them with its parameters: `name: {...}`"
    return reading.refuse(node, where, text)


def _tool(reading: Reading, node: Located, name: str, parameters: Located | None, where: str) -> object:
    built_in = BUILT_IN.get(name)
    if built_in is None and not is_reference(name):
        text = f"unknown tool '{name}'.{suggestion(name, BUILT_IN)} {known_names(BUILT_IN)}, or module:attribute"
        return reading.refuse(node, where, text)
    empty = Entries(spot=node.spot, entries={})
    try:
        if built_in is not None:
            given_node = empty if parameters is None else parameters
            values = read_fields(reading, given_node, built_in.parameters, where, what=f"tool '{name}'")
            return BAD if values is None else _made(reading, node, name, values, where)
        return _users(reading, node, name, parameters, where)
    except ValidationError as error:
        return reading.refuse(node, where, str(error))
    except Exception as error:  # noqa: BLE001  constructors speak through errors of many classes
        return reading.refuse(node, where, f"tool '{name}' cannot be made: {message_of(error)}")


def _made(reading: Reading, node: Located, name: str, values: dict[str, object], where: str) -> object:
    from ensemble_ray import tools  # a team without tools does not pay for them

    kind = getattr(tools, BUILT_IN[name].class_name)
    if name != "web_search":
        return kind(**values)
    provider = str(values["provider"])
    variable = str(values.get("api_key_env") or f"{provider.upper()}_API_KEY")
    key = key_from_environment(reading, node, variable, where)
    make = kind.of_tavily if provider == "tavily" else kind.of_serp_api
    return make(key) if given(key) else BAD


def _users(reading: Reading, node: Located, name: str, parameters: Located | None, where: str) -> object:
    from ensemble_ray.tools.decorator import tool_mark  # a team without tools does not pay for them
    from ensemble_ray.tools.registry import check_tool_entry

    found = reading.find(name, _TOOL_CODE)
    if parameters is not None:
        values = plain(reading, parameters, where)
        if not isinstance(values, dict) or not callable(found):
            return reading.refuse(
                parameters, where, f"'{name}' must be a class or function, and its parameters a mapping"
            )
        if tool_mark(found) is not None:
            text = (
                f"'{name}' is a tool already: parameters are for a class or a function that makes one. Leave them out"
            )
            return reading.refuse(parameters, where, text)
        found = found(**cast("dict[str, object]", values))
    elif isinstance(found, type):
        found = found()
    if check_tool_entry(found, 0) is not None:
        kind = type(found).__name__
        text = f"'{name}' is a {kind}, and neither marked with @tool nor an AgentTool nor an object with @tool methods"
        return reading.refuse(node, where, text)
    return found


def _is_made_as_tool(found: object) -> bool:
    """Whether it is a tool entry, or a class whose objects are."""
    from ensemble_ray.tools.decorator import marked_functions
    from ensemble_ray.tools.registry import check_tool_entry
    from ensemble_ray.tools.tool import AgentTool, DynamicToolProvider

    if isinstance(found, type):
        return issubclass(found, AgentTool | DynamicToolProvider) or bool(marked_functions(found))
    return check_tool_entry(found, 0) is None


_TOOL_CODE = Expected(
    what="a function marked with @tool, or an AgentTool", accepts=lambda _: True, is_made_for_it=_is_made_as_tool
)


def tool_schema() -> Mapping[str, JsonValue]:
    """What an editor is told of a tool entry."""
    bare: list[JsonValue] = [
        {"const": name, "description": tool.doc} for name, tool in BUILT_IN.items() if tool.is_bare
    ]
    own: JsonValue = {"type": "string", "pattern": REFERENCE_PATTERN, "description": "Your own tool: module:attribute."}
    with_parameters: JsonValue = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {name: _parameters_schema(tool) for name, tool in BUILT_IN.items()},
        "patternProperties": {
            REFERENCE_PATTERN: {"type": "object", "description": "Arguments of the class or function."}
        },
        "additionalProperties": False,
    }
    return {"anyOf": [*bare, own, with_parameters]}


def _parameters_schema(tool: BuiltIn) -> JsonValue:
    properties: dict[str, JsonValue] = {
        name: {**field.kind.schema, "description": field.doc} for name, field in tool.parameters.items()
    }
    required: list[JsonValue] = [name for name, field in tool.parameters.items() if field.is_required]
    schema: dict[str, JsonValue] = {
        "type": "object" if required else ["object", "null"],
        "description": tool.doc,
        "properties": properties,
        "additionalProperties": False,
    }
    return {**schema, "required": required} if required else schema


#: An entry of a list of tools.
TOOL = Kind(read=_read, schema={"$ref": "#/definitions/tool"})
