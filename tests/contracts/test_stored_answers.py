"""The contract of answers that later runs may reuse, over every store, and over the way to a store on another node."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from ensemble_ray import RunState
from ensemble_ray.actors.link.journal import RemoteAnswers, answers_at
from ensemble_ray.actors.link.wire import RecordLocation
from ensemble_ray.ports import StoredAnswers
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RunStore, StoreAddress

from .owned_runs import begun, fact
from .record_stores import STORES, address_of

CALL = "a#0/0/model"


@pytest.fixture(params=[*STORES, "ray"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    """An empty store; `ray` is one of files, reached as from another node."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return address_of("sqlite" if request.param == "ray" else request.param, request, tmp_path)


@pytest.fixture
def store(address: StoreAddress) -> RunStore:
    """The store there."""
    return store_at(address)


@pytest.fixture
def answers(address: StoreAddress, request: pytest.FixtureRequest) -> StoredAnswers:
    """The answers there, as a process of a run has them."""
    if request.node.callspec.params.get("address") == "ray":
        return RemoteAnswers(RecordLocation(address=address, node_id=ray.get_runtime_context().get_node_id()))
    return store_at(address)


async def _recorded(store: RunStore, run_id: str, *digests: str, name: str = CALL) -> None:
    """A completed run with an answer to each of these requests, one turn after the other."""
    names = [name.replace("/0/", f"/{turn}/") for turn in range(len(digests))]
    facts = [
        fact(each, text=f"{digest} of {run_id}", reuse_digest=digest)
        for each, digest in zip(names, digests, strict=True)
    ]
    run = await begun(store, run_id, facts)
    await run.close(RunState.COMPLETED)


async def test_answer_of_another_run_is_found_by_its_request(store: RunStore, answers: StoredAnswers) -> None:
    """S-USE-20, S-USE-21: with its run and text; no other request finds it."""
    await _recorded(store, "first", "one", "two")
    await answers.offer_answers("first", [("one", "a#0/0/model", 10.0), ("two", "a#0/1/model", 11.0)])
    found = await answers.find_answer("two", since=5.0, run_id="second")
    assert found is not None
    assert (found.run, found.name, found.data.text) == ("first", "a#0/1/model", "two of first")
    assert await answers.find_answer("three", since=5.0, run_id="second") is None


async def test_nothing_is_found_before_anything_was_offered(answers: StoredAnswers) -> None:
    """S-USE-21: a lookup in a store without answers is no error."""
    assert await answers.find_answer("one", since=0.0, run_id="second") is None


async def test_answer_is_found_within_its_age_and_by_other_runs_alone(store: RunStore, answers: StoredAnswers) -> None:
    """S-USE-21: the age is that of the answer; a run never takes its own."""
    await _recorded(store, "first", "one")
    await answers.offer_answers("first", [("one", CALL, 10.0)])
    assert await answers.find_answer("one", since=10.0, run_id="second") is not None
    assert await answers.find_answer("one", since=10.5, run_id="second") is None
    assert await answers.find_answer("one", since=5.0, run_id="first") is None


async def test_newest_offer_replaces_the_one_before(store: RunStore, answers: StoredAnswers) -> None:
    """S-USE-20: an offer that is repeated changes nothing."""
    for number, run_id in enumerate(("first", "second")):
        await _recorded(store, run_id, "one")
        for _ in range(2):
            await answers.offer_answers(run_id, [("one", CALL, 10.0 + number)])
    found = await answers.find_answer("one", since=0.0, run_id="third")
    assert found is not None
    assert found.data.text == "one of second"


async def test_answer_goes_with_its_run(store: RunStore, answers: StoredAnswers) -> None:
    """S-USE-22: also if another run has its id and a model call of that name."""
    await _recorded(store, "first", "one")
    await answers.offer_answers("first", [("one", CALL, 10.0)])
    await store.delete("first")
    assert await answers.find_answer("one", since=0.0, run_id="second") is None
    await _recorded(store, "first", "two")
    assert await answers.find_answer("one", since=0.0, run_id="second") is None


async def test_offer_that_its_record_does_not_hold_is_not_found(store: RunStore, answers: StoredAnswers) -> None:
    """S-USE-22: the record decides, not the index."""
    await answers.offer_answers("gone", [("one", CALL, 10.0)])
    assert await answers.find_answer("one", since=0.0, run_id="second") is None
    await _recorded(store, "first", "two")
    await answers.offer_answers("first", [("one", CALL, 10.0)])
    assert await answers.find_answer("one", since=0.0, run_id="second") is None


async def test_long_texts_and_strange_names_arrive_whole(store: RunStore, answers: StoredAnswers) -> None:
    """S-USE-21: texts that a store keeps apart, and names with characters that a database refuses."""
    name, text = "a\0/\\b#0/0/model", "long " * 5_000
    run = await begun(store, "first", [fact(name, text=text, reuse_digest="one")])
    await run.close(RunState.COMPLETED)
    await answers.offer_answers("first", [("one", name, 10.0)])
    found = await answers.find_answer("one", since=0.0, run_id="second")
    assert found is not None
    assert (found.name, found.data.text) == (name, text)


async def test_unrecorded_run_has_no_answers() -> None:
    """S-USE-3."""
    assert answers_at(None) is None
