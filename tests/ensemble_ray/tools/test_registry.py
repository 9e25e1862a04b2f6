"""From a user's list of tools to what an agent can call."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AbstractTypedAgentTool,
    CustomSchemaAgentTool,
    DynamicToolProvider,
    Effect,
    ToolResult,
    ValidationError,
    tool,
)
from ensemble_ray.tools.registry import (
    TRACE,
    BoundAgentTool,
    BoundFunction,
    check_tool_entry,
    expand_providers,
    resolve_tools,
)
from ensemble_ray.tools.tool import ContextAgentTool
from tests.ensemble_ray.tools.doubles import Plain, Safe


@tool
def search(query: str) -> str:
    """Search."""
    return query


@tool(cpu=True)
def crunch(n: int) -> int:
    """Crunch."""
    return n


class Calculator:
    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool(name="sub")
    def subtract(self, a: int, b: int) -> int:
        """Subtract."""
        return a - b


class Empty:
    """No tools."""


def nothing(text: str) -> ToolResult:
    """Not marked."""
    return ToolResult.success(text)


class Provider(DynamicToolProvider):
    def __init__(self, *tools: object) -> None:
        self.tools = tools
        self.asked = 0

    def resolve(self) -> Sequence[object]:
        self.asked += 1
        return self.tools


class LateProvider(Provider):
    async def resolve(self) -> Sequence[object]:  # type: ignore[override]  # a provider may be async
        return super().resolve()


@pytest.mark.parametrize("prefix", ["Tool", "Task tool"])
def test_entry_is_refused_when_it_is_none_or_no_tool(prefix: str) -> None:
    """S-DOM-5, S-DOM-6, S-DOM-23: index and class name, in the words of the list it is in."""
    assert check_tool_entry(None, 0, prefix=prefix) == f"{prefix} at index 0 must not be None"
    assert (
        check_tool_entry(Empty(), 2, prefix=prefix)
        == f"{prefix} at index 2 (Empty) is neither an AgentTool nor has @tool methods"
    )
    for other in (Calculator, "search", 5):
        problem = check_tool_entry(other, 1)
        assert problem is not None
        assert problem.endswith("is neither an AgentTool nor has @tool methods")


def test_plain_function_is_refused_with_what_to_do_when_it_is_listed() -> None:
    """S-DOM-6: the likeliest mistake of all."""
    problem = check_tool_entry(nothing, 1)
    assert problem is not None
    assert problem.endswith("nor has @tool methods: put @tool before the function 'nothing'")


def test_spec_is_logged_with_its_description(caplog: pytest.LogCaptureFixture) -> None:
    """S-TOOL-90, S-TOOL-20: name, description and parameters, as the model is given them."""
    with caplog.at_level(TRACE, "ensemble_ray.tools.registry"):
        (spec,) = resolve_tools([Plain(nothing)]).specs
    logged = json.loads(caplog.messages[0].removeprefix("Tool spec: "))
    assert logged == {"name": spec.name, "description": spec.description, "parameters": spec.parameters}


def test_tool_is_warned_of_once_when_it_tells_the_model_too_little(caplog: pytest.LogCaptureFixture) -> None:
    """S-TOOL-17: by its name; a tool that tells everything is none."""

    @tool
    def bare(query, limit: int = 3):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  the point of this test
        return query * limit

    @tool
    def told(query: str) -> str:
        """Look it up."""
        return query

    for _ in range(2):
        assert check_tool_entry(bare, 0) is None
        assert check_tool_entry(told, 1) is None
    assert caplog.messages == [
        "Tool 'bare' has no docstring: the model does not know its purpose; no type for query: the model may pass any value"
    ]


def test_entry_is_refused_when_its_name_cannot_be() -> None:
    """S-DOM-7, S-DOM-8."""
    assert check_tool_entry(Plain(nothing, name=" "), 0) == "Tool name must not be blank"
    nameless = Plain(nothing)
    del nameless.name
    assert check_tool_entry(nameless, 0) == "Tool name must not be blank"
    assert (
        check_tool_entry(Plain(nothing, name="a-b"), 0)
        == "Tool name 'a-b' must contain only alphanumeric characters and underscores"
    )


def test_entry_passes_when_it_is_a_tool_of_any_kind() -> None:
    """S-TOOL-12, S-TOOL-30: functions, bound methods, objects, AgentTools, providers."""
    for entry in (search, Calculator().add, Calculator(), Plain(nothing), Safe(nothing), Provider()):
        assert check_tool_entry(entry, 0) is None


def test_specs_keep_the_order_of_the_list_when_kinds_are_mixed() -> None:
    """S-TOOL-12, S-TOOL-30: an object contributes all of its tools."""
    resolved = resolve_tools([Plain(nothing), Calculator(), search])
    assert resolved.names == ("plain", "add", "sub", "search")
    assert [spec.name for spec in resolved.specs] == list(resolved.names)
    assert [bound.name for bound in resolved] == list(resolved.names)
    assert isinstance(resolved.get("plain"), BoundAgentTool)
    assert isinstance(resolved.get("sub"), BoundFunction)
    assert resolved.get("nope") is None
    assert resolve_tools([Calculator().add]).names == ("add",)


def test_spec_has_one_text_input_when_the_tool_is_plain() -> None:
    """S-TOOL-20."""
    spec = resolve_tools([Plain(nothing)]).specs[0]
    assert (spec.name, spec.description) == ("plain", "does plain")
    assert spec.parameters == {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The input to pass to the tool"}},
        "required": ["input"],
    }


def test_schema_is_the_tools_own_when_it_brings_one() -> None:
    """S-TOOL-24: it replaces the generated schema, and wins over typed input."""

    class Query(BaseModel):
        q: str

    class Own(AbstractTypedAgentTool[Query], CustomSchemaAgentTool):
        name = "own"
        description = "own"
        input_type = Query

        @property
        def parameter_schema(self) -> Mapping[str, object]:
            return {"type": "object", "properties": {"anything": {}}}

        def execute_typed(self, arguments: Query, /) -> object:
            return arguments.q

    bound = resolve_tools([Own()]).get("own")
    assert isinstance(bound, BoundAgentTool)
    assert bound.spec.parameters == {"type": "object", "properties": {"anything": {}}}
    assert bound.takes_arguments


class Foreign(CustomSchemaAgentTool):
    """A tool whose schema somebody else wrote."""

    def __init__(self, schema: object) -> None:
        self.name = "foreign"
        self.description = "foreign"
        self.schema = schema

    @property
    def parameter_schema(self) -> Mapping[str, object]:
        return self.schema  # type: ignore[return-value]  wrong on purpose

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text)


def test_a_schema_of_its_own_is_normalised_when_a_tool_is_resolved(caplog: pytest.LogCaptureFixture) -> None:
    """S-LLM-60, S-LLM-61: with one line of what models do not see."""
    tool = Foreign({"$schema": "draft", "if": {}})
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            (spec,) = resolve_tools([tool]).specs
    assert spec.parameters == {"type": "object", "properties": {}}
    (line,) = [record.getMessage() for record in caplog.records if "foreign" in record.getMessage()]
    assert line.endswith("do not see: $schema, if")


@pytest.mark.parametrize("schema", [None, {"type": "array"}, ["x"]])
def test_resolution_is_refused_when_a_schema_of_the_users_own_cannot_be(schema: object) -> None:
    """S-LLM-64: the author is told; a server's tool would be left out."""
    with pytest.raises(ValidationError, match=r"^Tool 'foreign': the schema of its arguments "):
        resolve_tools([Foreign(schema)])


def test_a_servers_tool_gets_another_name_when_its_own_is_taken() -> None:
    """S-LLM-63: by the user's tools wherever they stand, by tools of other servers before it, or by the library."""

    class Remote(ContextAgentTool):
        description = "remote"
        parameter_schema = {}  # noqa: RUF012  # type: ignore[assignment]  read alone

        def __init__(self, name: str, origin: str) -> None:
            self.name = name
            self.origin = origin

        def execute(self, text: str, /) -> ToolResult:
            return ToolResult.success(text)

    remote = [Remote("search", "one"), Remote("find", "one"), Remote("find", "two"), Remote("delegate", "two")]
    names = resolve_tools([*remote, search], reserved=["delegate"]).names
    assert names[1] == "find"
    assert names[4] == "search"
    assert [
        re.fullmatch(rf"{each.name}_[0-9a-f]{{8}}", name) is not None for each, name in zip(remote, names, strict=False)
    ] == [*(True, False, True, True)]
    assert names == resolve_tools([*remote, search], reserved=["delegate"]).names


def test_nothing_is_offered_when_the_list_is_empty() -> None:
    """S-TOOL-33."""
    resolved = resolve_tools([])
    assert (resolved.specs, resolved.names, len(resolved)) == ((), (), 0)


@pytest.mark.parametrize("entry", [Empty(), None, nothing])
def test_resolution_is_refused_when_an_entry_is_no_tool(entry: object) -> None:
    """S-TOOL-31, S-ENG-60: with the full name of its class."""
    kind = f"{type(entry).__module__}.{type(entry).__qualname__}"
    with pytest.raises(ValidationError) as caught:
        resolve_tools([search, entry])
    assert str(caught.value) == f"Tool object of type '{kind}' is neither an AgentTool nor has @tool methods"


def test_resolution_is_refused_when_a_name_cannot_be() -> None:
    """S-TOOL-4, S-ENG-60: also for what a provider brings, which no definition could check."""
    with pytest.raises(ValidationError, match=r"^Tool name 'a-b' must contain only"):
        resolve_tools([Provider(Plain(nothing, name="a-b"))])


@pytest.mark.parametrize(
    "entries",
    [
        [Plain(nothing, name="search"), Safe(nothing, name="search")],
        [Plain(nothing, name="search"), search],
        [search, search],
        [Calculator(), Calculator()],
        [Provider(search), search],
    ],
)
def test_resolution_is_refused_when_two_tools_have_one_name(entries: list[object]) -> None:
    """S-TOOL-34, S-ENG-60: of whatever kinds."""
    with pytest.raises(ValidationError, match=r"^Duplicate tool name: '(search|add)'$"):
        resolve_tools(entries)


def test_provider_is_asked_once_when_a_task_resolves_its_tools() -> None:
    """S-TOOL-32."""
    provider = Provider(search, Calculator())
    assert resolve_tools([Plain(nothing), provider]).names == ("plain", "search", "add", "sub")
    assert provider.asked == 1


async def test_provider_is_asked_once_when_expanded_beforehand() -> None:
    """S-TOOL-32: sync ones in a thread, async ones awaited."""
    provider, late = Provider(search), LateProvider(Calculator())
    entries = await expand_providers([provider, Plain(nothing), late])
    assert resolve_tools(entries).names == ("search", "plain", "add", "sub")
    assert (provider.asked, late.asked) == (1, 1)
    with pytest.raises(ValidationError, match=r"LateProvider.resolve is async"):
        resolve_tools([late])


def test_resolution_is_refused_when_a_cpu_tool_is_a_bound_method() -> None:
    """S-SET-35: its object would travel with each call."""

    class Holder:
        @tool(cpu=True)
        def crunch(self, n: int) -> int:
            """Crunch."""
            return n

        @tool(cpu=True)
        @staticmethod
        def free(n: int) -> int:
            """Free of its object."""
            return n

    for entry in (Holder(), Holder().crunch):
        with pytest.raises(ValidationError, match=r"Tool 'crunch' is a bound method, but @tool\(cpu=True\)"):
            resolve_tools([entry])
    bound = resolve_tools([crunch, Holder.free])
    assert [found.cpu for found in bound if isinstance(found, BoundFunction)] == [True, True]


def test_resolution_is_refused_when_a_method_comes_without_its_object() -> None:
    """S-TOOL-12: the text says what to list instead."""
    with pytest.raises(ValidationError, match=r"Tool 'add' is a method of Calculator: list the object or its bound"):
        resolve_tools([Calculator.add])


def test_spec_is_logged_when_trace_is_on(caplog: pytest.LogCaptureFixture) -> None:
    """S-TOOL-90: its JSON, at the level below DEBUG."""
    with caplog.at_level(5, logger="ensemble_ray.tools.registry"):
        resolve_tools([search])
    assert [record.levelno for record in caplog.records] == [5]
    assert '"query": {"type": "string"}' in caplog.records[0].getMessage()
    assert caplog.records[0].levelno < logging.DEBUG


def test_effect_is_the_tools_own_when_resolved() -> None:
    """S-DUR-20: of functions, objects with tool methods, classes, instances, and what a provider offers."""

    @tool(effect="none")
    def peek() -> str:
        """Peek."""
        return ""

    class Box:
        @tool(effect="idempotent")
        def put(self) -> str:
            """Put."""
            return ""

    said = Plain(str, "said")
    said.effect = "none"
    resolved = resolve_tools([search, peek, Box(), Plain(str), said, Provider(_renamed("later", "idempotent"))])
    assert {each.name: each.effect for each in resolved} == {
        "search": "once",
        "peek": "none",
        "put": "idempotent",
        "plain": "once",
        "said": "none",
        "later": "idempotent",
    }


def _renamed(name: str, effect: Effect) -> Plain:
    made = Plain(str, name)
    made.effect = effect
    return made


def test_tool_is_refused_when_its_effect_cannot_be() -> None:
    """S-DUR-20: where it is listed, and where it is resolved."""
    wrong = Plain(str, "post")
    wrong.effect = "twice"  # type: ignore[assignment]  on purpose
    problem = "Tool 'post' effect must be one of [none, idempotent, once], got: 'twice'"
    assert check_tool_entry(wrong, 0) == problem
    with pytest.raises(ValidationError, match=re.escape(problem)):
        resolve_tools([wrong])
