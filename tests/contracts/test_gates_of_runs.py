"""The contract of `RunStore` about review gates: which wait, and decisions that any process takes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from ensemble_ray import RunState, ValidationError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.facts.runs import ReviewDecided
from ensemble_ray.ports import Persistence
from ensemble_ray.record.open_reviews import Obstacle, fold_gates, open_reviews
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.sqlite.losses import RECORD
from ensemble_ray.record.stores import RunStore, StoreAddress
from tests.template import ForkedProgram

from .owned_runs import RUN, begun, line_of, program_on, until_left
from .record_stores import STORES, address_of

GATE = "draft#0/0/after-review"
APPROVED = ReviewDecided(verdict="approve", by="Ann", outside=True)
#: A program that decides when it is told to; its arguments: the store's address, and who decides.
_DECIDER = """
import asyncio, json, sys
from ensemble_ray.facts.runs import ReviewDecided
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress

store = store_at(StoreAddress(**json.loads(sys.argv[1])))
print("ready", flush=True)
sys.stdin.readline()
refused = asyncio.run(store.decide("run-1", "draft#0/0/after-review", ReviewDecided(verdict="approve", by=sys.argv[2])))
print(sys.argv[2] if refused is None else refused[0].decided.data.by, refused is None)
"""


@pytest.fixture(params=STORES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    """An empty store, as data that travels."""
    return address_of(request.param, request, tmp_path)


@pytest.fixture
def store(address: StoreAddress) -> RunStore:
    """The store there."""
    return store_at(address)


def asked(name: str = GATE, *, run_id: str = RUN, at: float | None = None, **data: object) -> Fact:
    """A gate that is asked at; its task was put down there."""
    given = {"review_id": f"id of {name}", "timing": "after_execution", "task_description": "Draft", "detached": True}
    moment = time.time() if at is None else at
    return read_fact(run=run_id, kind="review", name=name, at=moment, data={**given, **data})


def fact(kind: str, name: str, run_id: str = RUN, **data: object) -> Fact:
    """Another fact."""
    return read_fact(run=run_id, kind=kind, name=name, at=1.0, data=data)


async def recorded(
    store: RunStore, facts: Sequence[Fact], *, run_id: str = RUN, state: RunState = RunState.INTERRUPTED
) -> None:
    """Leave a run behind."""
    await (await begun(store, run_id, [fact("plan", "run", run_id), *facts])).close(state)


async def listed(store: RunStore) -> list[tuple[str, list[str]]]:
    """Each run with the names of its gates that are open."""
    return [
        (run.run_id, [gate.asked.name for gate in fold_gates(facts) if gate.is_open])
        for run, facts in await store.gates()
    ]


# Which wait.


async def test_gates_of_runs_that_have_not_ended_are_given_oldest_run_first(store: RunStore) -> None:
    """S-REV-125: also of one that runs; a run without gates, and one that has ended, is not looked into."""
    assert await store.gates() == []
    await recorded(store, [asked(run_id="one")], run_id="one")
    await recorded(store, [], run_id="none")
    for number, state in enumerate(state for state in RunState if state.is_final):
        await recorded(store, [asked(run_id=f"ended-{number}")], run_id=f"ended-{number}", state=state)
    running = await begun(store, "two", [asked(run_id="two"), asked("b#0/0/before-review", run_id="two")])
    assert await listed(store) == [("one", [GATE]), ("two", [GATE, "b#0/0/before-review"])]
    assert [bool(run.owner) for run, _ in await store.gates()] == [False, True]
    await running.close(RunState.COMPLETED)
    assert await listed(store) == [("one", [GATE])]


async def test_gates_are_known_of_a_run_whose_owner_died(store: RunStore, address: StoreAddress) -> None:
    """S-REV-125: it is interrupted, and its gate waits."""
    asking = (
        'fact("draft#0/0/after-review", "review", review_id="g", timing="after_execution", task_description="Draft")'
    )
    program = f"await run.journal.append([{asking}], until=Persistence.COMMITTED)\ndie()"
    with program_on(address, program) as process:
        process.wait(60)
    await until_left(store, RUN)
    ((run, facts),) = await store.gates()
    assert (run.state, run.owner) == (RunState.INTERRUPTED, "")
    assert [review.gate_id for review in open_reviews(facts)] == ["g"]


@pytest.mark.parametrize(
    ("name", "kind", "end"),
    [
        (GATE, "output", "draft#0"),
        (GATE, "task_failed", "draft#0"),
        (GATE, "task_exited", "draft#0"),
        ("draft#0/2/call-1-review-0", "tool_result", "draft#0/2/call-1"),
        ("draft#0/2/call-1-review-0", "output", "draft#0"),
        ("m#0/0/call-0/delegate#0/1/call-2-review-0", "tool_result", "m#0/0/call-0"),
        ("m#0/0/call-0/delegate#0/1/call-2-review-0", "output", "m#0/0/call-0/delegate#0"),
        ("loop:refine#1/writer#0/0/after-review", "output", "loop:refine#1/writer#0"),
        ("map-3#0/x#0/0/after-review", "item_output", "map-3#0"),
    ],
)
async def test_gate_is_closed_when_what_it_belongs_to_has_ended(
    store: RunStore, name: str, kind: str, end: str
) -> None:
    """S-REV-126: the task, the work that handed it on, or the tool's call; what others gave closes nothing."""
    data: dict[str, object] = {
        "output": {"output": {}},
        "item_output": {"output": {}},
        "tool_result": {"outcome": "success", "text": "", "started_at": 1.0, "duration_s": 0.0},
    }.get(kind, {})
    others = [fact("output", "other#0", output={}), fact("output", "draft#1", output={})]
    await recorded(store, [asked(name), *others])
    assert await listed(store) == [(RUN, [name])]
    run = await store.claim(RUN)
    await run.journal.append([fact(kind, end, **data)], epoch=run.epoch, until=Persistence.COMMITTED)
    await run.close(RunState.INTERRUPTED)
    assert [gate.is_closed for gate in fold_gates(await store.gates_of(RUN))] == [True]


async def test_what_is_asked_of_a_gate_is_given_whole(store: RunStore) -> None:
    """S-REV-125: also long texts; a gate that was asked at again is one gate, as it was asked last, with its first time."""
    text = "A long draft. " * 1000
    now = time.time()
    first = asked(at=now, detached=False, task_output=text, prompt="Polite?", timeout_s=60.0, required_role="legal")
    again = asked(at=now, task_output=text, prompt="Polite?", timeout_s=60.0, required_role="legal")
    await recorded(store, [first, again])
    (review,) = open_reviews(await store.gates_of(RUN))
    assert (review.run_id, review.gate_id, review.task_output, review.prompt) == (RUN, f"id of {GATE}", text, "Polite?")
    assert review.expires_at is not None
    assert (review.expires_at - review.created_at).total_seconds() == pytest.approx(60)
    assert review.required_role == "legal"


async def test_run_whose_record_is_damaged_does_not_hide_the_others(
    store: RunStore, address: StoreAddress, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """S-REV-125: it is left out with a warning."""
    await recorded(store, [asked(run_id="bad")], run_id="bad")
    await recorded(store, [asked(run_id="good")], run_id="good")
    if address.url:
        with request.getfixturevalue("postgres").connection(address.url) as connection:
            connection.execute("UPDATE ensemble_ray.facts SET data = '[' WHERE run_id = 'bad' AND kind = 'review'")
    else:
        with closing(sqlite3.connect(Path(address.home) / "runs" / "bad" / RECORD)) as connection, connection:
            connection.execute("UPDATE facts SET data = '[' WHERE kind = 'review'")
    assert await listed(store) == [("good", [GATE])]
    assert "The review gates of run bad are not listed" in caplog.text


async def test_no_other_facts_and_no_runs_that_have_ended_are_read(
    store: RunStore, address: StoreAddress, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """S-REV-135: what nobody reads may be broken."""
    others = [fact("output", "other#0", output={}), fact("tool_result", "draft#0/1/call-1")]
    await recorded(store, [asked(), *others])
    await recorded(store, [asked(run_id="ended")], run_id="ended", state=RunState.COMPLETED)
    broken = "UPDATE {} SET data = '[' WHERE kind IN ('output', 'tool_result') OR {}"
    if address.url:
        with request.getfixturevalue("postgres").connection(address.url) as connection:
            connection.execute(broken.format("ensemble_ray.facts", "run_id = 'ended'").encode())
    else:
        for run_id in (RUN, "ended"):
            path = Path(address.home) / "runs" / run_id / RECORD
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute(broken.format("facts", int(run_id == "ended")))
    assert await listed(store) == [(RUN, [GATE])]
    assert "not listed" not in caplog.text


# Decisions.


async def test_decision_is_recorded_with_who_and_when(store: RunStore) -> None:
    """S-REV-127: as the last fact of the run, which stands as before; long texts too."""
    await recorded(store, [asked()], state=RunState.WAITING)
    before = await store.summary(RUN)
    text = "Better. \ud800" * 500
    began = time.time()
    decision = ReviewDecided(verdict="edit", text=text, by="Ann", comment="kinder", outside=True)
    assert await store.decide(RUN, GATE, decision) is None
    last = (await store.facts(RUN))[-1]
    assert isinstance(last.data, ReviewDecided)
    assert (last.name, last.data.verdict, last.data.text, last.data.by, last.data.comment) == (
        GATE, "edit", text, "Ann", "kinder"
    )  # fmt: skip
    assert began <= last.at <= time.time()
    assert await store.summary(RUN) == before
    (gate,) = fold_gates(await store.gates_of(RUN))
    assert gate.decided == last
    assert not gate.is_open


async def test_second_decision_is_refused_with_the_first(store: RunStore) -> None:
    """S-REV-128: the first counts, and nothing is written."""
    await recorded(store, [asked()])
    assert await store.decide(RUN, GATE, APPROVED) is None
    refused = await store.decide(RUN, GATE, ReviewDecided(verdict="exit", by="Bob"))
    assert refused is not None
    gate, obstacle = refused
    assert obstacle is Obstacle.DECIDED
    assert gate.decided is not None
    assert gate.decided.data.by == "Ann"
    assert len(await store.facts(RUN)) == 3


async def test_one_counts_when_many_decide_at_the_same_time(store: RunStore, address: StoreAddress) -> None:
    """S-REV-128: all others are told the same."""
    await recorded(store, [asked()])
    people = [f"person {number}" for number in range(8)]
    outcomes = await asyncio.gather(
        *(store_at(address).decide(RUN, GATE, ReviewDecided(verdict="approve", by=person)) for person in people)
    )
    (winner,) = (person for person, refused in zip(people, outcomes, strict=True) if refused is None)
    told = {refused[0].decided.data.by for refused in outcomes if refused is not None and refused[0].decided}
    assert told == {winner}


async def test_one_counts_when_two_processes_decide(store: RunStore, address: StoreAddress) -> None:
    """S-REV-128: between processes as between tasks of one."""
    await recorded(store, [asked()])
    command = [sys.executable, "-c", _DECIDER, json.dumps(asdict(address))]
    programs = [
        ForkedProgram[str]([*command, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for who in ("Ann", "Bob")
    ]
    assert [line_of(program) for program in programs] == ["ready"] * 2
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
    outputs = [program.communicate(timeout=60)[0].split() for program in programs]
    assert sorted(counts for _, counts in outputs) == ["False", "True"]
    assert len({winner for winner, _ in outputs}) == 1
    assert len(await store.facts(RUN)) == 3


async def test_gate_of_a_process_that_asks_its_own_handler_is_not_decided_by_others(store: RunStore) -> None:
    """S-REV-129: while that process owns the run; when it is dead, anybody decides."""
    run = await begun(store, facts=[asked(detached=False)])
    refused = await store.decide(RUN, GATE, APPROVED)
    assert refused is not None
    assert refused[1] is Obstacle.ATTACHED
    await run.close(RunState.INTERRUPTED)
    assert await store.decide(RUN, GATE, APPROVED) is None


async def test_gate_is_decided_while_its_run_goes_on_with_other_work(store: RunStore) -> None:
    """S-REV-129: where its task was put down; epochs stay as they are, so that nobody is stopped by it."""
    run = await begun(store, facts=[fact("plan", "run"), asked()])
    await run.journal.append([fact("model", "draft#0/0/model")], epoch=4, until=Persistence.COMMITTED)
    assert await store.decide(RUN, GATE, APPROVED) is None
    assert (await store.facts(RUN))[-1].epoch == 4
    for name, epoch in (("draft#0/1/model", 4), ("other#0/0/model", 0)):
        await run.journal.append([fact("model", name)], epoch=epoch, until=Persistence.COMMITTED)
    known = await run.journal.lookup_recorded("draft#0")
    assert (GATE, "review_decision") in known
    await run.close(RunState.COMPLETED)
    assert [each.seq for each in await store.facts(RUN)] == [1, 2, 3, 4, 5, 6]


async def test_owner_that_comes_after_a_decision_knows_it(store: RunStore) -> None:
    """S-REV-130: whatever its epoch."""
    await recorded(store, [asked()])
    again = await store.claim(RUN)
    await again.close(RunState.WAITING)
    assert await store.decide(RUN, GATE, APPROVED) is None
    owner = await store.claim(RUN)
    known = await owner.journal.lookup_recorded("draft#0")
    assert (GATE, "review_decision") in known
    await owner.close(RunState.COMPLETED)


async def test_nobody_decides_when_the_time_is_up(store: RunStore) -> None:
    """S-REV-128: what follows from the timeout is for the run to record."""
    await recorded(store, [asked(at=time.time() - 61, timeout_s=60.0)])
    refused = await store.decide(RUN, GATE, APPROVED)
    assert refused is not None
    assert refused[1] is Obstacle.EXPIRED
    assert await listed(store) == [(RUN, [GATE])]


async def test_unknown_run_is_not_decided(store: RunStore) -> None:
    """S-REV-128: and nothing is made by asking."""
    with pytest.raises(ValidationError, match=f"Unknown run '{RUN}'"):
        await store.decide(RUN, GATE, APPROVED)
    assert await store.gates_of(RUN) == []
    assert await store.runs() == []
