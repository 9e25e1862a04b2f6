"""Factories that are made of texts."""

from __future__ import annotations

import pytest

from ensemble_ray import Agent, MapEnsemble, Task, ValidationError
from ensemble_ray.record.identity.definition import map_reduce_run_data
from ensemble_ray.teamfile.fields import AllItemsPrompt, GroupPrompt, ItemPrompt
from ensemble_ray.testing import ScriptedModel


def _prompt(text: str, *inputs: str) -> ItemPrompt:
    return ItemPrompt(Task.of(text), frozenset(inputs))


@pytest.mark.parametrize(
    ("text", "item", "shown"),
    [
        ("Sum {title}: {text}", {"title": "T", "text": "a {title} {{b}}"}, "Sum T: a {title} {{b}}"),
        ("All: {item}", {"a": 1}, 'All: {"a": 1}'),
        ("One: {item}", {"item": "own", "b": 2}, "One: own"),
        ("One: {item}", "plain", "One: plain"),
        ("{a} {b} {c}.", {"a": None, "b": [1, "\u00e9"], "c": 1.5}, ' [1, "\u00e9"] 1.5.'),
        ("{{a}} {a} {not a name}", {"a": 1}, "{a} 1 {not a name}"),
        ("{topic}: {a}", {"a": 1}, "{topic}: 1"),
        ("{topic}: {a}", {"a": 1, "topic": "own"}, "own: 1"),
    ],
)
def test_fields_stand_in_their_places(text: str, item: object, shown: str) -> None:
    """S-MR-170: fields, whole items, escapes; what an item says is no template; inputs are left."""
    assert _prompt(text, "topic")(item).description == shown


def test_expected_output_is_a_template_too() -> None:
    """S-MR-170: in the texts of a map."""
    prompt = ItemPrompt(Task(description="Say {a}", expected_output="About {a}"))
    assert prompt({"a": "tea"}).expected_output == "About tea"
    assert prompt({"a": "tea"}) is not prompt({"a": "tea"})


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (
            {"txt": 1, "id": 2},
            "it has no field 'text', which the prompt names. Did you mean 'txt'? Known: [txt, id, item]",
        ),
        ("plain", "it is a str without fields, and the prompt names the field 'text': write {item} for all of it"),
        (None, "it is a NoneType without fields, and the prompt names the field 'text': write {item} for all of it"),
    ],
)
def test_a_field_that_is_missing_is_named(item: object, told: str) -> None:
    """S-MR-171: with those that are there."""
    prompt = _prompt("Sum {text}")
    assert prompt.problem(item) == told
    assert prompt.problem({"text": None}) is None
    with pytest.raises(ValidationError, match=r"without fields|no field"):
        prompt(item)


def test_several_missing_fields_are_named_together() -> None:
    """S-MR-171: all at once."""
    problem = _prompt("{a} {b} {c}").problem({"c": 1})
    assert problem == "it has no fields 'a', 'b', which the prompt names. Known: [c, item]"


def test_a_reduce_has_its_group_as_context() -> None:
    """S-MR-172: its text needs no variables."""
    group = [Task.of("a"), Task.of("b")]
    task = GroupPrompt(Task.of("Join {topic} {{x}}"))(group)
    assert list(task.context) == group
    assert task.description == "Join {topic} {x}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Say of\n{items}\nall", 'Say of\na\n{"b": 1}\nall'), ("Say all", 'Say all\n\na\n{"b": 1}')],
)
def test_all_items_stand_where_the_text_says_or_behind_it(text: str, shown: str) -> None:
    """S-MR-172: one per line."""
    assert AllItemsPrompt(Task.of(text))(["a", {"b": 1}]).description == shown


def _digest(text: str, goal: str) -> object:
    agent = Agent(role="R", goal=goal, llm=ScriptedModel())
    prompt = ItemPrompt(Task.of(text).replace(agent=agent))
    team = MapEnsemble(items=["a"], map_task=prompt)
    return map_reduce_run_data(team, workflow="map", inputs={}, items={}).digest


def test_a_changed_prompt_or_agent_is_a_changed_definition() -> None:
    """S-MR-173: what a resume compares."""
    assert _digest("Sum {item}", "g") == _digest("Sum {item}", "g")
    assert (
        len(
            {
                str(each)
                for each in (_digest("Sum {item}", "g"), _digest("Sum {item}.", "g"), _digest("Sum {item}", "h"))
            }
        )
        == 3
    )
