"""Names of runs, instances and effects."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.values import ids
from ensemble_ray.values.ids import (
    delegated_instance,
    delegating_call,
    effect_name,
    instance_of,
    new_object_id,
    new_run_id,
    task_instance,
    uuid_of,
)


def test_run_ids_are_fresh_uuids() -> None:
    """S-ENG-2, S-TRC-4: each run has its own."""
    first, second = new_run_id(), new_run_id()
    assert first != second
    assert str(uuid.UUID(first)) == first


def test_object_ids_are_fresh() -> None:
    """S-CONV-30: objects with equal fields are different objects."""
    assert new_object_id() != new_object_id()


@given(st.text())
def test_derived_id_is_a_version_4_uuid(name: str) -> None:
    """Ids that are called UUIDs look like them, whatever name they are made of."""
    made = uuid.UUID(uuid_of(name))
    assert (made.version, made.variant) == (4, uuid.RFC_4122)


@pytest.mark.program
def test_derived_id_is_the_same_in_every_process() -> None:
    """A re-run finds it again: nothing of the process or of its hash seed is in it."""
    code = "from ensemble_ray.values.ids import uuid_of; print(uuid_of('facts#0/1/call-0'))"
    home = Path(ids.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=home)  # noqa: S603  our own code
    assert done.stdout.strip() == uuid_of("facts#0/1/call-0") == "75681ef8-706e-4053-8534-4b00beff502c"
    assert uuid_of("facts#0/1/call-0") != uuid_of("facts#0/1/call-1")


def test_instance_is_a_path_of_keys_and_occurrences() -> None:
    """Where the second attempt of a task inside another is found."""
    assert instance_of("facts") == "facts#0"
    assert instance_of("writer", occurrence=1, parent="loop:refine#2") == "loop:refine#2/writer#1"


def test_effect_is_named_by_instance_turn_and_call() -> None:
    """What was done in which turn."""
    assert effect_name("facts#0", 2) == "facts#0/2/model"
    assert effect_name("facts#0", 2, "call-1") == "facts#0/2/call-1"


def test_work_that_was_handed_on_is_told_from_tasks_by_its_name() -> None:
    """S-DUR-74: its call, and the task of the plan that it belongs to, however deep it is."""
    call = effect_name("facts#0", 2, "call-1")
    worker = delegated_instance(call)
    assert worker == "facts#0/2/call-1/delegate#0"
    deeper = delegated_instance(effect_name(worker, 0, "call-3"))
    assert (delegating_call(worker), delegating_call(deeper)) == (call, f"{worker}/0/call-3")
    assert delegating_call("delegate#0") is None
    assert [task_instance(name) for name in ("facts#0", call, deeper, f"{deeper}/0/model")] == ["facts#0"] * 4
