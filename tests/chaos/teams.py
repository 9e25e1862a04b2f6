"""Teams that are killed; `ensemble-ray resume` finds each by its origin, such as `tests.chaos.teams:chain`.

What a tool does is a line of JSON in a file that the model names, so that a line stands there for each time it was
really done. Every tool is slow for a moment around its line: kills shall fall between doing and recording. So are
policies, which leave a line for each time that they are asked.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble_ray import (
    Agent,
    ChatModel,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Ensemble,
    Fallback,
    HierarchicalConstraints,
    MapReduceEnsemble,
    OpenAIChatModel,
    Task,
    TaskHandlerContext,
    UnitOutput,
    current_tool_context,
    tool,
)

__all__ = [
    "BIG",
    "ITEMS",
    "QUESTIONS",
    "UNPAID",
    "big",
    "chain",
    "chain_with_tools",
    "dag",
    "dag_with_tools",
    "fallback",
    "leave",
    "make_agent",
    "make_task",
    "mapreduce",
    "newsroom",
    "ordered",
    "peers",
    "pipelined",
]

#: The environment variable that says where policies leave their lines.
QUESTIONS = "CHAOS_QUESTIONS"

#: The model that has no credit.
UNPAID = "unpaid"
#: The environment variable that says how many items the big map-reduce has.
BIG = "CHAOS_ITEMS"
#: Items of the map-reduces: forty good ones, and in the file a line that is none.
ITEMS = 40
_ITEMS_FILE = Path(__file__).with_name("items.jsonl")
#: Tokens that a reduce may be given: about four outputs, see `answers.answer_in_map_reduce`.
_BUDGET = 40
#: Tasks of a map-reduce that may be in flight.
_WINDOW = 8
_ITEM = re.compile(r"Step (m\d+) of")

#: How long a tool takes before and after its line, s.
_MOMENT_S = 0.01
#: Which task of the graph needs which: three diamonds one after the other, and a tail.
_GRAPH: dict[str, Sequence[str]] = {
    "a": (),
    "b1": ("a",),
    "b2": ("a",),
    "b3": ("a",),
    "c1": ("b1", "b2"),
    "c2": ("b2", "b3"),
    "d": ("c1", "c2"),
    "e1": ("d",),
    "e2": ("d",),
    "e3": ("d",),
    "f": ("e1", "e2", "e3"),
    "g": ("f", "a"),
}


def _done(name: str, path: str, text: str) -> None:
    """Leave a line, in one write."""
    leave(path, tool=name, key=current_tool_context().idempotency_key, text=text)


def leave(path: str, **line: object) -> None:
    """Leave a line of JSON, in one write; slow before and after it."""
    time.sleep(_MOMENT_S)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps({**line, "pid": os.getpid(), "at": time.time()}).encode() + b"\n")
    finally:
        os.close(file)
    time.sleep(_MOMENT_S)


@tool(effect="once")
def append_line(path: str, text: str) -> str:
    """Append a line; doing it twice would show."""
    _done("append_line", path, text)
    return f"appended {text}"


@tool(effect="idempotent")
def put(path: str, text: str) -> str:
    """Put a text in place; doing it again changes nothing."""
    _done("put", path, text)
    return f"put {text}"


@tool(effect="none")
def look_up(path: str, text: str) -> str:
    """Only look."""
    _done("look_up", path, text)
    return f"found {text}"


def join(context: TaskHandlerContext) -> str:
    """What the tasks before gave, in order."""
    time.sleep(_MOMENT_S)
    return " + ".join(output.raw for output in context.context_outputs)


def mark(context: TaskHandlerContext) -> str:
    """What a map without a model gives: a mark of its item, as the model's answers have."""
    time.sleep(_MOMENT_S)
    found = _ITEM.search(context.description)
    assert found is not None, context.description
    return f"<<{found[1]}:handler>>"


@dataclass(frozen=True)
class _Desk:
    """A policy; all of them leave a line first."""

    #: where; it goes with the policy, since processes of a cluster that was there have another environment
    path: str

    def evaluate(self, request: DelegationRequest, _context: DelegationPolicyContext) -> DelegationPolicyResult:
        """Ask the desk."""
        leave(self.path, policy=type(self).__name__, key=request.task_id, text=request.task_description)
        return self._verdict(request)

    def _verdict(self, request: DelegationRequest) -> DelegationPolicyResult:
        raise NotImplementedError


class LegalDesk(_Desk):
    """Refuses libel."""

    def _verdict(self, request: DelegationRequest) -> DelegationPolicyResult:
        if "Step libel" in request.task_description:
            return DelegationPolicyResult.reject("no libel")
        return DelegationPolicyResult.allow()


class CityDesk(_Desk):
    """Sends to the analyst what was meant for the desk."""

    def _verdict(self, request: DelegationRequest) -> DelegationPolicyResult:
        if "Step desk" in request.task_description:
            text = f"{request.task_description}, by the desk"
            return DelegationPolicyResult.modify(request.replace(agent_role="Analyst", task_description=text))
        return DelegationPolicyResult.allow()


def _policies() -> Sequence[_Desk]:
    path = os.environ.get(QUESTIONS, str(Path.cwd() / "questions"))
    return LegalDesk(path), CityDesk(path)


def _model(name: str = "chaos") -> OpenAIChatModel:
    # The address goes with the agent: processes of a cluster that was there have another environment.
    return OpenAIChatModel(name, base_url=os.environ.get("OPENAI_BASE_URL"), api_key="sk-of-chaos")


def make_agent(
    role: str, *, has_tools: bool = True, isolation: str = "shared", llm: ChatModel | None = None, **more: object
) -> Agent:
    """Return an agent, by default of the scenarios' model."""
    tools = [append_line, put, look_up] if has_tools else []
    return Agent(role=role, goal="Answer", llm=llm or _model(), tools=tools, isolation=isolation, **more)  # type: ignore[arg-type]


def make_task(name: str, agent: Agent | None, context: Sequence[Task | UnitOutput], **more: object) -> Task:
    """Return a task whose text names its step."""
    return Task(
        name=name,
        description=f"Step {name} of {{topic}}",
        expected_output="A word",
        agent=agent,
        context=context,
        **more,  # type: ignore[arg-type]
    )


def _chain(*, has_tools: bool, llm: ChatModel | None = None) -> Ensemble:
    agent = make_agent("Walker", has_tools=has_tools, llm=llm)
    tasks: list[Task] = []
    for number in range(8):
        tasks.append(make_task(f"s{number}", agent, tasks[-1:]))
    return Ensemble(tasks=tasks, workflow="sequential")


def _dag(*, has_tools: bool) -> Ensemble:
    agents = [make_agent(f"Worker {n}", has_tools=has_tools, isolation="process") for n in range(3)]
    tasks: dict[str, Task] = {}
    for number, (name, needed) in enumerate(_GRAPH.items()):
        context = [tasks[each] for each in needed]
        if has_tools and name == "d":
            tasks[name] = make_task(name, None, context, handler=join, effect="idempotent")
        else:
            tasks[name] = make_task(name, agents[number % 3], context)
    return Ensemble(tasks=list(tasks.values()), workflow="parallel")


def chain() -> Ensemble:
    """Eight tasks, one after the other, by one agent."""
    return _chain(has_tools=False)


def chain_with_tools() -> Ensemble:
    """The same, each task with calls of all three kinds of tools."""
    return _chain(has_tools=True)


def fallback() -> Ensemble:
    """The same, with a first model that has no credit."""
    return _chain(has_tools=True, llm=Fallback([_model(UNPAID), _model()]))


def dag() -> Ensemble:
    """Twelve tasks in diamonds, by three agents with a process each."""
    return _dag(has_tools=False)


def dag_with_tools() -> Ensemble:
    """The same with tools, and one task without a model."""
    return _dag(has_tools=True)


def newsroom() -> Ensemble:
    """A manager under every kind of constraint, whose agenda runs into all of them; one of its workers asks another."""
    agents = [
        make_agent("Researcher"),
        make_agent("Stringer", max_iterations=4),
        make_agent("Analyst", isolation="process"),
        make_agent("Writer", isolation="process", allow_delegation=True),
        make_agent("Proofreader", has_tools=False),
        make_agent("Printer"),
    ]
    return Ensemble(
        agents=agents,
        tasks=[make_task("news", agents[0], []), make_task("report", agents[3], [])],
        workflow="hierarchical",
        manager_llm=_model(),
        manager_max_iterations=40,
        hierarchical_constraints=HierarchicalConstraints(
            required_workers=["Writer"],
            allowed_workers={agent.role for agent in agents if agent.role != "Printer"},
            max_calls_per_worker={"Researcher": 3, "Stringer": 2, "Analyst": 2},
            global_max_delegations=11,
            required_stages=[["Researcher", "Stringer"], ["Analyst"], ["Writer"]],
        ),
        delegation_policies=_policies(),
    )


def peers() -> Ensemble:
    """Two agents that do one thing at a time, and each asks the other one, who asks back; a third that only helps."""
    ada = make_agent("Ada", isolation="process", max_concurrency=1, allow_delegation=True)
    bob = make_agent("Bob", isolation="process", max_concurrency=1, allow_delegation=True)
    cyd = make_agent("Cyd", has_tools=False)
    both = [make_task("p0", ada, []), make_task("q0", bob, [])]
    return Ensemble(
        agents=[ada, bob, cyd],
        tasks=[*both, make_task("s0", ada, both)],
        workflow="parallel",
        max_delegation_depth=2,
        delegation_policies=_policies(),
    )


# Map-reduces. Every fourth item's map has tools, every tenth has no model; the model refuses some items, see `answers`.


def _map_agent(model: OpenAIChatModel) -> Callable[[Mapping[str, Any]], Agent]:
    """Agents of two kinds: most items have one without tools."""

    def of(item: Mapping[str, Any]) -> Agent:
        tools = [] if item["n"] % 4 else [append_line, put, look_up]
        return Agent(role=f"Reader {item['n']}", goal="Answer", llm=model, tools=tools)

    return of


def _map_task(item: Mapping[str, Any], agent: Agent) -> Task:
    name = f"Step m{item['n']} of {{topic}}"
    if item["n"] % 10 == 9:
        return Task(description=name, expected_output="A mark", handler=mark, effect="idempotent")
    return Task(description=name, expected_output="A mark", agent=agent)


def _reduce_task(parts: list[Task]) -> Task:
    return Task(description="Step reduce of {topic}", expected_output="All marks", context=parts)


def _tokens(text: str) -> int:
    """Of what has no model to count them."""
    return 9


def _items() -> Iterator[Mapping[str, Any]]:
    for number in range(ITEMS):
        yield {"n": number}


def _map_reduce(items: object, *, results: str, **more: object) -> MapReduceEnsemble:
    place = Path(os.environ.get(QUESTIONS, str(Path.cwd() / "questions"))).parent
    model = _model()
    return MapReduceEnsemble(
        items=items,
        map_task=_map_task,
        map_agent=_map_agent(model),
        reduce_task=_reduce_task,
        llm=model,
        results=place / results,
        dead_letters=place / "letters.jsonl",
        on_item_error="collect",
        parallel_error_strategy="continue_on_error",
        max_parallel_tasks=_WINDOW,
        **more,  # type: ignore[arg-type]
    )


def mapreduce() -> MapReduceEnsemble:
    """Over a list, in groups that fit a budget, level by level."""
    return _map_reduce(list(_items()), results="rows.jsonl", target_token_budget=_BUDGET, token_estimator=_tokens)


def pipelined() -> MapReduceEnsemble:
    """Over a file, one line of which is broken, in groups of four, as they come."""
    return _map_reduce(_ITEMS_FILE, results="rows.jsonl", chunk_size=4, mode="pipelined")


def ordered() -> MapReduceEnsemble:
    """Over a generator, in groups that fit a budget, as they come, in the order of the items; its rows are packed."""
    return _map_reduce(
        _items(),
        results="rows.parquet",
        target_token_budget=_BUDGET,
        token_estimator=_tokens,
        mode="pipelined",
        ordered=True,
    )


def _count_task(item: int) -> Task:
    return Task(description=f"Step m{item} of {{topic}}", expected_output="A number")


def big() -> MapReduceEnsemble:
    """As many items as somebody says, one call each, in groups of twenty, level by level."""
    place = Path(os.environ.get(QUESTIONS, str(Path.cwd() / "questions"))).parent
    return MapReduceEnsemble(
        items=range(int(os.environ.get(BIG, "1000"))),
        map_task=_count_task,
        reduce_task=_reduce_task,
        llm=_model(),
        chunk_size=20,
        results=place / "rows.jsonl",
    )
