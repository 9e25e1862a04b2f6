"""`module:attribute`: an ensemble or a function that makes one, from the current directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Ensemble, ValidationError
from ensemble_ray.definition.fields import Origin
from ensemble_ray.teamfile import load_ensemble, load_runnable, load_source
from ensemble_ray.teamfile.references import is_reference
from ensemble_ray.testing import ScriptedModel

MODULE = """
from ensemble_ray import Agent, Ensemble, MapEnsemble, MapReduceEnsemble, Task

agent = Agent(role="A", goal="g", llm="local")
first = Task(name="first", description="d", expected_output="e", agent=agent)
second = Task(name="second", description="d", expected_output="e", llm="local", context=[first])
team = Ensemble(tasks=[first, second], agents=[agent])
number = 5

def make_team():
    return team

def _map(item):
    return Task.of(f"map {item}")

def _reduce(group):
    return Task(description="d", expected_output="e", context=group)

planned = MapReduceEnsemble(items=["a", "b"], map_task=_map, reduce_task=_reduce, llm="local")
fed = MapEnsemble(items=["a", "b"], map_task=_map, llm="local")

def make_managed():
    return team.replace(workflow="hierarchical", manager_llm="local")

def make_nothing():
    return None

def with_arguments(size):
    return team

def made_of(words):
    return Ensemble(tasks=[Task.of(word) for word in words.split()])

async def later():
    return team

def broken():
    raise OSError("no disk")
"""


@pytest.fixture
def module(folder: Path) -> str:
    """A module of the current directory; gives its name."""
    (folder / "teams_of_test.py").write_text(MODULE, encoding="utf-8")
    (folder / "broken_of_test.py").write_text("x = 1\n1 / 0\n", encoding="utf-8")
    (folder / "unparsed_of_test.py").write_text("x = = 1\n", encoding="utf-8")
    (folder / "needy_of_test.py").write_text("import no_such_package_at_all\n", encoding="utf-8")
    return "teams_of_test"


@pytest.mark.parametrize("attribute", ["team", "make_team"])
def test_a_team_is_found_when_the_attribute_is_one_or_makes_one(module: str, attribute: str) -> None:
    """Its origin is the target, so that a record can name it."""
    team = load_ensemble(f"{module}:{attribute}")
    assert [task.name for task in team.tasks] == ["first", "second"]
    assert team.origin == f"{module}:{attribute}"


def test_a_recorded_team_is_made_again_with_the_arguments_it_was_made_with(module: str) -> None:
    """S-DUR-35: what a callable was called with is recorded beside where it stands."""
    source = Origin(place=f"{module}:made_of", overrides={"words": "x y", "workflow": "sequential"})
    team = load_source(source)
    assert isinstance(team, Ensemble)
    assert [task.description for task in team.tasks] == ["x", "y"]
    assert team.source == source
    with pytest.raises(ValidationError, match=r"made_of' needs arguments: \[words\]"):
        load_source(Origin(place=f"{module}:made_of"))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("teams_of_tset:team", "There is no module 'teams_of_tset'. Did you mean 'teams_of_test'?"),
        ("teams_of_test:taem", "Module 'teams_of_test' has no attribute 'taem'. Did you mean 'team'?"),
        (
            "teams_of_test:number",
            "is a int, and neither an Ensemble nor a function that makes one. Known: [team, planned, fed]",
        ),
        ("teams_of_test:make_nothing", "is a NoneType, and neither an Ensemble"),
        ("teams_of_test:with_arguments", "needs arguments: [size]"),
        ("teams_of_test:later", "is async"),
        ("teams_of_test:broken", "teams_of_test:broken() failed: OSError: no disk"),
        ("broken_of_test:team", "Importing module 'broken_of_test' failed: ZeroDivisionError: division by zero ("),
        ("unparsed_of_test:team", "Module 'unparsed_of_test': invalid syntax ("),
        ("needy_of_test:team", "needs the module 'no_such_package_at_all', which is not installed"),
        ("json.decodr:x", "Package 'json' has no module 'decodr'. Did you mean 'decoder'?"),
    ],
)
def test_the_nearest_is_named_when_a_target_is_wrong(module: str, target: str, expected: str) -> None:
    """Whatever goes wrong in a user's module is our error with its text; the original is its cause."""
    with pytest.raises(ValidationError) as caught:
        load_ensemble(target)
    assert expected in str(caught.value)


def test_the_line_is_named_when_a_module_fails(module: str) -> None:
    """Where to look."""
    with pytest.raises(ValidationError, match=r"broken_of_test\.py, line 2\)"):
        load_ensemble("broken_of_test:team")


def test_tasks_stay_the_same_ones_when_the_model_is_replaced(module: str) -> None:
    """`--llm` rewrites inside: ids stay, so that the user's own tasks still find their outputs (S-CONV-30)."""
    original = load_ensemble(f"{module}:team")
    model = ScriptedModel("x")
    team = load_ensemble(f"{module}:team", llm=model)
    assert list(team.tasks) == list(original.tasks)
    first, second = team.tasks
    assert second.context == (first,)
    assert second.context[0].agent is not None
    assert second.context[0].agent.llm is model
    assert team.agents is not None
    assert team.agents[0].llm is model
    assert (second.llm, team.llm) == (model, model)
    assert original.agents is not None
    assert original.agents[0].llm is not model


def test_manager_has_the_given_model_when_it_had_one_of_its_own(module: str) -> None:
    """`--llm`: else it has the first agent's, as ever."""
    model = ScriptedModel("x")
    assert load_ensemble(f"{module}:make_managed", llm=model).manager_llm is model
    assert load_ensemble(f"{module}:team", llm=model).manager_llm is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a:b", True), ("a.b:c.d", True), ("a", False), ("a:", False), ("a/b:c", False), ("1a:b", False)],
)
def test_references_are_told_from_other_texts(text: str, expected: bool) -> None:  # noqa: FBT001  the expectation
    """What counts as `module:attribute`."""
    assert is_reference(text) is expected


def test_every_kind_of_ensemble_is_found_where_it_will_be_run(module: str) -> None:
    """S-MR-161, S-MR-165: what a run was recorded with is loaded again; who needs a plan gets the one that there is."""
    kinds = [type(load_runnable(f"{module}:{name}")).__name__ for name in ("team", "planned", "fed")]
    assert kinds == ["Ensemble", "MapReduceEnsemble", "MapEnsemble"]
    again = load_source(load_runnable(f"{module}:fed").source)
    assert (type(again).__name__, again.origin) == ("MapEnsemble", f"{module}:fed")
    tree = load_ensemble(f"{module}:planned")
    assert (len(tree.tasks), tree.origin) == (3, f"{module}:planned")
    with pytest.raises(ValidationError, match="is a MapEnsemble whose tasks are made while it runs"):
        load_ensemble(f"{module}:fed")
    with pytest.raises(ValidationError, match="No other model can be chosen for a MapEnsemble"):
        load_runnable(f"{module}:fed", llm=ScriptedModel())
