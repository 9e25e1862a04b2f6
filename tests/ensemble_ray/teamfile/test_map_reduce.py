"""Team files with a map-reduce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import MapEnsemble, MapReduceEnsemble, Task, ValidationError
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.definition.run_rules import RunListeners
from ensemble_ray.definition.task import WithReflection
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.teamfile import Runnable, load_ensemble, load_runnable
from ensemble_ray.teamfile.fields import AllItemsPrompt, GroupPrompt, ItemPrompt
from ensemble_ray.teamfile.sections import ItemTaskKeys, MapReduceKeys, MapTeamKeys
from tests.ensemble_ray.teamfile.conftest import Refused
from tests.ensemble_ray.teamfile.test_json_schema import schema_errors

Loaded = Callable[[str], Runnable]

WHOLE = """
llm: local
inputs: {topic: tides}
max_parallel_tasks: 3
agents:
  reader: {goal: Find what is said}
map_reduce:
  items: reviews.jsonl
  map:
    description: "What of {topic} is in {text}?"
    expected_output: One line
    agent: reader
  reduce: {description: Bring together}
  direct: {description: "Say all of {items}"}
  target_token_budget: 400
  max_reduce_levels: 3
  mode: pipelined
  ordered: true
  on_item_error: collect
  dead_letters: out/dead.jsonl
  results: out/rows.jsonl
  replicas: 2
  max_concurrency: 4
"""


@pytest.fixture
def loaded(folder: Path) -> Loaded:
    """Loads a YAML text beside a file of items."""
    (folder / "reviews.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n', encoding="utf-8")

    def loaded(text: str) -> Runnable:
        (folder / "team.yaml").write_text(text, encoding="utf-8")
        return load_runnable("team.yaml")

    return loaded


async def test_every_value_arrives_when_a_file_is_whole(loaded: Loaded, folder: Path) -> None:
    """S-MR-175: sections become factories, paths are seen from the file, items that lack a field are refused."""
    team = loaded(WHOLE)
    assert isinstance(team, MapReduceEnsemble)
    assert isinstance(team.map_task, ItemPrompt)
    assert isinstance(team.reduce_task, GroupPrompt)
    assert isinstance(team.direct_task, AllItemsPrompt)
    task = team.map_task({"text": "the sea"})
    assert (task.description, task.expected_output) == ("What of {topic} is in the sea?", "One line")
    assert task.agent is not None
    assert task.agent.role == "reader"
    assert (team.budget, team.max_reduce_levels, team.mode, team.ordered) == (400, 3, "pipelined", True)
    assert (team.on_item_error, team.replicas, team.max_concurrency, team.max_parallel_tasks) == ("collect", 2, 4, 3)
    assert (team.results, team.dead_letters) == (folder / "out/rows.jsonl", folder / "out/dead.jsonl")
    assert team.origin == str(folder / "team.yaml")
    pulled = await team.item_source.open().next(5)
    assert pulled.items[0] == (0, {"text": "a"})
    assert isinstance(pulled.items[1], RefusedItem)
    assert schema_errors(WHOLE) == []


def test_a_map_alone_is_a_map_ensemble(loaded: Loaded) -> None:
    """S-MR-175: without `reduce`; items may be a list, or the dead letters of a run."""
    team = loaded("llm: local\nmap_reduce:\n  items: [a, {b: 1}]\n  map: {description: 'Say {item}'}\n")
    assert isinstance(team, MapEnsemble)
    assert team.item_source.count == 2
    dead = loaded(
        "llm: local\nmap_reduce:\n  items: {dead_letters: reviews.jsonl}\n  map: {description: 'Say {item}'}\n"
    )
    assert isinstance(dead, MapEnsemble)
    assert dead.item_source.identity["kind"] == "dead_letters"


async def test_items_are_rows_of_a_csv_file_that_says_how_it_is_written(loaded: Loaded, folder: Path) -> None:
    """S-MR-175, S-MR-196: delimiter and encoding."""
    (folder / "orders.txt").write_bytes("id;note,é\n1;a,b\n".encode("latin-1"))
    text = 'llm: local\nmap_reduce:\n  items: {csv: orders.txt, delimiter: ";", encoding: latin-1}\n  map: {description: d}\n'
    team = loaded(text)
    assert isinstance(team, MapEnsemble)
    reader = team.item_source.open()
    assert list((await reader.next(1)).items) == [(0, {"id": "1", "note,é": "a,b"})]
    await reader.close()
    assert schema_errors(text) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("  map: {description: d}\n", ["team.yaml:2:1: map_reduce: the map-reduce needs the key 'items'"]),
        ("  items: [1]\n", ["team.yaml:3:3: map_reduce: the map-reduce needs the key 'map'"]),
        (
            "  items: nothing.csv\n  map: {description: d}\n",
            [
                "team.yaml:3:10: map_reduce.items: items file '{folder}/nothing.csv' cannot be read: No such file or directory"
            ],
        ),
        (
            "  items: [1]\n  map: {description: d, agent: reder}\n  reduce: {description: r}\n",
            ["team.yaml:4:32: map_reduce.map.agent: unknown agent 'reder'. The file declares no agents by name"],
        ),
        (
            "  items: [1]\n  map: {description: d}\n  reduce: {description: r}\n  chunk_size: 1\n",
            ["team.yaml:6:15: map_reduce.chunk_size: chunk_size must be >= 2, got: 1"],
        ),
        (
            "  items: [1]\n  map: {description: d}\n  chunk_size: 3\n",
            [
                "team.yaml:5:3: map_reduce.chunk_size: it is of use only with the section 'reduce', which says how outputs are brought together"
            ],
        ),
        (
            "  items: [1]\n  map: {description: d}\ntasks: {a: {description: d}}\n",
            ["team.yaml:5:1: tasks: a file with 'map_reduce' has no tasks beside it: its tasks are made of its items"],
        ),
        (
            "  items: [1]\n  map: {description: d}\n  reduce: {description: r}\nmax_parallel_tasks: 0\n",
            ["team.yaml:6:21: max_parallel_tasks: MapReduceEnsemble max_parallel_tasks must be > 0 when set, got: 0"],
        ),
    ],
)
def test_mistakes_are_told_with_their_places(refused: Refused, folder: Path, text: str, told: list[str]) -> None:
    """S-MR-175, S-MR-176: those of the file, and those that the ensemble itself finds."""
    found = refused(f"llm: local\nmap_reduce:\n{text}")
    assert found == [line.replace("{folder}", str(folder)) for line in told]


def test_keys_of_plans_are_unknown(refused: Refused) -> None:
    """S-MR-175: a map-reduce has no workflow and no context."""
    text = "llm: local\nworkflow: parallel\nmap_reduce:\n  items: [1]\n  map: {description: d, context: [a]}\n"
    told = refused(text)
    assert told[1].startswith("team.yaml:2:1: workflow: unknown key of a team with a map-reduce.")
    assert told[2].startswith("team.yaml:5:25: map_reduce.map.context: unknown key of the section 'map'.")
    assert schema_errors(text) != []


def test_one_of_the_sections_is_needed(refused: Refused) -> None:
    """S-MR-175: neither is a mistake."""
    assert refused("llm: local\n") == [
        "team.yaml:1:1: a team needs the key 'tasks', or one of [loops, phases, graph, map_reduce]"
    ]
    assert schema_errors("llm: local\n") == ["$"]
    assert schema_errors("tasks: {a: {description: d}}\nmap_reduce: {map: {description: d}}\n") == ["$"]


def test_what_needs_a_plan_refuses_it(loaded: Loaded) -> None:
    """S-MR-177: its tasks are made while it runs."""
    loaded(WHOLE)
    with pytest.raises(ValidationError, match="is a MapReduceEnsemble whose tasks are made while it runs"):
        load_ensemble("team.yaml")


def test_the_keys_are_those_of_the_class() -> None:
    """S-MR-175: every field has its key, and no key is without its field."""
    fields = {info.alias or name for name, info in MapReduceDefinition.model_fields.items()}
    rules = {info.alias or name for name, info in (RunListeners.model_fields | WithReflection.model_fields).items()}
    agents = {"map_agent", "reduce_agent", "direct_agent"}  # a section names its agent
    sides = {"map": "map_task", "reduce": "reduce_task", "direct": "direct_task"}
    assert {sides.get(name, name) for name in MapReduceKeys.model_fields} == fields - rules - agents
    assert set(MapTeamKeys.model_fields) >= set(EVENT_TYPES) | {"llm", "inputs", "retry", "max_tokens", "max_cost"}
    assert set(MapTeamKeys.model_fields) - {"agents", "map_reduce", "redaction"} <= rules  # `redaction` is `redactor`
    assert set(ItemTaskKeys.model_fields) <= set(Task.model_fields) - {"context", "name"}
