"""What a dynamic run records besides what its tasks do."""

import dataclasses
import json
import os
import subprocess
import sys
from datetime import date
from types import SimpleNamespace

import pydantic
import pytest

from ensemble_ray import OpenAIChatModel
from ensemble_ray.facts.runs import GroupRecorded, ItemsRecorded, PlanRecorded
from ensemble_ray.record.identity.definition import (
    DIRECT,
    FINAL,
    differences,
    item_digest,
    map_key,
    map_reduce_run_data,
    position_of,
    reduce_key,
)
from ensemble_ray.record.resume.reading import check_same, what_differs

MODEL = OpenAIChatModel("gpt-4o-mini", base_url="https://me:pw@example.org/v1", api_key="sk-secret")


def _map(item: str) -> str:
    return item


def _other_map(item: str) -> str:
    return item * 2


def _definition(**changes: object) -> SimpleNamespace:
    """The fields of an ensemble that a run's data tells of, and some that it does not."""
    fields: dict[str, object] = {
        "map_task": _map,
        "reduce_task": _other_map,
        "input_estimator": str,
        "llm": MODEL,
        "target_token_budget": 1000,
        "mode": "levels",
        "max_parallel_tasks": 7,
        "max_tool_output_length": -1,
    }
    return SimpleNamespace(**{**fields, **changes})


def _data(definition: SimpleNamespace) -> PlanRecorded:
    return map_reduce_run_data(
        definition, workflow="map_reduce_adaptive", inputs={"topic": "Ray"}, items={"kind": "list", "count": 3}
    )


def test_data_of_a_dynamic_run_tells_its_code_and_its_rules() -> None:
    """S-MR-161, S-DUR-36: callables by name and source; nothing that is secret, no estimator that nobody wrote."""
    data = _data(_definition())
    assert data.is_dynamic
    assert not PlanRecorded(plan={}).is_dynamic
    assert data.plan == {"workflow": "map_reduce_adaptive", "target_token_budget": 1000, "mode": "levels"}
    told = data.definition
    assert isinstance(told, dict)
    assert sorted(told) == ["llm", "map_task", "reduce_task"]
    assert sorted(told["map_task"]) == ["callable", "source"]
    held = _data(_definition(context_budget=8000)).definition
    assert held == {**told, "context_budget": 8000}  # S-MEM-138
    assert "secret" not in json.dumps(data.to_data())
    assert "pw@" not in json.dumps(data.to_data())


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"map_task": _other_map}, "definition.map_task.callable"),
        ({"mode": "pipelined"}, "plan.mode"),
        ({"target_token_budget": 10}, "plan.target_token_budget"),
        ({"llm": OpenAIChatModel("other", base_url="https://example.org/v1", api_key="k")}, "definition.llm.model"),
        ({"direct_task": _map}, "definition.direct_task"),
    ],
)
def test_difference_has_a_path_when_a_definition_changed(changes: dict[str, object], path: str) -> None:
    """S-MR-161, S-DUR-36: and another digest."""
    old, new = _data(_definition()), _data(_definition(**changes))
    (found, *_) = what_differs(old, new)
    assert found.startswith(f"{path}: ")
    assert old.digest != new.digest
    with pytest.raises(Exception, match=path):
        check_same("r", old, new, doing="resume")


def test_limits_of_speed_and_the_place_of_items_make_no_difference() -> None:
    """S-MR-162: whether the items are the same is seen by the items."""
    slow = _definition(max_parallel_tasks=1, replicas=3)
    moved = map_reduce_run_data(
        slow, workflow="map_reduce_adaptive", inputs={"topic": "Ray"}, items={"path": "x.jsonl"}
    )
    assert what_differs(_data(_definition()), moved) == []


def test_work_is_named_by_its_key() -> None:
    """S-MR-160: and the key tells which work it is."""
    assert (map_key(17), reduce_key(2, 0), FINAL, DIRECT) == ("map-17", "reduce-2-0", "final-reduce", "direct")
    assert (position_of("map-17"), position_of("reduce-2-10")) == ((0, 17), (2, 10))
    assert [position_of(key) for key in (FINAL, DIRECT, "map-", "map-1-2", "reduce-1", "xmap-1")] == [None] * 6


def test_group_names_its_reduce_and_what_it_reduces() -> None:
    """S-MR-161: level, number, and the keys of its inputs in order."""
    found = GroupRecorded(level=1, number=2, inputs=["map-7", "map-3"], is_final=False)
    assert found.kind == "group"
    assert found.to_data() == {"level": 1, "number": 2, "inputs": ["map-7", "map-3"], "is_final": False}


def test_items_that_follow_each_other_are_named_by_the_first() -> None:
    """S-MR-162, S-MR-126: those of a dead-letter file by their indices."""
    row = ItemsRecorded.of([5, 6], ["a", "b"])
    assert (row.kind, row.to_data()) == ("items", {"first": 5, "digests": ["a", "b"]})
    assert ItemsRecorded.of([9, 2], ["a", ""]).to_data() == {"indices": [9, 2], "digests": ["a", ""]}


def test_fact_of_items_takes_twenty_bytes_an_item() -> None:
    """S-MR-162: there may be millions."""
    digests = [item_digest(index) for index in range(1000)]
    found = ItemsRecorded.of(range(1000), digests)
    assert len(json.dumps(found.to_data())) <= 20 * 1000 + 100


# Hashes of items.


class _Row(pydantic.BaseModel):
    name: str
    tags: set[str] = set()


@dataclasses.dataclass
class _Point:
    x: int
    seen: frozenset[str] = frozenset()


class _Nameless:
    pass


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [2]}, {"b": [2], "a": 2}),
        ("text", "other"),
        (date(2026, 1, 2), date(2026, 1, 3)),
        (_Row(name="a"), _Row(name="b")),
        (_Point(1), _Point(2)),
        ({(1, 2): {"x"}}, {(1, 2): {"y"}}),
        (b"x", b"y"),
        ("\ud800", "\ud801"),
    ],
)
def test_hash_is_another_when_an_item_changed(one: object, other: object) -> None:
    """S-MR-162: by its JSON, or by its `repr`."""
    assert item_digest(one)
    assert item_digest(one) == item_digest(one)
    assert item_digest(one) != item_digest(other)


def test_order_of_keys_is_no_difference() -> None:
    """S-MR-162: a row is the same row."""
    assert item_digest({"a": 1, "b": 2}) == item_digest({"b": 2, "a": 1})


def test_item_is_not_compared_when_nothing_names_it() -> None:
    """S-MR-162: its `repr` names an address, also deep inside; it breaks; it holds itself."""

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    cycle: list[object] = []
    cycle.append(cycle)
    found = [item_digest(item) for item in (_Nameless(), [{"a": _Nameless()}], lambda: 0, Broken(), cycle)]
    assert found == [""] * 5


def digests() -> list[str]:
    """Hashes of items that hold sets."""
    items: tuple[object, ...] = (
        {"a", "b", "c", "d"},
        _Row(name="n", tags={"p", "q", "r"}),
        _Point(1, frozenset("xyz")),
        {2: {"u", "v"}, "k": 1},
    )
    return [item_digest(item) for item in items]


@pytest.mark.program
def test_hash_is_the_same_in_the_next_process() -> None:
    """S-MR-162: also of sets, whose order is another there."""
    code = f"from {__name__} import digests; print(digests())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there == f"{digests()}\n"
    assert "" not in digests()


def test_digest_is_over_plan_and_definition() -> None:
    """S-DUR-36: the same data has the same digest."""
    old, new = _data(_definition()), _data(_definition())
    assert old.digest == new.digest
    assert differences(old.to_data(), new.to_data()) == []
