"""What a definition is, as data."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pydantic
import pytest

from ensemble_ray import (
    Agent,
    CalculatorTool,
    ChatMessage,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Ensemble,
    Graph,
    GraphEdge,
    HierarchicalConstraints,
    LocalChatModel,
    Loop,
    OpenAIChatModel,
    Phase,
    Task,
    ToolPipeline,
    Until,
    tool,
)
from ensemble_ray.plan.planner import plan_run, resolve_tasks
from ensemble_ray.record.identity.definition import definition_data, differences, identity_of
from ensemble_ray.testing import ScriptedModel

SECRET = "sk-secret"  # noqa: S105  made up, and looked for in what must not hold it
MODEL = OpenAIChatModel(
    "gpt-4o-mini",
    base_url="https://me:pw@example.org/v1",
    api_key=SECRET,
    temperature=0.5,
    extra_headers={"X-Key": SECRET},
    extra_body={"guided": "yes"},
)


class Report(pydantic.BaseModel):
    """What a task gives."""

    title: str


@tool
def price(item: str) -> str:
    """Price of an item."""
    return item


class Shop:
    """A tool with state."""

    def __init__(self, name: str) -> None:
        self.name = name

    @tool
    def stock(self, item: str) -> str:
        """How many there are."""
        return item + self.name


def handle(context: object) -> str:
    """Do a task without a model."""
    return str(context)


def allow(given: object) -> None:
    """A guardrail that refuses nothing."""
    del given


def _data(*tasks: Task, **more: object) -> dict[str, object]:
    ensemble = cast("Callable[..., Ensemble]", Ensemble)(tasks=tasks, **more)
    return definition_data(plan_run(ensemble, resolve_tasks(ensemble)), ensemble)


def _agent(**changes: object) -> Agent:
    given = {"role": "Writer", "goal": "Write", "llm": MODEL, **changes}
    return cast("Callable[..., Agent]", Agent)(**given)


def _task(**changes: object) -> Task:
    given = {"description": "Write", "expected_output": "Prose", "name": "write", **changes}
    return cast("Callable[..., Task]", Task)(**given)


def test_data_holds_neither_keys_nor_urls() -> None:
    """S-DUR-36, S-DUR-6: whatever stands in a model's options."""
    text = json.dumps(_data(_task(agent=_agent(tools=[price, Shop(SECRET)], rate_limit=None))))
    assert SECRET not in text
    assert "example.org" not in text
    assert "gpt-4o-mini" in text


def test_nodes_that_agents_may_be_on_make_no_difference() -> None:
    """S-CLU-40: a run is resumed on another cluster, where they live elsewhere."""
    asking = _agent(num_cpus=1, num_gpus=0.5, resources={"desk": 1}, labels={"zone": "a"})
    assert _data(_task(agent=asking)) == _data(_task(agent=_agent()))


def test_difference_has_a_path_when_anything_that_runs_was_changed() -> None:
    """S-DUR-36: models by name and options, tools, limits, types, callables."""

    @tool(name="price")
    def other(item: str) -> str:
        """Price of an item."""
        return item + item

    before = _data(
        _task(agent=_agent(tools=[price]), output_type=Report),
        _task(name="count", handler=handle, output_guardrails=[allow]),
    )

    class Longer(Report):
        pages: int

    changed = MODEL.__class__("gpt-4o", temperature=0.9, extra_body={"guided": "no"})
    after = _data(
        _task(agent=_agent(llm=changed, tools=[other], max_iterations=3), output_type=Longer),
        _task(name="count", handler=allow, output_guardrails=[handle]),
        max_tool_output_length=100,
    )
    paths = {line.partition(":")[0] for line in differences(before, after)}
    assert {
        "agents.writer.llm.model",
        "agents.writer.llm.options.temperature",
        "agents.writer.llm.options.extra_body",
        "agents.writer.max_iterations",
        "agents.writer.tools.price.source",
        "tasks.write.output_type.properties.pages",
        "tasks.count.handler.source",
        "tasks.count.handler.callable",
        "tasks.count.output_guardrails.0.callable",
        "max_tool_output_length",
    } <= paths


def test_difference_has_a_path_when_another_conversation_is_continued() -> None:
    """S-DOM-77, S-DUR-36: what was said before decides what is answered."""

    def continuing(answer: str) -> dict[str, object]:
        said = [ChatMessage(role="user", content="Two?"), ChatMessage(role="assistant", content=answer)]
        return _data(_task(agent=_agent(), history=said))

    assert differences(continuing("2"), continuing("2")) == []
    (found,) = differences(continuing("2"), continuing("3"))
    assert found.startswith("tasks.write.history")


def test_difference_has_a_path_when_a_context_budget_changed() -> None:
    """S-MEM-138: it decides what a model sees; without one the data is what it was."""
    before = _data(_task(agent=_agent()))
    after = _data(_task(agent=_agent(), context_budget=500), context_budget=8000)
    assert {line.partition(":")[0] for line in differences(before, after)} == {"context_budget", "tasks.write"}


def test_nothing_differs_when_captured_values_and_places_do() -> None:
    """S-DUR-36: a definition is its code and texts; where the model is and what a tool holds is the caller's matter."""
    here = _agent(llm=OpenAIChatModel("m", base_url="http://here/v1", api_key="a"), tools=[Shop("a")])
    there = _agent(llm=OpenAIChatModel("m", base_url="http://there/v1", api_key="b"), tools=[Shop("b")])
    assert differences(_data(_task(agent=here)), _data(_task(agent=there))) == []


def test_limited_model_is_the_model_when_data_is_made() -> None:
    """S-DUR-36: a limit says when, not what."""
    limited = _agent(rate_limit={"requests": 2, "period": 60})
    assert differences(_data(_task(agent=_agent())), _data(_task(agent=limited))) == []


def test_local_model_is_known_by_the_name_of_its_file() -> None:
    """S-DUR-36: another machine may keep it elsewhere."""
    agents = [_agent(llm=LocalChatModel(path)) for path in ("/a/model.gguf", "/b/model.gguf", "/b/other.gguf")]
    first, second, third = (_data(_task(agent=agent)) for agent in agents)
    assert differences(first, second) == []
    assert differences(first, third) == ["agents.writer.llm.model: 'model.gguf' -> 'other.gguf'"]


def test_tools_of_every_kind_are_known_by_name() -> None:
    """S-DUR-36: functions, objects, built-in ones, pipelines with their steps."""
    pipeline = ToolPipeline.of(CalculatorTool(), CalculatorTool())
    data = _data(_task(agent=_agent(tools=[price, Shop("a"), CalculatorTool(), pipeline])))
    agents = cast("Mapping[str, Mapping[str, Mapping[str, Mapping[str, object]]]]", data["agents"])
    tools = agents["writer"]["tools"]
    assert list(tools) == ["price", "stock", "calculator", "calculator_then_calculator"]
    assert "source" in tools["stock"]
    assert "source" not in tools["calculator"]  # another version of the library is no other definition
    assert len(cast("list[object]", tools["calculator_then_calculator"]["steps"])) == 2


def test_plain_tasks_leave_no_trace_in_the_data() -> None:
    """S-DUR-36: their texts stand in the plan; a thousand of them cost nothing."""
    agent = _agent(llm=ScriptedModel())
    assert _data(*(_task(name=f"t{number}", agent=agent) for number in range(1000)))["tasks"] == {}


def test_output_type_without_schema_is_known_by_name() -> None:
    """S-DUR-36: nothing that a user may write stops a run."""

    class Odd:
        """Nothing that pydantic knows."""

    data = _data(_task(handler=handle, output_type=Odd))
    tasks = cast("Mapping[str, Mapping[str, Mapping[str, str]]]", data["tasks"])
    assert tasks["write"]["output_type"]["type"].endswith("Odd")


_MODULE = """
import functools
from ensemble_ray.record.identity.definition import identity_of

class Parent:
    def greet(self): return "hello"

class Child(Parent):
    def __call__(self, given): return {CHILD}

def plain(given):
    return {PLAIN}

def wrapped(function):
    @functools.wraps(function)
    def call(*args): return function(*args)
    return call

@wrapped
def first(given): return 1

@wrapped
def second(given): return 2

made = {}
exec("def typed(given): return given in {'a', 'b', 'c'}", made)

if __name__ == "__main__":
    import json
    found = [plain, Child(), Child().greet, first, second, made["typed"], len, functools.partial(plain, 1), lambda x: x]
    print(json.dumps([identity_of(each) for each in found]))
"""


def _identities(path: Path, **texts: str) -> list[dict[str, str]]:
    text = _MODULE.replace("{CHILD}", texts.get("child", "given")).replace("{PLAIN}", texts.get("plain", "given"))
    path.write_text(text)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603  our own interpreter
    return cast("list[dict[str, str]]", json.loads(done.stdout))


@pytest.mark.program
def test_code_has_one_identity_in_every_process_and_another_when_it_was_changed(tmp_path: Path) -> None:
    """S-DUR-36: module, qualified name and source; also of what has no source text, sets in any order included."""
    module = tmp_path / "mod.py"
    before, again = _identities(module), _identities(module)
    assert before == again
    after = _identities(module, child="2", plain="3")
    changed = [old != new for old, new in zip(before, after, strict=True)]
    assert changed == [True, True, False, False, False, False, False, True, False]
    plain, child, greet, first, second, typed, builtin, partial, _ = before
    assert plain["callable"] == "__main__.plain"
    assert plain == partial
    assert child["callable"] == "__main__.Child"
    assert greet["callable"] == "__main__.Parent.greet"
    assert first["source"] != second["source"]
    assert "source" in typed
    assert builtin == {"callable": "builtins.len"}


def test_methods_partials_and_classes_are_known_by_their_code() -> None:
    """S-DUR-36: nothing that can be called stops a run."""
    method = identity_of(Shop("a").stock)
    assert method == identity_of(Shop.stock) == identity_of(functools.partial(Shop("b").stock, "x"))
    assert identity_of(Shop)["callable"] == f"{__name__}.Shop"
    assert identity_of(Shop("a")) == identity_of(Shop)


class Strategy:
    """Writes a manager's words."""

    def build_system_prompt(self, context: object) -> str:
        """Who it is."""
        return f"lead {type(context).__name__}"

    def build_user_prompt(self, context: object) -> str:
        """What it does."""
        return f"do {type(context).__name__}"


class Gatekeeper:
    """A policy as an object."""

    def evaluate(self, request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        """Everything may go on."""
        del request, context
        return DelegationPolicyResult.allow()


def let_pass(request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
    """A policy as a function."""
    return Gatekeeper().evaluate(request, context)


def _managed(**changes: object) -> Ensemble:
    worker = Agent(role="Worker", goal="Work", llm=MODEL)
    task = Task(description="Do it", expected_output="x", agent=worker)
    given = {"manager_llm": MODEL, "manager_prompt_strategy": Strategy(), "delegation_policies": [let_pass], **changes}
    return Ensemble(tasks=[task], workflow="hierarchical").replace(**given)


def _whole(ensemble: Ensemble) -> dict[str, object]:
    planned = plan_run(ensemble, resolve_tasks(ensemble))
    return {"plan": planned.plan.to_dict(), "definition": definition_data(planned, ensemble)}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"hierarchical_constraints": HierarchicalConstraints(max_calls_per_worker={"Worker": 2})},
         "plan.hierarchy.max_calls_per_worker.Worker: absent -> 2"),
        ({"enforce_required": "fail"}, "plan.hierarchy.enforce_required: 'remind' -> 'fail'"),
        ({"manager_stall_turns": 9}, "plan.hierarchy.stall_turns: 5 -> 9"),
        ({"manager_llm": OpenAIChatModel("other")}, "definition.agents.manager.llm.model: 'gpt-4o-mini' -> 'other'"),
        ({"manager_max_iterations": 3}, "definition.agents.manager.max_iterations: 20 -> 3"),
        ({"max_delegation_depth": 1}, "definition.delegation.max_depth: 3 -> 1"),
        ({"delegation_policies": [Gatekeeper()]}, "definition.delegation.policies.0.callable: "),
        ({"manager_prompt_strategy": None}, "definition.delegation.manager_prompts: "),
    ],
)  # fmt: skip
def test_difference_has_a_path_when_what_a_manager_is_held_to_was_changed(
    changes: dict[str, object], path: str
) -> None:
    """S-DUR-75, S-DUR-36: constraints, limits, policies and who writes its words."""
    found = differences(_whole(_managed()), _whole(_managed(**changes)))
    assert any(line.startswith(path) for line in found), found


def test_nothing_differs_when_only_times_and_repetitions_of_delegations_do() -> None:
    """S-DUR-75: they say how long somebody waits, not what is asked."""
    assert differences(_whole(_managed()), _whole(_managed(delegation_timeout=5, delegation_retries=7))) == []


def test_agent_that_may_delegate_is_told_by_path() -> None:
    """S-DUR-75: and what is the same with and without delegation is not in the data."""
    plain = Agent(role="Worker", goal="Work", llm=MODEL)
    alone, asking = (
        _whole(Ensemble(tasks=[Task(description="Do", expected_output="x", agent=each)]))
        for each in (plain, plain.replace(allow_delegation=True))
    )
    assert differences(alone, asking) == [
        "definition.delegation: absent -> {'max_depth': 3}",
        "plan.agents.0.allow_delegation: absent -> True",
    ]
    assert "hierarchy" not in cast("dict[str, object]", alone["plan"])


def test_callables_of_units_are_part_of_the_definition() -> None:
    """S-LOOP-170: by their place, as guardrails are; of a built-in predicate what it looks for."""

    def is_good(context: object) -> bool:
        return bool(context)

    def of_loop(**fields: object) -> object:
        body = [_task(handler=handle, output_type=Report)]
        loop = cast("Callable[..., Loop]", Loop)(name="refine", body=body, **fields)
        return _data(loops=[loop]).get("units")

    assert of_loop() is None
    assert of_loop(until=is_good) == {"loop:refine": {"until": identity_of(is_good)}}
    assert of_loop(until=Until.text_contains("OK")) == {
        "loop:refine": {"until": {"callable": "Until.text_contains", "text": "OK", "ignore_case": False}}
    }
    assert of_loop(until=Until.parsed(is_good)) == {
        "loop:refine": {"until": {"callable": "Until.parsed", "condition": identity_of(is_good)}}
    }
    edges = [
        GraphEdge(from_state="a", to_state="a", condition=is_good),
        GraphEdge(from_state="a", to_state=Graph.END),
    ]
    graph = Graph(name="g", states={"a": _task(handler=handle)}, edges=edges, start="a")
    assert _data(graph=graph)["units"] == {"graph:g": {"edges": {"0": identity_of(is_good)}}}


def test_definition_says_nothing_of_units_when_none_asks_anything() -> None:
    """S-LOOP-170: caps, modes and names stand in the plan."""
    phase = Phase(name="p", tasks=[_task(handler=handle)])
    assert "units" not in _data(phases=[phase])
    assert "units" not in _data(_task(handler=handle))
