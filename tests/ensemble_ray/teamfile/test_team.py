"""A team file becomes an ensemble: the same field names as in Python, everything by name."""

from __future__ import annotations

import logging
from decimal import Decimal
from pathlib import Path
from typing import cast

import pytest

from ensemble_ray import (
    Agent,
    AgentSynthesizer,
    FileReadTool,
    Graph,
    HierarchicalConstraints,
    LocalChatModel,
    Loop,
    OpenAIChatModel,
    ParallelErrorStrategy,
    Phase,
    RateLimit,
    RateLimitedChatModel,
    RetryPolicy,
    Task,
    Workflow,
)
from ensemble_ray.definition import EnsembleDefinition
from ensemble_ray.definition.validation import TeamModels
from ensemble_ray.teamfile import load_ensemble
from ensemble_ray.teamfile.fields import ConstraintKeys
from ensemble_ray.teamfile.section import FileSection
from ensemble_ray.teamfile.sections import AgentKeys, GraphKeys, LoopKeys, PhaseKeys, TaskKeys, TeamKeys
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.teamfile.conftest import Load

WHOLE = """
llm: openai:gpt-4o-mini
workflow: parallel
inputs: {topic: tides, version: 1.10, loud: true, nothing: }
parallel_error_strategy: continue_on_error
max_parallel_tasks: 3
cost_configuration: {input_token_rate: 1e-6, output_token_rate: 0.5, currency: EUR}
rate_limit: {requests: 10, period: 60}
agent_synthesizer: template
capture_mode: standard
agents:
  writer:
    role: Writer
    goal: Write plainly
    background: Ten years of it
    tools: [calculator, datetime, {file_read: {base_dir: .}}]
    max_iterations: 5
    isolation: shared
    num_cpus: 2
    num_gpus: 0.5
    resources: {desk: 1}
    labels: {zone: "in(a, b)"}
  checker:
    goal: Check facts
    llm: {model: local, temperature: 0, max_tokens: 64}
tasks:
  article:
    description: Write 200 words on {topic}
    expected_output: Prose
    agent: writer
    context: [facts]
  facts:
    description: Find five facts about {topic}
    agent: checker
  loose:
    description: Say {topic}
    max_iterations: 2
"""


def test_every_value_arrives_when_a_file_is_whole(load: Load) -> None:
    """Agents and tasks by name, context by name also when it stands further down, defaults as in Python."""
    team = load(WHOLE)
    article, facts, loose = team.tasks
    assert [task.name for task in team.tasks] == ["article", "facts", "loose"]
    assert article.context == (facts,)
    assert team.agents is not None
    writer, checker = team.agents
    assert article.agent is writer
    assert facts.agent is checker
    assert loose.agent is None
    assert (writer.role, writer.goal, writer.background) == ("Writer", "Write plainly", "Ten years of it")
    assert (writer.max_iterations, writer.isolation) == (5, "shared")
    assert (writer.num_cpus, writer.num_gpus) == (2, 0.5)
    assert (writer.resources, writer.labels) == ({"desk": 1}, {"zone": "in(a, b)"})
    assert [getattr(tool, "name", None) for tool in writer.tools] == ["calculator", "datetime", "file_read"]
    assert facts.expected_output == Task.of("any").expected_output
    assert loose.max_iterations == 2
    assert team.workflow is Workflow.PARALLEL
    assert team.parallel_error_strategy is ParallelErrorStrategy.CONTINUE_ON_ERROR
    assert team.max_parallel_tasks == 3
    assert team.rate_limit == RateLimit.of(10, 60)
    assert team.cost_configuration is not None
    assert team.cost_configuration.input_token_rate == Decimal("0.000001")
    assert isinstance(team.agent_synthesizer, AgentSynthesizer)


def test_inputs_stay_as_written_when_they_look_like_numbers(load: Load) -> None:
    """An input is text for templates (S-DOM-70), so `1.10` must not become `1.1`."""
    assert load(WHOLE).inputs == {"topic": "tides", "version": "1.10", "loud": "true", "nothing": ""}


def test_a_file_says_which_variable_takes_messages(load: Load) -> None:
    """S-SRV-102: as in Python."""
    assert load(f"chat_input: topic\n{WHOLE.lstrip()}").chat_input == "topic"
    assert load(WHOLE).chat_input is None


def test_a_file_names_its_team(load: Load) -> None:
    """S-DOM-83, S-DOM-84: as in Python; a file that does not has the name of the file."""
    named = "name: News desk\ndescription: Writes the news.\ntags: {desk: news}\n"
    team = load(f"{named}{WHOLE.lstrip()}")
    assert (team.name, team.description, team.tags) == ("News desk", "Writes the news.", {"desk": "news"})
    assert load(WHOLE).name is None
    assert load(WHOLE).source.name == "team"


def test_models_are_resolved_when_they_are_strings_or_mappings(load: Load) -> None:
    """A string is a model as in Python (S-CONV-19); an agent without one takes the team's, as in Python (S-DOM-72)."""
    team = load(WHOLE)
    assert team.agents is not None
    declared, checker = team.agents
    writer = TeamModels(team).resolve_agent(declared)
    assert isinstance(writer.llm, RateLimitedChatModel)  # the file's own limit holds for it (S-RATE-33)
    assert isinstance(writer.llm.delegate, OpenAIChatModel)
    assert writer.llm.delegate.model == "gpt-4o-mini"
    assert checker.llm == LocalChatModel(temperature=0, max_tokens=64)
    assert checker.role == "checker"


def test_origin_is_the_files_path_when_loaded(load: Load, folder: Path) -> None:
    """A record can say where its definition came from."""
    assert load(WHOLE).origin == str(folder / "team.yaml")


def test_lists_are_taken_when_agents_and_tasks_have_names(load: Load) -> None:
    """The other form: lists, where the name is a key; tasks may go without."""
    team = load(
        """
        llm: local
        agents:
          - {name: a, role: A, goal: g}
        tasks:
          - {name: one, description: d, agent: a}
          - {description: e, context: [one]}
        """
    )
    one, two = team.tasks
    assert (one.name, two.name) == ("one", None)
    assert two.context == (one,)
    assert one.agent is not None
    assert one.agent.role == "A"


def test_workflow_is_left_open_when_it_is_null(load: Load) -> None:
    """As `workflow=None` in Python: it is found from the tasks' context (S-DET-40)."""
    assert load("llm: local\nworkflow:\ntasks: {a: {description: d}}\n").workflow is None
    assert load("llm: local\ntasks: {a: {description: d}}\n").workflow is Workflow.SEQUENTIAL


def test_nothing_is_tried_again_when_the_retry_policy_is_null(load: Load) -> None:
    """As `retry=None` in Python (S-DUR-60); a file that does not mention it has the policy of Python."""
    assert load("llm: local\nretry:\ntasks: {a: {description: d}}\n").retry is None
    assert load("llm: local\ntasks: {a: {description: d}}\n").retry == RetryPolicy()


def test_values_are_shared_when_a_file_has_anchors(load: Load) -> None:
    """Aliases and merge keys are plain YAML; own keys win over merged ones."""
    team = load(
        """
        agents:
          a: &base {role: A, goal: g, llm: local, max_iterations: 3}
          b:
            <<: *base
            role: B
        tasks: {t: {description: d, agent: b}}
        """
    )
    assert team.agents is not None
    assert [(agent.role, agent.goal, agent.max_iterations) for agent in team.agents] == [("A", "g", 3), ("B", "g", 3)]


def test_paths_count_from_the_file_when_they_are_relative(load: Load, folder: Path) -> None:
    """A team file works from any current directory."""
    (folder / "sub").mkdir()
    (folder / "sub" / "data").mkdir()
    (folder / "sub" / "data" / "x.txt").write_text("found", encoding="utf-8")
    text = "llm: local:m.gguf\ntasks: {t: {description: d, tools: [{file_read: {base_dir: data}}]}}\n"
    (folder / "sub" / "team.yaml").write_text(text, encoding="utf-8")
    team = load_ensemble("sub/team.yaml")
    (tool,) = team.tasks[0].tools
    assert isinstance(tool, FileReadTool)
    assert tool.execute('{"path": "x.txt"}').output == "found"
    assert isinstance(team.llm, LocalChatModel)
    assert team.llm.path == folder / "sub" / "m.gguf"


USER_CODE = '''
from dataclasses import dataclass
from ensemble_ray import tool

@dataclass
class Answer:
    value: int

@tool
def shout(text: str) -> str:
    """Shout it."""
    return text.upper()

class Search:
    def __init__(self, limit: int = 5) -> None:
        self.limit = limit

    @tool
    def look(self, query: str) -> str:
        """Look it up."""
        return query

class Watcher:
    def on_task_start(self, event) -> None: ...

def ready(context) -> str:
    return "ready"

def allow(value) -> None: ...
'''


def test_user_code_is_found_when_the_file_names_it(load: Load, folder: Path) -> None:
    """`module:attribute` beside the file: tools, handlers, types, guardrails, listeners, callbacks."""
    (folder / "my_code.py").write_text(USER_CODE, encoding="utf-8")
    team = load(
        """
        llm: local
        listeners: [my_code:Watcher]
        on_task_complete: my_code:allow
        tasks:
          typed:
            description: d
            output_type: my_code:Answer
            output_guardrails: [my_code:allow]
            tools: [my_code:shout, my_code:Search, {my_code:Search: {limit: 2}}]
          done: {description: d, handler: my_code:ready, effect: none}
        """
    )
    typed, done = team.tasks
    shout, plain, limited = cast("tuple[object, object, object]", typed.tools)
    assert callable(shout)
    assert shout("a") == "A"
    assert (getattr(plain, "limit", None), getattr(limited, "limit", None)) == (5, 2)
    assert typed.output_type is not None
    assert typed.output_type.__name__ == "Answer"
    assert len(typed.output_guardrails) == 1
    assert callable(done.handler)
    assert done.effect == "none"  # S-DUR-25
    assert [type(listener).__name__ for listener in team.listeners] == ["Watcher"]
    assert len(team.on_task_complete) == 1


def test_every_model_is_replaced_when_another_is_given(folder: Path) -> None:
    """`--llm`: none of the models that the file names is even looked at, nor their keys."""
    text = "agents: {a: {goal: g, llm: {model: m, api_key_env: NOT_THERE}}, b: {goal: g}}\n"
    text += "tasks: {t: {description: d, agent: a}, u: {description: d, llm: nonsense}}\nmanager_llm: nonsense\n"
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    model = ScriptedModel("x")
    team = load_ensemble("team.yaml", llm=model)
    assert team.agents is not None
    agents = [TeamModels(team).resolve_agent(agent) for agent in team.agents]
    assert {team.llm, team.manager_llm, team.tasks[1].llm, *(agent.llm for agent in agents)} == {model}


def test_an_endpoint_is_told_to_take_no_schemas_when_the_file_says_so(load: Load) -> None:
    """S-OUT-47: as in Python."""
    team = load("llm: {model: m, structured_outputs: false}\ntasks: {t: {description: d}}\n")
    assert team.llm == OpenAIChatModel("m", structured_outputs=False)


def test_the_key_comes_from_the_environment_when_a_variable_is_named(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file names the variable; the key shows nowhere (S-CONV-22)."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    team = load(
        "llm: {model: m, base_url: 'http://127.0.0.1:1/v1', api_key_env: MY_KEY}\ntasks: {t: {description: d}}\n"
    )
    assert team.llm == OpenAIChatModel("m", base_url="http://127.0.0.1:1/v1", api_key="sk-very-secret")
    assert "secret" not in repr(team)
    assert "secret" not in caplog.text


def test_keys_may_be_missing_when_a_team_is_only_looked_at(folder: Path) -> None:
    """`plan` needs no key."""
    text = "llm: {model: m, api_key_env: NOT_THERE}\ntasks: {t: {description: d}}\n"
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    assert load_ensemble("team.yaml", needs_keys=False).tasks[0].name == "t"


#: Fields that a file cannot give: what was said before a run, and what the library sets for another attempt of a task.
NOT_IN_FILES = {"history", "revision_feedback", "prior_attempt_output", "attempt_number"}


@pytest.mark.parametrize(
    ("section", "kind", "beside"),
    [
        (AgentKeys, Agent, set[str]()),
        (TaskKeys, Task, {"name", *NOT_IN_FILES}),
        (TeamKeys, EnsembleDefinition, set[str]()),
        (LoopKeys, Loop, {"name"}),
        (PhaseKeys, Phase, {"name"}),
        (GraphKeys, Graph, set[str]()),
        (ConstraintKeys, HierarchicalConstraints, set[str]()),
    ],
)
def test_keys_are_the_fields_of_the_classes(section: type[FileSection], kind: type[Task], beside: set[str]) -> None:
    """The same names in YAML and in Python: a new field gets its key, a key has its field."""
    fields = {info.alias or name for name, info in kind.model_fields.items()}
    assert set(section.model_fields) - {"map_reduce", "a2a", "evaluation"} == fields - beside
