"""Tools in a team file: `calculator`, `file_read: {base_dir: ./data}`, `module:Class: {argument: value}`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.teamfile.document import NOWHERE, Entries, Items, Located, list_known_names, suggestion
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
    plain,
    refuse,
    require_text,
    text_in,
)
from ensemble_ray.tools.registry import check_tool_entry
from ensemble_ray.tools.tool import AgentTool, DynamicToolProvider, marked_functions, tool_mark
from ensemble_ray.values.reviews import OnTimeoutAction

_NAMES = TypeAdapter(list[Text])
_SWITCH = TypeAdapter[bool](Annotated[bool, plain(bool, "true, false, or a list of names of variables")])
_Inherit = Annotated[
    object,
    PlainValidator(
        lambda node: (_NAMES if isinstance(node, Items) else _SWITCH).validate_python(node),
        json_schema_input_type=bool | list[str],
    ),
]


class _ToolKeys(FileSection):
    called = "tool '{name}'"
    about: ClassVar[str]
    class_name: ClassVar[str]


_BASE_DIR = "An existing directory; paths are relative to this file's directory."
_APPROVAL = "Whether the review handler must approve each call."


class _Calculator(_ToolKeys):
    about = "Computes arithmetic expressions."
    class_name = "CalculatorTool"


class _DateTime(_ToolKeys):
    about = "Returns the current date and time, and computes with dates and times."
    class_name = "DateTimeTool"


class _JsonParser(_ToolKeys):
    about = "Reads a value from a JSON text."
    class_name = "JsonParserTool"


class _FileWrite(_ToolKeys):
    about = "Writes text files below a directory."
    class_name = "FileWriteTool"
    base_dir: PathText = key(_BASE_DIR, is_required=True)
    require_approval: Flag = key(_APPROVAL)


class _FileRead(_ToolKeys):
    about = "Reads text files below a directory."
    class_name = "FileReadTool"
    base_dir: PathText = key(_BASE_DIR, is_required=True)
    max_bytes: Whole = key("Largest file that it reads.")


class _WebScrape(_ToolKeys):
    about = "Fetches a web page and returns its text."
    class_name = "WebScraperTool"
    max_content_length: Whole = key("Longest returned text, characters.")
    allow_private_hosts: Flag = key("Whether it may fetch from hosts of the local network.")


class _WebSearch(_ToolKeys):
    about = "Searches the web through a service."
    class_name = "WebSearchTool"
    provider: Annotated[str, one_of(("tavily", "serpapi"), "provider")] = key("The service.", is_required=True)
    api_key_env: Text = key("Variable that holds its key; default TAVILY_API_KEY or SERPAPI_API_KEY.")


class _Outside(_ToolKeys):
    name: Text = key("Name by which the model calls it.", is_required=True)
    description: Text = key("Description for the model.", is_required=True)


class _Http(_Outside):
    about = "Sends the model's input to one HTTP address."
    class_name = "HttpAgentTool"
    url: Text = key("The address.", is_required=True)
    method: Text = key("HTTP method; default POST.")
    headers: Headers = key("Headers: text, or {env: NAME} for secrets.")
    timeout: Number = key("Seconds.")
    max_response_bytes: Whole = key("Largest accepted answer.")
    require_approval: Flag = key(_APPROVAL)


class _Process(_Outside):
    about = "Runs one program with the model's input on its standard input."
    class_name = "ProcessAgentTool"
    only_lists = frozenset({"command"})
    command: list[Text] = key("The program and its arguments; no shell.", is_required=True)
    timeout: Number = key("Seconds.")
    max_output_bytes: Whole = key("Bytes to read per stream; the rest is dropped.")
    environment: Variables = key("Environment variables of the program: text, or {env: NAME} for secrets.")
    inherit: _Inherit = key("Names of variables of this process that it inherits; true: all, including keys of models.")
    require_approval: Flag = key(_APPROVAL)


class _HumanInput(_ToolKeys):
    about = "Asks a person, through the review handler."
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
    about = "The tools of an MCP server."
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
    about = "An agent of another system, called by the A2A protocol."
    class_name = "A2ATool"
    url: Text = key("URL of its card, without /.well-known/agent-card.json.", is_required=True)
    name: Text = key("Name by which the model calls it; default ask_ and the last part of the URL.")
    description: Text = key("Description for the model.")
    headers: Headers = key("Headers: text, or {env: NAME} for secrets.")
    hosts: list[Text] = key("Hosts that its card may name in addition to the host of the URL.")
    effect: Text = key("Effect of a question: none, idempotent or once.")
    timeout: Number = key("Longest time of a question, seconds.")
    connect_timeout: Number = key("Longest time to connect, seconds.")


class _Entry(BaseModel):
    """An entry with parameters. The key is the tool's name."""

    model_config = ConfigDict(
        extra="forbid",
        defer_build=True,
        json_schema_extra=lambda schema: schema.update(  # exactly one key: a built-in tool, or user code
            minProperties=1,
            maxProperties=1,
            patternProperties={
                REFERENCE_PATTERN: {"type": "object", "description": "Arguments of the class or function."}
            },
            properties={
                name: {word: value for word, value in cast("dict[str, Any]", shown).items() if word != "default"}
                for name, shown in cast("dict[str, Any]", schema["properties"]).items()
            },
        ),
    )

    calculator: _Calculator | None = key(_Calculator.about)
    datetime: _DateTime | None = key(_DateTime.about)
    json_parser: _JsonParser | None = key(_JsonParser.about)
    file_read: _FileRead = key(_FileRead.about)
    file_write: _FileWrite = key(_FileWrite.about)
    human_input: _HumanInput | None = key(_HumanInput.about)
    web_scrape: _WebScrape | None = key(_WebScrape.about)
    web_search: _WebSearch = key(_WebSearch.about)
    http: _Http = key(_Http.about)
    process: _Process = key(_Process.about)
    mcp: _Mcp = key(_Mcp.about)
    a2a: _A2a = key(_A2a.about)


_BUILT_IN = tuple(_Entry.model_fields)


def _read(node: object, info: ValidationInfo) -> object:
    name, parameters = text_in(node), None
    if isinstance(node, Entries) and len(node) == 1:
        ((name, parameters),) = node.items()
    if name is None:
        one_of_them = "must be the name of a built-in tool, module:attribute, or one of them"
        raise ValidationError(f"{one_of_them} with its parameters: `name: {{...}}`")
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
    from ensemble_ray import tools

    entries = Entries(NOWHERE, {}, {}) if parameters is None else parameters
    section: _ToolKeys = getattr(_Entry.model_validate({name: entries}, context=reading), name)
    kind, values = getattr(tools, section.class_name), section.values()
    if not isinstance(section, _WebSearch):
        return kind(**values)
    make = kind.of_tavily if section.provider == "tavily" else kind.of_serp_api
    return make(reading.read_key(values.get("api_key_env") or f"{section.provider.upper()}_API_KEY"))


def _find(reading: Reading, name: str, parameters: Located | None) -> object:
    found = reading.find(name, _TOOL_CODE)
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


_TOOL_CODE = Expected(
    what="a function marked with @tool, or an AgentTool",
    accepts=lambda _: True,
    is_intended=lambda found: (
        issubclass(found, AgentTool | DynamicToolProvider) or bool(marked_functions(found))
        if isinstance(found, type)
        else check_tool_entry(found, 0) is None
    ),
)


# built-in tools without required parameters
_Bare = (
    Annotated[Literal["calculator"], Field(description=_Calculator.about)]
    | Annotated[Literal["datetime"], Field(description=_DateTime.about)]
    | Annotated[Literal["json_parser"], Field(description=_JsonParser.about)]
    | Annotated[Literal["web_scrape"], Field(description=_WebScrape.about)]
)
_Own = Annotated[ReferenceText, Field(description="Your own tool: module:attribute.")]

Tool = Annotated[object, PlainValidator(_read, json_schema_input_type=_Bare | _Own | _Entry)]
