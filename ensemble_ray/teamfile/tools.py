"""Tools in a team file: a built-in tool by name, or user code as `module:attribute`.

Examples: `calculator`, `file_read: {base_dir: ./data}`, `module:function`, `module:Class: {argument: value}`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.teamfile.document import NOWHERE, Entries, Items, Located, Scalar, list_known_names, suggestion
from ensemble_ray.teamfile.references import Expected, is_reference
from ensemble_ray.teamfile.section import (
    REFERENCE_PATTERN,
    FileSection,
    Flag,
    Headers,
    Number,
    PathText,
    Reading,
    ReferenceText,
    Text,
    Variables,
    Whole,
    context_of,
    convert_freely,
    is_null,
    key,
    mapping,
    one_of,
    refuse,
    require_text,
    text_in,
)
from ensemble_ray.values.reviews import OnTimeoutAction


def _read_inherit(node: object) -> bool | list[str]:
    if isinstance(node, Items):
        return _NAMES.validate_python(node)
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return node.value
    raise ValidationError("must be true, false, or a list of names of variables")


_NAMES = TypeAdapter(list[Text])
_Inherit = Annotated[object, PlainValidator(_read_inherit, json_schema_input_type=bool | list[str])]


class _ToolKeys(FileSection):
    called = "tool '{name}'"
    #: class in `ensemble_ray.tools`
    class_name: ClassVar[str]


_BASE_DIR = "An existing directory; paths are relative to this file's directory."
_APPROVAL = "Whether the review handler must approve each call."


class _Calculator(_ToolKeys):
    """Computes arithmetic expressions."""

    class_name = "CalculatorTool"


class _DateTime(_ToolKeys):
    """Returns the current date and time, and computes with dates and times."""

    class_name = "DateTimeTool"


class _JsonParser(_ToolKeys):
    """Reads a value from a JSON text."""

    class_name = "JsonParserTool"


class _FileWrite(_ToolKeys):
    """Writes text files below a directory."""

    class_name = "FileWriteTool"
    base_dir: PathText = key(_BASE_DIR, is_required=True)
    require_approval: Flag = key(_APPROVAL)


class _FileRead(_ToolKeys):
    """Reads text files below a directory."""

    class_name = "FileReadTool"
    base_dir: PathText = key(_BASE_DIR, is_required=True)
    max_bytes: Whole = key("Largest file that it reads.")


class _WebScrape(_ToolKeys):
    """Fetches a web page and returns its text."""

    class_name = "WebScraperTool"
    max_content_length: Whole = key("Longest returned text, characters.")
    allow_private_hosts: Flag = key("Whether it may fetch from hosts of the local network.")


class _WebSearch(_ToolKeys):
    """Searches the web through a service."""

    class_name = "WebSearchTool"
    provider: Annotated[str, one_of(("tavily", "serpapi"), "provider")] = key("The service.", is_required=True)
    api_key_env: Text = key("Variable that holds its key; default TAVILY_API_KEY or SERPAPI_API_KEY.")


class _Outside(_ToolKeys):
    name: Text = key("Name by which the model calls it.", is_required=True)
    description: Text = key("Description for the model.", is_required=True)


class _Http(_Outside):
    """Sends the model's input to one HTTP address."""

    class_name = "HttpAgentTool"
    url: Text = key("The address.", is_required=True)
    method: Text = key("HTTP method; default POST.")
    headers: Headers = key("Headers: text, or {env: NAME} for secrets.")
    timeout: Number = key("Seconds.")
    max_response_bytes: Whole = key("Largest accepted answer.")
    require_approval: Flag = key(_APPROVAL)


class _Process(_Outside):
    """Runs one program with the model's input on its standard input."""

    class_name = "ProcessAgentTool"
    only_lists = frozenset({"command"})
    command: list[Text] = key("The program and its arguments; no shell.", is_required=True)
    timeout: Number = key("Seconds.")
    max_output_bytes: Whole = key("Bytes to read per stream; the rest is dropped.")
    environment: Variables = key("Environment variables of the program: text, or {env: NAME} for secrets.")
    inherit: _Inherit = key("Names of variables of this process that it inherits; true: all, including keys of models.")
    require_approval: Flag = key(_APPROVAL)


class _HumanInput(_ToolKeys):
    """Asks a person, through the review handler."""

    class_name = "HumanInputTool"
    timeout: Number = key("Seconds; 0: no limit.")
    on_timeout: Annotated[str, one_of(OnTimeoutAction)] = key("Result if no answer arrives in time.")


_EFFECTS = TypeAdapter(Annotated[dict[str, Text], mapping("must be a mapping of names of tools to effects")])
_Effect = Annotated[
    object,
    PlainValidator(
        lambda node: _EFFECTS.validate_python(node) if isinstance(node, Entries) else require_text(node),
        json_schema_input_type=str | dict[str, str],
    ),
]


class _Mcp(_ToolKeys):
    """The tools of an MCP server."""

    class_name = "MCP"
    server: Text = key("stdio:COMMAND ARGUMENTS, or the URL of a server.", is_required=True)
    headers: Headers = key("Headers for a URL: text, or {env: NAME} for secrets.")
    env: Variables = key("Environment variables of the program: text, or {env: NAME} for secrets.")
    cwd: PathText = key("Working directory of the program; relative to this file's directory.")
    tools: list[Text] = key("Names of the offered tools; default: all.")
    prefix: Text = key("Prefix of the names.")
    effect: _Effect = key(
        "Effect of calls: none, idempotent or once; or a mapping by name. Default: the server's hints."
    )
    resources: Flag = key("Whether two tools list and read the server's resources.")
    prompts: Flag = key("Whether each prompt of the server is a tool.")
    sampling: Flag = key("Whether the server may call the agent's model.")
    max_samples: Whole = key("How often the server may do so in one call; default 10.")
    timeout: Number = key("Longest time of a call, seconds.")
    connect_timeout: Number = key("Longest time until the server answers first, seconds.")


class _A2a(_ToolKeys):
    """An agent of another system, called by the A2A protocol."""

    class_name = "A2ATool"
    url: Text = key("URL of its card, without /.well-known/agent-card.json.", is_required=True)
    name: Text = key("Name by which the model calls it; default ask_ and the last part of the URL.")
    description: Text = key("Description for the model.")
    headers: Headers = key("Headers: text, or {env: NAME} for secrets.")
    hosts: list[Text] = key("Hosts that its card may name in addition to the host of the URL.")
    effect: Text = key("Effect of a question: none, idempotent or once.")
    timeout: Number = key("Longest time of a question, seconds.")
    connect_timeout: Number = key("Longest time to connect, seconds.")


def _describe_entry(schema: dict[str, Any]) -> None:
    """Allow exactly one key in the schema: a built-in tool, or a reference to user code."""
    for shown in schema["properties"].values():
        shown.pop("default", None)
    arguments = {"type": "object", "description": "Arguments of the class or function."}
    schema.update(minProperties=1, maxProperties=1, patternProperties={REFERENCE_PATTERN: arguments})


class _Entry(BaseModel):
    """An entry with parameters. The key is the tool's name."""

    model_config = ConfigDict(extra="forbid", defer_build=True, json_schema_extra=_describe_entry)

    calculator: _Calculator | None = key(_Calculator.__doc__)
    datetime: _DateTime | None = key(_DateTime.__doc__)
    json_parser: _JsonParser | None = key(_JsonParser.__doc__)
    file_read: _FileRead = key(_FileRead.__doc__)
    file_write: _FileWrite = key(_FileWrite.__doc__)
    human_input: _HumanInput | None = key(_HumanInput.__doc__)
    web_scrape: _WebScrape | None = key(_WebScrape.__doc__)
    web_search: _WebSearch = key(_WebSearch.__doc__)
    http: _Http = key(_Http.__doc__)
    process: _Process = key(_Process.__doc__)
    mcp: _Mcp = key(_Mcp.__doc__)
    a2a: _A2a = key(_A2a.__doc__)


_BUILT_IN = tuple(_Entry.model_fields)


def _read(node: object, info: ValidationInfo) -> object:
    name, parameters = text_in(node), None
    if isinstance(node, Entries) and len(node) == 1:
        ((name, parameters),) = node.items()
    if name is None:
        text = (
            "must be the name of a built-in tool, module:attribute, or one of them with its parameters: `name: {...}`"
        )
        raise ValidationError(text)
    if parameters is not None and is_null(parameters):
        parameters = None
    tool = name.strip()
    try:
        if tool in _BUILT_IN:
            return _build(context_of(info), tool, parameters)
        if is_reference(tool):
            return _find(context_of(info), tool, parameters)
    except pydantic.ValidationError:
        raise
    except ValidationError as error:
        raise refuse(str(error), name, at="around") from None
    except Exception as error:  # noqa: BLE001  constructors of tools may raise anything
        raise refuse(f"tool '{tool}' cannot be made: {message_of(error)}", name, at="around") from None
    text = f"unknown tool '{tool}'.{suggestion(tool, _BUILT_IN)} {list_known_names(_BUILT_IN)}, or module:attribute"
    raise refuse(text, name, at="around")


def _build(reading: Reading, name: str, parameters: Located | None) -> object:
    from ensemble_ray import tools  # slow to import

    entries = Entries(NOWHERE, {}, {}) if parameters is None else parameters
    section: _ToolKeys = getattr(_Entry.model_validate({name: entries}, context=reading), name)
    kind, values = getattr(tools, section.class_name), section.values()
    if not isinstance(section, _WebSearch):
        return kind(**values)
    make = kind.of_tavily if section.provider == "tavily" else kind.of_serp_api
    return make(reading.read_key(values.get("api_key_env") or f"{section.provider.upper()}_API_KEY"))


def _find(reading: Reading, name: str, parameters: Located | None) -> object:
    from ensemble_ray.tools.registry import check_tool_entry
    from ensemble_ray.tools.tool import tool_mark  # slow to import

    found = reading.find(name, _TOOL_CODE)
    if parameters is not None:
        if not isinstance(parameters, Entries) or not callable(found):
            raise refuse(f"'{name}' must be a class or function, and its parameters a mapping", name)
        if tool_mark(found) is not None:
            text = "is a tool already: parameters are for a class or a function that makes one. Leave them out"
            raise refuse(f"'{name}' {text}", name)
        found = found(**convert_freely(parameters))
    elif isinstance(found, type):
        found = found()
    if check_tool_entry(found, 0) is not None:
        kind = type(found).__name__
        text = f"'{name}' is a {kind}, and neither marked with @tool nor an AgentTool nor an object with @tool methods"
        raise ValidationError(text)
    return found


def _is_intended_as_tool(found: object) -> bool:
    from ensemble_ray.tools.registry import check_tool_entry
    from ensemble_ray.tools.tool import AgentTool, DynamicToolProvider, marked_functions

    if isinstance(found, type):
        return issubclass(found, AgentTool | DynamicToolProvider) or bool(marked_functions(found))
    return check_tool_entry(found, 0) is None


_TOOL_CODE = Expected(
    what="a function marked with @tool, or an AgentTool", accepts=lambda _: True, is_intended=_is_intended_as_tool
)


#: Built-in tools without required parameters.
_Bare = (
    Annotated[Literal["calculator"], Field(description=_Calculator.__doc__)]
    | Annotated[Literal["datetime"], Field(description=_DateTime.__doc__)]
    | Annotated[Literal["json_parser"], Field(description=_JsonParser.__doc__)]
    | Annotated[Literal["web_scrape"], Field(description=_WebScrape.__doc__)]
)
_Own = Annotated[ReferenceText, Field(description="Your own tool: module:attribute.")]

Tool = Annotated[object, PlainValidator(_read, json_schema_input_type=_Bare | _Own | _Entry)]
