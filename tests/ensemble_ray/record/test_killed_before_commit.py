"""A process that dies while facts wait for their commit: what left the run is recorded, and the rest is done again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from ensemble_ray import InlineRuntime, aresume
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.ensemble_ray.record.killed_team import DIED, RUN_ID, Killed
from tests.ensemble_ray.record.sqlite_runs import HOME_OF_CODE
from tests.template import run_forked

READ, ORDERED = "facts#0/0/call-0", "facts#0/1/call-0"
#: Kind and name of the facts of the first task up to the call with an effect.
BEFORE_EFFECT = [
    ("plan", "run"),
    ("stimulus", "run"),
    ("model", "facts#0/0/model"),
    ("tool_intent", READ),
    ("tool_result", READ),
    ("model", "facts#0/1/model"),
    ("tool_intent", ORDERED),
]
UNTIL_OUTPUT = [*BEFORE_EFFECT, ("tool_result", ORDERED), ("model", "facts#0/2/model"), ("output", "facts#0")]


async def killed_at(
    place: str, directory: Path, *, has_effect: bool = False, listens: bool = False
) -> list[tuple[str, str]]:
    """Kind and name of what is recorded when the process ended at that place."""
    arguments = f"{str(directory)!r}, {str(directory / 'marks')!r}, {place!r}"
    script = (
        "from tests.ensemble_ray.record.killed_team import main; "
        f"main({arguments}, has_effect={has_effect}, listens={listens})"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME_OF_CODE)}
    done = await asyncio.to_thread(
        run_forked,
        [sys.executable, "-c", script],
        cwd=HOME_OF_CODE,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == DIED, done.stderr
    return [(fact.kind, fact.name) for fact in await SqliteStore(directory).facts(RUN_ID)]


async def resumed(directory: Path, *, has_effect: bool = False, listens: bool = False) -> Counter[str]:
    """How often each thing was done, after the run came to its end in this process."""
    again = Killed(directory / "marks")
    output = await aresume(
        RUN_ID, again.team(has_effect=has_effect, listens=listens), runtime=InlineRuntime(home=directory)
    )
    assert [each.raw for each in output.task_outputs] == ["The facts", "The article"]
    facts = await SqliteStore(directory).facts(RUN_ID)
    names = Counter((fact.kind, fact.name) for fact in facts if fact.kind in {"model", "tool_result", "output"})
    assert set(names.values()) == {1}, "each answer, result and output is recorded once"
    return Counter(again.done)


@pytest.mark.program
@pytest.mark.parametrize("place", ["look_up", "request facts 1", "request article 0"])
async def test_request_and_read_wait_for_no_commit_when_the_process_dies(place: str, tmp_path: Path) -> None:
    """S-DUR-2, S-DUR-23, S-DUR-37: what they depend on may be lost with them; then it is done again, once."""
    assert await killed_at(place, tmp_path) == [("plan", "run")]
    done = await resumed(tmp_path)
    repeated = {"look_up": 2, "request facts 0": 2, "request facts 1": 1 + (place != "look_up")}
    assert done == {**repeated, "request article 0": 1 + (place == "request article 0")}


@pytest.mark.program
async def test_all_facts_are_committed_when_the_process_dies_in_an_effect(tmp_path: Path) -> None:
    """S-DUR-3, S-DUR-22, S-DUR-23: no recorded work is done again, and the effect is flagged in place of a repetition."""
    assert await killed_at("order", tmp_path, has_effect=True) == BEFORE_EFFECT
    done = await resumed(tmp_path, has_effect=True)
    assert (done["look_up"], done["order"]) == (1, 1)
    assert (done["request facts 0"], done["request facts 1"], done["request facts 2"]) == (1, 1, 1)


@pytest.mark.program
async def test_result_of_an_effect_is_committed_when_the_next_request_leaves(tmp_path: Path) -> None:
    """S-DUR-22: its outcome is known."""
    recorded = await killed_at("request facts 2", tmp_path, has_effect=True)
    assert recorded == [*BEFORE_EFFECT, ("tool_result", ORDERED)]
    done = await resumed(tmp_path, has_effect=True)
    assert (done["order"], done["request facts 1"], done["request facts 2"]) == (1, 1, 2)


@pytest.mark.program
async def test_output_is_committed_when_user_code_depends_on_it(tmp_path: Path) -> None:
    """S-DUR-2: a guardrail on the input of the next task."""
    recorded = await killed_at("guardrail", tmp_path, has_effect=True)
    assert recorded[: len(UNTIL_OUTPUT)] == UNTIL_OUTPUT
    done = await resumed(tmp_path, has_effect=True)
    assert (done["request facts 2"], done["guardrail"], done["request article 0"]) == (1, 2, 1)


@pytest.mark.program
async def test_result_is_committed_when_a_listener_hears_of_it(tmp_path: Path) -> None:
    """S-DUR-2: what left the run is not done again."""
    called = [
        ("plan", "run"),
        ("stimulus", "run"),
        ("model", "facts#0/0/model"),
        ("tool_intent", READ),
        ("tool_result", READ),
    ]
    assert (await killed_at("called look_up", tmp_path, listens=True))[: len(called)] == called
    done = await resumed(tmp_path, listens=True)
    assert (done["look_up"], done["request facts 0"]) == (1, 1)


@pytest.mark.program
async def test_output_is_committed_when_a_listener_hears_of_it(tmp_path: Path) -> None:
    """S-DUR-2: the output of the first task, while the second one begins."""
    recorded = await killed_at("complete The facts", tmp_path, listens=True)
    assert ("output", "facts#0") in recorded
    done = await resumed(tmp_path, listens=True)
    assert (done["look_up"], done["request facts 0"], done["request facts 1"]) == (1, 1, 1)
