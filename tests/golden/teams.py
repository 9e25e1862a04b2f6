"""The teams whose runs are the golden records.

In: the name of a team. Out: its definition, the same each time.

Never change a tool, handler, guardrail, policy, provider or factory here, nor the name or place of one, nor the texts of
tasks and agents: records name them and hold hashes of their source, and a resume compares. Add a team instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    AgentSynthesizer,
    CalculatorTool,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Ensemble,
    ExitEarlyError,
    GraphRoutingContext,
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    HierarchicalConstraints,
    LoopIterationContext,
    MapEnsemble,
    MapReduceEnsemble,
    OpenAIChatModel,
    Task,
    TaskHandlerContext,
    TryAgain,
    tool,
)
from ensemble_ray.teamfile import Runnable, load_runnable
from tests.golden.model import SERVER
from tests.golden.model import model as _model
from tests.golden.model import pass_by as _call


def _agent(role: str, llm: object, **fields: Any) -> Agent:
    return Agent(role=role, goal=f"be a good {role}", llm=llm, **fields)


def _task(description: str, by: Agent | None = None, **fields: Any) -> Task:
    return Task(**{"description": description, "expected_output": "a text", "agent": by, **fields})


# Tools, handlers, guardrails, policies.


@tool(effect="none")
def search(text: str) -> str:
    """Search for a text."""
    _call("search")
    return f"found {text}"


@tool(effect="idempotent")
def stamp(text: str) -> str:
    """Stamp a text."""
    _call("stamp")
    return f"stamped {text}"


@tool(effect="once")
def pay(amount: str) -> str:
    """Pay an amount."""
    _call("pay")
    return f"paid {amount}"


@tool(effect="once")
def order(item: str) -> str:
    """Order an item."""
    _call("order")
    return f"a receipt for {item}"


@tool(effect="none")
def breaks() -> str:
    """Raise an error."""
    _call("breaks")
    raise LookupError("it is broken")


@tool(effect="none")
def book(day: str) -> str:
    """Book a day."""
    _call("book")
    raise TryAgain(f"Give {day} as a date")


@tool(effect="none")
def leave() -> str:
    """End the run."""
    _call("leave")
    raise ExitEarlyError("that is enough")


def count_letters(context: TaskHandlerContext) -> str:
    """Count the letters of what came before."""
    _call("count_letters")
    return " ".join(str(len(each.raw)) for each in context.context_outputs)


def conclude(context: TaskHandlerContext) -> str:
    """Join what came before."""
    _call("conclude")
    return " + ".join(each.raw for each in context.context_outputs)


def accept(given: GuardrailInput) -> GuardrailResult:
    """Accept any task."""
    return GuardrailResult.success()


def be_kind(given: GuardrailOutput) -> GuardrailResult:
    """Refuse bad words, and ask for other ones where they are rude."""
    if "rude" in given.raw_response:
        raise TryAgain("Say it in kind words")
    return GuardrailResult.failure("bad words") if "bad" in given.raw_response else GuardrailResult.success()


def judge(request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
    """Refuse what is forbidden."""
    _call(f"judge {request.task_description}")
    if request.task_description == "forbidden":
        return DelegationPolicyResult.reject("that is forbidden")
    return DelegationPolicyResult.allow()


def is_refined(context: LoopIterationContext) -> bool:
    """End a loop with its third iteration."""
    _call(f"is_refined {context.iteration_number}")
    return context.iteration_number == 3


def is_enough(context: GraphRoutingContext) -> bool:
    """Lead on from a state that was visited twice."""
    _call(f"is_enough {context.step_number}")
    return len(context.state_history[context.current_state]) == 2


class City(BaseModel):
    """A typed answer."""

    name: str
    people: int


# Teams with a plan.


def sequential() -> Ensemble:
    """Return a team: three steps with templates; the first answer is long."""
    llm = _model()
    research = _task("Research {topic}", _agent("Researcher", llm), name="research")
    outline = _task("Outline {topic} for {audience}", _agent("Editor", llm), name="outline", context=[research])
    article = _task("Write about {topic}", _agent("Writer", llm), context=[research, outline])
    return Ensemble(tasks=[research, outline, article], workflow="sequential", inputs={"audience": "children"})


def _diamond(prefix: str, **fields: Any) -> Ensemble:
    llm = _model()
    first = _task(f"{prefix} a", _agent("Digger", llm), name="a")
    second = _task(f"{prefix} b", _agent("Digger", llm), name="b", context=[first])
    third = _task(f"{prefix} c", _agent("Writer", llm), name="c", context=[first])
    last = _task(f"{prefix} d", _agent("Writer", llm), name="d", context=[second, third])
    alone = _task(f"{prefix} e", _agent("Reader", llm), name="e")
    return Ensemble(tasks=[first, second, third, last, alone], workflow="parallel", max_parallel_tasks=1, **fields)


def parallel() -> Ensemble:
    """Return a team: a diamond and a task beside it."""
    return _diamond("step")


def parallel_errors() -> Ensemble:
    """Return the same team, where one task fails and the others go on."""
    return _diamond("errors", parallel_error_strategy="continue_on_error")


def hierarchical() -> Ensemble:
    """Return a team: a manager with constraints; some of what it hands on is refused, and a worker hands on, too."""
    llm = _model()
    digger = _agent("Digger", llm, allow_delegation=True)
    return Ensemble(
        tasks=[_task("Get it done", digger)],
        agents=[digger, _agent("Payer", llm, tools=[pay]), _agent("Writer", llm)],
        workflow="hierarchical",
        manager_llm=llm,
        delegation_policies=[judge],
        hierarchical_constraints=HierarchicalConstraints(
            required_workers=["Writer"],
            required_stages=[["Digger"], ["Writer"]],
            max_calls_per_worker={"Digger": 1},
        ),
    )


def nested() -> Ensemble:
    """Return a team: delegation among peers, two deep."""
    llm = _model()
    asker = _agent("Asker", llm, allow_delegation=True)
    digger = _agent("Digger", llm, allow_delegation=True)
    payer = _agent("Payer", llm, tools=[pay])
    return Ensemble(tasks=[_task("Ask around", asker)], agents=[asker, digger, payer], delegation_policies=[judge])


def checked() -> Ensemble:
    """Return a team: handlers, and guardrails of which one asks for another answer."""
    llm = _model()
    reviewed = _task(
        "Review it", _agent("Reviewer", llm), name="review", input_guardrails=[accept], output_guardrails=[be_kind]
    )
    counted = _task("Count it", name="count", handler=count_letters, context=[reviewed])
    joined = _task("Join it", name="join", handler=conclude, effect="none", context=[reviewed, counted])
    return Ensemble(tasks=[reviewed, counted, joined], workflow="sequential")


def structured() -> Ensemble:
    """Return a team: a typed answer that is right the second time."""
    llm = _model()
    city = _task("Describe a city", _agent("Geographer", llm), output_type=City, max_output_retries=1)
    return Ensemble(tasks=[city, _task("Praise it", _agent("Writer", llm), context=[city])])


def _with_tools(**fields: Any) -> Ensemble:
    tools = [search, stamp, pay, breaks, book, CalculatorTool()]
    return Ensemble(tasks=[_task("Use tools", _agent("Worker", _model(), tools=tools), name="use")], **fields)


def tools() -> Ensemble:
    """Return a team: tools of each effect, their errors, and one that is not there."""
    return _with_tools(capture_mode="full")


def strict_tools() -> Ensemble:
    """Return the same team; an unknown outcome fails its task."""
    return _with_tools(on_unknown="fail")


def early_exit() -> Ensemble:
    """Return a team: a tool ends the run in its second task."""
    llm = _model()
    first, last = (_task(text, _agent("Writer", llm)) for text in ("Begin", "Never"))
    return Ensemble(tasks=[first, _task("Leave", _agent("Clerk", llm, tools=[leave])), last])


def budget() -> Ensemble:
    """Return a team: four steps of 400 tokens, and a budget that is not enough for all."""
    by = _agent("Writer", _model())
    return Ensemble(tasks=[_task(f"spend {number}", by) for number in range(4)], max_tokens=1000)


def streaming() -> Ensemble:
    """Return a team: answers that stream."""
    by = _agent("Writer", _model(), stream=True)
    return Ensemble(tasks=[_task("Say one", by), _task("Say two", by)])


def synthesized() -> Ensemble:
    """Return a team: agents that a model makes."""
    tasks = [_task("Tell of Rome", tools=[search]), _task("Tell of Athens")]
    return Ensemble(tasks=tasks, llm=_model(), agent_synthesizer=AgentSynthesizer.llm_based())


def provider() -> Ensemble:
    """Return a team: a model behind an endpoint."""
    llm = OpenAIChatModel("m", base_url=os.environ.get(SERVER) or "http://127.0.0.1:9/v1", api_key="none")
    buyer = _agent("Buyer", llm, tools=[order])
    return Ensemble(tasks=[_task("Order tea", buyer), _task("Praise it", buyer)])


def planned_file() -> Runnable:
    """Return the team of a file."""
    return load_runnable(str(Path(__file__).parent / "planned.yaml"))


def mapped_file() -> Runnable:
    """Return the map-reduce of a file."""
    return load_runnable(str(Path(__file__).parent / "mapped.yaml"))


# Teams over items.


def make_map_task(item: object) -> Task:
    """Make the task of an item."""
    return Task.of(f"map {item}")


def make_agent_of_item(item: object) -> Agent:
    """Make the agent of an item."""
    return _agent("Mapper", _model())


def make_task_for_agent(item: object, agent: Agent) -> Task:
    """Make the task of an item for its agent."""
    return Task(description=f"map {item}", expected_output="a text", agent=agent)


def make_reducer() -> Agent:
    """Make the agent of a group."""
    return _agent("Reducer", _model())


def make_reduce_task(agent: Agent, group: list[Task]) -> Task:
    """Make the task over a group."""
    joined = "+".join(each.description for each in group)
    return Task(description=f"reduce {joined}", expected_output="a text", agent=agent, context=group)


def make_direct_task(agent: Agent, items: Sequence[object]) -> Task:
    """Make the task over all items."""
    return Task(description=f"Read all of {list(items)}", expected_output="a text", agent=agent)


def make_reader() -> Agent:
    """Make the agent of all items."""
    return _agent("Reader", _model(), tools=[search])


def _reduced(count: int, **fields: Any) -> MapReduceEnsemble:
    return MapReduceEnsemble(
        items=range(4, 4 + count),
        map_agent=make_agent_of_item,
        map_task=make_task_for_agent,
        reduce_agent=make_reducer,
        reduce_task=make_reduce_task,
        max_parallel_tasks=1,
        **fields,
    )


def mapping() -> MapEnsemble:
    """Return a team: items of which one fails and is collected."""
    return MapEnsemble(
        items=range(1, 6),
        map_agent=make_agent_of_item,
        map_task=make_task_for_agent,
        on_item_error="collect",
        dead_letters="letters.jsonl",
        results="results.jsonl",
        max_parallel_tasks=1,
        retry=None,
    )


def strict_mapping() -> MapEnsemble:
    """Return a team: items of which none may fail; a generator of them, and agents that are made for each."""
    return MapEnsemble(
        items=({"word": word} for word in ("tide", "kelp", "salt")),
        map_task=make_map_task,
        llm=_model(),
        max_parallel_tasks=1,
    )


def chunked() -> MapReduceEnsemble:
    """Return a team: a map-reduce whose tree is made at once."""
    return _reduced(5, chunk_size=2)


def adaptive() -> MapReduceEnsemble:
    """Return a team: a map-reduce by tokens, of several levels."""
    return _reduced(7, target_token_budget=20)


def pipelined() -> MapReduceEnsemble:
    """Return a team: a map-reduce whose reduces begin as soon as they can."""
    return _reduced(5, target_token_budget=20, mode="pipelined", ordered=True)


def direct() -> MapReduceEnsemble:
    """Return a team: a map-reduce over so little that it is one task."""
    team = _reduced(2, target_token_budget=1000, direct_agent=make_reader, direct_task=make_direct_task)
    return team.replace(items=["one", "two"])
