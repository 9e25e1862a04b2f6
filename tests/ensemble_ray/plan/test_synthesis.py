"""Agents for tasks that name none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    AgentSynthesizer,
    ChatModel,
    RateLimit,
    RateLimitedChatModel,
    SynthesisContext,
    Task,
    ValidationError,
    tool,
)
from ensemble_ray.definition import EnsembleDefinition
from ensemble_ray.plan.planner import plan_run, resolve_tasks, synthesize_agents
from ensemble_ray.testing import ScriptedModel

LIMIT = RateLimit.per_minute(60)
OTHER_LIMIT = RateLimit.per_minute(30)


@tool
def count(text: str) -> int:
    """Count words."""
    return len(text.split())


def task(description: str, *context: Task, **fields: object) -> Task:
    """A task of that description."""
    return Task(description=description, expected_output="A list", context=context, **fields)


async def made(definition: EnsembleDefinition, **options: object) -> list[Agent]:
    """Agents made for the tasks of the definition, in task order."""
    agents = await synthesize_agents(resolve_tasks(definition), definition, **options)
    return [agents[task.object_id] for task in definition.tasks if task.object_id in agents]


@dataclass
class Custom:
    """A synthesizer that is no subclass of anything."""

    agent: Agent
    asked: list[tuple[Task, SynthesisContext]] = field(default_factory=list)

    def synthesize(self, task: Task, context: SynthesisContext) -> Agent:
        self.asked.append((task, context))
        return self.agent


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("Research the tides", "Researcher"),
        ("Please INVESTIGATE, today", "Researcher"),
        ("Compose a poem", "Writer"),
        ("Analyse the data", "Analyst"),
        ("Implement it", "Developer"),
        ("Verify the claim", "Tester"),
        ("Summarise the talk", "Summarizer"),
        ("Categorize mails", "Classifier"),
        ("Compute the sum", "Calculator"),
        ("Create a logo", "Creator"),
        ("Generate names", "Generator"),
        ("Review the code", "Reviewer"),
        ("Audit the books", "Auditor"),
        ("Design a house", "Designer"),
        ("Plan a trip", "Planner"),
        ("Validate it", "Validator"),
        ("Translate this", "Translator"),
        ("Extract names", "Extractor"),
        ("Monitor the port", "Monitor"),
        ("Track parcels", "Tracker"),
        ("Scrape the page", "Collector"),
        ("Parse the log", "Parser"),
        ("Convert units", "Converter"),
        ("Format the text", "Formatter"),
        ("Clean the table", "Cleaner"),
        ("Process orders", "Processor"),
        ("Carefully, and in 2 hours, write-up", "Agent"),
        ("Now: 'write'! research", "Writer"),
        ("one two three four five six seven write", "Writer"),
        ("one two three four five six seven eight write", "Agent"),
        ("Researching things", "Agent"),
        ("writewrite write", "Writer"),
        ("--'w-r-i-t-e'--- it", "Writer"),
    ],
)
async def test_role_comes_from_the_first_known_verb_when_made_by_template(description: str, role: str) -> None:
    """S-DET-23: the first 8 words, lower-cased, without what is no letter."""
    model = ScriptedModel()
    (agent,) = await made(EnsembleDefinition(tasks=[task(description)], llm=model))
    assert (agent.role, agent.goal, agent.llm) == (role, description, model)
    assert agent.background is not None
    assert f"expert {role}" in agent.background
    assert agent.background.count(".") == 1
    assert not model.calls


async def test_agent_is_made_per_task_when_none_is_named() -> None:
    """S-DET-20, S-DET-22: only for those; plan and task find it, the user's task stays as it is."""
    model = ScriptedModel()
    facts = task("Research tides")
    article = task("Write", facts, agent=Agent(role="Own", goal="g", llm=model))
    check = task("Check", handler=str)
    definition = EnsembleDefinition(tasks=[facts, article, check], llm=model)
    resolved = resolve_tasks(definition)
    agents = await synthesize_agents(resolved, definition)
    assert list(agents) == [facts.object_id]
    plan = plan_run(definition, resolved, agents).plan
    assert [(node.agent_role, node.agent_key) for node in plan.nodes] == [
        ("Researcher", "researcher"),
        ("Own", "own"),
        ("(deterministic)", None),
    ]
    assert [(entry.key, entry.is_synthesized) for entry in plan.agents] == [("researcher", True), ("own", False)]
    assert plan.nodes[1].context == (plan.nodes[0].key,)
    assert facts.agent is None
    other = await synthesize_agents(resolved, definition)
    assert other[facts.object_id] != agents[facts.object_id]


async def test_tasks_own_model_is_used_when_it_has_one() -> None:
    """S-DET-20, S-RATE-31: task, then ensemble; the ensemble's limit leaves it alone (S-RATE-33)."""
    own, shared = ScriptedModel(), ScriptedModel()
    tasks = [task("a", llm=own), task("b")]
    first, second = await made(EnsembleDefinition(tasks=tasks, llm=shared))
    assert (first.llm, second.llm) == (own, shared)
    first, second = await made(EnsembleDefinition(tasks=tasks, llm=shared, rate_limit=LIMIT))
    assert first.llm is own
    assert isinstance(second.llm, RateLimitedChatModel)


async def test_one_bucket_is_shared_when_the_ensemble_has_a_limit() -> None:
    """S-RATE-33, S-DET-20: by all agents made in one run; another run has another; the definition keeps the raw model."""
    model = ScriptedModel()
    explicit = Agent(role="Own", goal="g", llm=model)
    definition = EnsembleDefinition(
        tasks=[task("a"), task("b"), task("c", agent=explicit)], llm=model, rate_limit=LIMIT
    )
    first, second = await made(definition)
    assert isinstance(first.llm, RateLimitedChatModel)
    assert (first.llm.delegate, first.llm.rate_limit) == (model, LIMIT)
    assert first.llm is second.llm
    again, _ = await made(definition)
    assert again.llm != first.llm
    assert explicit.llm is definition.llm is model


async def test_raw_model_is_limited_when_a_task_brings_its_own_limit() -> None:
    """S-RATE-32: own bucket, and the ensemble's is not drawn from."""
    model = ScriptedModel()
    tasks = [task("a", rate_limit=OTHER_LIMIT), task("b", rate_limit=OTHER_LIMIT), task("c")]
    first, second, third = await made(EnsembleDefinition(tasks=tasks, llm=model, rate_limit=LIMIT))
    assert isinstance(first.llm, RateLimitedChatModel)
    assert (first.llm.delegate, first.llm.rate_limit) == (model, OTHER_LIMIT)
    assert len({first.llm, second.llm, third.llm}) == 3


async def test_tools_and_limit_of_the_task_win_when_set() -> None:
    """S-DET-21: over the synthesizer's; one agent given to several tasks is not changed for the others."""
    model = ScriptedModel()
    one = Agent(role="One", goal="g", llm=model, max_iterations=7)
    tasks = [task("a", tools=[count]), task("b", max_iterations=3), task("c")]
    first, second, third = await made(EnsembleDefinition(tasks=tasks, llm=model, agent_synthesizer=Custom(one)))
    assert (first.tools, first.max_iterations) == ((count,), 7)
    assert (second.tools, second.max_iterations) == ((), 3)
    assert third is one
    assert len({first, second, third}) == 3
    (templated,) = await made(EnsembleDefinition(tasks=[task("a", tools=[count], max_iterations=2)], llm=model))
    assert (templated.tools, templated.max_iterations) == ((count,), 2)


async def test_tools_have_no_effect_when_the_task_names_an_agent() -> None:
    """S-DET-21: an explicit agent is used as it is."""
    model = ScriptedModel()
    own = Agent(role="Own", goal="g", llm=model)
    definition = EnsembleDefinition(tasks=[task("a", agent=own, tools=[count], max_iterations=1, llm=ScriptedModel())])
    resolved = resolve_tasks(definition)
    planned = plan_run(definition, resolved, await synthesize_agents(resolved, definition))
    assert planned.agents == {"own": own}
    assert planned.agents["own"].tools == ()
    assert planned.agents["own"].llm is model


async def test_custom_synthesizer_is_asked_when_given() -> None:
    """S-DET-25, S-SET-12: with the resolved task, the model and a locale; object, subclass, function, async function."""
    model = ScriptedModel()
    agent = Agent(role="Custom", goal="g", llm=model)
    custom = Custom(agent)
    definition = EnsembleDefinition(tasks=[task("On {x}")], llm=model, agent_synthesizer=custom, inputs={"x": "tides"})
    assert await made(definition, locale="de") == [agent]
    ((asked, context),) = custom.asked
    assert asked.description == "On tides"
    assert (context.model, context.locale) == (model, "de")
    assert SynthesisContext(model=model).locale == "en"

    async def slowly(task: Task, context: SynthesisContext) -> Agent:
        await asyncio.sleep(0)
        return agent

    assert await made(definition.replace(agent_synthesizer=slowly)) == [agent]
    assert await made(definition.replace(agent_synthesizer=lambda *_: agent)) == [agent]


def roles_of(agents: list[Agent]) -> list[str]:
    """Their roles."""
    return [agent.role for agent in agents]


async def test_roles_are_numbered_when_a_manager_has_to_tell_them_apart() -> None:
    """S-DET-26: from the second on, in task order; roles of the user's agents and the manager's are taken too."""
    model = ScriptedModel()
    writer = Agent(role="writer", goal="g", llm=model)
    idle = Agent(role="Researcher 2", goal="g", llm=model)
    tasks = [task("Research a"), task("Write b"), task("Research c"), task("Draw", agent=writer), task("Research d")]
    team = EnsembleDefinition(tasks=tasks, llm=model, agents=[writer, idle], workflow="hierarchical")
    agents = await made(team)
    assert roles_of(agents) == ["Researcher", "Writer 2", "Researcher 3", "Researcher 4"]
    assert [agent.goal for agent in agents] == ["Research a", "Write b", "Research c", "Research d"]
    assert roles_of(await made(team.replace(workflow="parallel"))) == ["Researcher", "Writer", *["Researcher"] * 2]
    boss = Custom(Agent(role=" Manager", goal="g", llm=model))
    assert roles_of(await made(team.replace(agent_synthesizer=boss, tasks=[task("x")]))) == [" Manager 2"]


async def test_one_agent_stays_one_worker_when_a_synthesizer_gives_it_again() -> None:
    """S-DET-26, S-HIER-4: an agent object that serves several tasks is no duplicate, but a copy of it is."""
    model = ScriptedModel()
    custom = Custom(Agent(role="Expert", goal="g", llm=model))
    tasks = [task("a"), task("b"), task("c", max_iterations=3)]
    team = EnsembleDefinition(tasks=tasks, llm=model, agent_synthesizer=custom, workflow="hierarchical")
    first, second, copied = await made(team)
    assert first is second is custom.agent
    assert (copied.role, copied.max_iterations) == ("Expert 2", 3)
    assert roles_of(await made(team.replace(agents=[custom.agent]))) == ["Expert", "Expert", "Expert 2"]


async def test_synthesizer_is_refused_when_it_gives_no_agent() -> None:
    """S-DET-25."""
    definition = EnsembleDefinition(tasks=[task("a")], llm=ScriptedModel(), agent_synthesizer=lambda *_: "Agent")
    with pytest.raises(ValidationError, match=r"^The agent synthesizer must return an Agent for task 'a', got: str$"):
        await made(definition)


@pytest.mark.parametrize("wrap", ["{}", "```json\n{}\n```", "Sure! {} Enjoy {{it}}."])
async def test_model_describes_the_agent_when_llm_based(wrap: str) -> None:
    """S-DET-24: one call per task, without tools, on the task's resolved texts."""
    model = ScriptedModel(wrap.format('{"role": " Tide expert ", "goal": "Explain", "backstory": "Sailor"}'))
    definition = EnsembleDefinition(
        tasks=[task("Explain {x}")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based(), inputs={"x": "tides"}
    )
    (agent,) = await made(definition)
    assert (agent.role, agent.goal, agent.background, agent.llm) == ("Tide expert", "Explain", "Sailor", model)
    (call,) = model.calls
    assert not call.tools
    assert "Explain tides" in call.text
    assert "A list" in call.text
    assert "JSON" in call.text


@pytest.mark.parametrize(
    "answer",
    [
        "no idea",
        "",
        "{broken",
        '["role"]',
        '{"role": " ", "goal": "g"}',
        '{"role": "r", "goal": ""}',
        '{"role": "r"}',
        '{"role": 5, "goal": "g"}',
    ],
)
async def test_template_is_used_when_the_models_answer_is_of_no_use(
    answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DET-24: with a warning."""
    model = ScriptedModel(answer)
    definition = EnsembleDefinition(
        tasks=[task("Research tides")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based()
    )
    (agent,) = await made(definition)
    assert (agent.role, agent.goal) == ("Researcher", "Research tides")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_background_is_left_out_when_the_model_gives_none() -> None:
    """S-DET-24: only role and goal are needed."""
    model = ScriptedModel('{"role": "r", "goal": "g"}')
    definition = EnsembleDefinition(tasks=[task("a")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based())
    (agent,) = await made(definition)
    assert agent.background is None


async def test_run_fails_when_the_models_call_fails() -> None:
    """S-DET-24: an AgentExecutionError with its cause; other calls are dropped."""
    cause = ConnectionError("gone")
    model = ScriptedModel(otherwise=cause)
    definition = EnsembleDefinition(
        tasks=[task("a"), task("b")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based()
    )
    with pytest.raises(AgentExecutionError) as caught:
        await made(definition)
    assert str(caught.value) == "Agent '(synthesized)': gone (ConnectionError)"
    assert caught.value.__cause__ is cause
    assert (caught.value.agent_role, caught.value.task_description) == ("(synthesized)", "a")


async def test_calls_are_recorded_under_their_effects_when_a_recorder_is_given() -> None:
    """S-SET-46: the recorder sees the synthesizer's calls and none of the agent's own."""
    names: list[str] = []

    class Recording:
        def __init__(self, name: str, model: ChatModel) -> None:
            self.name, self.model = name, model

        async def chat(self, messages: object, tools: object = ()) -> object:
            names.append(self.name)
            return await self.model.chat(messages)  # type: ignore[arg-type, misc]  passes on what it was given

    model = ScriptedModel(otherwise='{"role": "r", "goal": "g"}')
    definition = EnsembleDefinition(
        tasks=[task("a", name="facts"), task("b")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based()
    )
    agents = await made(definition, recorded=Recording)
    assert sorted(names) == ["facts#0/0/synthesis", "task-2#0/0/synthesis"]
    assert all(agent.llm is model for agent in agents)


async def test_no_more_are_asked_at_once_than_tasks_may_run() -> None:
    """S-PAR-17: the ensemble's cap holds for its synthesizer too."""
    running = most = 0

    async def slowly(task: Task, context: SynthesisContext) -> Agent:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Agent(role="r", goal="g", llm=context.model)

    tasks = [task(str(number)) for number in range(20)]
    definition = EnsembleDefinition(tasks=tasks, llm=ScriptedModel(), agent_synthesizer=slowly, max_parallel_tasks=3)
    agents = await made(definition)
    assert len(set(agents)) == 20
    assert most == 3


def test_outputs_of_agentless_tasks_are_found_when_their_task_is_asked() -> None:
    """S-DET-22: the node carries the id of the user's own task."""
    facts = task("Research {x}")
    definition = EnsembleDefinition(tasks=[facts], llm=ScriptedModel())
    planned = plan_run(definition, resolve_tasks(definition, {"x": "tides"}))
    assert planned.plan.nodes[0].object_id == facts.object_id
