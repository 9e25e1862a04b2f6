"""What an ensemble declares."""

from __future__ import annotations

import pickle

import pytest

from ensemble_ray import (
    Agent,
    CaptureMode,
    EnsembleListener,
    ExecutionTrace,
    Graph,
    GraphEdge,
    Loop,
    OpenAIChatModel,
    ParallelErrorStrategy,
    Phase,
    RateLimit,
    RunOptions,
    Task,
    TaskStartEvent,
    ValidationError,
    Workflow,
)
from ensemble_ray.definition import EnsembleDefinition
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()
FACTS = Task.of("Find facts")


class Recorder(EnsembleListener):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_task_start(self, event: TaskStartEvent) -> None:
        self.seen.append(event)


class Exporter:
    def export(self, trace: ExecutionTrace) -> None: ...


def test_defaults_hold_when_nothing_is_given() -> None:
    """The table of fields of file 01; S-DET-41: sequential unless told; S-PAR-20."""
    made = EnsembleDefinition()
    assert (made.tasks, made.agents, made.workflow, made.verbose) == ((), None, Workflow.SEQUENTIAL, False)
    assert (made.llm, made.is_streaming, made.agent_synthesizer, made.inputs) == (None, False, None, {})
    assert (made.parallel_error_strategy, made.max_parallel_tasks) == (ParallelErrorStrategy.FAIL_FAST, None)
    assert (made.max_tool_output_length, made.tool_log_truncate_length, made.tool_metrics) == (-1, 200, None)
    assert (made.listeners, made.rate_limit, made.capture_mode, made.trace_exporter) == ((), None, None, None)
    assert made.cost_configuration is None


def test_nothing_but_types_is_checked_when_an_ensemble_is_built() -> None:
    """S-DOM-60: an ensemble without tasks, with a limit and no model, is an object like any other."""
    EnsembleDefinition(tasks=[], agents=[], workflow="hierarchical", rate_limit=RateLimit.per_minute(1))
    EnsembleDefinition(tasks=None, workflow="parallel", parallel_error_strategy=None)


def test_a_field_that_nobody_knows() -> None:
    """S-CONV-4."""
    with pytest.raises(ValidationError, match=r"unknown field 'dashbord'\. Did you mean 'dashboard'"):
        EnsembleDefinition(dashbord=None)  # type: ignore[call-arg]


def test_plain_words_become_members_when_a_field_is_an_enum() -> None:
    """S-CONV-6."""
    made = EnsembleDefinition(workflow="parallel", parallel_error_strategy="continue_on_error", capture_mode="full")
    assert made.workflow is Workflow.PARALLEL
    assert made.parallel_error_strategy is ParallelErrorStrategy.CONTINUE_ON_ERROR
    assert made.capture_mode is CaptureMode.FULL
    assert EnsembleDefinition(workflow=None).workflow is None
    assert EnsembleDefinition(workflow=Workflow.PARALLEL).workflow is Workflow.PARALLEL


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"workflow": "paralel"},
            "Unknown workflow 'paralel'. Did you mean 'parallel'? Known: [sequential, hierarchical, parallel]",
        ),
        ({"workflow": "x"}, "Unknown workflow 'x'. Known: [sequential, hierarchical, parallel]"),
        (
            {"parallel_error_strategy": "failfast"},
            "Unknown parallel_error_strategy 'failfast'. Did you mean 'fail_fast'? Known: [fail_fast, continue_on_error]",
        ),
        ({"capture_mode": "on"}, "Unknown capture_mode 'on'. Known: [off, standard, full]"),
    ],
)
def test_known_words_are_listed_when_a_word_is_unknown(given: dict[str, object], message: str) -> None:
    """S-CONV-6, S-CONV-10: lists stand in brackets without quotes."""
    with pytest.raises(ValidationError) as caught:
        EnsembleDefinition(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "given",
    [
        {"tasks": ["facts"]},
        {"tasks": [None]},
        {"agents": [FACTS]},
        {"llm": 5},
        {"listeners": [5]},
        {"listeners": 5},
        {"on_task_start": 5},
        {"on_task_start": [print, 5]},
        {"trace_exporter": 5},
        {"agent_synthesizer": 5},
        {"max_parallel_tasks": 0},
        {"max_parallel_tasks": "2"},
        {"inputs": 5},
        {"tool_metrics": 5},
    ],
)
def test_our_error_is_raised_when_a_field_has_a_wrong_type(given: dict[str, object]) -> None:
    """S-CONV-12, S-SET-41."""
    with pytest.raises(ValidationError) as caught:
        EnsembleDefinition(**given)
    assert type(caught.value) is ValidationError


def test_cap_is_named_when_it_is_not_above_zero() -> None:
    """S-CONV-10, S-SET-41: on ensembles and on options."""
    for kind, name in ((EnsembleDefinition, "Ensemble"), (RunOptions, "RunOptions")):
        with pytest.raises(ValidationError) as caught:
            kind(max_parallel_tasks=0)
        assert str(caught.value) == f"{name} max_parallel_tasks must be > 0 when set, got: 0"


def test_model_is_made_when_llm_is_a_string() -> None:
    """S-CONV-19."""
    assert isinstance(EnsembleDefinition(llm="openai:gpt-4o-mini").llm, OpenAIChatModel)
    with pytest.raises(ValidationError, match="Unknown llm 'nope'"):
        EnsembleDefinition(llm="nope")


def test_collections_are_copied_when_an_ensemble_is_built() -> None:
    """S-CONV-5."""
    tasks, inputs, agents = [FACTS], {"topic": "tides"}, [Agent(role="r", goal="g", llm=MODEL)]
    made = EnsembleDefinition(tasks=tasks, inputs=inputs, agents=agents)
    for collection in (tasks, inputs, agents):
        collection.clear()
    assert made.tasks == (FACTS,)
    assert made.inputs == {"topic": "tides"}
    assert made.agents is not None
    assert len(made.agents) == 1
    assert EnsembleDefinition(inputs=None).inputs == {}


def test_every_event_has_its_keyword_when_registered_by_callable() -> None:
    """S-EVT-2: one `on_*` per kind of event, in table order, no other."""
    fields = [name for name in EnsembleDefinition.model_fields if name.startswith("on_")]
    fields.remove("on_incomplete")  # no event: what becomes of incomplete answers (S-ENG-37)
    fields.remove("on_unknown")  # no event: what is to be done with an unknown outcome (S-DUR-24)
    assert fields == list(EVENT_TYPES)


def test_callables_are_kept_in_order_when_one_or_several_are_given() -> None:
    """S-EVT-2."""
    made = EnsembleDefinition(on_task_start=[print, repr], on_task_failed=str, on_token=None)
    assert made.on_task_start == (print, repr)
    assert made.callbacks == {"on_task_start": (print, repr), "on_task_failed": (str,)}


def test_another_task_list_is_run_when_tasks_are_exchanged() -> None:
    """S-DOM-69."""
    made = EnsembleDefinition(tasks=[FACTS], llm=MODEL, workflow=None)
    other = Task.of("Other")
    changed = made.with_tasks([other])
    assert (changed.tasks, changed.llm, changed.workflow) == ((other,), MODEL, None)
    assert made.tasks == (FACTS,)
    for wrong in ([], None, [other, None]):
        with pytest.raises(ValueError, match=r"^tasks"):
            made.with_tasks(wrong)  # type: ignore[arg-type]  wrong lists are what is tested


def test_streaming_is_kept_when_an_ensemble_is_changed() -> None:
    """S-STR-1: written as `stream`; the name itself belongs to the method that streams a run."""
    made = EnsembleDefinition(stream=True)
    assert made.is_streaming
    assert made.replace(verbose=True).is_streaming
    assert not made.replace(stream=False).is_streaming
    with pytest.raises(ValidationError, match="unknown field 'is_streaming'"):
        EnsembleDefinition(is_streaming=True)


def test_listener_is_appended_when_one_is_added() -> None:
    """S-DOM-69."""
    first, second = Recorder(), Recorder()
    made = EnsembleDefinition(listeners=[first])
    assert made.with_additional_listener(second).listeners == (first, second)
    assert made.listeners == (first,)


def test_options_win_when_a_run_gives_them() -> None:
    """S-DOM-68, S-SET-41: None keeps the ensemble's value; the ensemble itself is unchanged."""
    made = EnsembleDefinition(tasks=[FACTS], max_tool_output_length=10, max_parallel_tasks=4)
    changed = made.with_options(RunOptions(tool_log_truncate_length=0, max_parallel_tasks=2))
    assert (changed.max_tool_output_length, changed.tool_log_truncate_length, changed.max_parallel_tasks) == (10, 0, 2)
    assert made.with_options(None) is made
    assert (made.tool_log_truncate_length, made.max_parallel_tasks) == (200, 4)
    assert RunOptions() == RunOptions(max_tool_output_length=None)
    held = made.replace(context_budget=8000)
    assert [held.with_options(RunOptions(context_budget=n)).context_budget for n in (None, 9)] == [8000, 9]
    for owner in (EnsembleDefinition, RunOptions):
        with pytest.raises(ValidationError, match=r" context_budget must be > 0 when set, got: -1$"):
            owner(context_budget=-1)


def test_exporter_is_kept_when_it_is_a_callable_or_an_object() -> None:
    """S-TRC-60: what takes a trace."""
    exporter = Exporter()
    assert EnsembleDefinition(trace_exporter=exporter).trace_exporter is exporter
    assert EnsembleDefinition(trace_exporter=print).trace_exporter is print


def test_tasks_are_the_same_when_an_ensemble_was_pickled() -> None:
    """S-CONV-30: a context task and a listed task are still one after the way."""
    article = Task.of("Write").replace(context=[FACTS])
    definition = EnsembleDefinition(tasks=[FACTS, article], inputs={"a": 1})
    made = pickle.loads(pickle.dumps(definition))  # noqa: S301  our own bytes
    assert made.tasks == (FACTS, article)
    assert made.tasks[1].context[0] == made.tasks[0]


def test_unit_among_the_tasks_is_told_where_it_belongs() -> None:
    """S-LOOP-188: the message names the place, the unit and the argument that takes it."""
    only = Task(description="d", expected_output="o")
    graph = Graph(name="g", states={"a": only}, edges=[GraphEdge(from_state="a", to_state=Graph.END)], start="a")
    for unit, text in (
        (Loop(name="l", body=[only]), "tasks[1] is the Loop 'l', not a task: give it as loops=[...]"),
        (Phase.of("p", only), "tasks[1] is the Phase 'p', not a task: give it as phases=[...]"),
        (graph, "tasks[1] is the Graph 'g', not a task: give it as graph=..."),
    ):
        with pytest.raises(ValidationError) as caught:
            EnsembleDefinition(tasks=[Task(description="d", expected_output="o"), unit])  # type: ignore[list-item]
        assert str(caught.value) == text
